"""What was chosen, in words."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

from lp.budget.step_times import StepTimes
from lp.config import LookaheadConfig


class Step(Protocol):
    """What is told of a step, as in StepStats."""

    @property
    def columns(self) -> int: ...
    @property
    def num_draft(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def idle(self) -> bool: ...


def bounds(config: LookaheadConfig, curve: StepTimes | None) -> str:
    """One line: what a step may take, and what it costs."""
    shape = f"W={config.window_size} N={config.ngram_size} G={config.guess_set_size}"
    if curve is None:
        return f"fixed budget {shape}"
    return f"adaptive budget up to {shape} depth={config.depth}; {curve}"


def spent(steps: Sequence[Step]) -> str:
    """One line: what the steps of a text took, and what that brought."""
    if not steps:
        return "no steps yet"
    tried = [step for step in steps if not step.idle]
    tokens = sum(step.accepted + 1 for step in steps)
    line = f"last text: {tokens} tokens in {len(steps)} steps (S={tokens / len(steps):.2f})"
    if tried:
        rows = sorted(step.num_draft for step in tried)
        few, middle, many = (rows[len(rows) * tenth // 10] for tenth in (1, 5, 9))
        columns = fmean(step.columns for step in tried)
        line += f", candidate rows {few}/{middle}/{many} (10th, 50th, 90th of 100), columns {columns:.1f} on average"
    return line + f", {len(steps) - len(tried)} steps left plain"
