"""Tiny models with quantised weights, of every kind that a CPU can make and run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lp.optional import is_installed
from tests.support.tiny_models import letters, tiny_model

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}
GROUP = 32  # weights of a row that share a scale, where a kind has groups


@dataclass(frozen=True)
class Kind:
    """A way to quantise a model.

    Attributes:
        package: what it needs to be installed.
        write: quantises the checkpoint in a folder, in place, or leaves that to a load with the config that it gives.
        arch: the architecture.
        sizes: fields of the model's config.
        saved: whether a quantised model can be saved, and with it be read by parts.
        dtype: type of the weights that are not quantised: the one that its kernels compute in, if they take one alone.
    """

    package: str
    write: Callable[[Path], Any]
    arch: str = "llama"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    saved: bool = True
    dtype: torch.dtype = torch.float32


def quantised_folder(name: str, folder: Path, dtype: torch.dtype | None = None, **options: Any) -> PreTrainedModel:
    """The model of a kind, as transformers loads it; its checkpoint and a tokenizer are in the folder from now on.

    A test is skipped where the kind's package is not installed.

    Args:
        name: one of QUANTISED.
        folder: where to.
        dtype: type of the weights that are not quantised; None: the kind's.
        options: arguments of `tiny_model`; `max_shard_size` of the checkpoint.
    """
    kind = QUANTISED[name]
    if not is_installed(kind.package):
        pytest.skip(f"{name} needs the package {kind.package}, which is not installed")
    dtype = dtype or kind.dtype
    shards = {"max_shard_size": options.pop("max_shard_size", "5GB")}
    arch = options.pop("arch", kind.arch)
    whole = tiny_model(arch, dtype=dtype, **SIZES | dict(kind.sizes) | options)
    whole.save_pretrained(folder)
    letters(whole.config.vocab_size - 1).save_pretrained(folder)
    at_load = kind.write(folder)
    quantised = "quantization_config" in json.loads((folder / "config.json").read_text())
    settings = {"quantization_config": at_load} if at_load else {}
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **settings)
    if kind.saved and not quantised:
        model.save_pretrained(folder, **shards)
    model.generation_config = tf.GenerationConfig(do_sample=False)
    return model.eval()


def _torchao(name: str, **fields: Any) -> Callable[[Path], Any]:
    def config(folder: Path) -> Any:
        from torchao import quantization

        made = {key: value(quantization) if callable(value) else value for key, value in fields.items()}
        return tf.TorchAoConfig(getattr(quantization, name)(**made))

    return config


def _by_group(quantization: Any) -> Any:
    return quantization.PerGroup(GROUP)


def _by_tensor(quantization: Any) -> Any:
    return quantization.granularity.PerTensor()


def _four_bits(quantization: Any) -> torch.dtype:
    return torch.int4


def _rewritten(folder: Path, settings: dict[str, Any], quantise: Callable[[str, torch.Tensor], dict[str, Any]]) -> None:
    """Put what `quantise(name of a layer, its weights)` gives in the place of the weights of all projections."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        layer = name.removesuffix(".weight")
        own = quantise(layer, weights.pop(name).float())
        weights |= {f"{layer}.{each}": values.contiguous() for each, values in own.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _configured(folder, settings)


def _configured(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def _compressed(bits: int, kind: str, packed: str, strategy: str, activations: str = "") -> Callable[[Path], None]:
    """Weights of compressed-tensors, with activations by this strategy, if any."""

    def write(folder: Path) -> None:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        args = QuantizationArgs(
            num_bits=bits, type=kind, strategy=strategy, group_size=GROUP if strategy == "group" else None
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        largest = 448.0 if kind == "float" else 2 ** (bits - 1) - 1

        def quantise(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
            groups = weight.reshape(len(weight), -1, GROUP if strategy == "group" else weight.shape[1])
            scale = groups.abs().amax(-1) / largest
            compressor = BaseCompressor.get_value_from_registry(packed)
            own: dict[str, torch.Tensor] = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
            return own

        rounded = {"num_bits": 8, "type": kind, "strategy": activations, "dynamic": True, "symmetric": True}
        group = {
            "targets": ["Linear"], "weights": json.loads(args.model_dump_json()),
            "input_activations": rounded if activations else None, "output_activations": None, "format": packed,
        }  # fmt: skip
        settings = {
            "quant_method": "compressed-tensors", "format": packed, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        }  # fmt: skip
        _rewritten(folder, settings, quantise)

    return write


def _fp8(folder: Path) -> None:
    def quantise(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = weight.shape
        blocks = weight.reshape(rows // GROUP, GROUP, columns // GROUP, GROUP)
        scale = blocks.abs().amax((1, 3)) / 448
        values = (blocks / scale[:, None, :, None]).reshape(rows, columns)
        return {"weight": values.to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    settings = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "activation_scheme": "dynamic"}
    _rewritten(folder, settings, quantise)


def _mxfp4(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        shape = experts, rows, columns // 32
        weights[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        weights[f"{name}_scales"] = torch.randint(119, 122, shape, dtype=torch.uint8, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _configured(folder, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def _gemma(folder: Path) -> None:
    def quantise(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        fixed = {f"{side}_activation_scale": torch.tensor(0.05) for side in ("input", "output")}
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale, **fixed}

    settings = {"quant_method": "gemma", "num_bits": 8, "quantize_embeddings": False}
    _rewritten(folder, settings | {"modules_to_not_convert": ["lm_head"]}, quantise)


def _bitnet(folder: Path) -> None:
    from transformers.integrations.bitnet import pack_weights

    def quantise(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = 1 / weight.abs().mean()
        return {"weight": pack_weights((weight * scale).round().clamp(-1, 1)), "weight_scale": scale.reshape(1)}

    _rewritten(folder, {"quant_method": "bitnet", "linear_class": "bitlinear"}, quantise)


def in_words(
    folder: Path,
    settings: dict[str, Any],
    layout: str = "less one",
    bits: int = 4,
    symmetric: bool = False,
    scattered: bool = False,
) -> dict[str, torch.Tensor]:
    """Quantise a checkpoint in place to words of 32 bits, as GPTQ and AWQ do.

    Args:
        folder: the checkpoint.
        settings: its quantisation config.
        layout: "less one" and "plain" are GPTQ's first and second format, "across" is AWQ's.
        bits: bits of each value.
        symmetric: all zero points are in the middle.
        scattered: a group's columns do not lie side by side (act-order).

    Returns:
        By name, the weights that are meant, float16.
    """
    meant = {}

    def packed(values: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        """Along the last dimension: place i of a word has the value order[i] of those that it stands for."""
        per_word = values.reshape(*values.shape[:-1], -1, 32 // bits)
        words = sum(per_word[..., value].long() << bits * place for place, value in enumerate(order))
        assert isinstance(words, torch.Tensor)
        return (words - (words >> 31 << 32)).to(torch.int32)

    def quantise(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        columns = weight.shape[1]
        groups = torch.arange(columns) // GROUP
        if scattered:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        each = [weight[:, groups == group] for group in range(int(groups.max()) + 1)]
        low, high = (torch.stack([getattr(one, end)(1).values for one in each]) for end in ("min", "max"))
        middle = 2 ** (bits - 1)
        span = 2 * torch.maximum(-low, high) if symmetric else high - low
        scales = (span / (2**bits - 1)).half()
        zeros = torch.full_like(low, middle) if symmetric else (-low / scales).round().clamp(1, 2**bits - 1)
        values = (weight.T / scales[groups] + zeros[groups]).round().clamp(0, 2**bits - 1)
        meant[f"{layer}.weight"] = (scales[groups] * (values - zeros[groups]).half()).T
        plain, across = range(32 // bits), (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"scales": scales, "qzeros": packed(zeros - int(layout == "less one"), plain)}
        if layout == "across":
            return tensors | {"qweight": packed(values, across), "qzeros": packed(zeros, across)}
        return tensors | {"qweight": packed(values.T, plain).T, "g_idx": groups.to(torch.int32)}

    _rewritten(folder, settings, quantise)
    return meant


def _gptq(folder: Path, method: str = "auto-round") -> Any:
    """AutoRound's own, which has the layout of GPTQ; or GPTQ's, which AutoRound reads where it is asked to."""
    settings = {"quant_method": method, "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    in_words(folder, settings | {"packing_format": "auto_round:auto_gptq", "backend": "auto"}, symmetric=True)
    return tf.AutoRoundConfig() if method == "gptq" else None


def _four_bit_blocks(kind: str) -> Callable[[Path], Any]:
    return lambda folder: tf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.bfloat16
    )


QUANTISED: dict[str, Kind] = {
    "torchao int8": Kind("torchao", _torchao("Int8WeightOnlyConfig")),
    "torchao int8 by group": Kind("torchao", _torchao("Int8WeightOnlyConfig", granularity=_by_group)),
    "torchao int8, one scale": Kind("torchao", _torchao("Int8WeightOnlyConfig", granularity=_by_tensor)),
    "torchao int4 in int8": Kind("torchao", _torchao("IntxWeightOnlyConfig", weight_dtype=_four_bits)),
    "torchao int4 in int8 by group": Kind(
        "torchao", _torchao("IntxWeightOnlyConfig", weight_dtype=_four_bits, granularity=_by_group)
    ),
    "torchao float8": Kind("torchao", _torchao("Float8WeightOnlyConfig")),
    "torchao int8, activations by token": Kind("torchao", _torchao("Int8DynamicActivationInt8WeightConfig")),
    "torchao int8 by group, activations by token": Kind("torchao", _torchao("Int8DynamicActivationIntxWeightConfig")),
    "torchao int8, activations by one scale": Kind(
        "torchao", _torchao("Int8DynamicActivationInt8WeightConfig", granularity=_by_tensor)
    ),
    "compressed-tensors int4 by group": Kind("compressed_tensors", _compressed(4, "int", "pack-quantized", "group")),
    "compressed-tensors int8 packed": Kind("compressed_tensors", _compressed(8, "int", "pack-quantized", "channel")),
    "compressed-tensors int8": Kind("compressed_tensors", _compressed(8, "int", "int-quantized", "channel")),
    "compressed-tensors float8": Kind("compressed_tensors", _compressed(8, "float", "float-quantized", "channel")),
    "compressed-tensors int8, activations by token": Kind(
        "compressed_tensors", _compressed(8, "int", "int-quantized", "channel", "token")
    ),
    "compressed-tensors float8, activations by token": Kind(
        "compressed_tensors", _compressed(8, "float", "float-quantized", "channel", "token")
    ),
    "compressed-tensors int8, activations by one scale": Kind(
        "compressed_tensors", _compressed(8, "int", "int-quantized", "channel", "tensor")
    ),
    "bitsandbytes nf4": Kind("bitsandbytes", _four_bit_blocks("nf4"), dtype=torch.bfloat16),
    "bitsandbytes fp4": Kind("bitsandbytes", _four_bit_blocks("fp4"), dtype=torch.bfloat16),
    "bitsandbytes int8": Kind("bitsandbytes", lambda folder: tf.BitsAndBytesConfig(load_in_8bit=True)),
    "quanto int8": Kind("optimum", lambda folder: tf.QuantoConfig(weights="int8"), saved=False),
    "quanto int4": Kind("optimum", lambda folder: tf.QuantoConfig(weights="int4"), saved=False),
    "quanto float8": Kind("optimum", lambda folder: tf.QuantoConfig(weights="float8"), saved=False),
    "auto-round int4 by group": Kind("auto_round", _gptq, dtype=torch.float16),
    "gptq, which auto-round loads": Kind("auto_round", lambda folder: _gptq(folder, "gptq"), dtype=torch.float16),
    "fp8, expanded as it is loaded": Kind("accelerate", _fp8),
    "mxfp4, expanded as it is loaded": Kind(
        "accelerate", _mxfp4, "gpt_oss", {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    ),
    "gemma": Kind("transformers", _gemma),
    "bitnet": Kind("accelerate", _bitnet),
}


# How torchao quantises a model in memory, whatever its dtype; groups are as small as tiny layers need.
IN_PLACE: dict[str, Callable[[Path], Any]] = {
    "int8": _torchao("Int8WeightOnlyConfig"),
    "int8 by group": _torchao("Int8WeightOnlyConfig", granularity=lambda quantization: quantization.PerGroup(4)),
    "int8, one scale": _torchao("Int8WeightOnlyConfig", granularity=_by_tensor),
}


def quantise_in_place(model: PreTrainedModel, name: str) -> None:
    """Quantise the linear layers of a model in memory, but for its head.

    Args:
        model: without adapters.
        name: one of IN_PLACE.
    """
    from torchao.quantization import quantize_

    head = model.get_output_embeddings()
    linear = [each for each in model.modules() if type(each) is torch.nn.Linear and each is not head]
    for each in linear:
        if each.weight.dtype == torch.float64:  # which torchao's int8 multiplies, but does not round
            each.weight = torch.nn.Parameter(each.weight.float(), requires_grad=False)
    config = IN_PLACE[name](Path()).get_apply_tensor_subclass()
    quantize_(model, config, lambda module, path: any(module is each for each in linear))
