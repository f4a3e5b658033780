"""The token budget in words, for users: what steps may take, and what the steps of the last text took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol

from lp.budget.step_times import StepTimes
from lp.config import LookaheadConfig


class Step(Protocol):
    """The statistics of a step that are read here, as in StepStats."""

    @property
    def columns(self) -> int: ...
    @property
    def num_draft(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def idle(self) -> bool: ...


def describe_budget(config: LookaheadConfig, step_times: StepTimes | None) -> str:
    """One line: what a step may take, and how long steps are.

    Args:
        config: of the decoder.
        step_times: None for a fixed budget.
    """
    shape = f"W={config.window_size} N={config.ngram_size} G={config.guess_set_size}"
    if step_times is None:
        return f"fixed budget {shape}"
    return f"adaptive budget up to {shape} depth={config.depth}; {step_times}"


def describe_origin(path: Path, doubtful: Sequence[int] = ()) -> str:
    """Where step times are stored, or why they are not.

    Args:
        doubtful: sizes that a busy machine may have slowed down, 0 for the plain step.
    """
    if not doubtful:
        return f"; stored in {path}"
    sizes = ", ".join(f"{size} tokens" if size else "plain" for size in doubtful)
    return f"; not stored, since the machine seemed busy with something else (steps: {sizes})"


def describe_steps(steps: Sequence[Step]) -> str:
    """One line: what the steps of a text took, and what that brought."""
    if not steps:
        return "no steps yet"
    lookahead_steps = [step for step in steps if not step.idle]
    tokens = sum(step.accepted + 1 for step in steps)
    line = f"last text: {tokens} tokens in {len(steps)} steps (S={tokens / len(steps):.2f})"
    if lookahead_steps:
        sizes = sorted(step.num_draft for step in lookahead_steps)
        p10, p50, p90 = (sizes[len(sizes) * tenth // 10] for tenth in (1, 5, 9))
        columns = fmean(step.columns for step in lookahead_steps)
        line += (
            f", {p10}/{p50}/{p90} draft tokens a step (10th, 50th, 90th percentile), {columns:.1f} columns on average"
        )
    return f"{line}, {len(steps) - len(lookahead_steps)} plain steps"
