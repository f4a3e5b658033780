"""A small model made of a large one, for the probe: a few of its layers, in float32, run by the model's own code.

A mask or a position is wrong in every layer of a kind or in none. So the excerpt has the first layer of each kind and
the last one of all; the others hand on what they are given. Its output is what the LM head would be given. In float32
rounding is a hundred thousand times smaller than what a node changes that is seen and must not be.

Only what those layers hold is copied, up to a limit: attention's weights first, since a mask acts there. Quantised
weights whose class has `dequantize` are copied as the values that they stand for. Other quantised weights, embeddings
and what is beyond the limit are shared with the model, and run in its dtype on inputs that are rounded to it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lp.attention.masks import named_kinds
from lp.models.memory import free_bytes
from lp.models.recurrent_layers import NO_LIMIT
from lp.models.skipped_layer import NoHead, OutputForm, SkippedLayer
from lp.models.view import ModelView

MOST_BYTES = 1 << 30  # of copied weights, and at most a quarter of what is free
SHORT_WINDOW = 6  # tokens, of sliding-window layers, so that a text of 24 tokens crosses it
PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)  # of buffers that hold quantised weights
KEPT_ATTENTION = ("sdpa", "eager")  # others may lack their package, or take no float32; the runner sets its own anyway
PRECISE = (torch.float32, torch.float64)  # dtypes whose rounding hides nothing


class Excerpt(ModelView):
    """A view of a model with few layers, in float32 where its weights can be copied.

    Args:
        original: left as it is.
        in_float32: or in the model's own dtype, sharing its weights.
        form: of what layers return; None: the first pass finds it out.
        whole: with all layers and the LM head, in its own dtype: for a model whose code does not run otherwise.

    Attributes:
        model: the excerpt. Its sliding window is short, so that a few tokens cross it, and Mamba-2's time steps have no
            limits, which hold for some tokens alone.
        whole: as given.
        rounded: some of its weights stayed in the model's dtype.
        noise: the embeddings of tokens are off by this much of their size: set it to learn what rounding does.
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
        self.form = form or OutputForm()
        self._hooks: list[Any] = []
        self._instead: dict[int, nn.Module] = {}
        if not whole:
            layers = _decoder_layers(original)
            chosen = _chosen(original, layers)
            self._instead = {
                id(layer): SkippedLayer(layer, i, self.form) for i, layer in enumerate(layers) if i not in chosen
            }
            if (head := original.get_output_embeddings()) is not None:
                self._instead[id(head)] = NoHead(
                    original.dtype if original.dtype in PRECISE or not self._casts else torch.float32
                )
        self._kept = self._kept_modules(original) if self._casts else set()
        self.rounded = bool(self._kept - {id(self._embedding)})
        super().__init__(original, self._forward_of)
        if not whole and form is None:
            for i in chosen:
                self._listen(self._modules[id(layers[i])])
        _simplify(self.model)
        if self.model.config._attn_implementation not in KEPT_ATTENTION:
            supported = self.model._supports_sdpa
            self.model.set_attn_implementation("sdpa" if supported else "eager")

    @contextlib.contextmanager
    def perturbed(self, noise: float) -> Iterator[None]:
        """With embeddings that are off by so much of their size."""
        self.noise = noise
        try:
            yield
        finally:
            self.noise = 0.0

    def _mirrored(self, module: nn.Module) -> nn.Module:
        if id(module) in self._instead:
            self._modules[id(module)] = self._instead[id(module)]
        return super()._mirrored(module)

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

    def _kept_modules(self, original: PreTrainedModel) -> set[int]:
        """Modules that are not cast: embeddings, of which a text reads a few rows; weights that cannot be; and, where
        room is short, the largest others first and attention last.
        """
        kept = set()
        sizes = []
        for module, in_attention in self._running(original):
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

    def _listen(self, layer: nn.Module) -> None:
        """Let skipped layers know the form of what this one returns, until `settle`."""
        vars(layer)["_forward_hooks"] = OrderedDict(layer._forward_hooks)  # the original's own must stay as they are
        self._hooks.append(layer.register_forward_hook(self.form.note))

    def settle(self) -> None:
        """After a pass: skipped layers know what they return, and no hook of the excerpt's own is left."""
        while self._hooks:
            self._hooks.pop().remove()


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, where it is plain which they are; else none."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    return [*lists[0]] if len(lists) == 1 else []


def _chosen(model: PreTrainedModel, layers: list[nn.Module]) -> set[int]:
    """The first layer of each kind, and the last of all."""
    named = named_kinds(model.config.get_text_config())
    first: dict[Any, int] = {}
    for i, layer in enumerate(layers):
        first.setdefault((named[i] if i < len(named) else None, _kind(layer)), i)
    return {*first.values(), len(layers) - 1}


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What makes a layer another kind: its modules, switches (some are 0 or 1), and the sliding window."""
    return tuple(
        (name, type(module), *[_setting(key, value) for key, value in sorted(vars(module).items())])
        for name, module in layer.named_modules()
    )


def _setting(name: str, value: Any) -> tuple[str, Any]:
    switch = isinstance(value, (bool, str, type(None))) or (
        type(value) is int and value in (0, 1) and not ("layer" in name or "idx" in name)
    )
    return (name, value) if switch or name == "sliding_window" else (name, type(value))


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
