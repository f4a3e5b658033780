"""The paper's analytic model of lookahead (arXiv 2402.02057, section 4): tokens a step from four numbers.

alpha: chance that a token of a candidate is accepted; b: candidates verified a step; gamma: their tokens, N - 1;
f: of f steps one finds good candidates, the others add one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lp.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What a run showed.

    Args:
        candidates: b.
        depth: gamma.
        compression: S, tokens a step.
    """

    candidates: int
    depth: int
    compression: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceModel:
    """S of any number and depth of candidates.

    Args:
        alpha: in [0, 1].
        f: at least 1.

    Raises:
        ValueError: one of them out of range.
    """

    alpha: float
    f: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"alpha is {self.alpha}; it must be a chance in [0, 1]; fit it to what was seen")
        if not 1 <= self.f < float("inf"):
            raise UserError(f"f is {self.f}; it must be at least 1; 1 means that every step finds candidates")

    def expected_tokens(self, candidates: int, depth: int) -> float:
        """E[tokens] of a step that verifies good candidates, the bonus token included (equation 4)."""
        powers = self.alpha ** np.arange(1, depth + 1)
        return float(depth + 1 - ((1 - powers) ** candidates).sum())

    def compression(self, candidates: int, depth: int) -> float:
        """S: f - 1 steps of one token each to one of E[tokens] (section 4.2)."""
        return (self.f - 1 + self.expected_tokens(candidates, depth)) / self.f

    @classmethod
    def fitted(cls, seen: Iterable[Observed]) -> AcceptanceModel:
        """The alpha and f whose S comes closest to what was seen, in the mean square of its logarithm.

        For every alpha of a grid the best f is found on another; both are then made finer around the best.

        Raises:
            ValueError: nothing was seen.
        """
        seen = list(seen)
        if not seen:
            raise UserError("no runs were given, and a model of two numbers needs at least two of them; measure some")
        alphas, inverses = np.linspace(0, 1, 101), np.linspace(0.01, 1, 100)  # of f: its inverse is in (0, 1]
        for width in (0.01, 1e-3, 1e-4):
            errors = _errors(seen, alphas, inverses)
            best_alpha, best_inverse = np.unravel_index(errors.argmin(), errors.shape)
            alpha, inverse = alphas[best_alpha], inverses[best_inverse]
            alphas = np.clip(alpha + width * np.linspace(-1, 1, 41), 0, 1)
            inverses = np.clip(inverse + width * np.linspace(-1, 1, 41), 1e-4, 1)
        return cls(alpha=float(alpha), f=float(1 / inverse))

    def error(self, seen: Iterable[Observed]) -> float:
        """Root of the mean square of log(S of the model / S seen)."""
        return float(np.sqrt(_errors(list(seen), np.array([self.alpha]), np.array([1 / self.f]))[0, 0]))


def _errors(seen: list[Observed], alphas: np.ndarray, inverses: np.ndarray) -> np.ndarray:
    """Mean squares by alpha and 1 / f."""
    total = np.zeros((len(alphas), len(inverses)))
    for run in seen:
        tokens = [AcceptanceModel(alpha=a, f=1).expected_tokens(run.candidates, run.depth) for a in alphas]
        model = 1 + (np.array(tokens)[:, None] - 1) * inverses[None]
        total += np.log(model / run.compression) ** 2
    return total / len(seen)
