"""The analytic model of the paper against dice thrown, and its fit against itself."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from scripts.studies.scaling_law import AcceptanceModel, Observed


@pytest.mark.parametrize(("alpha", "drafts", "depth"), [(0.6, 1, 4), (0.3, 8, 3), (0.9, 4, 7), (0.5, 15, 1)])
def test_expected_tokens_are_those_of_dice(alpha: float, drafts: int, depth: int) -> None:
    """An exponent off by one is a few per cent, which no plot shows."""
    rng = random.Random(1)

    def accepted() -> int:
        return next((i for i in range(depth) if rng.random() >= alpha), depth)

    thrown = fmean(1 + max(accepted() for _ in range(drafts)) for _ in range(20000))
    assert AcceptanceModel(alpha=alpha, f=1).expected_tokens(drafts, depth) == pytest.approx(thrown, rel=0.02)


def test_the_fit_finds_what_made_the_runs() -> None:
    """Two numbers from a table of S."""
    for alpha, f in ((0.25, 3.0), (0.6, 1.0), (0.8, 6.5)):
        made = AcceptanceModel(alpha=alpha, f=f)
        seen = [
            Observed(drafts=b, depth=depth, compression=made.compression(b, depth))
            for b in (1, 4, 16, 64)
            for depth in (2, 4, 7)
        ]
        fitted = AcceptanceModel.fitted(seen)
        assert (fitted.alpha, fitted.f) == (pytest.approx(alpha, abs=0.002), pytest.approx(f, rel=0.01))
        assert fitted.error(seen) < 1e-3 < AcceptanceModel(alpha=alpha / 2, f=f).error(seen)


def test_edges() -> None:
    """Nothing accepted is plain decoding; everything accepted is the whole depth."""
    assert AcceptanceModel(alpha=0, f=2).compression(9, 4) == 1
    assert AcceptanceModel(alpha=1, f=1).compression(1, 4) == 5
    with pytest.raises(ValueError, match="measure some"):
        AcceptanceModel.fitted([])
