"""Figures of speculative decoding under vLLM's names: how many tokens were drafted, and how many of them accepted.

Responses and `/metrics` report these figures. As in vLLM, decode steps that drafted nothing are left out. The names are
those of vLLM 0.32's `metrics.speculative_decoding` (--per-request-spec-decode-metrics summary), which load generators
such as AIPerf read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lp.engine.output import StepStats


def draft_tokens(steps: Iterable[StepStats]) -> int:
    """Count the tokens that decode steps drafted, for counters and acceptance rates.

    Each step adds the larger of its numbers `num_draft` and `accepted`: accepted tokens of the lookahead window are not
    in `num_draft`, and an acceptance rate must not exceed 1.

    Args:
        steps: statistics of the decode steps to add up.
    """
    return sum(max(step.num_draft, step.accepted) for step in steps)


def acceptance(steps: Sequence[StepStats]) -> dict[str, Any]:
    """Summarise how well drafting worked for one generated text, in the fields of vLLM's `speculative_decoding`.

    Args:
        steps: statistics of all decode steps of the text. Steps that neither drafted nor accepted anything are left
            out.

    Returns:
        Values by vLLM's field names. `mean_acceptance_length` is the mean number of tokens that a step added, bonus
        token included. `draft_acceptance_rate` is the number of accepted tokens divided by that of drafted ones.
        `acceptance_histogram[j]` is the number of steps that accepted j draft tokens. `num_spec_tokens` is None, as
        steps draft different numbers of tokens.
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
