"""Fused layers: the same numbers as transformers' own, over the same weights, and never where something is unknown."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import lp
import lp.models.fused
from lp.attention.ablation import WithoutAttention
from lp.config import Capture
from lp.models import weight_layout
from lp.models.architectures import NormRule
from lp.models.fused import FusedModel, fuse
from lp.models.runner import ModelRunner
from lp.models.support import check_supported
from tests.support.layouts import drawn_layout, visible_of
from tests.support.peft_releases import add_adapter
from tests.support.tiny_models import MATRIX, drawn_text, plain_greedy, tiny_config, tiny_model

FUSED = {
    *("llama", "llama_linear", "llama_llama3", "llama_yarn", "llama_dynamic", "llama_longrope"),
    *("mistral", "mistral_sliding", "mixtral", "qwen2", "qwen2_sliding", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("gemma", "gemma2", "gemma3", "phi3", "phi3_sliding", "phi3_longrope"),
    *("granite", "smollm3", "olmo2", "olmo3"),
}
# What drawn models would lack: fields whose effect is none at their defaults.
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 5.0,
        "attention_multiplier": 0.2,
    },
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"final_logit_softcapping": 2.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "qwen3": {"attention_bias": True},
}
CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4)
IDS = drawn_text(random.Random(5), 30)
NEW = 16  # tokens of a text


def _supported(arch: str) -> bool:
    try:
        check_supported(tiny_config(arch))
    except ValueError:
        return False
    return True


def _drawn(arch: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model whose norms and biases are not the ones and zeros that they begin with."""
    model = tiny_model(arch, dtype=dtype, **FIELDS.get(arch, {}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def _steps(runner: ModelRunner, seed: int) -> torch.Tensor:
    """Logits of a prompt in chunks and of drawn trees, each with a commit behind it."""
    rng = random.Random(seed)
    text = drawn_text(rng, rng.randint(1, 60))
    logits: list[torch.Tensor] = []
    with torch.inference_mode():
        cache = runner.new_cache(len(text) + 200)
        runner.prefill(text, cache, 16, lambda chunk: logits.append(chunk.clone()))
        for _ in range(3):
            visible = visible_of(drawn_layout(rng))
            tokens = drawn_text(rng, len(visible))
            positions = [cache.length + int(row.sum()) - 1 for row in visible]
            indices = sorted(rng.sample(range(len(tokens)), rng.randint(1, len(tokens))))
            logits.append(runner.forward(tokens, positions, visible, cache, indices).clone())
            cache.commit([node for node in range(len(tokens)) if visible[-1, node]])
    return torch.cat(logits)


def _error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


def _merged(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        return [weight_layout._merged(parameters)]


@pytest.fixture(params=["cpu", "gpu"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How fused weights lie in memory: as for a CPU, or as for a GPU, which is tried on a CPU here."""
    if request.param == "gpu":
        monkeypatch.setattr("lp.models.fused.laid_out", _merged)
    return str(request.param)


@pytest.mark.parametrize("arch", [*filter(_supported, MATRIX)])
def test_which_architectures_are_fused(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lp"):
        runner = ModelRunner(tiny_model(arch))
    assert runner.fused == (arch in FUSED)
    assert isinstance(runner.network, FusedModel) == runner.fused
    assert not [record for record in caplog.records if record.levelno > logging.INFO and "fused" in record.message]


@pytest.mark.subset(16)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("arch", sorted(FUSED & {*MATRIX}))
def test_logits_are_those_of_transformers_layers(arch: str, backend: str) -> None:
    model = _drawn(arch)
    fused, plain = ModelRunner(model, backend), ModelRunner(model, backend, fused=False)
    assert fused.fused and not plain.fused
    for seed in range(3):
        assert _error(_steps(fused, seed), _steps(plain, seed)) < 1e-12
    if fused.boundary is None:
        fused._capture_steps(Capture.OFF, probe=False)
        plain._capture_steps(Capture.OFF, probe=False)
        assert _error(_steps(fused, 3), _steps(plain, 3)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "olmo2", "granite"])
def test_logits_in_the_dtypes_of_models(arch: str, dtype: torch.dtype) -> None:
    """Rotary sums and residuals are rounded once where transformers rounds twice."""
    model = _drawn(arch, dtype)
    difference = _steps(ModelRunner(model), 0).double() - _steps(ModelRunner(model, fused=False), 0).double()
    spread = _steps(ModelRunner(model, fused=False), 0).double().std()
    assert float(difference.square().mean().sqrt() / spread) < {torch.float32: 1e-4}.get(dtype, 0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ["llama", "olmo2", "gemma"])
def test_norms_round_where_transformers_norms_do(arch: str, dtype: torch.dtype) -> None:
    model = _drawn(arch, dtype)
    rules = {"llama": NormRule.ROUNDED, "olmo2": NormRule.WIDE, "gemma": NormRule.OFFSET}
    states = torch.randn(50, 32).to(dtype) * 3
    with torch.inference_mode():
        ours = lp.models.fused._norm_of(model.model.norm, rules[arch])(states)
        theirs = model.model.norm(states)
    assert ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=3e-7 if dtype.itemsize > 2 else 0, atol=0)


@pytest.mark.parametrize("arch", ["llama", "qwen2_sliding", "olmo3", "phi3_longrope", "mixtral"])
def test_text_is_that_of_plain_decoding(arch: str) -> None:
    model = _drawn(arch)
    expected = plain_greedy(copy.deepcopy(model), IDS, 40)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    assert decoder.runner.fused and decoder.generate(IDS, 40).tokens == expected


def test_partial_rotary_is_not_fused() -> None:
    """A head of which only a part is turned, as Phi-4-mini's."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = tiny_model("phi3", rope_parameters=rope)
    assert fuse(tiny_model("phi3")) is not None and fuse(model) is None
    assert lp.LookaheadDecoder(model, CONFIG).generate(IDS, 8).tokens == plain_greedy(model, IDS, 8)


def test_a_forward_of_a_tied_heads_own() -> None:
    """As a library that offloads weights sets it; one token's product does not go through it."""
    model = tiny_model("llama", tie_word_embeddings=True)
    decoder = lp.PlainDecoder(model)
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: -forward(x)
    assert decoder.generate(IDS, 8, eos_token_id=()).tokens == plain_greedy(model, IDS, 8)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3", "phi3"])
def test_merged_weights_give_the_same_logits(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases or without, layers that have one weight for several, and shared heads."""
    model = _drawn(arch)
    expected = _steps(ModelRunner(model, fused=False), 1)
    monkeypatch.setattr("lp.models.fused.laid_out", _merged)
    fused = ModelRunner(model)
    assert fused.fused and _error(_steps(fused, 1), expected) < 1e-12


def test_several_runners_share_the_weights(layout: str) -> None:
    model = tiny_model("qwen2")
    names = [name for name, _ in model.named_parameters()]
    before = copy.deepcopy(model.state_dict())
    with torch.inference_mode():  # as where a decoder is made within a generation
        fuse(model)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    first = model.model.layers[0].self_attn
    assert first.q_proj.weight.t().is_contiguous() == (layout == "cpu")
    assert (first.k_proj.weight.untyped_storage().data_ptr() == first.q_proj.weight.untyped_storage().data_ptr()) == (
        layout == "gpu"
    )
    ModelRunner(model), ModelRunner(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(parameter.nbytes for parameter in model.parameters())
    weight_layout.restore(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == len(names)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_model_is_saved_copied_and_trained_as_before(tmp_path: Path, layout: str) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    ids = torch.tensor([IDS])
    expected = model(ids).logits
    lp.LookaheadDecoder(model, CONFIG).generate(IDS, 4)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, expected)
    copied = copy.deepcopy(model)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert sum(len(file.read_bytes()) for file in tmp_path.glob("*.pt")) < 1.5 * sum(
        p.nbytes for p in model.parameters()
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.train()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(copied(ids).logits, expected), "the copy has weights of its own"
    assert not torch.equal(model(ids).logits, expected)
    model.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(model.eval()(ids).logits, expected)
    assert torch.allclose(model.to(torch.float64)(ids).logits.float(), expected, atol=1e-4)


class _Hooked(Exception):
    """The hook fired."""


def _lora(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    add_adapter(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False), "first")
    model.double().eval()


def _parameter(model: Any) -> None:
    projection = model.model.layers[1].self_attn.q_proj
    projection.weight = nn.Parameter(projection.weight.flip(0).clone())


def _data(model: Any) -> None:
    projection = model.model.layers[0].mlp.up_proj
    projection.weight.data = -projection.weight.data


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1.5)
        model.model.layers[1].mlp.gate_proj.weight.neg_()
        model.model.layers[0].input_layernorm.weight.mul_(-2.0)


def _hook(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, inputs, output: -output)


def _module(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj = nn.Sequential(model.model.layers[1].self_attn.o_proj, nn.ReLU())


def _activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.Tanh()


def _forward(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    forward = norm.forward
    norm.forward = lambda states: -forward(states)


CHANGES = {
    change: fused
    for fused, changes in {
        True: (_parameter, _data, _in_place, _activation),
        False: (_lora, _hook, _module, _forward),
    }.items()
    for change in changes
}


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_texts_is_followed(change: Callable[[PreTrainedModel], None], capture: bool) -> None:
    model = tiny_model("llama")
    before = plain_greedy(model, IDS, NEW)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    runner = decoder.runner
    if capture:
        runner._capture_steps(Capture.OFF, probe=False)
    assert runner.fused and decoder.generate(IDS, NEW).tokens == before
    change(model)
    expected = plain_greedy(model, IDS, NEW)
    assert expected != before, "the change changes nothing"
    assert decoder.generate(IDS, NEW).tokens == expected
    assert runner.fused == CHANGES[change]


def test_another_dtype_between_texts() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    decoder.generate(IDS, NEW)
    model.to(torch.float64)
    assert decoder.generate(IDS, NEW).tokens == plain_greedy(model, IDS, NEW)
    assert decoder.runner.fused and decoder.runner.masks.dtype == torch.float64


def test_layers_are_fused_again_once_a_hook_is_gone() -> None:
    model = tiny_model("llama")
    decoder = lp.LookaheadDecoder(model, CONFIG)
    fired: list[int] = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: fired.append(1))
    decoder.generate(IDS, NEW)
    assert fired and not decoder.runner.fused
    handle.remove()
    fired.clear()
    assert decoder.generate(IDS, NEW).tokens == plain_greedy(model, IDS, NEW)
    assert decoder.runner.fused
    network = decoder.runner.network
    decoder.generate(IDS, NEW)
    assert decoder.runner.network is network, "nothing has changed"


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.rotary_emb", "lm_head", "model.layers.1.mlp.act_fn"])
def test_hooks_of_modules_that_are_called_fire(name: str) -> None:
    model = tiny_model("llama")
    fired: list[torch.Tensor] = []
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: fired.append(output))
    runner = ModelRunner(model)
    fired.clear()
    _steps(runner, 0)
    assert fired


def test_what_a_hook_keeps_is_not_overwritten() -> None:
    """The layers add to the residual stream in place."""
    model = tiny_model("llama")
    kept: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: kept.append(output))
    runner = ModelRunner(model)
    kept.clear()
    _steps(runner, 0)
    known = {tuple(row) for row in model.model.embed_tokens.weight.tolist()}
    assert kept and all(tuple(row) in known for output in kept for row in output[0].tolist())


class _Subclass(LlamaForCausalLM):
    """A user's class."""


def _shared(model: Any) -> None:
    model.share_memory()


def _mixed(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.float()


def _no_bias(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = None


def _trained(model: Any) -> None:
    model.model.layers[1].train()


def _quantised(model: Any) -> None:
    model.model.layers[1].mlp.down_proj = nn.Identity()


@pytest.mark.parametrize("change", [_shared, _mixed, _no_bias, _trained, _quantised, _lora, _hook, _forward])
def test_what_is_not_known_is_not_fused(change: Callable[[PreTrainedModel], None]) -> None:
    model = tiny_model("qwen2")
    change(model)
    assert fuse(model) is None


def test_a_subclass_is_not_fused() -> None:
    config = tiny_config("llama")
    assert fuse(LlamaForCausalLM(config).eval()) is not None
    assert fuse(_Subclass(config).eval()) is None


def test_a_class_that_a_library_has_changed_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama")
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, states: -states)
    fused = fuse(model)
    assert fused is None or not isinstance(fused._layers[0].mlp, lp.models.fused._Mlp)


def test_fused_layers_that_fail_the_probe_are_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lp.models.fused, "rotate", lambda states, cos, sin: states)
    model = tiny_model("llama")
    decoder = lp.LookaheadDecoder(model, CONFIG)
    assert not decoder.runner.fused and decoder.runner.attention == "flash"
    assert "layers are not fused: LlamaForCausalLM" in caplog.text
    assert decoder.generate(IDS, NEW).tokens == plain_greedy(model, IDS, NEW)
    assert not decoder.runner.fused


def test_the_attention_function_is_the_models_own() -> None:
    """Chosen at every step: an ablation leaves attention out for a while."""
    runner = ModelRunner(tiny_model("llama"))
    assert runner.fused
    expected = _steps(runner, 0)
    with WithoutAttention(runner.model) as _:
        pass
    without = WithoutAttention(runner.model)
    with without:
        assert not torch.equal(_steps(runner, 0), expected)
    assert without.called
    assert torch.equal(_steps(runner, 0), expected)


def test_under_autocast_the_models_own_layers_run() -> None:
    """autocast chooses the dtype of every operation by its name."""
    model = tiny_model("llama", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            _steps(ModelRunner(model, "sdpa", probe=False), 0),
            _steps(ModelRunner(model, "sdpa", probe=False, fused=False), 0),
        )
