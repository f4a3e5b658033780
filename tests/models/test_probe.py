"""The probe: a model that does not honour the tree mask is refused by name, and one that does is probed once."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import lp
import lp.attention.flash
from lp.attention.base import StepView, View
from lp.attention.masks import StepMasks
from lp.draft.layout import ancestors
from lp.models.float32_excerpt import Excerpt
from lp.models.kv_cache import StaticKVCache
from lp.models.probe import probed
from lp.models.probe_step import PARENTS, PREFIX, Fault, planted
from lp.models.runner import ModelRunner
from lp.models.skipped_layer import SkippedLayer
from tests.support.tiny_models import SLIDING_WINDOW, drawn_weights, tiny_config, tiny_model

SLIDING = ["mistral_sliding", "qwen2_sliding", "gemma3", "phi3_sliding", "starcoder2"]
DTYPES = (torch.float64, torch.bfloat16)
VARIED = ["llama", "gpt2", "opt", "gpt_neox", "falcon", "mixtral", "deepseek_v3", "gemma2", "gpt_oss", *SLIDING]
build = StepMasks.build


def _by_order(self: StepMasks, view: View) -> Any:
    assert isinstance(view, StepView)
    return build(self, replace(view, visible_TT=torch.ones_like(view.visible_TT).tril()))


def _counted(model: PreTrainedModel) -> list[int]:
    """Tokens of every forward pass of the model from now on."""
    num_tokens: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        num_tokens.append(kwargs["input_ids"].shape[1] if "input_ids" in kwargs else args[0].shape[1])

    model.register_forward_pre_hook(count, with_kwargs=True)
    return num_tokens


@pytest.mark.parametrize("arch", VARIED)
def test_branches_that_see_each_other_are_refused(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that drops the mask and goes by order alone would mix branches, and often pass a greedy comparison."""

    monkeypatch.setattr(StepMasks, "build", _by_order)
    for dtype in DTYPES:
        with pytest.raises(ValueError, match=r"ForCausalLM|LMHeadModel") as refused:
            ModelRunner(tiny_model(arch, dtype=dtype))
        assert "does not honour a tree mask" in str(refused.value)


@pytest.mark.subset(14)
@pytest.mark.parametrize("arch", VARIED)
@pytest.mark.parametrize("fault", planted([5]), ids=lambda fault: fault.kind)
def test_one_node_that_is_wrong_is_refused(arch: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a large model differs from itself by more than one node changes that is seen and must not be."""
    honest, forward = ancestors(PARENTS), ModelRunner.forward

    def wrong(self: ModelRunner, tokens: Any, positions: Any, visible: np.ndarray, *rest: Any, **kw: Any) -> Any:
        if np.array_equal(visible, honest) and kw.get("capture", True):
            visible = fault.visible
            positions = [positions[0] - PREFIX + position for position in fault.positions]
        return forward(self, tokens, positions, visible, *rest, **kw)

    monkeypatch.setattr(ModelRunner, "forward", wrong)
    with pytest.raises(ValueError, match="does not honour a tree mask"):
        ModelRunner(tiny_model(arch, dtype=torch.bfloat16))


@pytest.mark.parametrize("arch", SLIDING)
def test_a_window_that_is_not_applied_is_refused(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask without the window, or with it one token off, is wrong only once a text is longer than the window."""
    for off in (1, 1000):

        def shifted(self: StepMasks, view: View, off: int = off) -> Any:
            self.config.sliding_window += off
            try:
                return build(self, view)
            finally:
                self.config.sliding_window -= off

        monkeypatch.setattr(StepMasks, "build", shifted)
        with pytest.raises(ValueError, match="does not honour a tree mask"):
            ModelRunner(tiny_model(arch))


def test_a_boolean_mask_under_eager_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`eager` adds its mask: True and False would shift scores by one and hide nothing."""

    def boolean(self: StepMasks, *args: Any) -> torch.Tensor:
        mask = build(self, *args)
        return mask if mask is None else mask == 0  # type: ignore[operator, return-value]

    monkeypatch.setattr(StepMasks, "build", boolean)
    with pytest.raises(ValueError, match="LlamaForCausalLM with eager attention does not honour"):
        ModelRunner(tiny_model(), "eager")


@pytest.mark.parametrize("fault", ["commit", "positions", "rope"])
def test_other_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is not all: tokens must have their positions, and the accepted ones must stay in the cache."""
    forward, commit = ModelRunner.forward, StaticKVCache.commit

    def misplaced(self: ModelRunner, tokens: Any, positions: Any, visible: np.ndarray, *rest: Any, **kw: Any) -> Any:
        start = positions[0]
        return forward(self, tokens, range(start, start + len(tokens)), visible, *rest, **kw)

    model = tiny_model()
    if fault == "positions":
        monkeypatch.setattr(ModelRunner, "forward", misplaced)
    elif fault == "commit":
        monkeypatch.setattr(StaticKVCache, "commit", lambda self, tokens: commit(self, range(len(tokens))))
    else:  # an architecture that ignores position_ids
        rotary = model.model.rotary_emb
        rotary.register_forward_pre_hook(
            lambda module, args, kw: (args, kw | {"position_ids": torch.arange(kw["position_ids"].shape[1])[None]}),
            with_kwargs=True,
        )
    with pytest.raises(ValueError, match="does not honour a tree mask"):
        ModelRunner(model)


def test_a_model_that_fails_is_named() -> None:
    """A traceback from inside somebody's modelling code says nothing about what to do."""
    model = tiny_model()

    def fail_on_a_step(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["use_cache"]:
            raise KeyError("surprise")

    model.register_forward_pre_hook(fail_on_a_step, with_kwargs=True)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM .* cannot run a tree-shaped step \(KeyError: 'surprise'\); try"
    ):
        ModelRunner(model)


def test_a_context_too_short_to_probe_is_named() -> None:
    """A table of positions ends in an IndexError from inside torch."""
    shape = GPT2Config(vocab_size=40, n_positions=8, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel .* cannot run a tree-shaped step \(IndexError"):
        ModelRunner(GPT2LMHeadModel(shape).eval())


def test_the_probe_is_small_and_runs_once() -> None:
    """Every `generate(custom_generate=...)` makes a decoder: a probe a call would cost as much as several tokens."""
    model = tiny_model("gemma3")
    num_tokens = _counted(model)
    lp.LookaheadDecoder(model, lp.LookaheadConfig(adaptive=False))
    # The whole model's step; two plain branches at once, twice; prefix, tree, planted faults, tree, the step behind it.
    passes = [3, 14, 14, 10, 7, *[7] * 9, 7, 1]
    assert num_tokens == passes
    lp.LookaheadDecoder(model, lp.PromptLookupConfig())
    assert len(num_tokens) == len(passes)
    lp.LookaheadDecoder(model, lp.LookaheadConfig(adaptive=False), attention="eager")
    assert num_tokens == passes * 2
    ModelRunner(tiny_model("llama"), probe=False)


def test_the_probe_leaves_the_model_as_it_was() -> None:
    """A window left short would change every later text, and another attention those of other threads."""
    for arch in SLIDING:
        model = tiny_model(arch)
        held = [getattr(module, "sliding_window", None) for module in model.modules()]
        state, running = torch.get_rng_state(), model.config._attn_implementation
        ModelRunner(model, "eager")
        assert model.config._attn_implementation == running
        assert model.config.sliding_window == SLIDING_WINDOW
        assert [getattr(module, "sliding_window", None) for module in model.modules()] == held
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2", "qwen3_moe", "deepseek_v3"])
def test_half_precision_passes(arch: str) -> None:
    """Rounding is no fault of the mask, nor of fused layers."""
    for dtype in (torch.bfloat16, torch.float16):
        for layers in (2, 12):
            runner = ModelRunner(tiny_model(arch, dtype=dtype, num_hidden_layers=layers, **_kinds(arch, layers)))
            assert runner.fused == (arch in ("llama", "gemma3", "qwen3_moe"))


def _kinds(arch: str, layers: int) -> dict[str, Any]:
    named = tiny_config(arch).layer_types if arch == "gemma3" else None
    return {"layer_types": named * (layers // 2)} if named else {}


def test_a_kernel_that_is_wrong_in_the_models_dtype_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict about the mask is given in float32, which is another kernel."""
    kernel = lp.attention.flash._cpu_flash

    def coarse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kw: Any) -> Any:
        return kernel(q, k, v * 1.1 if v.dtype is torch.bfloat16 else v, *args, **kw)

    monkeypatch.setattr("lp.attention.flash._cpu_flash", coarse)
    model = tiny_model(dtype=torch.float32)
    ModelRunner(model, "flash")
    for in_bfloat16 in (tiny_model(dtype=torch.bfloat16), model.to(torch.bfloat16)):
        with pytest.raises(
            ValueError, match=r"computes attention in bfloat16 that is off by 0\.0\d+, where rounding makes"
        ):
            ModelRunner(in_bfloat16, "flash")


def test_a_noisy_arithmetic_is_judged_by_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of 8-bit activations hides a fault of one node, and may not refuse the model; a wrong mask still shows."""
    monkeypatch.setattr("lp.models.runner.inexact_quantisation", lambda model: "simulated")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = ModelRunner(tiny_model(dtype=torch.bfloat16))
        with torch.inference_mode():
            found = probed(runner)
        assert 0.005 < found.noise < found.limit < 0.2
        monkeypatch.setattr(StepMasks, "build", _by_order)
        with pytest.raises(ValueError, match="does not honour a tree mask"):
            ModelRunner(tiny_model(dtype=torch.bfloat16))


def test_an_excerpt_leaves_the_model_as_it_is() -> None:
    """It shares what it does not copy, hooks among them."""
    model = tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=8)
    model.config.sliding_window = SLIDING_WINDOW
    before = [(name, id(parameter), parameter.dtype) for name, parameter in model.named_parameters()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    excerpt = Excerpt(model)
    layers = excerpt.model.model.layers
    assert [isinstance(layer, SkippedLayer) for layer in layers] == [False, *[True] * 6, False]
    assert {parameter.dtype for parameter in excerpt.model.parameters()} == {torch.float32} == {excerpt.model.dtype}
    assert excerpt.model.model.embed_tokens.weight is model.model.embed_tokens.weight, "which no text needs all of"
    assert excerpt.model.config.sliding_window < SLIDING_WINDOW == model.config.sliding_window
    excerpt.model(torch.tensor([[3, 4, 5]]), use_cache=False)
    assert before == [(name, id(parameter), parameter.dtype) for name, parameter in model.named_parameters()]
    assert hooks == [len(module._forward_hooks) for module in model.modules()]


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "gemma3"])
def test_a_layer_too_large_to_be_copied(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights stay in bfloat16: most of what they round is rounded alike on both sides."""
    monkeypatch.setattr("lp.models.float32_excerpt.MOST_BYTES", 5000)  # a few of the weights
    runner = ModelRunner(tiny_model(arch, dtype=torch.bfloat16))
    excerpt = Excerpt(runner.original)
    assert excerpt.rounded
    with torch.inference_mode():
        found = probed(runner)
    assert found.error <= found.limit < found.fault and found.limit < 0.05


def test_rounding_that_hides_every_fault_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A verdict that would let one wrong node pass is no silent one, whatever made it so."""
    monkeypatch.setattr("lp.models.probe.SHOWS", 1e9)
    ModelRunner(tiny_model(dtype=torch.bfloat16))
    assert "rounding hides what one token changes" in caplog.text


def test_attention_is_cast_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask acts there: what the MLP rounds is rounded alike on both sides."""
    model = tiny_model(dtype=torch.bfloat16, intermediate_size=8)
    attention = sum(p.numel() for layer in model.model.layers for p in layer.self_attn.parameters())
    monkeypatch.setattr("lp.models.float32_excerpt.MOST_BYTES", 4 * attention)
    layer = Excerpt(model).model.model.layers[0]
    assert layer.self_attn.q_proj.weight.dtype == layer.self_attn.o_proj.weight.dtype == torch.float32
    assert layer.mlp.up_proj.weight.dtype == torch.bfloat16


def test_weights_that_torchao_quantised_are_judged_by_what_they_stand_for() -> None:
    """They are tensors of another class, and were left in bfloat16, where a model hides one node that sees another."""
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model(dtype=torch.bfloat16)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    excerpt = Excerpt(model)
    weight, own = (each.model.layers[0].self_attn.q_proj.weight for each in (excerpt.model, model))
    assert not excerpt.rounded and weight.dtype == torch.float32
    assert torch.equal(weight, own.dequantize().to(torch.float32))
    with torch.inference_mode():
        found = probed(ModelRunner(model, probe=False), range(1, len(PARENTS)))
    assert found.error <= found.limit < 1e-3 and all(effect > found.limit for _, effect in found.faults)


def test_an_excerpt_that_does_not_run_in_float32_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The verdict in the model's own dtype is weaker; and a CPU that is full is no verdict at all."""
    init, reason = Excerpt.__init__, ["surprise"]

    def fails(self: Excerpt, original: Any, in_float32: bool = True, *rest: Any, **kw: Any) -> None:
        if in_float32:
            raise RuntimeError(reason[0])
        init(self, original, in_float32, *rest, **kw)

    monkeypatch.setattr(Excerpt, "__init__", fails)
    ModelRunner(tiny_model(dtype=torch.bfloat16), "sdpa")
    assert "do not run in float32 (RuntimeError: surprise)" in caplog.text
    reason[0] = "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    with pytest.raises(torch.OutOfMemoryError, match="DefaultCPUAllocator"):
        ModelRunner(tiny_model(dtype=torch.bfloat16), "sdpa")


def test_a_layer_whose_code_needs_all_others_is_judged_whole() -> None:
    """It is refused for what it computes, and not because an excerpt does not run."""
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=4)

    def look_around(module: Any, args: Any) -> None:
        assert model.model.layers[1].self_attn.k_proj is not None
        if isinstance(args[0], torch.Tensor) and not seen[-1]:
            raise RuntimeError("the layer before has not run")

    seen = [False]
    model.model.layers[1].register_forward_hook(lambda *_: seen.__setitem__(-1, True))
    model.model.layers[3].register_forward_pre_hook(look_around)
    model.register_forward_hook(lambda *_: seen.__setitem__(-1, False))
    ModelRunner(model, "sdpa")


@pytest.mark.subset(6)
@pytest.mark.parametrize("seed", range(20))
def test_planted_faults_are_refused_whatever_the_weights(seed: int) -> None:
    """Outliers, and attention that looks at one token alone, change what rounding and what a fault do."""
    runner = ModelRunner(drawn_weights(seed, torch.bfloat16))
    with torch.inference_mode():
        found = probed(runner, range(1, len(PARENTS)))
    assert runner.fused and found.error < 2 * found.noise < found.limit
    assert all(effect > found.limit for _, effect in found.faults if effect > 16 * found.noise)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_real_model(dtype: str) -> None:
    """A trained model of 30 layers differs from itself by 0.1 in bfloat16, which toys never do."""
    folder = os.environ.get("LP_REAL_MODEL")
    if folder is None:
        pytest.skip("LP_REAL_MODEL names no folder of a trained model")
    model = lp.load(folder, dtype=dtype)[0]
    for attention in ("sdpa", "eager", "flash"):
        runner = ModelRunner(model, attention)
        assert runner.fused and runner.attention == attention
        with torch.inference_mode():
            found = probed(runner, range(1, len(PARENTS)))
        assert found.error < 1e-5 < found.limit < 1e-3
        assert all(effect > found.limit for _, effect in found.faults)
