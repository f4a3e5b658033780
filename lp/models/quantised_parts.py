"""Quantised weights that ranks divide: each reads its own part of the tensors that are stored for one.

What is stored for a weight (N outputs, K inputs) are integers, several of them in one where they are small, and scales:
one for all, one a row, or one for each group of columns. The part of a weight that a rank holds is the same part of
each of these, counted in their own entries. Groups are never cut, and nothing is expanded that stays quantised on one
device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from transformers import CompressedTensorsConfig

from lp.errors import UserError
from lp.models.part import Part
from lp.models.quantisation import Activations, activations_of
from lp.optional import is_installed

Stored = Mapping[str, Any]  # by name, the tensors that are stored for a weight, or safetensors' slices of them
Sizes = tuple[int, ...]


class Format(Protocol):
    """How a quantised checkpoint stores weights."""

    def stored(self, keys: Iterable[str], metadata: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """The quantised weights of a checkpoint: by name, the names of its tensors in the files, by what they are."""

    def shape(self, name: str, stored: Stored) -> Sizes:
        """Shape of a quantised weight."""

    def part(self, name: str, stored: Stored, shape: Sizes, part: Part | None, dtype: torch.dtype) -> torch.Tensor:
        """A part of a quantised weight of this shape, None for all of it."""


def format_of(fields: dict[str, Any] | None, source: str) -> Format | None:
    """How a checkpoint stores its quantised weights; None where they are not quantised.

    Args:
        fields: its quantisation config, as `quantisation_of` gives it.
        source: the checkpoint, for messages.

    Raises:
        ValueError: quantised in a way that ranks cannot divide; names it, why, and the remedy.
    """
    if fields is None:
        return None
    method = fields["quant_method"]
    activations = activations_of(fields)
    if activations is Activations.UNKNOWN:
        reason = "may quantise activations too, as far as lp knows"
    elif activations is not Activations.KEPT:
        reason = "quantises activations too, which a rank would round by its own share of the columns"
    elif method not in FORMATS:
        reason = f"lp can't read by parts; it can weights alone of {' and '.join(FORMATS)}"
    elif not is_installed(package := method.replace("-", "_")):
        reason = f"is read by the package {package}; pip install {method}"
    else:
        return FORMATS[method](fields)
    raise UserError(f"ranks can't divide {source!r}: it is quantised by {method}, which {reason}; use parallel.tp=1")


def part_of_stored(
    name: str, shape: Sizes, part: Part, stored: Sizes, scale: bool, swapped: bool = False
) -> Part | None:
    """The part of a stored tensor that belongs to a part of its weight; None: all of it.

    Args:
        name: name of the weight, for messages.
        shape: shape of the weight.
        part: part of the weight.
        stored: shape of the stored tensor.
        scale: whether it holds scales, one of which may be for all.
        swapped: whether its first dimension goes along the weight's columns.

    Raises:
        ValueError: the part begins or ends within what one entry stands for.
    """
    dimension = 1 - part.dimension if swapped else part.dimension
    entries = stored[dimension] if dimension < len(stored) else 1
    if scale and entries == 1:
        return None
    group, rest = divmod(shape[part.dimension], entries)
    if rest or any(bound % group for each in part.ranges for bound in each):
        kind = "groups" if scale else "words"
        raise UserError(
            f"{name} {shape} is quantised in {kind} of {group}, and ranks would cut one at "
            f"{', '.join(str(bound) for each in part.ranges for bound in each if bound % group)}; "
            "give a parallel.tp whose parts are whole ones, or parallel.tp=1"
        )
    return Part(dimension, tuple((first // group, last // group) for first, last in part.ranges))


def _sizes(stored: Any) -> Sizes:
    return (*stored.get_shape(),) if hasattr(stored, "get_shape") else (*stored.shape,)


def _of(stored: Any, part: Part | None) -> torch.Tensor:
    """A part of a stored tensor, in memory of its own."""
    values: torch.Tensor = stored[...] if part is None else part.of(stored)
    return values.clone(memory_format=torch.contiguous_format)


class Torchao:
    """torchao's tensors, which transformers stores as the tensors that they consist of, with the rest as metadata.

    Args:
        fields: the quantisation config.
    """

    # By class: the tensors whose first dimension goes along the weight's columns. Others are laid out as no part of
    # a weight is, or for devices that have not been tried.
    SWAPPED: Mapping[str, frozenset[str]] = {
        "Int8Tensor": frozenset(),
        "IntxUnpackedToInt8Tensor": frozenset(),
        "Float8Tensor": frozenset(),
        "Int4Tensor": frozenset({"scale", "zero_point"}),
    }
    TENSORS = frozenset({"qdata", "scale", "zero_point"})

    def __init__(self, fields: dict[str, Any]) -> None:
        self._described: dict[str, dict[str, Any]] = {}

    def stored(self, keys: Iterable[str], metadata: Mapping[str, str]) -> dict[str, dict[str, str]]:
        for name in json.loads(metadata.get("tensor_names", "[]")):
            described = json.loads(metadata[name])
            if described["_type"] != torch.Tensor.__name__:
                self._described[name] = described
        found = {}
        for name, described in self._described.items():
            path, _, last = name.rpartition(".")
            found[name] = {each: f"{path}._{last}_{each}" for each in described["_tensor_data_names"]}
        return found

    def shape(self, name: str, stored: Stored) -> Sizes:
        *others, last = _sizes(stored["qdata"])
        return (*others, 2 * last if self._described[name]["_type"] == "Int4Tensor" else last)

    def part(self, name: str, stored: Stored, shape: Sizes, part: Part | None, dtype: torch.dtype) -> torch.Tensor:
        from torchao.prototype.safetensors.safetensors_utils import object_from_dict

        described = self._described[name]
        data = _torchao_fields(name, described["_type"], described["_data"], stored, shape, part)
        values: torch.Tensor = object_from_dict({**described, "_data": data})
        return values


def part_of_tensor(name: str, weight: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a weight in memory, in memory of its own: of torchao's as of plain ones."""
    if not hasattr(weight, "tensor_data_names"):
        return part.of(weight).clone()
    own: Any = weight
    tensors = [*own.tensor_data_names, *getattr(own, "optional_tensor_data_names", ())]
    stored = {each: getattr(own, each) for each in tensors if getattr(own, each) is not None}
    others = [*own.tensor_attribute_names, *getattr(own, "optional_tensor_attribute_names", ())]
    fields = {each: getattr(own, each) for each in others}
    found: torch.Tensor = type(own)(**_torchao_fields(name, type(own).__name__, fields, stored, (*own.shape,), part))
    return found


def _torchao_fields(
    name: str, kind: str, fields: Mapping[str, Any], stored: Stored, shape: Sizes, part: Part | None
) -> dict[str, Any]:
    """Arguments of the class of torchao that a part of a weight is an instance of."""
    rounded = fields.get("act_quant_kwargs") or fields.get("activation_quantization")
    if kind not in Torchao.SWAPPED or rounded or stored.keys() - Torchao.TENSORS:
        what = f"as torchao's {kind}" + (" with scales for activations" if kind in Torchao.SWAPPED else "")
        raise UserError(f"{name} is quantised {what}, which ranks can't divide: use parallel.tp=1")
    data = dict(fields)
    for each, values in stored.items():
        swapped = each in Torchao.SWAPPED[kind]
        own = part and part_of_stored(name, shape, part, _sizes(values), each != "qdata", swapped)
        data[each] = _of(values, own)
    sizes = part.sizes(shape) if part else shape
    data["block_size"] = [min(pair) for pair in zip(fields["block_size"], sizes, strict=True)]
    if "shape" in data:
        data["shape"] = [*sizes]
    return data


class CompressedTensors:
    """compressed-tensors' weights, which transformers expands in the first pass: a rank expands its own part at once.

    Args:
        fields: the quantisation config.
    """

    SCALES = ("weight_scale", "weight_zero_point", "weight_global_scale")
    TENSORS = ("weight", "weight_packed", "weight_shape", *SCALES)
    ORDER = "weight_g_idx"  # the group of every column, where those of a group do not lie side by side
    PACKED = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")

    def __init__(self, fields: dict[str, Any]) -> None:
        self._config = CompressedTensorsConfig.from_dict(fields).quantization_config
        groups = self._config.config_groups.values()
        if unknown := sorted({str(each.format or self._config.format) for each in groups} - {*self.PACKED}):
            raise UserError(
                f"ranks can't divide weights of compressed-tensors' format {unknown[0]!r}, but those of "
                f"{', '.join(self.PACKED)}; use parallel.tp=1"
            )

    def stored(self, keys: Iterable[str], metadata: Mapping[str, str]) -> dict[str, dict[str, str]]:
        names = {*keys}
        if ordered := sorted(name for name in names if name.endswith(self.ORDER)):
            raise UserError(f"{ordered[0]} scatters a group's columns, which ranks can't divide; use parallel.tp=1")
        layers = [name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale")]
        return {
            f"{layer}.weight": {each: f"{layer}.{each}" for each in self.TENSORS if f"{layer}.{each}" in names}
            for layer in layers
        }

    def shape(self, name: str, stored: Stored) -> Sizes:
        if "weight" in stored:
            return _sizes(stored["weight"])
        return (*stored["weight_shape"][...].tolist(),)

    def part(self, name: str, stored: Stored, shape: Sizes, part: Part | None, dtype: torch.dtype) -> torch.Tensor:
        from compressed_tensors.compressors import BaseCompressor

        scheme = self._scheme(name.removesuffix(".weight"))
        tensors = {}
        for each, values in stored.items():
            if each == "weight_shape":
                tensors[each] = torch.tensor(part.sizes(shape) if part else shape)
                continue
            own = part and part_of_stored(name, shape, part, _sizes(values), each in self.SCALES)
            tensors[each] = _of(values, own)
            if each in self.SCALES and tensors[each].is_floating_point():  # before they are used, as transformers does
                tensors[each] = tensors[each].to(dtype)
        compressor = BaseCompressor.get_value_from_registry(scheme.format or self._config.format)
        expanded: torch.Tensor = compressor.decompress(tensors, scheme)["weight"].to(dtype)
        return expanded

    def _scheme(self, layer: str) -> Any:
        from compressed_tensors.utils.match import is_match

        linear = nn.Linear(1, 1, device="meta")  # what is quantised is of this class
        for group in self._config.config_groups.values():
            if is_match(layer, linear, group.targets, self._config.ignore or ()):
                return group
        raise UserError(f"{layer} has quantised weights, but no group of the quantisation config is for it")


FORMATS: Mapping[str, Callable[[dict[str, Any]], Format]] = {
    "torchao": Torchao,
    "compressed-tensors": CompressedTensors,
}
