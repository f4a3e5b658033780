"""Load a model that ranks divide: each rank reads its own slices of the safetensors files, straight to its device.

No rank ever holds a whole layer, and at any time only one tensor of a file is mapped into memory.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import cached_file

from lp.errors import UserError
from lp.models.auto_class import auto_class
from lp.models.part import Part
from lp.models.quantisation import quantisation_of
from lp.models.quantised_parts import Format, format_of
from lp.models.tensor_parallel import Plan, divided
from lp.parallel.replica import Replica

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GATES = (("gate_proj", "up_proj"), ("w1", "w3"))  # of an expert, where each has tensors of its own
DOWNS = ("down_proj", "w2")
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
COMPARED_ROWS = 1024
_BUILDING = threading.Lock()  # transformers sets torch's default dtype meanwhile, which threads share


def load_divided(
    source: str,
    config: Any,
    replica: Replica,
    device: str | torch.device,
    dtype: torch.dtype | str,
    plan: Plan | None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load this rank's part of a model that the ranks of a replica divide among them.

    Args:
        source: folder, or hub name.
        config: the checkpoint's config.
        replica: the ranks that divide the model.
        device: device to load the weights to.
        dtype: dtype for the weights; "auto" is the checkpoint's.
        plan: a user's plan of how modules are divided; None takes the model's own plan.
        kwargs: `attn_implementation`, `trust_remote_code` and `local_files_only`, as transformers has them.

    Raises:
        ValueError: weights that are quantised in a way that ranks cannot divide, files that are missing or damaged,
            weights that are missing or of other shapes than the config says, or a model that cannot be divided.
    """
    quantised = format_of(quantisation_of(config), source)
    weights = WeightFiles(source, kwargs.pop("local_files_only", False), quantised)
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or weights.dtype
    assert isinstance(dtype, torch.dtype)
    with _BUILDING, torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype, **kwargs)
    weights.rename(model)
    tied = _tie(model, weights)
    _compute_buffers(model, device)
    in_float32 = _kept_in_float32(model, dtype)

    def fetch(name: str, whole: torch.Tensor, part: Part | None) -> torch.Tensor:
        kept = torch.float32 if in_float32.search(name) else whole.dtype
        stored = name if weights.has(name) else tied.get(name, name)
        return weights.read(stored, tuple(whole.shape), part, device, kept).contiguous()

    for module, name, full_name in _stored_buffers(model):
        if weights.has(full_name):
            module._buffers[name] = fetch(full_name, model.get_buffer(full_name), None)
        elif not _may_be_missing(model, full_name):
            raise weights.missing(full_name)
    return divided(model, replica, plan, fetch)


def _tie(model: PreTrainedModel, weights: WeightFiles) -> dict[str, str]:
    """Tie weights as the model's config says, except those of which the checkpoint has two that differ.

    Returns:
        By name of a weight, the name of another one in the checkpoint that has the same values.
    """
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True)
    same = {}
    model.tie_weights()
    for name, source in pairs.items():
        if weights.has(name) and weights.has(source) and not weights.equal(name, source):
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            module._parameters[last] = nn.Parameter(torch.empty_like(module._parameters[last]))
        elif weights.has(name):
            same[source] = name
    return same


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Names of weights that transformers has in float32 where the others are of this dtype."""
    kept = set[str]()
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return re.compile("|".join(each.replace("*", ".*") for each in sorted(kept)) or "(?!)")


def _stored_buffers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, str]]:
    """Modules, names and full names of buffers that a checkpoint has, such as the bias of a router."""
    for path, module in model.named_modules():
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            if module._buffers[name] is not None:
                yield module, name, f"{path}.{name}" if path else name


def _may_be_missing(model: PreTrainedModel, name: str) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _compute_buffers(model: PreTrainedModel, device: str | torch.device) -> None:
    """Give buffers that no checkpoint has, such as rotary frequencies, their values, as transformers does."""
    initialises: dict[nn.Module, PreTrainedModel] = {}  # the innermost model that a module is in
    for inner in model.modules():  # outer ones first
        if isinstance(inner, PreTrainedModel):
            initialises |= dict.fromkeys(inner.modules(), inner)
    for module in model.modules():
        on_meta = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in on_meta:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if on_meta:
            initialises[module]._init_weights(module)  # of weights on the meta device it does nothing
            for name in on_meta:
                module._buffers[name] = module._buffers[name].to(device)


class WeightFiles:
    """The safetensors files of a model, from which parts of weights are read.

    Files are opened for one tensor at a time, since all that is mapped counts as memory of the process.

    Args:
        source: folder, or hub name.
        offline: whether to look for files of the hub only in its local cache.
        quantised: how quantised weights are stored; None: no weights are quantised.

    Raises:
        ValueError: there are no such files, or one is damaged.
    """

    def __init__(self, source: str, offline: bool, quantised: Format | None = None) -> None:
        self.source = source
        self.offline = offline
        self.quantised = quantised
        self._tensors: dict[str, dict[str, str]] = {}  # of quantised weights, by the weight's name in the files
        self._stored: dict[str, str] = {}  # their names in the files, by those of a model: see `rename`
        index = self._file(INDEX)
        if index is not None:
            try:
                names: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"cannot load {source!r}: {INDEX} is damaged ({error}); download it again") from error
            self._files = {file: self._file(file) for file in {*names.values()}}
            self._file_of = names
            self._find_quantised()
            return
        single = self._file(SINGLE)
        if single is None:
            raise UserError(
                f"cannot load {source!r}: it has no {SINGLE} or {INDEX}; convert its weights to safetensors"
            )
        with self._opened(single) as file:
            self._file_of = dict.fromkeys(file.keys(), SINGLE)
        self._files = {SINGLE: single}
        self._find_quantised()

    def _find_quantised(self) -> None:
        if self.quantised is None:
            return
        metadata: dict[str, str] = {}
        for first in {file: name for name, file in self._file_of.items()}.values():
            with self._opened(self._path(first)) as file:
                metadata |= file.metadata() or {}
        self._tensors = self.quantised.stored(self._file_of, metadata)

    def rename(self, model: PreTrainedModel) -> None:
        """Find the name in the files for each weight of a model, as transformers renames weights when it loads them.

        Call this before `has`, `equal` and `read`, which take the model's names.

        Args:
            model: the model, which may be on torch's meta device.
        """
        renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        wanted = model.state_dict()
        for name in sorted({*self._file_of, *self._tensors}):
            renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, wanted)
            if renamed not in wanted and name in wanted:  # it has the module's name already
                renamed = name
            self._stored.setdefault(renamed, name)

    def _file(self, name: str) -> Path | None:
        folder = Path(self.source)
        if folder.is_dir():
            return folder / name if (folder / name).exists() else None
        found = cached_file(
            self.source,
            name,
            local_files_only=self.offline,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if found is None else Path(found)

    def _opened(self, path: Path) -> Any:
        try:
            return safe_open(path, "pt")
        except Exception as error:
            raise UserError(f"cannot load {self.source!r}: {path.name} is damaged or incomplete ({error})") from error

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point weight in the first file, for checkpoints whose config names no dtype."""
        if not self._file_of:
            return torch.float32
        first = min(self._file_of, key=self._file_of.__getitem__)
        with self._opened(self._path(first)) as file:
            stored = [STORED_DTYPES.get(file.get_slice(name).get_dtype()) for name in file.keys()]  # noqa: SIM118
        return next(filter(None, stored), torch.float32)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a weight of this name, which is the model's name for it."""
        return name in self._stored

    def equal(self, name: str, other: str) -> bool:
        """Whether two weights, given by the model's names, have the same values.

        Only a few rows of them are held in memory at a time.
        """
        ours, theirs = self._stored[name], self._stored[other]
        if ours in self._tensors or theirs in self._tensors:
            one, two = (self._tensors.get(each, {"": each}) for each in (ours, theirs))
            return one.keys() == two.keys() and all(self._equal(one[each], two[each]) for each in one)
        return self._equal(ours, theirs)

    def _equal(self, ours: str, theirs: str) -> bool:
        with self._opened(self._path(ours)) as one, self._opened(self._path(theirs)) as two:
            a, b = one.get_slice(ours), two.get_slice(theirs)
            if a.get_shape() != b.get_shape():
                return False
            rows = a.get_shape()[0]
            starts = range(0, rows, COMPARED_ROWS)
            return all(torch.equal(a[at : at + COMPARED_ROWS], b[at : at + COMPARED_ROWS]) for at in starts)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Part | None,
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Read a part of a weight to a device.

        Args:
            name: the model's name for the weight.
            shape: shape that the whole weight has in the model.
            part: the part to read; None: the whole weight.
            device: device to read it to.
            dtype: dtype to cast it to.

        Raises:
            ValueError: the weight is missing, damaged, or of another shape.
        """
        if stored := self._stored.get(name):
            return self._read(stored, name, shape, part, device, dtype)
        if ".experts." not in name:
            raise self.missing(name)
        values = torch.empty(part.sizes(shape) if part else shape, device=device, dtype=dtype)
        for expert in range(shape[0]):
            self._read_expert(values[expert], name, expert, shape[1:], part, dtype)
        return values

    def _read_expert(
        self,
        target: torch.Tensor,
        name: str,
        expert: int,
        shape: tuple[int, ...],
        part: Part | None,
        dtype: torch.dtype,
    ) -> None:
        """Read one expert's part of a tensor of all experts; in the files each projection of an expert is a tensor."""
        path, _, kind = name.rpartition(".")
        one = None if part is None else Part(part.dimension - 1, part.ranges)
        if kind != "gate_up_proj":
            stored = self._first_of([f"{path}.{expert}.{each}.weight" for each in DOWNS], name)
            target.copy_(self._read(stored, name, shape, one, target.device, dtype))
            return
        half = shape[0] // 2, *shape[1:]
        own = part.ranges if part else ((0, half[0]), (half[0], shape[0]))
        starts = 0
        for index, (first, last) in enumerate(own):
            stored = self._first_of([f"{path}.{expert}.{pair[index]}.weight" for pair in GATES], name)
            rows = Part(0, ((first - index * half[0], last - index * half[0]),))
            target[starts : starts + last - first] = self._read(stored, name, half, rows, target.device, dtype)
            starts += last - first

    def _read(
        self,
        stored: str,
        name: str,
        shape: tuple[int, ...],
        part: Part | None,
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        with contextlib.ExitStack() as files:
            if stored in self._tensors:
                assert self.quantised is not None
                tensors = {
                    each: files.enter_context(self._opened(self._path(key))).get_slice(key)
                    for each, key in self._tensors[stored].items()
                }
                self._check_shape(name, self.quantised.shape(stored, tensors), shape)
                return self.quantised.part(stored, tensors, shape, part, dtype).to(device)
            file = files.enter_context(self._opened(self._path(stored)))
            values = file.get_slice(stored)
            self._check_shape(name, tuple(values.get_shape()), shape)
            if not shape:
                number: torch.Tensor = file.get_tensor(stored)
                return number.to(device=device, dtype=dtype, copy=True)
            whole = Part(0, ((0, shape[0]),))
            return (part or whole).of(values).to(device=device, dtype=dtype, copy=True)

    def _check_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise UserError(
                f"cannot load {self.source!r}: config.json makes {name} {shape}, the weights have {found}; "
                "use the config that belongs to these weights"
            )

    def _path(self, stored: str) -> Path:
        path = self._files[self._file_of[stored]]
        if path is None:
            raise UserError(f"cannot load {self.source!r}: {self._file_of[stored]} is missing; download it again")
        return path

    def _first_of(self, names: list[str], wanted: str) -> str:
        for name in names:
            # The first releases of transformers 5 rename Mixtral's experts as they convert them.
            for each in (name, name.replace(".mlp.", ".block_sparse_moe.")):
                if stored := self._stored.get(each):
                    return stored
        raise self.missing(wanted)

    def missing(self, name: str) -> UserError:
        """Make the error to raise for a weight that the files do not have."""
        return UserError(
            f"cannot load {self.source!r}: the weights have no {name}; use a complete checkpoint of a causal LM, "
            "with the config that belongs to it; of some checkpoints transformers computes other weights, "
            "which a load with parallel.tp > 1 does not: load those with parallel.tp=1"
        )
