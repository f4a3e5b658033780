"""Totals of runs and of records: one set of figures for every table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.bench.alternation import Measured
from launch.bench.compare import Difference
from launch.bench.totals import Total
from lp.engine.output import GenerationOutput, StepStats

STEPS = [StepStats(5, 4, 1, 0.1, 0.0, 0.0)] * 2


def _measured(tokens: int, *rounds_s: float, resumed: int = 0) -> Measured:
    output = GenerationOutput([7] * tokens, "length", STEPS, decode_s=rounds_s[0], resumed=resumed)
    return Measured(output=output, decode_s=sorted(rounds_s)[len(rounds_s) // 2], rounds_s=rounds_s)


def test_runs_are_added_up() -> None:
    """Tokens that a journal had took no step: counted, they would raise S and speed after a restart."""
    total = Total.of_runs("lookahead", [_measured(4, 1.5, 1.0, 0.5), _measured(6, 5.0, 2.0, 1.0, resumed=2)])
    assert (total.prompts, total.tokens, total.steps, total.compression) == (2, 8, 4, 2.0)
    assert (total.tokens_a_step, total.decode_s, total.tokens_per_s) == (5.0, 3.0, pytest.approx(8 / 3))
    assert total.rounds_s == [6.5, 3.0, 1.5] and total.rates[1] == pytest.approx(8 / 3)
    assert total.differing is None, "nothing was compared"
    assert Total(method="chat").compression == Total(method="chat").tokens_per_s == 0.0


def test_a_speedup_is_the_median_rounds() -> None:
    """The ratio of two medians is one of times of different rounds, between which the machine may have changed."""
    plain = Total.of_runs("plain", [_measured(4, 1.0, 2.0, 3.0)])
    ours = replace(Total.of_runs("lookahead", [_measured(4, 4.0, 1.0, 2.0)]), plain=plain)
    assert ours.decode_s == plain.decode_s == 2.0
    assert ours.speedups == [0.25, 2.0, 1.5] and ours.speedup == 1.5
    assert plain.speedup is None and replace(plain, plain=plain).speedups == []


def test_differences_are_those_of_the_method() -> None:
    """Another method's difference, counted here, would blame the wrong one."""
    at = Difference(method="lookahead", position=0, token=1, plain_token=2, gap=0.0, near_tie=True)
    found = [at, replace(at, method="prompt_lookup", near_tie=False)]
    totals = [Total.of_runs(name, [_measured(4, 1.0)], found) for name in ("lookahead", "prompt_lookup", "plain")]
    assert [(total.differing, total.near_ties) for total in totals] == [(1, 1), (1, 0), (0, 0)]
