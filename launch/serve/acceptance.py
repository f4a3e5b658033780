"""Counts of drafted and accepted tokens under vLLM's names, for responses and for `/metrics`.

As in vLLM, only steps that drafted something count. A step's draft tokens are the nodes of its draft tree, and those
tokens of its lookahead window that were accepted. The names are those of vLLM 0.32's `metrics.speculative_decoding`
(--per-request-spec-decode-metrics summary), which load tools such as AIPerf read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lp.engine.output import StepStats


def draft_tokens(steps: Iterable[StepStats]) -> int:
    """Number of tokens that the decode steps drafted, for counters and acceptance rates.

    A step counts the larger of its draft tokens and its accepted tokens, as accepted tokens of the lookahead window
    are not among its draft tokens: a rate of accepted tokens is then at most 1.

    Args:
        steps: statistics of the decode steps.
    """
    return sum(max(step.num_draft, step.accepted) for step in steps)


def acceptance(steps: Sequence[StepStats]) -> dict[str, Any]:
    """Summarise how well drafting worked for one generated text, in the fields of vLLM's `speculative_decoding`.

    Args:
        steps: statistics of all decode steps of the text. Steps that neither drafted nor accepted anything are left
            out.

    Returns:
        vLLM's fields by name. `mean_acceptance_length` is the mean number of tokens that a step added, bonus token
        included; `draft_acceptance_rate` is accepted by drafted tokens; `acceptance_histogram[j]` is the number of
        steps that accepted j draft tokens; `num_spec_tokens` is None, as steps draft different numbers of tokens.
    """
    drafted = [step for step in steps if step.num_draft or step.accepted]
    accepted = Counter(step.accepted for step in drafted)
    num_accepted = sum(step.accepted for step in drafted)
    num_draft = draft_tokens(drafted)
    return {
        "mean_acceptance_length": 1 + num_accepted / max(len(drafted), 1),
        "draft_acceptance_rate": num_accepted / max(num_draft, 1),
        "acceptance_histogram": [accepted[count] for count in range(max(accepted, default=0) + 1)],
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_draft,
        "num_spec_tokens": None,
    }
