"""Loads a model that ranks divide: each reads its own slices of the safetensors files, straight to its device.

No rank ever holds a whole layer, and no more of a file is mapped than one tensor.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file

from lp.errors import UserError
from lp.models.tensor_parallel import Part, Plan, divided
from lp.parallel.replica import Replica

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Where checkpoints have other names than transformers' modules: Mixtral's experts; and those of one tensor each.
RENAMED = ((".mlp.", ".block_sparse_moe."),)
GATES = (("gate_proj", "up_proj"), ("w1", "w3"))  # of an expert
DOWNS = ("down_proj", "w2")
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
    """This rank's part of a model.

    Args:
        source: folder, or hub name.
        config: of the checkpoint.
        replica: the ranks.
        device: of the weights.
        dtype: of the weights; "auto" is the checkpoint's.
        plan: of the user; None takes the model's own.
        kwargs: `attn_implementation`, `trust_remote_code`, `local_files_only`.

    Raises:
        ValueError: quantised weights, files that are missing or damaged, weights that are missing or of other shapes
            than the config says, or a model that cannot be divided.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{source!r} is quantised, which cannot be divided among {replica.size} ranks; use parallel.tp=1"
        )
    offline = kwargs.pop("local_files_only", False)
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    assert isinstance(dtype, torch.dtype)
    with _BUILDING, torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    model.tie_weights()
    _compute_buffers(model, device)
    weights = Checkpoint(source, offline)

    def fetch(name: str, parameter: nn.Parameter, part: Part | None) -> torch.Tensor:
        values = weights.read(name, tuple(parameter.shape), part, device, dtype)
        return values.contiguous()

    return divided(model, replica, plan, fetch)


def _compute_buffers(model: PreTrainedModel, device: str | torch.device) -> None:
    """Give buffers that no checkpoint has, such as rotary frequencies, their values, as transformers does."""
    for module in model.modules():
        on_meta = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in on_meta:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if on_meta:
            model._init_weights(module)  # of weights on the meta device it does nothing
            for name in on_meta:
                module._buffers[name] = module._buffers[name].to(device)


class Checkpoint:
    """The safetensors files of a model, which are opened for one tensor at a time: what is mapped counts as memory.

    Args:
        source: folder, or hub name.
        offline: look into the hub's cache alone.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, source: str, offline: bool) -> None:
        self.source = source
        self.offline = offline
        index = self._file(INDEX)
        if index is not None:
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
            self._files = {file: self._file(file) for file in {*names.values()}}
            self._file_of = names
            return
        single = self._file(SINGLE)
        if single is None:
            raise UserError(
                f"cannot load {source!r}: it has no {SINGLE} or {INDEX}; convert its weights to safetensors"
            )
        with self._opened(single) as file:
            self._file_of = dict.fromkeys(file.keys(), SINGLE)
        self._files = {SINGLE: single}

    def _file(self, name: str) -> Path | None:
        folder = Path(self.source).expanduser()
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

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Part | None,
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """A part of a weight, None for all of it, on a device.

        Raises:
            ValueError: it is missing, damaged, or of another shape.
        """
        if known := self._known(name):
            return self._read(known, name, shape, part, device, dtype)
        values = torch.empty(_sizes(shape, part), device=device, dtype=dtype) if ".experts." in name else None
        if values is None:
            raise self._missing(name)
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
        """One expert's part of a tensor of all experts: gate and up projections are tensors of their own."""
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
        path = self._files[self._file_of[stored]]
        if path is None:
            raise UserError(f"cannot load {self.source!r}: {self._file_of[stored]} is missing; download it again")
        with self._opened(path) as file:
            values = file.get_slice(stored)
            found = tuple(values.get_shape())
            if found != shape:
                raise UserError(
                    f"cannot load {self.source!r}: config.json makes {name} {shape}, the weights have {found}; "
                    "use the config that belongs to these weights"
                )
            whole = Part(0, ((0, shape[0]),))
            return (part or whole).of(values).to(device=device, dtype=dtype, copy=True)

    def _known(self, name: str) -> str | None:
        return next((each for each in _names(name) if each in self._file_of), None)

    def _first_of(self, names: list[str], wanted: str) -> str:
        for name in names:
            if stored := self._known(name):
                return stored
        raise self._missing(wanted)

    def _missing(self, name: str) -> UserError:
        return UserError(
            f"cannot load {self.source!r}: the weights have no {name}; use a complete checkpoint of a causal LM, "
            "with the config that belongs to it"
        )


def _names(name: str) -> Iterator[str]:
    """What a weight may be called in a checkpoint."""
    yield name
    for own, theirs in RENAMED:
        if own in name:
            yield re.sub(re.escape(own), theirs, name)


def _sizes(shape: tuple[int, ...], part: Part | None) -> tuple[int, ...]:
    """Of a part."""
    sizes = [*shape]
    if part is not None:
        sizes[part.dimension] = sum(last - first for first, last in part.ranges)
    return tuple(sizes)
