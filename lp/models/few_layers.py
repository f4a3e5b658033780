"""A view of a model that runs only a few of its layers, over the same weights; the other layers return their input."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Set
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lp.attention.masks import named_kinds
from lp.models.model_view import ModelView
from lp.models.skipped_layer import OutputForm, SkippedLayer


class FewLayers(ModelView):
    """A view of a model that runs only a few of its layers: a quick stand-in to test or time the model with.

    Skipped layers return their input, and whatever else the model's layers return, such as attention weights.

    Args:
        original: the model, which is left as it is.
        kept: indices of the layers that run; 0 must be among them.
        replaced: given a module, returns the function that runs instead of the module's `forward` in the view, or None
            to keep its `forward`.
        form: what layers return besides hidden states; None: the first pass finds it out, after which `settle` must be
            called.
        instead: further modules to replace in the view: the stand-in, by the `id` of the module in the original.

    Attributes:
        form: what layers return besides hidden states.
    """

    def __init__(
        self,
        original: PreTrainedModel,
        kept: Set[int],
        replaced: Callable[[nn.Module], Callable[..., Any] | None] = lambda module: None,
        form: OutputForm | None = None,
        instead: Mapping[int, nn.Module] | None = None,
    ) -> None:
        self.form = form or OutputForm()
        self._hooks: list[Any] = []
        layers = decoder_layers(original)
        skipped = {id(layer): SkippedLayer(layer, i, self.form) for i, layer in enumerate(layers) if i not in kept}
        self._instead: dict[int, nn.Module] = {**skipped, **(instead or {})}
        super().__init__(original, replaced)
        if skipped and form is None:
            for i in kept:
                self._listen(self._modules[id(layers[i])])

    def _mirrored(self, module: nn.Module) -> nn.Module:
        if id(module) in self._instead:
            self._modules[id(module)] = self._instead[id(module)]
        return super()._mirrored(module)

    def _listen(self, layer: nn.Module) -> None:
        """Let skipped layers know the form of what this one returns, until `settle`."""
        vars(layer)["_forward_hooks"] = OrderedDict(layer._forward_hooks)  # the original's own must stay as they are
        self._hooks.append(layer.register_forward_hook(self.form.note))

    def settle(self) -> None:
        """Remove the hooks with which the view's first pass finds out what layers return besides hidden states.

        Call it after that pass.
        """
        while self._hooks:
            self._hooks.pop().remove()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """List the decoder layers of a model in their order.

    The list is empty where the model does not have exactly one module list that is as long as the config's number of
    layers.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    return [*lists[0]] if len(lists) == 1 else []


def first_of_each(model: PreTrainedModel, kind_of: Callable[[nn.Module], Hashable]) -> set[int]:
    """The index of the first layer of each kind, so that one layer can be tried for all layers that compute alike.

    Args:
        model: the model.
        kind_of: given a layer, returns its kind; layers also differ in kind if the config names different attention for
            them.
    """
    named = named_kinds(model.config.get_text_config())
    first: dict[Any, int] = {}
    for i, layer in enumerate(decoder_layers(model)):
        first.setdefault((named[i] if i < len(named) else None, kind_of(layer)), i)
    return {*first.values()}


def kind_of_layer(layer: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for layers that compute alike: their modules' classes, switches and sliding window.

    Switches are attributes that are a bool, a string, None, 0 or 1. Of other attributes only the type is compared.
    """
    return tuple(
        (name, type(module), *[_setting(key, value) for key, value in sorted(vars(module).items())])
        for name, module in layer.named_modules()
    )


def _setting(name: str, value: Any) -> tuple[str, Any]:
    switch = isinstance(value, (bool, str, type(None))) or (
        type(value) is int and value in (0, 1) and not ("layer" in name or "idx" in name)
    )
    return (name, value) if switch or name == "sliding_window" else (name, type(value))
