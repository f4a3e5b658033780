"""A view of a model: its own modules and config over the model's weights, which its owner may change freely.

Attention is a field of the config that every layer looks up in every pass. Code that sets it on a shared model, or
shortens its sliding window for a moment, changes what another thread is generating. Changes to a view do not affect
other users of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lp.models.digests import without_addresses
from lp.parallel.replica import Replica

# A model that records them installs hooks for it, and these are shared; nobody reads them here.
RECORDED = ("output_hidden_states", "_output_attentions", "output_router_logits")
LEFT_BY_TEXTS = {"rope_deltas"}  # attributes that `generate` sets anew for every text, and no pass of lp reads
_MARK = "_lp_"  # starts the names of attributes that this package leaves on a model


class ModelView:
    """A copy of a model's modules and config, over the same weights, that a runner may change unseen by others.

    Only modules that hold the config or know other ranks are copied, and modules that contain them. All other modules,
    most linear layers among them, are shared, with their weights and hooks. Weights that are changed in place and hooks
    that are added take effect at once. Other changes, such as of the active adapters, take effect with `follow`. A
    compiled form that torch.compile made of a copied module, or of its `forward`, is left out, since it runs the
    original.

    Args:
        original: the model, which is left as it is.
        replaced: given a module, returns the function that its copy runs in the place of its forward, or None to keep
            the forward. The function is called with the copy, the copy's own forward and the arguments.

    Attributes:
        model: the copy.
    """

    def __init__(
        self,
        original: PreTrainedModel,
        replaced: Callable[[nn.Module], Callable[..., Any] | None] = lambda module: None,
    ) -> None:
        self.original = original
        self._replaced = replaced
        self._configs: dict[int, Any] = {}  # deepcopy's memo: modules that share a config share its copy
        self._copy()

    def follow(self) -> bool:
        """Copy the original again if its modules, attributes or config have changed, as when an adapter was loaded.

        The new copy keeps the config of the previous copy, with what was set on it, unless the original's config has
        changed.

        Returns:
            Whether `model` is a new copy.
        """
        if self._settings != _settings(self.original):
            self._configs.clear()
        elif all(_same(_state(module), state) for module, state in self._copied):
            return False
        self._copy()
        return True

    def _copy(self) -> None:
        self._settings = _settings(self.original)
        self._modules: dict[int, nn.Module] = {}  # by the original's id: its copy, or itself where it is shared
        self._copied: list[tuple[nn.Module, list[dict[str, Any]]]] = []
        with torch.inference_mode(False):  # the next pass may be outside of it, and write to the buffers
            self.model = cast(PreTrainedModel, self._mirrored(self.original))
        for module, (attributes, *_) in self._copied:
            own = {name: self._own(value) for name, value in attributes.items() if name not in _OWN}
            copied = self._modules[id(module)]
            vars(copied).update(own)
            if replacement := self._replaced(module):
                vars(copied)["forward"] = partial(replacement, copied, copied.forward)

    def _mirrored(self, module: nn.Module) -> nn.Module:
        """The module itself where it can be shared; else a copy with modules and buffers, but no other attributes."""
        if id(module) in self._modules:
            return self._modules[id(module)]
        attributes, modules, buffers = state = _state(module)
        mirrored = {name: child if child is None else self._mirrored(child) for name, child in modules.items()}
        if not self._is_copied(module, attributes) and all(map(is_, mirrored.values(), modules.values())):
            self._modules[id(module)] = module
            return module
        copied = self._modules[id(module)] = object.__new__(type(module))
        vars(copied).update(_modules=mirrored, **self._storage(module, attributes, buffers))
        self._copied.append((module, state))
        return copied

    def _is_copied(self, module: nn.Module, attributes: dict[str, Any]) -> bool:
        """Whether the view needs a copy of a module for what the module itself has, whatever its own modules have."""
        settings = (PretrainedConfig, Replica)
        knows = "sliding_window" in attributes or any(isinstance(v, settings) for v in attributes.values())
        return knows or self._replaced(module) is not None

    def _storage(self, module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> dict[str, Any]:
        """The attributes of a copy that hold tensors."""
        # A rotary scaling writes its frequencies in place. Tables stay shared: they are large, and constant.
        own = {name for name in attributes["_non_persistent_buffers_set"] if getattr(buffers.get(name), "ndim", 0) == 1}
        buffers = {name: buffer.clone() if name in own else buffer for name, buffer in buffers.items()}
        return {"_buffers": buffers, "_parameters": attributes["_parameters"]}

    def _own(self, value: Any) -> Any:
        """The view's own form of an attribute: a config, a module, or a method of one, such as a wrapped `forward`."""
        match value:
            case PretrainedConfig():
                config = copy.deepcopy(value, self._configs)
                vars(config).update(dict.fromkeys(vars(config).keys() & RECORDED, False))
                return config
            case nn.Module():
                return self._modules.get(id(value), value)
            case MethodType():
                return MethodType(value.__func__, self._own(value.__self__))
            case partial():
                keywords = {name: self._own(keyword) for name, keyword in value.keywords.items()}
                return partial(self._own(value.func), *map(self._own, value.args), **keywords)
            case FunctionType() if compiled := getattr(value, "_torchdynamo_orig_callable", None):
                return self._own(compiled)
        return value


_OWN = ("_modules", "_buffers", "_parameters", "_compiled_call_impl")  # the last one is bound to the original


def _settings(model: PreTrainedModel) -> str:
    """All fields of its config, which has those of its parts."""
    return without_addresses(repr(model.config.to_dict()))  # JSON has no form for some values


def _state(module: nn.Module) -> list[dict[str, Any]]:
    """Its attributes, modules and buffers, as they are now: `dict` copies at once, whatever other threads do."""
    attributes = dict(vars(module))
    for mark in [name for name in attributes if name.startswith(_MARK)]:
        del attributes[mark]
    return [attributes, dict(attributes["_modules"]), dict(attributes["_buffers"])]


def _same(now: list[dict[str, Any]], then: list[dict[str, Any]]) -> bool:
    return all(
        a.keys() == b.keys() and all(value is b[name] for name, value in a.items() if name not in LEFT_BY_TEXTS)
        for a, b in zip(now, then, strict=True)
    )
