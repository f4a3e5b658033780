"""The fuzzer: drawn cases without a mismatch, and faults planted in the loop that it must find."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

import lp
from lp.attention import flash
from lp.attention.flash import SHORT
from lp.engine import decoder, prefixes
from lp.models.kv_cache import StaticKVCache
from lp.models.runner import ModelRunner
from lp.sampling.grammar import GrammarProcessor
from tests.conftest import LONG
from tests.support.drawn_cases import FEATURES, Case, drawn
from tests.support.fuzzing import past_failures, run
from tests.support.shrinking import shrink

CASES, SHARE = 3000 if LONG else 18, 0.1
FAULT_CASES, FAULT_SEED = 200, 6  # a seed whose first cases find them


def test_drawn_cases_equal_generate() -> None:
    """Whatever no test thought of: a failure is shrunk to the command that shows it."""
    for number in range(CASES):
        case = drawn(0, number, SHARE)
        failure = run(case)
        if failure:
            case, failure = shrink(case, failure)
            pytest.fail(f"{failure}\npython scripts/fuzz.py --case '{case.json()}'")


@pytest.mark.parametrize("case", past_failures(), ids=Case.json)
def test_a_past_failure_stays_mended(case: Case) -> None:
    """A fault that the fuzzer found once must not come back until it is drawn again."""
    assert run(case) is None


def _position(patch: pytest.MonkeyPatch) -> None:
    """The last row of a step stands one position too far."""
    forward = ModelRunner.forward

    def shifted(self: Any, tokens: Any, positions: Any, *rest: Any, capture: bool = True, **chain: bool) -> Any:
        late = capture and len(positions) > 1
        return forward(self, tokens, [*positions[:-1], positions[-1] + late], *rest, capture=capture, **chain)

    patch.setattr(ModelRunner, "forward", shifted)


def _branch(patch: pytest.MonkeyPatch) -> None:
    """The last row of a step sees the row before it, whosever branch that is."""
    forward = ModelRunner.forward

    def leaky(
        self: Any, tokens: Any, positions: Any, visible: Any, *rest: Any, capture: bool = True, **chain: bool
    ) -> Any:
        if capture:
            visible = visible.copy()
            visible[-1, -2:] = True
        return forward(self, tokens, positions, visible, *rest, capture=capture, **chain)

    patch.setattr(ModelRunner, "forward", leaky)


def _stale(patch: pytest.MonkeyPatch, cached: int = 0) -> None:
    """The last accepted row keeps the KV of the row that lay in its place, behind at least so many cached rows."""
    commit = StaticKVCache.commit

    def lazy(self: Any, rows: Any) -> None:
        rows = [*rows]
        commit(self, [*rows[:-1], len(rows) - 1] if rows and self.length >= cached else rows)

    patch.setattr(StaticKVCache, "commit", lazy)


@pytest.mark.subset(2)
@pytest.mark.parametrize("fault", [_position, _branch, _stale], ids=lambda fault: fault.__name__.strip("_"))
def test_a_planted_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], record_property: Any) -> None:
    """A fuzzer that finds nothing must not be one that sees nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lp.models.runner.check_tree_mask", lambda runner: None)  # which would see it at once
        fault(patch)
        found = next((number for number in range(FAULT_CASES) if run(drawn(FAULT_SEED, number, SHARE))), None)
    assert found is not None
    print(f"{fault.__name__}: found by case {found + 1}")
    assert run(drawn(FAULT_SEED, found, SHARE)) is None, "the case fails without the fault too"


def _far_mask(patch: pytest.MonkeyPatch) -> None:
    """Every row of a step sees all the others, whosever branch they are, once many rows are cached."""
    block = flash._on_cpu

    def leaky(q: Any, k: Any, v: Any, mask: Any, scale: Any) -> Any:
        return block(q, k, v, mask * (k.shape[2] - mask.shape[3] < SHORT), scale)

    patch.setattr(flash, "_on_cpu", leaky)


def _far_merge(patch: pytest.MonkeyPatch) -> None:
    """Cached rows weigh a little too much against the step's own."""
    merge = flash.merge
    patch.setattr(flash, "merge", lambda out, lse, other, other_lse: merge(out, lse + 0.1, other, other_lse))


def _far_commit(patch: pytest.MonkeyPatch) -> None:
    """The last accepted row keeps the KV of the row that lay in its place, once many rows are cached."""
    _stale(patch, SHORT)


@pytest.mark.subset(1)
@pytest.mark.parametrize("fault", [_far_mask, _far_merge, _far_commit], ids=lambda fault: fault.__name__.strip("_"))
def test_a_fault_behind_a_long_prefix_is_found(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Attention over more than SHORT cached rows is other code: trees, commits and ranks must meet it."""
    share = 0.5
    long = [number for number in range(FAULT_CASES) if len(drawn(1, number, share).ids) >= SHORT - 20]
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        found = next((number for number in long if run(drawn(1, number, share))), None)
    assert found is not None
    print(f"{fault.__name__}: found by long case {long.index(found) + 1}")
    assert run(drawn(1, found, share)) is None, "the case fails without the fault too"


def _grammar(patch: pytest.MonkeyPatch) -> None:
    """What may follow a node is what may follow the text, whatever branch it is on."""
    of_branches = GrammarProcessor.of_branches

    def shallow(self: Any, text: Any, branches: Any, scores: Any) -> Any:
        return of_branches(self, text, [branch[:-1] for branch in branches], scores)

    patch.setattr(GrammarProcessor, "of_branches", shallow)


def _prefix(patch: pytest.MonkeyPatch) -> None:
    """A kept cache is taken for one token more than it has in common with the prompt."""
    common = prefixes.common
    patch.setattr(prefixes, "common", lambda one, other: min(common(one, other) + 1, len(one), len(other)))


def _sequence(patch: pytest.MonkeyPatch) -> None:
    """The noise of every sequence is that of the first."""
    build = decoder.build_sampler
    patch.setattr(decoder, "build_sampler", lambda *args, **fields: build(*args, **fields | {"sequence": 0}))


def _widths(patch: pytest.MonkeyPatch) -> None:
    """Passes of the mode `exact="bitwise"` have as many rows as tokens come, and not a width that was asked about."""
    patch.setattr(ModelRunner, "padded", lambda self, num_tokens: num_tokens)


FEATURE_FAULTS = {_grammar: "grammar", _prefix: "turns", _sequence: "sequence", _widths: "bitwise"}


@pytest.mark.subset(2)
@pytest.mark.parametrize("fault", FEATURE_FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_fault_of_a_feature_is_found(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    """A feature that cases have and nothing compares is drawn for nothing."""
    having = [number for number in range(400) if FEATURES[FEATURE_FAULTS[fault]](drawn(1, number, SHARE))]
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        found = next((number for number in having if run(drawn(1, number, SHARE))), None)
    assert found is not None
    print(f"{fault.__name__}: found by case {having.index(found) + 1} of those with it, {found + 1} of all")
    assert run(drawn(1, found, SHARE)) is None, "the case fails without the fault too"


def test_long_cases_lie_on_both_sides_of_the_threshold() -> None:
    """On each side, or across it, there must be cases of one rank and of several in the short form."""
    cases = [drawn(0, number, SHARE) for number in range(60)]
    many = [case for case in cases if len(case.ids) >= SHORT - 20]
    assert {case.ranks > 1 for case in many if len(case.ids) >= SHORT} == {False, True}
    assert any(len(case.ids) < SHORT < len(case.ids) + case.new for case in many)
    assert len(many) <= 20, "short texts find more in the same time"


def test_a_failure_shrinks_to_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing draw of thirty settings says little; and the command must give the same case again."""

    def fails(case: Case) -> str | None:
        return "sampled text differs at 3: ..." if case.sampling and len(case.ids) >= 5 else None

    monkeypatch.setattr("tests.support.shrinking.run", fails)
    failing = (case for case in (drawn(2, number, 1.0) for number in range(100)) if fails(case))
    case, failure = shrink(next(failing), "sampled text differs at 7: ...")
    assert failure == "sampled text differs at 3: ..." and len(case.ids) == 5
    assert (case.ranks, case.processors, case.eos, case.calls, case.new) == (1, [], [], 1, 1)
    assert Case(**json.loads(case.json())) == case


def test_a_case_is_drawn_again_from_its_number() -> None:
    """What a case is must not depend on those before it."""
    first = [drawn(3, number, SHARE).json() for number in range(50)]
    random.seed(1)
    assert [drawn(3, number, SHARE).json() for number in reversed(range(50))] == first[::-1]
    assert sum(drawn(3, number, SHARE).ranks > 1 for number in range(100)) == 10


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_a_stopped_rank_is_a_failure_and_a_signal_is_not(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Interrupted` is no Exception: a rank that others stopped would end the fuzzer without its case."""

    def stopped(case: Case) -> str | None:
        raise lp.Interrupted(lp.GenerationOutput([1], "interrupted", []), number)

    monkeypatch.setattr("tests.support.fuzzing._compare", stopped)
    if number:
        with pytest.raises(lp.Interrupted):
            run(Case())
    else:
        assert (
            run(Case()) == "Interrupted: another rank stopped after 1 new tokens, which are in the attribute `output`"
        )
