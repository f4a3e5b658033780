"""LoRA adapters chosen per sequence: each token of a forward pass goes through the adapter of its own sequence.

No adapter is merged into the weights. A layer's base product is computed once for all tokens of the pass. What an
adapter adds is computed, as PEFT computes it, for the tokens of the sequences that chose this adapter.

T: tokens of the pass. A row is the hidden state of one token.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lp.errors import UserError
from lp.models.tree_pass import TreePass

Rows = slice | torch.Tensor  # int64
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
LINEAR = ("peft.tuners.lora.layer", "Linear")  # module and name of the one class of layers that is known exactly
# Parts of modules' names whose rows are not the tokens of a pass, in their order.
OTHER_ROWS = re.compile(r"(^|\.)(experts|lm_head)(\.|$)")


class AdapterRows(threading.local):
    """Tells a model's LoRA layers which tokens of this thread's forward pass go through which adapter.

    The model's runner runs each pass within the context manager `of`, which sets the attributes. LoRA layers run the
    function from `forward_of`, which reads them. A row is the hidden state of one token; T is the number of tokens in
    the pass.

    Attributes:
        groups: pairs of an adapter's name and the rows that go through it: a slice, or int64 indices into the T tokens.
            Empty outside of `of`, and where no sequence has chosen an adapter.
        others: rows of sequences that have chosen no adapter, which go through the adapters that are active on the
            model; None: there are no such rows.
        num_rows: T, for a check: a LoRA layer that gets another number of rows raises an error.
    """

    def __init__(self) -> None:
        self.groups: list[tuple[str, Rows]] = []
        self.others: Rows | None = None
        self.num_rows = 0

    @contextmanager
    def of(self, trees: Sequence[TreePass], device: torch.device) -> Iterator[None]:
        """Context manager for one forward pass: its tokens go through the adapters that their sequences have chosen.

        Only passes that this thread runs within the block are affected.

        Args:
            trees: each sequence's tokens and the name of its adapter, in the order in which the pass computes them.
            device: the model's device.
        """
        if all(tree.adapter is None for tree in trees):
            yield
            return
        names = [tree.adapter for tree in trees for _ in range(len(tree.tokens))]
        rows: dict[str | None, list[int]] = {}
        for row, name in enumerate(names):
            rows.setdefault(name, []).append(row)
        groups = {name: _rows(own, device) for name, own in rows.items()}
        self.others = groups.pop(None, None)
        self.num_rows = len(names)
        self.groups = [(str(name), own) for name, own in groups.items()]
        try:
            yield
        finally:
            self.groups, self.others = [], None

    def forward_of(self, module: nn.Module) -> Callable[..., torch.Tensor] | None:
        """Give the function that replaces a LoRA layer's forward, so that each token goes through its own adapter.

        The runner installs the function in its own view of the model, a copy of the modules over the same weights. It
        is called with the layer's copy, the copy's own forward and the arguments of the call.

        Args:
            module: any module of the model.

        Returns:
            The function; None for a module that is not a plain LoRA layer, which keeps its own forward.
        """
        return self._forward if _is_lora_linear(module) else None

    def _forward(
        self, layer: Any, own_forward: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not self.groups:
            return own_forward(x, *args, **kwargs)
        if x.shape[-2] != self.num_rows:
            raise RuntimeError(f"a LoRA layer got {x.shape[-2]} rows in a pass of {self.num_rows}")
        result: torch.Tensor = layer.base_layer(x, *args, **kwargs)
        if self.others is not None and not layer.disable_adapters and not layer.merged:
            _add(layer, layer.active_adapters, x, result, self.others)
        for name, rows in self.groups:
            _add(layer, [name], x, result, rows)
        return result


def _rows(rows: list[int], device: torch.device) -> Rows:
    """These rows, ascending: as a slice where they are neighbours, as the rows of one sequence are."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _add(layer: Any, names: Sequence[str], x: torch.Tensor, result: torch.Tensor, rows: Rows) -> None:
    """Add to some rows of the result what adapters add there: PEFT's sum, in PEFT's order, rounded once."""
    names = [name for name in names if name in layer.lora_A]
    if not names:
        return
    own, sums = x[..., rows, :], result[..., rows, :]
    for name in names:
        down = layer.lora_A[name]
        own = layer._cast_input_dtype(own, down.weight.dtype)
        sums = sums + layer.lora_B[name](down(own)) * layer.scaling[name]
    result[..., rows, :] = sums.to(result.dtype)


def check_text_adapter(model: nn.Module, name: object) -> None:
    """Refuse an adapter that cannot be applied to one sequence's tokens alone, before anything is decoded with it.

    Args:
        model: the model, with PEFT's adapters loaded under their names.
        name: name of the adapter that a request asks for: up to 64 ASCII letters, digits, "_" and "-".

    Raises:
        ValueError: the model has no adapter of this name; the adapter, or one that is active on the model, is not plain
            LoRA of linear layers whose rows are the tokens of a pass (experts and the LM head get other rows); or the
            adapter changes no layer.
    """
    loaded = getattr(model, "peft_config", None)
    names = sorted(loaded) if isinstance(loaded, dict) else []
    if not isinstance(name, str) or name not in names:
        there = ", ".join(names) if names else "none"
        raise UserError(
            f"adapter is {name!r}; the model has {there}: load it with model.load_adapter(FOLDER, adapter_name=NAME)"
        )
    if not NAME.fullmatch(name):
        raise UserError(f"adapter is {name!r}; load it under a name of up to 64 ASCII letters, digits, '_' and '-'")
    found = False
    for path, module in model.named_modules():
        for own in sorted({name, *_active(module)}):
            if not _has(module, own):
                continue
            if (why := _obstacle(path, module, own)) is not None:
                raise UserError(
                    f"adapter {own!r} cannot be chosen by a text: {path} {why}; texts can choose LoRA of the linear "
                    "layers of attention and MLPs: set this one active on the model instead, for all texts"
                    if own == name
                    else f"adapter {name!r} cannot be chosen by a text while {own!r} is active on the model: {path} "
                    f"{why}, for the rows of all texts; call model.disable_adapters() first"
                )
            found |= own == name
    if not found:
        raise UserError(f"adapter {name!r} changes no layer of the model")


def _active(module: Any) -> Sequence[str]:
    """Names of the adapters that a module applies to all rows."""
    return () if getattr(module, "disable_adapters", True) is not False else module.active_adapters


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module has parts of this adapter."""
    kinds = getattr(module, "adapter_layer_names", None)
    if kinds is None:  # a whole module that an adapter replaces
        return name in (getattr(module, "modules_to_save", None) or ())
    return any(name in (getattr(module, kind, None) or ()) for kind in kinds)


def _obstacle(path: str, module: nn.Module, name: str) -> str | None:
    if not _is_lora_linear(module):
        return f"is a {type(module).__module__}.{type(module).__name__}"
    layer: Any = module
    if name in layer.lora_variant:
        return f"is a {type(layer.lora_variant[name]).__name__}"
    if layer.merged:
        return "is merged into the weights"
    if OTHER_ROWS.search(path):
        return "gets other rows than the tokens of a pass"
    return None


def _is_lora_linear(module: nn.Module) -> bool:
    return (type(module).__module__, type(module).__name__) == LINEAR
