"""The step times of a decoder: measured by real steps of its own loop, with a key of all that they depend on."""

from __future__ import annotations

import signal
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import lp
from lp.budget.measure import Measurement
from lp.budget.step_times import StepTimes
from lp.budget.step_times_cache import StepTimesFile
from lp.draft.layout import StepLayout
from lp.engine.interrupts import DeferredSignals, Terminated
from lp.engine.step_pass import StepPass
from lp.engine.step_timing import StepTimingDecoder
from lp.models.runner import ModelRunner
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def given_step_times() -> None:
    """Here decoders measure."""


def test_real_steps_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the loop does not really run would have the times of smaller ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    computed: list[int] = []
    run = StepPass.run

    def counted(self: StepPass, layout: StepLayout, *args: Any) -> torch.Tensor:
        computed.append(layout.num_tokens)
        return run(self, layout, *args)

    monkeypatch.setattr(StepPass, "run", counted)
    config = lp.LookaheadConfig(adaptive=True, window_size=4, guess_set_size=20)
    times = lp.LookaheadDecoder(tiny_model(), config).step_times
    assert times is not None and times.num_tokens == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert set(times.num_tokens) <= set(computed)
    assert lp.LookaheadDecoder(tiny_model(), config).step_times == times


def test_ranks_have_step_times_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange is in them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, config = tiny_model(), lp.LookaheadConfig(adaptive=True, window_size=0, guess_set_size=4)
    alone = lp.LookaheadDecoder(model, config).step_times
    both = run_lockstep(2, lambda context: lp.LookaheadDecoder(model, config, context).step_times)
    assert both[0] == both[1] != alone and len([*tmp_path.rglob("*.json")]) == 2


def test_the_key_has_all_that_a_step_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads or on two nodes, a pool without numba or learning: their step times differ."""
    keys: list[str] = []

    def noted(file: StepTimesFile, *others: Any) -> Measurement:
        keys.append(file.path.name)
        return Measurement(StepTimes.constant(0.01, 9), ())

    monkeypatch.setattr("lp.engine.step_timing.load_or_measure", noted)
    model, config = tiny_model(), lp.LookaheadConfig(adaptive=True)
    lp.LookaheadDecoder(model, config)
    lp.LookaheadDecoder(model, config, ParallelContext(backend="gloo"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    lp.LookaheadDecoder(model, config)
    monkeypatch.setattr("lp.budget.step_times_cache.COMPILED", "otherwise")
    lp.LookaheadDecoder(model, config)
    lp.LookaheadDecoder(model, lp.LookaheadConfig(adaptive=True, learn=False))
    lp.LookaheadDecoder(model, lp.LookaheadConfig(adaptive=True, learn=False, pool_scope="session", pool_file="x"))
    assert len({*keys}) == 5 and keys[4] == keys[5], "the pool that is timed does not matter, what steps do to it does"


def test_the_largest_step_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of several levels would be cut to what is known; warm-up steps would make all sizes look alike."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = lp.LookaheadConfig(adaptive=True, window_size=6, ngram_size=4, guess_set_size=0, warmup_steps=3)
    decoder = lp.LookaheadDecoder(tiny_model(), config)
    assert decoder.step_times is not None and decoder.step_times.max_tokens == 18
    assert StepTimingDecoder(decoder.runner, config, decoder.context).config.warmup_steps == 0


def test_sigterm_while_steps_are_timed_is_no_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app ends with 0 where it was asked to end, and with 130 after Ctrl-C."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forward = ModelRunner.forward

    def stopped(self: Any, *args: Any, **options: Any) -> Any:
        if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), DeferredSignals):
            signal.raise_signal(signal.SIGTERM)
        return forward(self, *args, **options)

    monkeypatch.setattr(ModelRunner, "forward", stopped)
    with pytest.raises(Terminated):
        lp.LookaheadDecoder(tiny_model(), lp.LookaheadConfig(adaptive=True, guess_set_size=4))
    assert not [*tmp_path.rglob("*.json")]


def test_a_rank_that_fails_while_steps_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why; the others end in order, as they do in a text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forward, ended, first = ModelRunner.forward, dict[int, str](), tiny_model()
    models = [first, deepcopy(first)]

    def body(context: ParallelContext) -> None:
        def failing(self: Any, tokens: list[int], *args: Any, **kwargs: Any) -> Any:
            if len(tokens) == 12 and self.original is models[1]:
                raise RuntimeError("this device is gone")
            return forward(self, tokens, *args, **kwargs)

        monkeypatch.setattr(ModelRunner, "forward", failing)
        try:
            lp.LookaheadDecoder(models[context.rank], lp.LookaheadConfig(adaptive=True), context)
        except BaseException as error:
            ended[context.rank] = f"{type(error).__name__} {error}"

    run_lockstep(2, body)
    assert ended == {0: "Terminated ", 1: "RuntimeError this device is gone"}
