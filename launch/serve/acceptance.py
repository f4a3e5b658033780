"""How many draft tokens were accepted, under the names that vLLM's answers and `/metrics` have for it.

vLLM counts steps that have drafted something. A step's draft tokens are the nodes of its tree; a token of the lookahead
window is one where it was accepted. The names are those of vLLM 0.32's `metrics.speculative_decoding`
(--per-request-spec-decode-metrics summary), which load tools as AIPerf read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lp.engine.output import StepStats


def draft_tokens(steps: Iterable[StepStats]) -> int:
    """How many tokens these steps have drafted: no fewer than they accepted, of which some are of the window."""
    return sum(max(step.num_draft, step.accepted) for step in steps)


def acceptance(steps: Sequence[StepStats]) -> dict[str, Any]:
    """What the steps of a text have drafted, and what of it was accepted.

    Args:
        steps: all of the text's.

    Returns:
        vLLM's fields; `acceptance_histogram[j]` counts the steps that accepted j draft tokens, and `num_spec_tokens` is
        None, as no number of draft tokens is fixed.
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
