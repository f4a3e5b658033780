"""The step times of a decoder: one table for a model in this process, with a key of all that they depend on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lp
from lp.budget.step_times_cache import read_estimate
from lp.config import KVDtype
from lp.engine.step_timing import KnownStepTimes, step_times_file
from lp.models.layer_timing import TIMED_SIZES, time_passes
from lp.models.runner import ModelRunner, runner_of
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import tiny_model

ADAPTIVE = lp.LookaheadConfig(adaptive=True)


@pytest.fixture(autouse=True)
def given_step_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here decoders learn their step times, in a cache folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the passes that are timed before a decoder has any step times."""
    taken: list[int] = []

    def noted(runner: ModelRunner) -> dict[int, float]:
        taken.extend(TIMED_SIZES)
        return time_passes(runner)

    monkeypatch.setattr("lp.engine.step_timing.time_passes", noted)
    return taken


def _known(decoder: lp.LookaheadDecoder) -> KnownStepTimes:
    assert isinstance(decoder._step_times, KnownStepTimes)
    return decoder._step_times


@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "gemma3", "mixtral", "qwen3_5", "mamba2"])
def test_one_layer_is_timed(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a large model would take seconds before the first token. A clock that counts layers tells."""
    model = tiny_model(arch)
    runner = runner_of(model)
    ticks = iter(range(10**6))
    monkeypatch.setattr("lp.models.layer_timing.clock_of", lambda device, replica: lambda: float(next(ticks)))
    before = {id(module): dict(vars(module)) for module in model.modules()}
    found = time_passes(runner)
    # A pass is four readings of the clock: around itself and around its layer, which is one reading apart.
    layers = runner.config.num_hidden_layers
    assert found == dict.fromkeys(TIMED_SIZES, 3.0 + layers - 1), "the layer counts as often as there are layers"
    assert all(vars(module).keys() == before[id(module)].keys() for module in model.modules()), (
        "the model stays as it is"
    )


def test_timing_leaves_the_runner_as_it_is() -> None:
    """Buffers of the next cache are made by what a runner knows of all its layers."""
    model = tiny_model()
    runner = ModelRunner(model)
    kinds, network = runner.known_kinds, runner.network
    time_passes(runner)
    assert runner.known_kinds == kinds and runner.network is network
    assert runner.fused and len(runner.network._layers) == runner.config.num_hidden_layers


def test_a_model_whose_layers_are_not_found_is_timed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not start."""
    monkeypatch.setattr("lp.models.first_layer._cut", lambda *args: False)
    runner = ModelRunner(tiny_model("gpt_neox"))
    assert all(seconds > 0 for seconds in time_passes(runner).values())


def test_no_decoder_times_what_another_one_knows(passes: list[int], tmp_path: Path) -> None:
    """Every call of custom_generate makes a decoder; five to eighteen seconds before each were no use."""
    model = tiny_model()
    first = lp.LookaheadDecoder(model)
    assert passes == [*TIMED_SIZES] and first.step_times
    for _ in range(10):
        ids = torch.tensor([[1, 2, 3]])
        model.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=lp.generate, trust_remote_code=True)
    other = lp.LookaheadDecoder(model)
    assert passes == [*TIMED_SIZES], "no call times anything again"
    assert _known(other)._table is _known(first)._table and _known(first)._table.estimate.steps > 0
    lp.LookaheadDecoder(tiny_model())
    assert passes == [*TIMED_SIZES], "another process, or model object, has the file"
    lp.LookaheadDecoder(model, step_times="measure")
    assert passes == 2 * [*TIMED_SIZES], "unless it is asked to begin anew"
    assert not lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4)).step_times
    assert passes == 2 * [*TIMED_SIZES], "a fixed budget needs no times"


def test_threads_share_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """First decoders that are made at once timed a layer each, and what all but one learned was lost."""
    taken: list[int] = []

    def noted(runner: ModelRunner) -> dict[int, float]:
        taken.append(threading.get_ident())
        time.sleep(0.05)  # for the other threads
        return dict.fromkeys(TIMED_SIZES, 0.001)

    monkeypatch.setattr("lp.engine.step_timing.time_passes", noted)
    model, decoders = tiny_model(), list[lp.LookaheadDecoder]()
    lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4))  # has no table
    threads = [threading.Thread(target=lambda: decoders.append(lp.LookaheadDecoder(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(decoders) == 4 and len(taken) == 1
    assert len({id(_known(decoder)._table) for decoder in decoders}) == 1


def test_what_is_learned_is_kept_with_its_doubts(tmp_path: Path) -> None:
    """On a busy machine nothing was stored, and every decoder measured again."""
    decoder = lp.LookaheadDecoder(tiny_model())
    prior = _known(decoder)._table.estimate
    for _ in range(3):
        decoder.generate([1, 2, 3] * 4, 40, eos_token_id=())
    (file,) = tmp_path.rglob("*.json")
    stored = read_estimate(file.read_text())
    assert stored and stored.steps > 0 and stored.doubts.min() < prior.doubts.min()
    again = lp.LookaheadDecoder(tiny_model())
    assert again.step_times == stored.times and _known(again).careful == stored.careful


def test_an_engine_with_one_text_learns_and_with_several_does_not() -> None:
    """A server's texts mostly run alone; steps that texts share tell of none of them."""
    model = tiny_model()
    decoder = lp.LookaheadDecoder(model)
    table = _known(decoder)._table
    with lp.Engine(decoder) as engine:
        engine.submit([1, 2, 3] * 4, 30, eos_token_id=())
        engine.run()
        learned = table.estimate.steps + len(table._pending)
        assert learned > 0
        for first in (1, 2):
            engine.submit([first, 2, 3] * 4, 8, eos_token_id=())
        while engine.running != 1 and engine.step():
            if engine.running == 2:
                assert table.estimate.steps + len(table._pending) == learned
        engine.run()


def test_ranks_have_step_times_of_their_own(tmp_path: Path) -> None:
    """The exchange is in them; and ranks of which one has no table yet meet in the same collectives."""
    models = [tiny_model(), tiny_model()]
    alone = lp.LookaheadDecoder(models[0], ADAPTIVE)

    def body(context: ParallelContext) -> list[Any]:
        decoder = lp.LookaheadDecoder(models[context.rank], ADAPTIVE, context)
        return [decoder.step_times, _known(decoder).careful]

    both = run_lockstep(2, body)
    assert both[0] == both[1] and both[0][0] != alone.step_times
    models[1] = tiny_model()
    assert run_lockstep(2, body) == both


def test_the_key_has_all_that_a_step_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads or on two nodes, quantised KV, a pool without numba or learning: step times differ."""
    runner = runner_of(tiny_model())

    def key(config: lp.LookaheadConfig = ADAPTIVE, context: ParallelContext | None = None) -> str:
        return step_times_file(runner, config, context or ParallelContext()).path.name

    keys = [key(), key(context=ParallelContext(backend="gloo"))]
    runner.kv_dtype = KVDtype.INT8
    keys.append(key())
    runner.kv_dtype = KVDtype.AUTO
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    keys.append(key())
    monkeypatch.setattr("lp.budget.step_times_cache.COMPILED", "otherwise")
    keys.append(key())
    keys.append(key(lp.LookaheadConfig(adaptive=True, ablation=lp.Ablation(learn=False))))
    keys.append(
        key(lp.LookaheadConfig(adaptive=True, ablation=lp.Ablation(learn=False), pool_scope="session", pool_file="x"))
    )
    keys.append(key(lp.LookaheadConfig(adaptive=True, ablation=lp.Ablation(learn=False), corpora=["x"], history="x")))
    assert len({*keys}) == 6 and keys[5] == keys[6] == keys[7], (
        "the pool that is timed does not matter, what steps do to it does"
    )


def test_all_sizes_of_a_step_are_learned() -> None:
    """A window of several levels would be cut to what is known."""
    config = lp.LookaheadConfig(
        adaptive=True, window_size=6, ngram_size=4, guess_set_size=0, ablation=lp.Ablation(warmup_steps=3)
    )
    times = lp.LookaheadDecoder(tiny_model(), config).step_times
    assert times is not None and times.max_tokens == 18
