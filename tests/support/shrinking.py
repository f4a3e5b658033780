"""What is left of a failing case when everything that it fails without is taken away."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from tests.support.drawn_cases import Case
from tests.support.fuzzing import run

LEAST = {"window_size": 0, "ngram_size": 2, "guess_set_size": 0, "num_hidden_layers": 1, "num_key_value_heads": 1}


def shrink(case: Case, failure: str, seconds: float = 60) -> tuple[Case, str]:
    """The simplest case found within the time that fails too, and how."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for simpler in _simpler(case):
            said = run(simpler) if time.monotonic() < end else None
            if said and _kind(said) == _kind(failure):
                case, failure = simpler, said
                break
        else:
            break
    return case, failure


def _kind(failure: str) -> str:
    """Shrinking must not end at another failure."""
    return re.sub(r"[0-9]+", "", failure.partition(":")[0])


def _simpler(case: Case) -> Iterator[Case]:
    bare = Case()
    for item in fields(Case):
        simplest = getattr(bare, item.name)
        if item.name not in ("ids", "new", "overrides", "config") and getattr(case, item.name) != simplest:
            yield replace(case, **{item.name: simplest})
    if case.ranks > 2:
        yield replace(case, ranks=2)
    for name in ("config", "overrides"):
        yield from (replace(case, **{name: values}) for values in _simpler_values(getattr(case, name)))
    yield from (replace(case, new=less) for less in _less(case.new, 1))
    cuts = {len(case.ids) // 2, 1}
    yield from (replace(case, ids=case.ids[cut:]) for cut in sorted(cuts, reverse=True) if 0 < cut < len(case.ids))
    yield from (replace(case, processors=[p for p in case.processors if p != gone]) for gone in case.processors[:-1])


def _simpler_values(values: dict[str, Any]) -> Iterator[Any]:
    for key, value in values.items():
        if key in LEAST:
            yield from (values | {key: less} for less in _less(value, LEAST[key]))
        elif key != "vocab_size":  # the ids are of it
            yield {k: v for k, v in values.items() if k != key}


def _less(value: int, least: int) -> Iterator[int]:
    yield from sorted({least, (value + least) // 2, value - 1} & set(range(least, value)))
