"""Quantised models: which are exact, and ranks that read their weights by parts."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import lp
from lp.models.digests import model_digests
from lp.models.loader import load
from lp.models.part import Part
from lp.models.quantisation import inexact_quantisation, tokens_share_scales
from lp.models.quantised_parts import format_of, part_of_stored, part_of_tensor
from lp.models.sharded_loader import WeightFiles
from lp.models.tensor_parallel import divide
from lp.parallel.context import ParallelContext
from lp.parallel.replica import Replica
from tests.support.quantised import GROUP, QUANTISED, in_words, quantised_folder
from tests.support.quantised_matrix import row, standing_rows
from tests.support.thread_ranks import run_lockstep
from tests.support.tiny_models import drawn_text, letters, plain_greedy, tiny_model

BY_TOKEN = "while it runs, each token's by itself"
TOGETHER = "by what several tokens of a pass have in common"


def _torchao(name: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": data}}}


def _groups(**activations: Any) -> dict[str, Any]:
    group = {"weights": {"dynamic": False}, "input_activations": activations or None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


# Settings, why the model is not exact as it is ("" if it is), and whether tokens share scales.
SETTINGS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "weights of torchao": (_torchao("Int8WeightOnlyConfig", granularity={"_type": "PerTensor"}), "", False),
    "torchao by token": (_torchao("Int8DynamicActivationInt8WeightConfig"), f"torchao quantises .*{BY_TOKEN}", False),
    "torchao, one scale": (
        _torchao("Float8DynamicActivationFloat8WeightConfig", granularity=[{"_type": "PerTensor"}]), TOGETHER, True,
    ),
    "torchao, fixed scales": (_torchao("Int8StaticActivationInt8WeightConfig"), BY_TOKEN, False),
    "torchao nvfp4": (_torchao("NVFP4DynamicActivationNVFP4WeightConfig"), TOGETHER, True),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "outlier columns over all", True),
    "bitsandbytes nf4": ({"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": True}, "", False),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "", False),
    "awq": ({"quant_method": "awq", "bits": 4}, "", False),
    "auto-round": ({"quant_method": "auto-round", "bits": 4}, "", False),
    "auto-round w8a8": ({"quant_method": "auto-round", "act_bits": 8}, "does not know whether 'auto-round'", True),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, f"fp8 quantises .*{BY_TOKEN}", False),
    "fbgemm fp8": ({"quant_method": "fbgemm_fp8"}, f"fbgemm_fp8 quantises .*{BY_TOKEN}", False),
    "nvfp4": ({"quant_method": "nvfp4"}, TOGETHER, True),
    "compressed-tensors w4a16": (_groups(), "", False),
    "compressed-tensors by token": (_groups(dynamic=True, strategy="token"), BY_TOKEN, False),
    "compressed-tensors, one scale": (_groups(dynamic=True, strategy="tensor"), TOGETHER, True),
    "compressed-tensors, no strategy": (_groups(dynamic=True), TOGETHER, True),
    "compressed-tensors, fixed scales": (_groups(dynamic=False, strategy="tensor"), BY_TOKEN, False),
    "compressed-tensors without groups": ({"quant_method": "compressed-tensors"}, "does not know whether", True),
    "of tomorrow": ({"quant_method": "int3_dreams"}, "does not know whether 'int3_dreams' quantises activations", True),
}  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_which_quantisation_is_exact(kind: str) -> None:
    """A model whose tokens change each other must not pass for exact, nor an exact one be doubted; nor may a method
    that nobody here knows be called exact without a word.
    """
    fields, reason, shared = SETTINGS[kind]
    model = SimpleNamespace(config=SimpleNamespace(quantization_config=fields))
    found = inexact_quantisation(model)
    assert re.search(reason, found or "") if reason else found is None
    assert (tokens_share_scales(model) is not None) == shared


def test_a_known_object_as_quantisation_config() -> None:
    """A loaded model holds its quantisation config as an object, with enums in it."""
    eight, four = (
        SimpleNamespace(config=SimpleNamespace(quantization_config=quantisation))
        for quantisation in (tf.BitsAndBytesConfig(load_in_8bit=True), tf.GPTQConfig(bits=4))
    )
    assert "outlier columns" in (inexact_quantisation(eight) or "")
    assert inexact_quantisation(four) is None


def test_a_model_that_was_quantised_in_memory() -> None:
    """Its config says nothing, and it passed for exact without a word."""
    quantization = pytest.importorskip("torchao.quantization")
    dynamic, by_tensor = quantization.Int8DynamicActivationInt8WeightConfig, quantization.granularity.PerTensor()
    expected = [
        (quantization.Int8WeightOnlyConfig(), "", ""),
        (dynamic(), BY_TOKEN, ""),
        (quantization.Int8DynamicActivationIntxWeightConfig(), BY_TOKEN, ""),
        (dynamic(granularity=by_tensor), TOGETHER, TOGETHER),
    ]
    for config, *reasons in expected:
        model = tiny_model("llama", dtype=torch.float32, intermediate_size=64)
        quantization.quantize_(model, config)
        for found, reason in zip((inexact_quantisation(model), tokens_share_scales(model)), reasons, strict=True):
            assert reason in found if reason and found else (found is None and not reason)


@pytest.mark.subset(8)
@pytest.mark.parametrize("name", QUANTISED)
def test_the_table_of_quantised_models(name: str) -> None:
    """What the page says of a kind is what it does here, on one rank and on two."""
    assert row(name) == standing_rows()[name], "run python scripts/tables.py models and look at what changed"


def test_a_quantised_checkpoint_on_one_rank(tmp_path: Path) -> None:
    """`load` must leave a quantised model where transformers put it, and digests see one changed weight."""
    model = quantised_folder("torchao int8", tmp_path)
    loaded = load(tmp_path).model
    assert type(loaded.model.layers[0].self_attn.q_proj.weight).__name__ == "Int8Tensor"
    ids = [5, 6, 7, 8] * 4
    assert lp.LookaheadDecoder(loaded).generate(ids, 10).tokens == plain_greedy(model, ids, 10)
    digests = model_digests(model)
    model.model.layers[0].self_attn.q_proj.weight.qdata[0, 0] += 1
    assert model_digests(model) != digests


def test_activations_by_token(tmp_path: Path) -> None:
    """A warning says that tokens may differ; the mode bitwise has plain decoding's logits, and no warning."""
    model = quantised_folder("torchao int8, activations by token", tmp_path)
    with pytest.warns(UserWarning, match="tokens may differ .* torchao quantises activations"):
        assert not lp.LookaheadDecoder(model).runner.exact
    decoder, plain = lp.LookaheadDecoder(model, exact="bitwise"), lp.PlainDecoder(model, exact="bitwise")
    ids = drawn_text(random.Random(3), 20)
    ours, theirs = (each.generate(ids, 24, output_logits=True) for each in (decoder, plain))
    assert ours.tokens == theirs.tokens and torch.equal(ours.logits, theirs.logits)
    assert decoder.runner.exact


def test_activations_that_share_a_scale_are_refused_by_bitwise(tmp_path: Path) -> None:
    model = quantised_folder("torchao int8, activations by one scale", tmp_path)
    with pytest.raises(lp.UserError, match=f"bitwise.*{TOGETHER}"):
        lp.LookaheadDecoder(model, exact="bitwise")


DIVIDED = [name for name in QUANTISED if name.startswith("torchao") and "activations" not in name]


def _tensors(weight: Any) -> dict[str, Any]:
    """What a weight consists of: torchao's, or a plain one."""
    names = [*getattr(weight, "tensor_data_names", ()), *getattr(weight, "optional_tensor_data_names", ())]
    found = {name: getattr(weight, name) for name in names if getattr(weight, name) is not None}
    return found or {"": weight}


def _nbytes(weight: Any) -> int:
    return sum(each.untyped_storage().nbytes() for each in _tensors(weight).values())


@pytest.mark.parametrize("arch", ["llama", "phi3"])
@pytest.mark.parametrize("name", DIVIDED)
def test_parts_of_a_quantised_checkpoint(name: str, arch: str, tmp_path: Path) -> None:
    """The parts of all ranks are the whole, scales included: outputs one behind the other, inputs that are summed."""
    model = quantised_folder(name, tmp_path, arch=arch, max_shard_size="60KB")
    parts = [load(tmp_path, "auto", context=ParallelContext(replica=Replica(rank, 2))).model for rank in range(2)]
    x = torch.randn(5, 256, dtype=torch.float32)
    for layer, *own in zip(*(each.model.layers for each in (model, *parts)), strict=True):
        down = [each.mlp.down_proj for each in own]
        summed = sum(each.linear(x[:, 128 * rank : 128 * (rank + 1)]) for rank, each in enumerate(down))
        torch.testing.assert_close(summed, layer.mlp.down_proj(x), rtol=1e-5, atol=1e-5)
        ups = [(each.mlp.gate_up_proj if arch == "phi3" else each.mlp.up_proj)(x[:, :128]) for each in own]
        whole = (layer.mlp.gate_up_proj if arch == "phi3" else layer.mlp.up_proj)(x[:, :128])
        if arch == "phi3":  # gate and up projection in one
            ups = [torch.cat([each[:, half] for each in ups], 1) for half in (slice(0, 128), slice(128, 256))]
        torch.testing.assert_close(torch.cat(ups, 1), whole, rtol=1e-5, atol=1e-5)
    in_memory = divide(copy.deepcopy(model), Replica(1, 2))
    read = dict(parts[1].named_parameters())
    for weight_name, weight in in_memory.named_parameters():
        ours, theirs = _tensors(read[weight_name]), _tensors(weight)
        assert type(read[weight_name].data) is type(weight.data) and ours.keys() == theirs.keys()
        assert all(torch.equal(ours[each], theirs[each]) for each in theirs), weight_name
        assert getattr(read[weight_name], "block_size", None) == getattr(weight, "block_size", None)


@pytest.mark.parametrize("name", [*DIVIDED, "compressed-tensors int4 by group"])
def test_memory_of_a_quantised_model_that_two_ranks_divide(name: str, tmp_path: Path) -> None:
    """A rank's bytes of the layers that are divided: at most 0.55 of one rank's, and nothing is expanded."""
    model = quantised_folder(name, tmp_path)
    model(torch.tensor([[1, 2, 3]]))  # in which compressed-tensors expands its weights
    part = load(tmp_path, "auto", context=ParallelContext(replica=Replica(0, 2))).model

    def layers(of: Any) -> int:
        named = [(path, module) for path, module in of.named_modules() if path.endswith("_proj")]
        return sum(_nbytes(module.weight.data) for _, module in named)

    assert layers(part) <= 0.55 * layers(model)
    if name.startswith("torchao"):
        values = sum(module.weight.numel() for path, module in part.named_modules() if path.endswith("_proj"))
        assert layers(part) < 2 * values, "one byte a weight, and scales"


@pytest.mark.parametrize("name", ["torchao int8", "torchao int4 in int8 by group"])
def test_replicas_of_a_quantised_model(name: str, tmp_path: Path) -> None:
    """Two replicas of two ranks: greedy and sampled text of the whole model, at either end of the drawn seeds."""
    model = quantised_folder(name, tmp_path)
    ids = drawn_text(random.Random(5), 20)
    sampling = lp.SamplingParams(temperature=0.8, top_p=0.9, seed=4)
    expected = [
        plain_greedy(model, ids, 24),
        lp.AutoregressiveDecoder(model).generate(ids, 24, sampling).tokens,
    ]

    def body(context: ParallelContext) -> list[list[int]]:
        decoder = lp.LookaheadDecoder(load(tmp_path, "auto", context=context).model, context=context)
        return [decoder.generate(ids, 24, each).tokens for each in (None, sampling)]

    assert run_lockstep(4, body, tp=2) == [expected] * 4


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_dtype_than_the_scales(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    """Scales that are rounded behind the product, and not before it, make other weights than one rank has."""
    quantised_folder("compressed-tensors int8", tmp_path, stored)
    model = load(tmp_path, dtype).model
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))  # in which transformers expands its weights
    parts = [load(tmp_path, dtype, context=ParallelContext(replica=Replica(rank, 2))).model for rank in range(2)]
    whole, *own = (each.model.layers[0].self_attn.q_proj.weight for each in (model, *parts))
    assert whole.dtype == dtype and torch.equal(whole, torch.cat(own))


def test_a_group_that_ranks_would_cut(tmp_path: Path) -> None:
    """Its columns would have the scale of another group, or none."""
    quantised_folder("torchao int8 by group", tmp_path, intermediate_size=5 * GROUP)
    with pytest.raises(
        lp.UserError, match=rf"down_proj.weight .*groups of {GROUP}, and ranks would cut one at 80; give"
    ):
        load(tmp_path, "auto", context=ParallelContext(replica=Replica(0, 2)))
    with pytest.raises(lp.UserError, match=r"in words of 8, .* cut one at 4;"):
        part_of_stored("w", (16, 64), Part(1, ((4, 8),)), (16, 8), scale=False)


def test_a_config_of_other_sizes(tmp_path: Path) -> None:
    """A part of other weights can have the shape that is wanted."""
    quantised_folder("torchao int8", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(lp.UserError, match=r"config.json makes .* \(128, 128\), the weights have \(256, 128\)"):
        load(tmp_path, "auto", context=ParallelContext(replica=Replica(0, 2)))


@pytest.mark.parametrize("dimension", [0, 1])
def test_int4_of_torchao_is_divided_as_torchao_slices_it(dimension: int) -> None:
    """Its scales lie across: their first dimension goes along the weight's columns. Its products need a GPU."""
    quantization = pytest.importorskip("torchao.quantization")
    generator = torch.Generator().manual_seed(0)
    whole = quantization.Int4Tensor(
        torch.randint(-128, 127, (64, 32), dtype=torch.int8, generator=generator),
        torch.randn(2, 64, generator=generator).bfloat16(),
        torch.randn(2, 64, generator=generator).bfloat16(),
        [1, GROUP],
        torch.Size([64, 64]),
    )
    sliced = whole[32:64] if dimension == 0 else whole[:, 32:64]
    part: Any = part_of_tensor("w", whole, Part(dimension, ((32, 64),)))
    assert part.shape == sliced.shape and part.block_size == [1, GROUP]
    for name, values in _tensors(sliced).items():
        assert torch.equal(getattr(part, name), values), name
    assert _nbytes(part) < 0.55 * _nbytes(whole)


REFUSED = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "bitsandbytes, which lp can't read by parts; it can .*torchao, comp.*, gptq",
    ),
    "gptq in another format": (
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        "weights of gptq's format 'marlin', but those of gptq, gptq_v2",
    ),
    "awq in another format": ({"quant_method": "awq", "version": "gemv"}, "awq's format 'gemv', but those of gemm"),
    "auto-round in another format": (
        {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
        "auto-round's format 'auto_round:llm_compressor', but those of auto, ",
    ),
    "fp8": ({"quant_method": "fp8"}, "fp8, which quantises activations too, which a rank would round by"),
    "unknown": ({"quant_method": "int3_dreams"}, "int3_dreams, which may quantise activations too, as far as lp knows"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_ranks_cannot_divide(kind: str, tmp_path: Path, tiny_folder: Path) -> None:
    fields, reason = REFUSED[kind]
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    with pytest.raises(lp.UserError, match=f"ranks can't divide .*{reason}.*; use parallel.tp=1"):
        load(tmp_path, context=ParallelContext(replica=Replica(0, 2)))


def test_compressed_tensors_that_ranks_cannot_divide(tmp_path: Path) -> None:
    """Columns of a group that do not lie side by side would be given other groups' scales."""
    quantised_folder("compressed-tensors int4 by group", tmp_path)
    context = ParallelContext(replica=Replica(0, 2))
    weights = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj"
    save_file(weights | {f"{layer}.weight_g_idx": torch.zeros(128, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(lp.UserError, match=f"{layer}.weight_g_idx scatters a group's columns"):
        load(tmp_path, "auto", context=context)
    text = (tmp_path / "config.json").read_text().replace("pack-quantized", "nvfp4-pack-quantized")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(lp.UserError, match="format 'nvfp4-pack-quantized', but those of pack-quantized, "):
        load(tmp_path, "auto", context=context)


def test_scales_for_activations_are_not_divided(tmp_path: Path) -> None:
    """A model that was quantised in memory has no config that says so."""
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model("llama", dtype=torch.float32)
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(lp.UserError, match="Int8Tensor with scales for activations, which ranks can't divide"):
        divide(model, Replica(0, 2))


# By name: the quantisation config, and arguments of `in_words`.
IN_WORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gptq": ({"quant_method": "gptq"}, {}),
    "gptq, 2 bits": ({"quant_method": "gptq"}, {"bits": 2}),
    "gptq, 8 bits, symmetric": ({"quant_method": "gptq"}, {"bits": 8, "symmetric": True}),
    "gptq, act-order": ({"quant_method": "gptq", "desc_act": True}, {"scattered": True}),
    "gptq_v2": ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, {"layout": "plain"}),
    "auto-round": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, {}),
    "auto-round, its own": ({"quant_method": "auto-round", "packing_format": "auto_round"}, {"layout": "plain"}),
    "awq": ({"quant_method": "awq", "version": "gemm"}, {"layout": "across"}),
}


def _in_words(folder: Path, settings: dict[str, Any], dtype: torch.dtype, arch: str, **packing: Any) -> Any:
    """A checkpoint in words, and the model of the weights that are meant. The second of two ranks begins in a group."""
    inner = dict.fromkeys(["intermediate_size", "moe_intermediate_size"], 5 * GROUP)
    model = tiny_model(arch, dtype=dtype, hidden_size=128, num_key_value_heads=2, **inner)
    for each in (folder / "meant", folder / "words"):
        model.save_pretrained(each)
        letters(model.config.vocab_size - 1).save_pretrained(each)
    meant = in_words(folder / "words", settings, **packing)
    weights = load_file(folder / "meant" / "model.safetensors")
    weights |= {name: values.to(dtype).contiguous() for name, values in meant.items()}
    save_file(weights, folder / "meant" / "model.safetensors", {"format": "pt"})
    return load(folder / "meant", "auto").model


@pytest.mark.parametrize(
    ("arch", "dtype"), [("llama", torch.float16), ("phi3", torch.float32), ("qwen3_moe", torch.float32)], ids=str
)
@pytest.mark.parametrize("name", IN_WORDS)
def test_parts_of_weights_in_words(name: str, arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Each rank's weights are its part of what is meant, bit for bit: values, zero points, and groups that are cut."""
    settings, packing = IN_WORDS[name]
    expanded = _in_words(tmp_path, settings, dtype, arch, **packing)
    for rank in range(2):
        expected = divide(copy.deepcopy(expanded), Replica(rank, 2))
        read = load(tmp_path / "words", "auto", context=ParallelContext(replica=Replica(rank, 2))).model
        weights = dict(read.named_parameters())
        for weight_name, weight in expected.named_parameters():
            ours = weights[weight_name]
            assert ours.dtype == weight.dtype and torch.equal(ours, weight), weight_name
            assert ours.is_contiguous()


@pytest.mark.parametrize("name", ["gptq", "gptq, act-order", "awq"])
def test_text_of_weights_in_words(name: str, tmp_path: Path) -> None:
    """Two replicas of two ranks: greedy text of the expanded model on one."""
    settings, packing = IN_WORDS[name]
    expanded = _in_words(tmp_path, settings, torch.float32, "llama", **packing)
    ids = drawn_text(random.Random(6), 20)

    def body(context: ParallelContext) -> list[int]:
        decoder = lp.LookaheadDecoder(load(tmp_path / "words", "auto", context=context).model, context=context)
        return decoder.generate(ids, 24).tokens

    assert run_lockstep(4, body, tp=2) == [plain_greedy(expanded, ids, 24)] * 4


def test_words_that_ranks_cannot_divide(tmp_path: Path) -> None:
    """Layouts that are not known, or that a part would cut, must not be read as others."""
    context = ParallelContext(replica=Replica(0, 2))
    settings = {"quant_method": "gptq"}
    _in_words(tmp_path, settings, torch.float32, "llama")
    folder = tmp_path / "words"
    layer = "model.layers.0.mlp.down_proj"
    weights = load_file(folder / "model.safetensors")
    zeros = weights[f"{layer}.qzeros"]
    bad = {
        rf"{layer}.weight has 12 words of torch.int32 .* 128 outputs.* 2 or 4 or 8 bits": {"qzeros": zeros[:, :12]},
        rf"{layer}.weight has 16 words of torch.int16": {"qzeros": zeros.to(torch.int16)},
        rf"{layer}.weight has 3 groups for 160 columns, and no g_idx": {
            "g_idx": None, "scales": weights[f"{layer}.scales"][:3], "qzeros": zeros[:3],
        },
        rf"{layer}.scales have no qweight and qzeros": {"qweight": None},
        rf"{layer}.scales have no .* which ranks can't divide": {"qzeros": None},
    }  # fmt: skip
    for reason, own in bad.items():
        changed = weights | {f"{layer}.{each}": values for each, values in own.items()}
        kept = {name: values.contiguous() for name, values in changed.items() if values is not None}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(lp.UserError, match=reason):
            load(folder, "auto", context=context)
    rotated = {"quant_method": "auto-round", "rotation_config": {"hadamard_type": "hadamard"}}
    with pytest.raises(lp.UserError, match=r"rotates inputs .rotation_config., which ranks can't divide"):
        format_of(rotated, "it")


def test_words_that_ranks_would_cut(tmp_path: Path) -> None:
    """Its columns would begin within a word of eight."""
    words = {"qweight": torch.zeros(33, 16), "scales": torch.zeros(1, 16), "qzeros": torch.zeros(1, 2).int()}
    read: Any = format_of({"quant_method": "gptq"}, "it")
    assert read.shape("w", words) == (16, 264)
    with pytest.raises(lp.UserError, match=r"w \(16, 264\) is quantised in words of 8, .* cut one at 132; give"):
        read.part("w", words, (16, 264), Part(1, ((0, 132),)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round"])
def test_words_are_expanded_as_in_auto_rounds_layers(
    packing: str, bits: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Each layer's weights: those that AutoRound's own multiplies one with, bit for bit."""
    pytest.importorskip("auto_round")
    symmetric = packing == "auto_round:auto_gptq"  # of which AutoRound runs no other on a CPU
    fields = {"quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": GROUP}
    layout = "less one" if symmetric else "plain"
    settings = fields | {"sym": symmetric, "backend": "auto"}
    _in_words(tmp_path, settings, dtype, "llama", bits=bits, symmetric=symmetric, layout=layout)
    own = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "words", dtype=dtype)
    read = WeightFiles(str(tmp_path / "words"), True, format_of(settings, "it"))
    read.rename(tiny_model("llama"))
    layers = {name: module for name, module in own.named_modules() if hasattr(module, "qweight")}
    assert len(layers) == 14
    for name, layer in layers.items():
        weight = layer(torch.eye(layer.infeatures, dtype=dtype)).T
        found = read.read(f"{name}.weight", tuple(weight.shape), None, "cpu", dtype)
        assert found.dtype == dtype and torch.equal(found, weight), name
