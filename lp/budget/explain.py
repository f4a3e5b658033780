"""Describes the token budget to users: how large steps may become, and how large the steps of the last text were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol

from lp.budget.observed_times import Estimate
from lp.budget.step_times import StepTimes
from lp.config import LookaheadConfig

SURE = 0.08  # a relative doubt about a step time below which it counts as known


class Step(Protocol):
    """The fields of a decode step's statistics that `describe_steps` reads; `StepStats` has these fields."""

    @property
    def columns(self) -> int: ...
    @property
    def num_draft(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def idle(self) -> bool: ...


def describe_budget(config: LookaheadConfig, step_times: StepTimes | None) -> str:
    """Describe a decoder's token budget in one line, such as "fixed budget W=15 N=5 G=15".

    Args:
        config: settings of the decoder.
        step_times: table of step times by which an adaptive budget decides, shown at the end of the line; None if the
            budget is fixed.
    """
    shape = f"W={config.window_size} N={config.ngram_size} G={config.guess_set_size}"
    if step_times is None:
        return f"fixed budget {shape}"
    return f"adaptive budget up to {shape} depth={config.depth}; {step_times}"


def describe_origin(path: Path, estimate: Estimate, threads: int) -> str:
    """Describe how reliable step times are and where they are stored, as text to append to `describe_budget`'s line.

    For example "; known within 8 % up to 64 tokens, from 310 steps, 2 threads; kept in FILE".

    Args:
        path: path of the file in which the step times are kept.
        estimate: estimate from which the step times are taken.
        threads: number of CPU threads that compute a step; 0 on a GPU.
    """
    sure = [size for size, doubt in zip(estimate.num_tokens, estimate.doubts, strict=True) if doubt <= SURE]
    known = f"known within {100 * SURE:.0f} % up to {sure[-1]} tokens, from" if sure else "estimated from one layer and"
    by = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    return f"; {known} {estimate.steps} steps{by}; kept in {path}"


def describe_steps(steps: Sequence[Step]) -> str:
    """Summarise the decode steps of a text in one line: tokens, steps, draft tokens and columns per step, plain steps.

    Args:
        steps: statistics of each step.
    """
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
