"""Totals of runs and of records: one set of figures for every table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launch.bench.alternation import Measured
from launch.bench.compare import Difference
from launch.bench.table_text import table_of
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


def _record(perplexity: float, distinct_4: float | None, rouge: dict[str, float] | None) -> dict[str, Any]:
    distinct = {"1": 0.25, "2": 0.5, "3": 0.75, "4": distinct_4}
    record = {"method": "plain", "task": "t", "index": 0, "tokens": 4, "steps": 4, "decode_s": 1.0}
    record |= {"settings": {"W": 4, "G": 4}, "hardware": "a machine", "versions": {"torch": "1"}}
    return record | {"quality": {"perplexity": perplexity, "distinct": distinct, "rouge": rouge}}


def test_quality_is_shown() -> None:
    """quality=true took a forward pass for every text, and neither table nor JSON had a word of it."""
    rouge = {"rouge1": 0.5, "rouge2": 0.25, "rougeL": 0.5}
    total = Total.of_records([_record(2.0, None, rouge), _record(4.0, 1.0, None)])
    figures = total.figures()
    assert figures["perplexity"] == 3.0 and figures["rouge"] == rouge
    assert figures["distinct"] == {"1": 0.25, "2": 0.5, "3": 0.75, "4": 1.0}, "of texts that have as many tokens"
    heads, (line,) = table_of([total])
    cells = {"perplexity": "3.000", "distinct-1/2/4": "0.250/0.500/1.000", "ROUGE-1/2/L": "0.500/0.250/0.500"}
    assert cells.items() <= dict(zip(heads, line, strict=True)).items()
    without = Total.of_records([_record(2.0, None, None)])
    assert "rouge" not in without.figures() and "ROUGE-1/2/L" not in table_of([without])[0]
    assert "0.250/0.500/-" in table_of([without])[1][0]
    none = Total.of_records([{key: value for key, value in _record(2.0, None, None).items() if key != "quality"}])
    assert not {"perplexity", "distinct", "rouge"} & {*none.figures()} and not {*cells} & {*table_of([none])[0]}
