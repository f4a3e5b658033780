"""The strong-scaling measurement measures what it says, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest

import lp
from lp.bench.scaling import StrongScaling, strong_scaling
from lp.decoding.lookahead import LookaheadDecoder
from lp.distributed import ParallelContext, run_lockstep
from tests.tiny_models import tiny_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
CONFIG = lp.LookaheadConfig(window_size=6, ngram_size=4, guess_set_size=6)


def _measure(ranks: int) -> list[StrongScaling]:
    model = tiny_model()

    def body(context: ParallelContext) -> StrongScaling:
        return strong_scaling(model, CONFIG, context, [IDS, IDS[::-1]], 12, 2)

    return run_lockstep(ranks, body)


def test_one_rank_is_held_against_all() -> None:
    """A ratio of runs that took other steps, or that mixes up who ran with whom, would be believed."""
    result = _measure(3)[0]
    assert result.ratio == pytest.approx(result.together_ms / result.alone_ms)
    assert len(result.ratios) == 2 and result.compression >= 1
    assert [(s.ranks, s.rank) for s in result.splits] == [(1, 0), (3, 0), (3, 1), (3, 2)]
    alone, *shared = result.splits
    assert all(s.rows < alone.rows for s in shared) and sum(s.rows for s in shared) > alone.rows
    assert all(s.forward_ms > 0 for s in result.splits)
    assert result.table().count("\n| 3 |") == 3


def test_other_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 a near-tie may send one of the two another way; their times would not compare."""
    generate = LookaheadDecoder.generate

    def one_less(self: LookaheadDecoder, *args: Any, **kwargs: Any) -> lp.GenerationOutput:
        output = generate(self, *args, **kwargs)
        if self.context.world_size == 1:
            output.tokens.pop()
        return output

    monkeypatch.setattr(LookaheadDecoder, "generate", one_less)
    with pytest.raises(RuntimeError, match="different steps"):
        _measure(2)
