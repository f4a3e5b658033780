"""Read a rank's part of quantised weights, where ranks divide a model, from the tensors that a checkpoint stores.

For a weight (N outputs, K inputs) a checkpoint stores integers, several in one word where they are small. It also
stores scales: one for the weight, one for each row, or one for each group of columns. A rank reads the matching part of
each of these tensors. torchao's weights stay quantised. Weights of other formats are expanded to the model's dtype,
each rank's part as it is read.
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

Stored = Mapping[str, Any]  # the tensors that are stored for one weight, or safetensors' slices of them, by role
Sizes = tuple[int, ...]


class Format(Protocol):
    """How a quantised checkpoint stores its weights: an interface through which a rank reads its part of a weight."""

    def stored(self, keys: Iterable[str], metadata: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Find the quantised weights of a checkpoint.

        Args:
            keys: names of all tensors in the checkpoint's files.
            metadata: metadata of these files.

        Returns:
            For each weight's name, its tensors' names in the files, by their role, such as "scales".
        """

    def shape(self, name: str, stored: Stored) -> Sizes:
        """Shape of a whole quantised weight, such as (outputs, inputs).

        Args:
            name: name of the weight.
            stored: the weight's tensors, or safetensors' slices of them, by their role, such as "scales".
        """

    def part(self, name: str, stored: Stored, shape: Sizes, part: Part | None, dtype: torch.dtype) -> torch.Tensor:
        """Read a part of a quantised weight.

        Args:
            name: name of the weight.
            stored: the weight's tensors, or safetensors' slices of them, by their role, such as "scales".
            shape: shape of the whole weight.
            part: the part to read; None: the whole weight.
            dtype: dtype of the model, to which weights are expanded unless they stay quantised.
        """


def format_of(fields: dict[str, Any] | None, source: str) -> Format | None:
    """Find out how a checkpoint stores quantised weights, so that each rank can read its part; None: it has none.

    Args:
        fields: the checkpoint's quantisation config as plain data, from `quantisation_of`; None: it has none.
        source: name of the checkpoint, for messages.

    Raises:
        ValueError: ranks cannot divide weights that are quantised in this way; names the method, why, and the remedy.
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
        reason = f"lp can't read by parts; it can weights alone of {', '.join(FORMATS)}"
    elif (package := PACKAGES.get(method)) and not is_installed(package):
        reason = f"is read by the package {package}; pip install {method}"
    else:
        return FORMATS[method](fields)
    raise UserError(f"ranks can't divide {source!r}: it is quantised by {method}, which {reason}; use parallel.tp=1")


def part_of_stored(
    name: str, shape: Sizes, part: Part, stored: Sizes, scale: bool, swapped: bool = False
) -> Part | None:
    """Which entries of a stored tensor, such as scales, belong to a part of a quantised weight; None: all entries.

    Args:
        name: name of the weight, for messages.
        shape: shape of the weight.
        part: part of the weight.
        stored: shape of the stored tensor.
        scale: whether the tensor holds scales (or zero points), where a single entry may serve the whole dimension.
        swapped: whether the tensor's first dimension goes along the weight's columns, not its rows.

    Raises:
        ValueError: the part begins or ends amid the columns or rows that share one stored entry.
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
    """Reads parts of weights that torchao quantised: each is a tensor subclass, stored as several plain tensors.

    The class and its other fields are in the metadata of the files. The parts stay quantised.

    Args:
        fields: the quantisation config; not used, as the files' metadata has all that is needed.
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
    """Cut a part out of a weight that is in memory, plain or quantised by torchao; the result is a copy.

    Args:
        name: name of the weight, for messages.
        weight: the whole weight.
        part: the part to cut out.
    """
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
    """Arguments to construct a part of one of torchao's weights with its class."""
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
    """Reads parts of weights in the formats of compressed-tensors, and expands them to the model's dtype at once.

    Transformers would expand whole weights in the first forward pass.

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


class Words:
    """Reads parts of weights of GPTQ, AWQ and AutoRound, stored in 32-bit words, and expands them to the model's dtype.

    A weight is scale * (value - zero point), computed in the scale's dtype as in the methods' own layers. A word holds
    several values, or several zero points. Scales are (groups, N outputs), and zero points, once unpacked, are too. A
    checkpoint may also store the number of every column's group. A part by columns reads the scales of all groups, a
    few percent of the bytes. So it may begin within a group, or have columns of any groups.

    Args:
        fields: the quantisation config.
    """

    TENSORS = ("qweight", "qzeros", "scales", "g_idx")
    BITS = (2, 4, 8)  # others lie across the bounds of words
    # By method: the fields that name the format, the one that is meant where they are missing, and by format how values
    # and zero points are stored.
    KNOWN: Mapping[str, tuple[tuple[str, ...], str, Mapping[str, str]]] = {
        "gptq": (("checkpoint_format", "format"), "gptq", {"gptq": "less one", "gptq_v2": "plain"}),
        "awq": (("version", "format"), "gemm", {"gemm": "across"}),
        "auto-round": (
            ("packing_format",),
            "auto_round:gptq",
            {
                **dict.fromkeys(("auto", "auto_round:gptq", "auto_round:auto_gptq"), "less one"),
                **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), "plain"),
                **dict.fromkeys(("auto_round:awq", "auto_round:auto_awq"), "across"),
            },
        ),
    }
    ACROSS = (0, 4, 1, 5, 2, 6, 3, 7)  # places of the values of eight rows in one of AWQ's words, (K, N / 8)

    def __init__(self, fields: dict[str, Any]) -> None:
        method = fields["quant_method"]
        names, usual, known = self.KNOWN[method]
        written = str(next((fields[name] for name in names if fields.get(name)), usual)).lower()
        if written not in known:
            raise UserError(
                f"ranks can't divide weights of {method}'s format {written!r}, but those of {', '.join(known)}; "
                "use parallel.tp=1"
            )
        if rotated := [each for each in ("rotation_config", "spinquant_config") if fields.get(each)]:
            raise UserError(f"{method} rotates inputs ({rotated[0]}), which ranks can't divide; use parallel.tp=1")
        self._less_one = known[written] == "less one"  # what is stored of a zero point
        self._across = known[written] == "across"

    def stored(self, keys: Iterable[str], metadata: Mapping[str, str]) -> dict[str, dict[str, str]]:
        names = {*keys}
        layers = [name.removesuffix(".scales") for name in sorted(names) if name.endswith(".scales")]
        if alone := [each for each in layers if not {f"{each}.qweight", f"{each}.qzeros"} <= names]:  # of activations
            raise UserError(
                f"{alone[0]}.scales have no qweight and qzeros beside them, which ranks can't divide; use parallel.tp=1"
            )
        return {
            f"{layer}.weight": {each: f"{layer}.{each}" for each in self.TENSORS if f"{layer}.{each}" in names}
            for layer in layers
        }

    def shape(self, name: str, stored: Stored) -> Sizes:
        values = 32 // self._bits(name, stored)
        first, last = _sizes(stored["qweight"])
        return (last * values, first) if self._across else (last, first * values)

    def part(self, name: str, stored: Stored, shape: Sizes, part: Part | None, dtype: torch.dtype) -> torch.Tensor:
        bits = self._bits(name, stored)
        rows = Part(1, part.ranges) if part and part.dimension == 0 else None  # as they lie in scales and zero points
        columns = Part(0, part.ranges) if part and part.dimension == 1 else None
        words = part and part_of_stored(name, shape, part, _sizes(stored["qweight"]), scale=False, swapped=True)
        values = self._unpacked(_of(stored["qweight"], words), bits, along=1 if self._across else 0)
        packed = _of(stored["qzeros"], None)
        if self._less_one:  # by word, with a carry, as GPTQModel has it
            packed += sum(1 << place for place in range(0, 32, bits))
        zeros, scales = _of(self._unpacked(packed, bits, along=1), rows), _of(stored["scales"], rows)
        groups = _of(self._groups(name, stored, shape[1]), columns).long()
        expanded: torch.Tensor = scales[groups] * (values - zeros[groups])
        return expanded.to(dtype).T

    def _groups(self, name: str, stored: Stored, columns: int) -> Any:
        """The group of every column."""
        if "g_idx" in stored:
            return stored["g_idx"]
        groups = _sizes(stored["scales"])[0]
        if columns % groups:
            raise UserError(f"{name} has {groups} groups for {columns} columns, and no g_idx; use parallel.tp=1")
        return torch.arange(columns) // (columns // groups)

    def _bits(self, name: str, stored: Stored) -> int:
        """Bits of a value, which may differ from layer to layer."""
        words, rows = (_sizes(stored[each])[-1] for each in ("qzeros", "scales"))
        bits, rest = divmod(32 * words, rows)
        known = (4,) if self._across else self.BITS
        dtype = stored["qzeros"][:1].dtype
        if rest or bits not in known or dtype != torch.int32:
            raise UserError(
                f"{name} has {words} words of {dtype} for the zero points of {rows} outputs, which ranks can't divide: "
                f"they can values of {' or '.join(map(str, known))} bits in words of torch.int32; use parallel.tp=1"
            )
        return bits

    def _unpacked(self, words: torch.Tensor, bits: int, along: int) -> torch.Tensor:
        """Unpack the values of words, side by side along a dimension."""
        places = torch.tensor(self.ACROSS if self._across else range(32 // bits), dtype=torch.int32) * bits
        values = words.unsqueeze(along + 1) >> places.reshape(-1, *[1] * (1 - along))
        unpacked: torch.Tensor = (values & 2**bits - 1).to(torch.int16).flatten(along, along + 1)
        return unpacked


FORMATS: Mapping[str, Callable[[dict[str, Any]], Format]] = {
    "torchao": Torchao,
    "compressed-tensors": CompressedTensors,
    **dict.fromkeys(Words.KNOWN, Words),
}
PACKAGES = {"torchao": "torchao", "compressed-tensors": "compressed_tensors"}  # packages that read stored weights
