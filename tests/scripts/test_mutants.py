"""The list of planted faults fits the code: tests/mutants.jsonl, which scripts/mutants.py runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import ROOT

MUTANTS = [json.loads(line) for line in (ROOT / "tests/mutants.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_mutant_is_still_a_change_of_its_file() -> None:
    """A mutant whose line has changed would be planted nowhere, survive, or die of a syntax error."""
    for mutant in MUTANTS:
        source = (ROOT / mutant["path"]).read_text(encoding="utf-8")
        assert source.count(mutant["old"]) == 1, f"{mutant['path']} has not exactly one {mutant['old']!r}"
        assert mutant["new"] != mutant["old"]
        compile(source.replace(mutant["old"], mutant["new"]), mutant["path"], "exec")


def test_the_tests_of_every_mutant_exist() -> None:
    """A test that was renamed would end pytest with an error, as if the fault were found."""
    files = {test.partition("::")[0] for mutant in MUTANTS for test in mutant["tests"]}
    missing = [file for file in files if not (ROOT / "tests" / file).exists()]
    assert not missing


@pytest.mark.parametrize("field", ["equivalent", "planted"])
def test_what_is_said_of_a_mutant_is_a_sentence(field: str) -> None:
    """`equivalent` without a reason would take a survivor out of the count."""
    said: list[Any] = [mutant[field] for mutant in MUTANTS if field in mutant]
    assert all(isinstance(reason, str) and len(reason.split()) > 2 for reason in said)


def test_no_mutant_is_listed_twice() -> None:
    """A mutant that is listed twice would count twice."""
    assert len({(mutant["path"], mutant["old"], mutant["new"]) for mutant in MUTANTS}) == len(MUTANTS)
