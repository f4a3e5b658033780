"""A model's runner serves all its decoders: steps are captured once, before text is generated."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import TemperatureLogitsWarper

import lp
from lp.models.captured_steps import CAPACITY_UNIT, CapturedSteps
from lp.models.digests import model_digests
from lp.models.graph_recorder import GraphRecorder
from lp.models.kv_cache import CacheTooLarge, StaticKVCache
from lp.models.runner import ModelRunner, runner_of
from tests.support.captured import captured_runner
from tests.support.peft_releases import add_adapter
from tests.support.simulated_cuda import SimulatedCuda
from tests.support.tiny_models import drawn_text, plain_greedy, tiny_config, tiny_model

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
NEW = 12
IDS = drawn_text(random.Random("kept"), 20)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The work that was recorded, in turn."""
    record = GraphRecorder.record
    works: list[Any] = []

    def noted(self: GraphRecorder, work: Callable[[], Any]) -> Any:
        works.append(work)
        return record(self, work)

    monkeypatch.setattr(GraphRecorder, "record", noted)
    return works


def on_gpu() -> Any:
    return copy.deepcopy(tiny_model()).to("cuda")


@pytest.mark.parametrize(
    ("arch", "name", "value"),
    [
        ("mistral_sliding", "sliding_window", 8),
        ("gemma2", "final_logit_softcapping", 0.5),
        ("granite", "logits_scaling", 9.0),
    ],
)
def test_a_field_of_the_config_that_is_set(arch: str, name: str, value: float) -> None:
    """`generate` follows it at once; steps ran with a copy of the config as it was, also those of a new decoder."""
    model, sampling = tiny_model(arch), lp.SamplingParams(seed=1, temperature=0.05)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    before = decoder.generate(IDS, NEW, sampling).tokens
    setattr(model.config, name, value)
    expected = lp.AutoregressiveDecoder(model).generate(IDS, NEW, sampling).tokens
    assert expected != before
    assert decoder.generate(IDS, NEW, sampling).tokens == expected
    assert lp.LookaheadDecoder(model, CONFIG).generate(IDS, NEW, sampling).tokens == expected


@pytest.mark.parametrize("capture", ["off", "compile"])
@pytest.mark.usefixtures("uncompiled")
def test_a_rotary_boundary_that_is_set(capture: str) -> None:
    """A step went on across it, also of a new decoder, and an engine put texts on both sides into one pass."""
    model, new = tiny_model("phi3"), 40
    decoder = lp.LookaheadDecoder(model, CONFIG, capture=capture)
    engine = lp.Engine(decoder)
    prompts = IDS[:5], IDS[:18]
    assert [output.tokens for output in decoder.generate_batch(prompts, new)] == [
        plain_greedy(model, ids, new) for ids in prompts
    ]
    longrope = tiny_config("phi3_longrope")
    model.config.original_max_position_embeddings = 20
    model.config.rope_parameters = longrope.rope_parameters | {"original_max_position_embeddings": 20}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.double()
    for each in (decoder, lp.LookaheadDecoder(model, CONFIG, capture="off")):
        assert each.generate(IDS[:5], new).tokens == plain_greedy(model, IDS[:5], new)
        assert not each.runner.captured
    handles = [engine.submit(ids, new) for ids in prompts]
    engine.run()
    assert [handle.result().tokens for handle in handles] == [plain_greedy(model, ids, new) for ids in prompts]
    model.config.rope_parameters = tiny_config("phi3").rope_parameters
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.double()
    assert decoder.generate(IDS[:5], new).tokens == plain_greedy(model, IDS[:5], new)
    assert bool(decoder.runner.captured) == (capture != "off")


def test_a_config_may_have_what_json_has_no_form_for() -> None:
    model = tiny_model()
    decoder = lp.LookaheadDecoder(model, CONFIG)
    for value in (np.float32(1), torch.tensor(1), {1, 2}, {0: 1, "a": 2}, object()):
        model.config.of_the_user = value
        assert decoder.generate(IDS, 4).tokens == plain_greedy(model, IDS, 4)
        view = decoder.runner.model
        assert decoder.generate(IDS, 4).tokens and decoder.runner.model is view, "nothing has changed"
        assert model_digests(model) == model_digests(copy.deepcopy(model))


def test_kinds_are_known_behind_a_whole_pass_alone() -> None:
    """The first one ran out of memory in the second layer, and an engine's cache had room for one."""
    model = tiny_model()
    lp.LookaheadDecoder(model, CONFIG)
    lp.release(model)
    decoder = lp.LookaheadDecoder(model, CONFIG)  # which knows that the model honours the mask, and runs no pass

    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("simulated")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises((torch.OutOfMemoryError, lp.UserError)):
        decoder.generate(IDS, NEW)
    hook.remove()
    outputs = decoder.generate_batch([IDS, IDS[:5]], NEW)
    assert [output.tokens for output in outputs] == [plain_greedy(model, ids, NEW) for ids in (IDS, IDS[:5])]


def test_layers_of_several_dtypes_when_a_weight_has_moved() -> None:
    """Kinds of another dtype than the embedding's were taken for those of a model before."""
    model = tiny_model(dtype=torch.float32)
    attention = model.model.layers[1].self_attn.double()

    def widen(module: Any, arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = given.get("attention_mask")
        wide = {"hidden_states": given["hidden_states"].double()}
        wide["position_embeddings"] = tuple(each.double() for each in given["position_embeddings"])
        if torch.is_tensor(mask) and mask.is_floating_point():
            wide["attention_mask"] = mask.double()
        return arguments, given | wide

    attention.register_forward_pre_hook(widen, with_kwargs=True)
    attention.register_forward_hook(lambda module, arguments, output: (output[0].float(), *output[1:]))
    decoder = lp.LookaheadDecoder(model, CONFIG, attention="sdpa")
    for _ in range(2):
        outputs = decoder.generate_batch([IDS, IDS[:5]], NEW)
        assert [output.tokens for output in outputs] == [plain_greedy(model, ids, NEW) for ids in (IDS, IDS[:5])]
        weight = model.model.layers[0].self_attn.q_proj.weight
        weight.data = weight.data.clone()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of capture=compile run as they are: compiling takes a minute."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.usefixtures("uncompiled")
def test_captured_steps_of_other_weights_are_freed() -> None:
    """They hold their graphs, and these hold them: a device was full of caches that nobody used."""
    model = tiny_model()
    decoder = lp.LookaheadDecoder(model, CONFIG, capture="compile")
    decoder.generate(IDS, NEW)
    caches = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert decoder.runner.captured is not None and decoder.runner.captured.cache is not None
            caches.append(weakref.ref(decoder.runner.captured.cache))
            weight = model.model.layers[0].self_attn.q_proj.weight
            weight.data = weight.data.clone()
            assert decoder.generate(IDS, NEW).tokens == plain_greedy(model, IDS, NEW)
        assert [cache() for cache in caches] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("change", ["release", "double"])
def test_a_captured_cache_of_a_model_that_is_known_already(change: str) -> None:
    """It was probed before, so that no pass had told the sizes of its keys and values, which differ."""
    model = tiny_model("deepseek_v3", dtype=torch.float32)
    lp.LookaheadDecoder(model, CONFIG, capture="compile")
    lp.release(model) if change == "release" else model.double()
    decoder = lp.LookaheadDecoder(model, CONFIG, capture="compile")
    assert decoder.runner.captured is not None
    engine = lp.Engine(decoder, 2, 2000)
    for ids in (IDS, [*IDS, 3, 4]):
        handle = engine.submit(ids, NEW)
        engine.run()
        assert handle.result().tokens == plain_greedy(model, ids, NEW)


SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20}}


@pytest.mark.parametrize("how", SAMPLING)
def test_three_calls_capture_once(how: str, gpu: SimulatedCuda, recorded: list[Any]) -> None:
    """A capture takes as long as many steps; `custom_generate` makes a decoder for every call."""
    model = on_gpu()
    counts = []
    for seed in range(3):
        model.generate(
            torch.tensor([IDS], device="cuda"),
            custom_generate=lp.generate,
            max_new_tokens=NEW,
            window_size=4,
            ngram_size=3,
            guess_set_size=6,
            seed=seed,
            **SAMPLING[how],
        )
        counts.append(len(recorded))
    assert counts[0] and len({*counts}) == 1


def test_nothing_is_captured_while_text_is_generated(gpu: SimulatedCuda, recorded: list[Any]) -> None:
    """Or the first steps of every size would seem slow, and ranks would wait for them."""
    model = on_gpu()
    seen: list[int] = []
    sampling = lp.SamplingParams(temperature=0.8, seed=1)
    for given in (None, sampling):
        decoder = lp.LookaheadDecoder(model, CONFIG)
        seen.clear()
        tokens = decoder.generate(IDS, NEW, given, on_tokens=lambda tokens, step: seen.append(len(recorded))).tokens
        assert len({*seen, len(recorded)}) == 1
        assert tokens == lp.AutoregressiveDecoder(tiny_model()).generate(IDS, NEW, given).tokens


def test_a_longer_text_leaves_what_is_captured(gpu: SimulatedCuda, recorded: list[Any]) -> None:
    model = on_gpu()
    longer = drawn_text(random.Random("longer"), CAPACITY_UNIT)
    counts = []
    for ids in (IDS, longer, IDS, longer):
        tokens = lp.LookaheadDecoder(model, CONFIG).generate(ids, NEW, eos_token_id=()).tokens
        assert tokens == plain_greedy(tiny_model(), ids, NEW)
        counts.append(len(recorded))
    assert counts[0] < counts[1] == counts[2] == counts[3]


def test_texts_a_little_longer_each_time(recorded: list[Any]) -> None:
    """With capacities as large as each text needs, a chat would be captured anew at every turn."""
    steps = CapturedSteps(*_parts())
    capacities = {steps.empty_cache(slots).capacity for slots in range(10, 20 * CAPACITY_UNIT, 64)}
    assert len(capacities) <= 8 and len(steps._caches) == len(capacities)


def test_without_memory_the_caches_before_go(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = CapturedSteps(*_parts())
    first = weakref.ref(steps.empty_cache(10))
    new_cache = CapturedSteps._new_cache
    asked: list[int] = []

    def full(self: CapturedSteps, slots: int) -> StaticKVCache:
        asked.append(slots)
        if self._caches:
            raise CacheTooLarge(1, slots)
        return new_cache(self, slots)

    monkeypatch.setattr(CapturedSteps, "_new_cache", full)
    capacity = steps.empty_cache(3 * CAPACITY_UNIT).capacity
    gc.collect()
    assert first() is None and len(asked) == 2 and capacity - 3 * CAPACITY_UNIT <= 2 * CAPACITY_UNIT


def _parts() -> tuple[Any, ...]:
    runner = runner_of(tiny_model())
    return runner.network, runner.masks, lp.Capture.OFF


def test_decoders_of_one_model_share_a_runner() -> None:
    model = tiny_model()
    first = lp.LookaheadDecoder(model, CONFIG).runner
    assert lp.LookaheadDecoder(model).runner is first is lp.PlainDecoder(model).runner
    assert lp.LookaheadDecoder(model, CONFIG, attention="eager").runner is not first
    assert lp.LookaheadDecoder(copy.deepcopy(model), CONFIG).runner is not first, "a copy has weights of its own"
    assert lp.LookaheadDecoder(pickle.loads(pickle.dumps(model)), CONFIG).runner is not first
    model.to(torch.float32)
    assert lp.LookaheadDecoder(model, CONFIG).runner is not first
    lp.release(model)
    assert not any(name.endswith("runners") for name in vars(model))
    assert lp.LookaheadDecoder(model, CONFIG).generate(IDS, 4).tokens == plain_greedy(model, IDS, 4)


def test_threads_that_start_together_share_a_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runners would lay the weights out twice, the second time while the first one computes with them."""
    made = list[ModelRunner]()
    first_is_made = threading.Event()

    def slow(*arguments: Any, **settings: Any) -> ModelRunner:
        made.append(ModelRunner(*arguments, **settings))
        first_is_made.set()
        time.sleep(0.2)  # others ask while this one is not yet known
        return made[-1]

    monkeypatch.setattr("lp.models.runner.ModelRunner", slow)
    model, got = tiny_model(), list[ModelRunner]()
    threads = [threading.Thread(target=lambda: got.append(runner_of(model))) for _ in range(3)]
    threads[0].start()
    assert first_is_made.wait(60)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(got) == 3 and {*got} == {*made}


def test_a_callback_that_raises_leaves_what_is_captured(recorded: list[Any]) -> None:
    """It is the caller's text that ends, not the model's use."""
    model = tiny_model()
    decoder = lp.LookaheadDecoder(model, CONFIG)
    captured_runner(decoder)

    def fail(tokens: list[int], step: int) -> None:
        raise KeyError("the caller's")

    decoder.generate(IDS, NEW)
    before = len(recorded)
    with pytest.raises(KeyError):
        decoder.generate(IDS, NEW, on_tokens=fail)
    assert decoder.generate(IDS, NEW, eos_token_id=()).tokens == plain_greedy(model, IDS, NEW)
    assert len(recorded) == before


def test_an_adapter_that_is_switched(gpu: SimulatedCuda) -> None:
    """Its layers choose in Python which weights to use, and a graph would go on with those of its capture."""
    model = tiny_model()
    torch.manual_seed(0)
    for name in ("first", "second"):
        adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        add_adapter(model, adapter, name)
    model.double().eval()
    moved = copy.deepcopy(model).to("cuda")
    decoder = lp.PlainDecoder(moved, capture="graph")
    texts = []
    for change in (
        lambda model: model.set_adapter("first"),
        lambda model: model.set_adapter("second"),
        lambda model: model.disable_adapters(),
    ):
        change(model)
        change(moved)
        texts.append(plain_greedy(model, IDS, NEW))
        assert decoder.generate(IDS, NEW, eos_token_id=()).tokens == texts[-1]
    assert len({*map(tuple, texts)}) == 3, "changes that tell"


class _Warper(TemperatureLogitsWarper):
    """Its settings do not say what it does."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(1.0)
        self.change = change

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.change(scores)


def test_a_warper_of_the_callers_own(gpu: SimulatedCuda) -> None:
    """Captured with one, a step would go on with it for another of its class."""
    model = on_gpu()
    for change in (torch.neg, torch.clone):
        processors = [_Warper(change)]
        plain = lp.AutoregressiveDecoder(tiny_model()).generate(IDS, NEW, logits_processor=processors)
        output = lp.LookaheadDecoder(model, CONFIG).generate(IDS, NEW, logits_processor=processors)
        assert output.tokens == plain.tokens


def test_steps_run_on_the_models_device(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events are the current device's: on another one, nothing would be waited for."""
    seen: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (seen.append(torch.cuda.current_device()), replay(graph))
    )
    model = copy.deepcopy(tiny_model()).to("cuda:1")
    decoder = lp.LookaheadDecoder(model, CONFIG)
    assert decoder.generate(IDS, NEW, eos_token_id=()).tokens == plain_greedy(tiny_model(), IDS, NEW)
    assert {*seen} == {1} and torch.cuda.current_device() == 0


def test_runners_of_other_weights_go() -> None:
    """Their weights, graphs and caches would stay on a device that the model has left."""
    model = tiny_model()
    gone = weakref.ref(runner_of(model))
    runner_of(model.half())
    gc.collect()
    assert gone() is None


def test_release_lays_the_weights_out_as_they_were(tmp_path: Path) -> None:
    model = tiny_model()
    ids = torch.tensor([IDS])
    expected = model(ids).logits
    lp.LookaheadDecoder(model, CONFIG)
    assert not all(parameter.is_contiguous() for parameter in model.parameters())
    lp.release(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert torch.equal(model(ids).logits, expected)
    save_file({name: p for name, p in model.state_dict().items() if name != "lm_head.weight"}, tmp_path / "weights")


def test_out_of_memory_leaves_a_model_that_is_captured_again(gpu: SimulatedCuda, recorded: list[Any]) -> None:
    """Graphs' memory pools are of no more use once all their graphs are gone."""
    decoder = lp.LookaheadDecoder(on_gpu(), CONFIG)

    def fail(tokens: list[int], step: int) -> None:
        raise torch.OutOfMemoryError("simulated")

    decoder.generate(IDS, NEW)
    assert decoder.runner.captured
    recorder = decoder.runner.captured.recorder
    with pytest.raises(torch.OutOfMemoryError):
        decoder.generate(IDS, NEW, on_tokens=fail)
    assert decoder.runner.captured.recorder is not recorder and not decoder.runner.captured.reserved
    before = len(recorded)
    assert decoder.generate(IDS, NEW, eos_token_id=()).tokens == plain_greedy(tiny_model(), IDS, NEW)
    assert len(recorded) > before
