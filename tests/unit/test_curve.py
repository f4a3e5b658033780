"""The step curve: interpolation, padding, prices, the cache on disk, and that ranks share rank 0's."""

from __future__ import annotations

import random
import signal
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp
from lp.budget.step_times import StepTimes, flat, machine, measure, remembered
from lp.engine.signals import DeferredSignals, Terminated
from lp.engine.step_timing import _Stopwatch
from lp.parallel.context import ParallelContext
from lp.parallel.lockstep import run_lockstep
from tests.tiny_models import tiny_model

BUMP = StepTimes((1, 8, 31, 32, 64), (10.0, 12.0, 14.0, 5.0, 7.0), 9.0)


@pytest.fixture(autouse=True)
def given_curve() -> None:
    """Here decoders measure."""


def _drawn(rng: random.Random) -> StepTimes:
    rows = sorted({1, *rng.sample(range(2, 120), rng.randint(1, 8))})
    return StepTimes(tuple(rows), tuple(rng.uniform(0.5, 2) * (1 + 0.02 * row) for row in rows), 1.0)


def test_a_bump_is_padded_over() -> None:
    """bf16 on some processors takes five times as long for 8 rows as for 32."""
    assert [BUMP.padded(rows) for rows in (1, 8, 31, 32, 33, 64, 65)] == [32, 32, 32, 32, 33, 64, 65]
    assert [BUMP.step_s(rows) for rows in (1, 8, 31, 32, 64)] == [5, 5, 5, 5, 7]
    assert BUMP.step_s(48) == pytest.approx(6)
    assert "padded up to [32]" in str(BUMP) and "padded" not in str(flat(0.01, 64))


def test_noise_is_no_reason_to_pad() -> None:
    """Rows that say nothing are real work: a size measured a little too fast must not draw all smaller steps to it."""
    curve = StepTimes((1, 4, 5, 64), (1.0, 1.2, 1.15, 3.0), 1.0)
    assert [curve.padded(rows) for rows in range(1, 65)] == list(range(1, 65))


def test_prices_are_what_a_further_row_costs_at_least() -> None:
    """Too high a price stops growth before a step of the curve that pays as a whole."""
    for seed in range(40):
        curve = _drawn(random.Random(seed))
        assert (np.diff(curve.table) >= 0).all()
        for rows in range(1, curve.most):
            costs = [
                (curve.step_s(more) - curve.step_s(rows)) / (more - rows) for more in range(rows + 1, curve.most + 1)
            ]
            assert curve.slopes[rows] == pytest.approx(min(costs), abs=1e-12)
        assert curve.slopes[curve.most] == np.inf


@pytest.mark.parametrize(
    ("rows", "seconds", "plain_s"),
    [
        ((), (), 1.0),
        ((1, 2.5), (1.0, 1.0), 1.0),
        ((2, 3), (1.0, 1.0), 1.0),
        ((1, 1), (1.0, 1.0), 1.0),
        ((1, 10**13), (1.0, 2.0), 1.0),
        ((1,), (0.0,), 1.0),
        ((1,), (1.0,), -1.0),
    ],
)
def test_a_curve_that_is_none_is_refused(rows: tuple[int, ...], seconds: tuple[float, ...], plain_s: float) -> None:
    """A cut cache file would steer every step."""
    with pytest.raises(ValueError, match="a step curve has"):
        StepTimes(rows, seconds, plain_s)


def test_bearable_rows() -> None:
    """They say how much a text's steps may leave in the pool."""
    assert StepTimes((1, 17, 120), (1.0, 2.0, 30.0), 1.0).bearable == 17
    assert flat(1.0, 120).bearable == 120 and StepTimes((1, 9), (3.0, 4.0), 1.0).bearable == 1


def test_measure_alternates_and_takes_the_least() -> None:
    """A machine that is slow for one step must not make its size dear; sizes that never pay are not waited for."""
    asked: list[int] = []

    def step(rows: int) -> float:
        asked.append(rows)
        slow = 50 if len(asked) % 7 == 0 else 1
        return slow * (1e-3 + 1e-4 * rows + (1.0 if rows > 64 else 0))

    curve = measure(step, 200, ParallelContext())
    assert curve.rows[:4] == (1, 2, 3, 4) and curve.most == 96
    for rows, seconds in zip(curve.rows[:-1], curve.seconds[:-1], strict=True):
        assert seconds == pytest.approx(1e-3 + 1e-4 * rows)
    assert curve.plain_s == pytest.approx(1e-3)
    assert asked.count(8) >= 5 > asked.count(96)


def test_ranks_take_rank_0s_times() -> None:
    """Each rank's own clock would choose another budget on each."""

    def body(context: ParallelContext) -> StepTimes:
        return measure(lambda rows: (1 + context.rank) * (1e-3 + 1e-4 * rows), 32, context)

    curves = run_lockstep(3, body)
    assert curves[0] == curves[1] == curves[2] == measure(lambda rows: 1e-3 + 1e-4 * rows, 32, ParallelContext())


def test_the_cache_is_one_of_model_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve of another model or thread count is wrong; one measured again for every prompt costs seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[StepTimes] = []

    def fresh() -> StepTimes:
        made.append(flat(0.01 * (len(made) + 1), 9))
        return made[-1]

    context = ParallelContext()
    first = remembered(("a", 1), fresh, context, {})
    assert remembered(("a", 1), fresh, context, {}) == first and len(made) == 1
    shared = run_lockstep(2, lambda context: remembered(("a", 1), fresh, context, {}))
    assert shared == [first, first] and len(made) == 1, "ranks that do not read the file measure nothing"
    assert remembered(("a", 2), fresh, context, {}) != first
    (file,) = [path for path in tmp_path.rglob("*.json") if f"{first.plain_s}" in path.read_text()]
    file.write_text(file.read_text()[:-9])
    assert remembered(("a", 1), fresh, context, {}) == made[2], "a cut file is measured again"
    file.write_text("[" * 200_000)
    assert remembered(("a", 1), fresh, context, {}) == made[3], "so is one of something else"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert remembered(("a", 1), fresh, context, {}) == made[4]
    assert [*tmp_path.glob("home/.cache/lp/curves/*.json")], "a relative path is ignored, as XDG has it"
    monkeypatch.delenv("XDG_CACHE_HOME")
    kept: dict[str, str] = {}
    for home in ("/proc/nowhere", "~"):  # the second is what is left of a home where there is none
        monkeypatch.setenv("HOME", home)
        with pytest.warns(UserWarning, match="cannot be written to .*: set XDG_CACHE_HOME"):
            assert remembered(("a", 1), fresh, context, kept) == made[-1], "that costs the cache alone"
        assert remembered(("a", 1), fresh, context, kept) == made[-1], "it is measured once for a model"
        kept.clear()
    assert len(made) == 7 and not Path("~").exists() and not Path("cache").exists()
    assert machine(tiny_model().device)[1] == 1


def test_a_decoders_curve_is_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the loop does not really run would have times of smaller ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run: list[int] = []
    forward = lp.engine.lookahead.ModelRunner.forward

    def counted(self: Any, tokens: list[int], *args: Any, capture: bool = True) -> Any:
        if capture:
            run.append(len(tokens))
        return forward(self, tokens, *args, capture=capture)

    monkeypatch.setattr(lp.engine.lookahead.ModelRunner, "forward", counted)
    config = lp.LookaheadConfig(adaptive=True, window_size=4, guess_set_size=20)
    curve = lp.LookaheadDecoder(tiny_model(), config).curve
    assert curve is not None and curve.rows == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert set(curve.rows) <= set(run)
    assert lp.LookaheadDecoder(tiny_model(), config).curve == curve


def test_ranks_have_a_curve_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange is in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, config = tiny_model(), lp.LookaheadConfig(adaptive=True, window_size=0, guess_set_size=4)
    alone = lp.LookaheadDecoder(model, config).curve
    both = run_lockstep(2, lambda context: lp.LookaheadDecoder(model, config, context).curve)
    assert both[0] == both[1] != alone and len([*tmp_path.rglob("*.json")]) == 2


def test_the_key_knows_what_a_step_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads or on two nodes, a pool without numba or learning: a curve of one is not for all."""
    keys: list[str] = []

    def noted(parts: Any, *others: Any) -> StepTimes:
        keys.append(repr(parts))
        return flat(0.01, 9)

    monkeypatch.setattr("lp.engine.step_timing.remembered", noted)
    model, config = tiny_model(), lp.LookaheadConfig(adaptive=True)
    lp.LookaheadDecoder(model, config)
    lp.LookaheadDecoder(model, config, ParallelContext(backend="gloo"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    lp.LookaheadDecoder(model, config)
    monkeypatch.setattr("lp.budget.step_times.COMPILED", "otherwise")
    lp.LookaheadDecoder(model, config)
    lp.LookaheadDecoder(model, lp.LookaheadConfig(adaptive=True, learn=False))
    lp.LookaheadDecoder(model, lp.LookaheadConfig(adaptive=True, learn=False, pool_scope="session", pool_file="x"))
    assert len({*keys}) == 5 and keys[4] == keys[5], "which pool is timed is no matter, what steps do to it is"


def test_a_curve_reaches_the_largest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of several rows would be cut to what the curve knows; steps that warm up would look as cheap as one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = lp.LookaheadConfig(adaptive=True, window_size=6, ngram_size=4, guess_set_size=0, warmup_steps=3)
    decoder = lp.LookaheadDecoder(tiny_model(), config)
    assert decoder.curve is not None and decoder.curve.most == 18
    assert _Stopwatch(decoder).config.warmup_steps == 0


def test_sigterm_while_measuring_is_no_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app ends with 0 where it was asked to end, and with 130 after Ctrl-C."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forward = lp.engine.lookahead.ModelRunner.forward

    def stopped(self: Any, *args: Any, **options: Any) -> Any:
        if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), DeferredSignals):
            signal.raise_signal(signal.SIGTERM)
        return forward(self, *args, **options)

    monkeypatch.setattr(lp.engine.lookahead.ModelRunner, "forward", stopped)
    with pytest.raises(Terminated):
        lp.LookaheadDecoder(tiny_model(), lp.LookaheadConfig(adaptive=True, guess_set_size=4))
    assert not [*tmp_path.rglob("*.json")]


def test_a_rank_that_fails_while_steps_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why; the others end in order, as they do in a text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forward, ended, first = lp.engine.lookahead.ModelRunner.forward, dict[int, str](), tiny_model()
    models = [first, deepcopy(first)]

    def body(context: ParallelContext) -> None:
        def failing(self: Any, tokens: list[int], *args: Any, **kwargs: Any) -> Any:
            if len(tokens) == 12 and kwargs.get("capture", True) and self.model is models[1]:
                raise RuntimeError("this device is gone")
            return forward(self, tokens, *args, **kwargs)

        monkeypatch.setattr(lp.engine.lookahead.ModelRunner, "forward", failing)
        try:
            lp.LookaheadDecoder(models[context.rank], lp.LookaheadConfig(adaptive=True), context)
        except BaseException as error:
            ended[context.rank] = f"{type(error).__name__} {error}"

    run_lockstep(2, body)
    assert ended == {0: "Terminated ", 1: "RuntimeError this device is gone"}
