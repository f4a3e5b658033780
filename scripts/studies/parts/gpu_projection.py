"""R GPUs as `StepTime` has one: table and figure of docs/experiments/scaling.md, and the law of S fitted to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lp.errors import UserError


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """The estimated time of a step and S, and the speed that follows from both.

    Args:
        budget: B, step tokens of a replica of the model; 1 is plain decoding.
        compression: S, generated tokens a step.
        parts: what the step's time goes to, seconds by name: weights or FLOPs, kernels, host, gather.
    """

    budget: int
    compression: float
    parts: dict[str, float]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of decoding."""
        return self.compression / self.step_s


@dataclass(frozen=True, kw_only=True)
class GpuLine(StepEstimate):
    """The estimate for R GPUs with B tokens each: a line of the table.

    Args:
        ranks: R, the number of GPUs.
    """

    ranks: int

    @property
    def step_tokens(self) -> int:
        """R x B, the tokens that all ranks together compute in a step."""
        return self.ranks * self.budget

    @property
    def largest(self) -> str:
        """The largest part of a step, and its share."""
        name, seconds = max(self.parts.items(), key=lambda part: part[1])
        return f"{name}, {seconds / self.step_s:.0%}"

    def limit(self, fewer: GpuLine | None) -> str:
        """What costs most of the speed that more GPUs should bring.

        Args:
            fewer: the line before this one; None for the first.

        Returns:
            S, if it falls short of growing with the GPUs by a larger factor than the step grows; else the part of a
            step that grew most. Of the first line its largest part.
        """
        if fewer is None:
            return max(self.parts, key=lambda name: self.parts[name])
        short = self.ranks / fewer.ranks / (self.compression / fewer.compression)
        if short >= self.step_s / fewer.step_s:
            return "S"
        return max(self.parts, key=lambda name: self.parts[name] - fewer.parts.get(name, 0.0))


@dataclass(frozen=True, kw_only=True)
class LogLaw:
    """S = start + doubling x log2(tokens a step), which the paper finds for its method (arXiv 2402.02057, section 4).

    Args:
        start: S of one token, as the line has it.
        doubling: S that twice the tokens add.
    """

    start: float
    doubling: float

    @classmethod
    def of(cls, lines: Sequence[GpuLine]) -> LogLaw:
        """The law by least squares."""
        return cls.fitted([(line.step_tokens, line.compression) for line in lines])

    @classmethod
    def fitted(cls, points: Sequence[tuple[float, float]]) -> LogLaw:
        """The law by least squares, of (tokens a step, S); flat where there is one number of tokens.

        Raises:
            ValueError: no points.
        """
        if not points:
            raise UserError("points is empty; a line needs one at least")
        tokens, compressions = zip(*points, strict=True)
        if len(set(tokens)) == 1:
            return cls(start=float(np.mean(compressions)), doubling=0.0)
        doubling, start = np.polyfit(np.log2(tokens), compressions, 1)
        return cls(start=float(start), doubling=float(doubling))

    def compression(self, step_tokens: float) -> float:
        """S by the law where a step has so many tokens."""
        return self.start + self.doubling * math.log2(step_tokens)

    def __str__(self) -> str:
        return f"S = {self.start:.2f} + {self.doubling:.2f} log2(tokens a step)"
