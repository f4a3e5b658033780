"""The paper's analytic model of lookahead (arXiv 2402.02057, section 4): tokens a step from four numbers.

alpha: probability that a draft token is accepted; b: n-grams verified a step; gamma: their draft tokens, N - 1;
f: of f steps one finds good n-grams, the others add one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lp.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What a run measured.

    Args:
        drafts: b.
        depth: gamma.
        compression: S, tokens a step.
    """

    drafts: int
    depth: int
    compression: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceModel:
    """S of any number and length of drafted n-grams.

    Args:
        alpha: in [0, 1].
        f: at least 1.
    """

    alpha: float
    f: float

    def expected_tokens(self, drafts: int, depth: int) -> float:
        """E[tokens] of a step that verifies good n-grams, the bonus token included (equation 4)."""
        powers = self.alpha ** np.arange(1, depth + 1)
        return float(depth + 1 - ((1 - powers) ** drafts).sum())

    def compression(self, drafts: int, depth: int) -> float:
        """S: f - 1 steps of one token each to one of E[tokens] (section 4.2)."""
        return (self.f - 1 + self.expected_tokens(drafts, depth)) / self.f

    @classmethod
    def fitted(cls, runs: Iterable[Observed]) -> AcceptanceModel:
        """The alpha and f whose S comes closest to the runs', in the mean square of its logarithm.

        For every alpha of a grid the best f is found on another; both are then made finer around the best.

        Raises:
            ValueError: no runs.
        """
        runs = list(runs)
        if not runs:
            raise UserError("no runs were given, and a model of two numbers needs at least two of them; measure some")
        alphas = np.linspace(0, 1, 101)
        inverses = np.linspace(0.01, 1, 100)  # of f, in (0, 1]
        for width in (0.01, 1e-3, 1e-4):
            errors = _errors(runs, alphas, inverses)
            best_alpha, best_inverse = np.unravel_index(errors.argmin(), errors.shape)
            alpha = alphas[best_alpha]
            inverse = inverses[best_inverse]
            alphas = np.clip(alpha + width * np.linspace(-1, 1, 41), 0, 1)
            inverses = np.clip(inverse + width * np.linspace(-1, 1, 41), 1e-4, 1)
        return cls(alpha=float(alpha), f=float(1 / inverse))

    def error(self, runs: Iterable[Observed]) -> float:
        """Root of the mean square of log(S of the model / S measured)."""
        return float(np.sqrt(_errors(list(runs), np.array([self.alpha]), np.array([1 / self.f]))[0, 0]))


def _errors(runs: list[Observed], alphas: np.ndarray, inverses: np.ndarray) -> np.ndarray:
    """Mean squares by alpha and 1 / f."""
    total = np.zeros((len(alphas), len(inverses)))
    for run in runs:
        tokens = [AcceptanceModel(alpha=a, f=1).expected_tokens(run.drafts, run.depth) for a in alphas]
        model = 1 + (np.array(tokens)[:, None] - 1) * inverses[None]
        total += np.log(model / run.compression) ** 2
    return total / len(runs)
