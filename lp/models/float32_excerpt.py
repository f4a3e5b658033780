"""A small float32 model made of a few layers of a large one, on which it is checked that tree masks are honoured.

A wrong mask or position shows in every layer of a kind or in none. So the excerpt runs the first layer of each kind and
the last layer of the model; the other layers return their input. The excerpt's output is the input of the LM head. In
float32, rounding is a hundred thousand times smaller than the effect of one draft-tree node that is wrongly seen.

Only the weights of the layers that run are copied to float32, up to a limit in bytes: attention's weights first, since
masks act there. Quantised weights whose class has `dequantize` are copied as the values that they stand for. Other
quantised weights, embeddings and weights beyond the limit are shared with the model; their modules run in its dtype, on
inputs rounded to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lp.models.few_layers import FewLayers, decoder_layers, first_of_each, kind_of_layer
from lp.models.memory import free_bytes
from lp.models.recurrent_layers import NO_LIMIT
from lp.models.skipped_layer import NoHead, OutputForm, SkippedLayer

MOST_BYTES = 1 << 30  # of copied weights, and at most a quarter of what is free
SHORT_WINDOW = 6  # tokens, of sliding-window layers, so that a text of 24 tokens crosses it
PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)  # of buffers that hold quantised weights
KEPT_ATTENTION = ("sdpa", "eager")  # others may lack their package, or take no float32; the runner sets its own anyway
PRECISE = (torch.float32, torch.float64)  # dtypes whose rounding hides nothing


class Excerpt(FewLayers):
    """A view of a model with few layers, in float32 where its weights can be copied, to check that masks are honoured.

    Args:
        original: the model, which is left as it is.
        in_float32: whether to copy weights to float32; False: the excerpt shares the model's weights, in their dtype.
        whole: whether the excerpt has all layers and the LM head, in the model's dtype, for a model whose code does not
            run with a few layers.
        form: what layers return besides hidden states; None: the first pass finds it out.

    Attributes:
        model: the excerpt. Its sliding window is shortened, so that a few tokens cross it. Mamba-2's time steps are not
            clamped, since transformers clamps the time steps of some tokens only.
        whole: whether the excerpt has all layers, as given.
        rounded: whether some of its weights stayed in the model's dtype.
        noise: relative error added to each embedding; 0 outside `perturbed`.
    """

    def __init__(
        self,
        original: PreTrainedModel,
        in_float32: bool = True,
        whole: bool = False,
        form: OutputForm | None = None,
    ) -> None:
        self.noise = 0.0
        self.whole = whole
        self._casts = in_float32 and not whole and original.dtype not in PRECISE
        self._embedding = original.get_input_embeddings()
        count = len(decoder_layers(original))
        if not whole and not count:
            raise LookupError("it is not plain which of its modules are the decoder layers")
        instead: dict[int, nn.Module] = {}
        if not whole and (head := original.get_output_embeddings()) is not None:
            dtype = original.dtype if original.dtype in PRECISE or not self._casts else torch.float32
            instead[id(head)] = NoHead(dtype)
        kept = {*range(count)} if whole else first_of_each(original, kind_of_layer) | {count - 1}
        super().__init__(original, kept, self._forward_of, form, instead)
        self.rounded = bool(self._kept - {id(self._embedding)})
        _simplify(self.model)
        if self.model.config._attn_implementation not in KEPT_ATTENTION:
            supported = self.model._supports_sdpa
            self.model.set_attn_implementation("sdpa" if supported else "eager")

    @contextlib.contextmanager
    def perturbed(self, noise: float) -> Iterator[None]:
        """Context manager that makes embeddings off by a small relative error, to see what rounding does to outputs.

        Args:
            noise: the error as a share of each value, such as 4.8e-7; its sign is random.
        """
        self.noise = noise
        try:
            yield
        finally:
            self.noise = 0.0

    def _is_copied(self, module: nn.Module, attributes: dict[str, Any]) -> bool:
        return True

    def _storage(self, module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> dict[str, Any]:
        storage = super()._storage(module, attributes, buffers)
        if not self._casts:
            return storage
        if id(module) in self._kept:  # as plain attributes: the excerpt's parameters are those of one dtype
            return {**storage, "_parameters": {}, **attributes["_parameters"]}
        parameters = {name: _in_float32(parameter) for name, parameter in attributes["_parameters"].items()}
        storage["_buffers"] = {name: _in_float32(buffer) for name, buffer in storage["_buffers"].items()}
        return storage | {"_parameters": parameters}

    def _forward_of(self, module: nn.Module) -> Any:
        if module is self._embedding:
            return self._embedded
        return self._in_own_dtype if id(module) in self._kept else None

    def _in_own_dtype(self, copied: Any, own_forward: Any, *args: Any, **kwargs: Any) -> Any:
        """A module that keeps its dtype, between others in float32."""
        dtype = self.original.dtype
        args = tuple(_cast(value, dtype) for value in args)
        out = own_forward(*args, **{name: _cast(value, dtype) for name, value in kwargs.items()})
        return (
            tuple(_cast(part, torch.float32) for part in out) if isinstance(out, tuple) else _cast(out, torch.float32)
        )

    def _embedded(self, copied: Any, own_forward: Any, *args: Any, **kwargs: Any) -> Any:
        states = own_forward(*args, **kwargs)
        if self._casts:
            states = _cast(states, torch.float32)
        if not self.noise:
            return states
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, states.shape, generator=generator).to(states.device, states.dtype) * 2 - 1
        return states + states * signs * self.noise

    @cached_property
    def _kept(self) -> set[int]:
        """Ids of the modules that keep the model's dtype.

        Embeddings, of which a text reads a few rows; weights that cannot be cast; and, where room is short, the largest
        others first and attention last.
        """
        kept: set[int] = set()
        if not self._casts:
            return kept
        sizes = []
        for module, in_attention in self._running(self.original):
            own = [parameter for parameter in module._parameters.values() if parameter is not None]
            packed = any(buffer is not None and buffer.dtype in PACKED for buffer in module._buffers.values())
            if (
                isinstance(module, nn.Embedding)
                or module is self._embedding
                or packed
                or not all(map(_can_be_cast, own))
            ):
                kept.add(id(module))
            elif own:
                sizes.append((not in_attention, 4 * sum(parameter.numel() for parameter in own), id(module)))
        free = free_bytes(self._embedding.weight.device)
        room = MOST_BYTES if free is None else min(MOST_BYTES, free // 4)
        for _, nbytes, module_id in sorted(sizes):
            room -= nbytes
            if room < 0:
                kept.add(module_id)
        return kept

    def _running(self, module: nn.Module, in_attention: bool = False) -> Iterator[tuple[nn.Module, bool]]:
        """The modules of the excerpt, and whether they are a part of attention."""
        if id(module) not in self._instead:
            in_attention = in_attention or "attention" in type(module).__name__.lower()
            yield module, in_attention
            for child in module.children():
                yield from self._running(child, in_attention)


def _can_be_cast(parameter: nn.Parameter) -> bool:
    """Whether float32 values of a weight can be had: it is a plain parameter, or its class can dequantise."""
    dtypes = (torch.float16, torch.bfloat16, *PRECISE)
    known = type(parameter) is nn.Parameter or _is_quantised(parameter)
    return known and parameter.dtype in dtypes and parameter.device.type != "meta"


def _is_quantised(tensor: torch.Tensor) -> bool:
    """Whether it is of a class, as torchao's, that gives the values that quantised ones stand for."""
    return type(tensor).dequantize is not torch.Tensor.dequantize


def _in_float32(tensor: torch.Tensor | None) -> Any:
    if tensor is None or not tensor.is_floating_point():
        return tensor
    values = tensor.detach()
    if _is_quantised(values):
        values = values.dequantize()
    elif tensor.dtype in PRECISE:
        return tensor
    cast = values.to(torch.float32)
    return nn.Parameter(cast, requires_grad=False) if isinstance(tensor, nn.Parameter) else cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _simplify(model: PreTrainedModel) -> None:
    """Shorten the sliding window, and lift limits that hold for some tokens alone."""
    config: Any = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    holders: list[Any] = [config, *(m for m in model.modules() if not isinstance(m, SkippedLayer))]
    for holder in holders:
        if window is not None and window > SHORT_WINDOW and getattr(holder, "sliding_window", None) == window:
            holder.sliding_window = SHORT_WINDOW
        if hasattr(holder, "time_step_limit"):
            holder.time_step_limit = NO_LIMIT
