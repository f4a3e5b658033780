"""Mixtures of experts in `exact=bitwise`: a token's result has the same bits whichever other tokens share its pass.

An expert computes as many rows (hidden states of tokens) as tokens come to it, and libraries sum a product of few rows
in another order than one of many. Here its input is padded to a number of rows at which the model was found to give the
same bits (`lp.models.equal_widths`). The results of a token's experts are summed in the order of the experts' indices,
in float32 or wider.

Transformers finds this function by a name in a model's config, as it finds attention functions. The name is written to
the config of a runner's own view of the model. T: tokens, K: experts of a token, E: hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lp.models.sharded_layers import ShardedExperts

NAME = "lp_by_row"
_WIDTHS = "_lp_expert_widths"  # attribute of a view's config: how many rows an expert may compute, ascending


def pad_experts(model: nn.Module, widths: Sequence[int]) -> None:
    """Pad the input of each expert to fixed numbers of rows, so that a token's output has the same bits in every pass.

    Otherwise an expert computes as many rows as tokens come to it, and libraries round differently for few rows than
    for many.

    Args:
        model: a view of the model (a copy of its modules over the same weights), whose config is written to.
        widths: numbers of rows to pad to, ascending; if empty, an expert's input is padded to the number of tokens in
            the pass.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_by_row)
    for experts in experts_of(model):
        config: Any = experts.config
        config._experts_implementation = NAME
        vars(config)[_WIDTHS] = tuple(widths)


def experts_of(model: nn.Module) -> list[nn.Module]:
    """List the modules of a model whose experts can be computed by another function of transformers' registry."""
    return [module for module in model.modules() if _is_dispatched(module)]


def experts_obstacle(model: nn.Module) -> str | None:
    """Say why a model's experts cannot be padded, as a clause that names the module; None: they can, or there are none.

    Experts cannot be padded if a module's own code computes them, and not a function of transformers' registry.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__.lower()
        is_experts = name.rpartition(".")[2] == "experts" or ("experts" in kind and "shared" not in kind)
        summed = [*module.children()] if isinstance(module, ShardedExperts) else [module]
        if is_experts and not all(map(_is_dispatched, summed)):
            return f"{name}, a {type(module).__name__}, computes experts by code of its own, as many rows as come to it"
    return None


def experts_by_row(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute each token's experts and sum them by weight; equal to transformers' own functions but for rounding.

    Args:
        self: transformers' module with the weights of all experts: the function is called as its method.
        hidden_states: (T, E), T tokens of hidden size E.
        top_k_index: int64 (T, K), the numbers of each token's experts.
        top_k_weights: (T, K), the weights of these experts.

    Returns:
        Weighted sums of the experts' outputs, (T, E).
    """
    num_tokens, num_experts = top_k_index.shape
    widths = vars(self.config).get(_WIDTHS) or (num_tokens,)
    experts_TK, order_TK = top_k_index.sort(1)
    weights_TK = top_k_weights.gather(1, order_TK)
    outputs_TKE: torch.Tensor | None = None
    for expert in experts_TK.unique().tolist():
        tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
        count = len(tokens)
        width = next(width for width in widths if width >= count)
        rows = _expert(self, F.pad(hidden_states[tokens], (0, 0, 0, width - count)), expert)[:count]
        if outputs_TKE is None:
            wide = torch.promote_types(torch.promote_types(rows.dtype, weights_TK.dtype), torch.float32)
            outputs_TKE = rows.new_empty(num_tokens, num_experts, rows.shape[1], dtype=wide)
        outputs_TKE[tokens, places] = rows.to(outputs_TKE.dtype)
    assert outputs_TKE is not None
    weighted_TKE = outputs_TKE.mul_(weights_TK[..., None])
    summed_TE = weighted_TKE[:, 0]
    for place in range(1, num_experts):
        summed_TE = summed_TE + weighted_TKE[:, place]
    return summed_TE.to(hidden_states.dtype)


def _expert(experts: Any, rows: torch.Tensor, expert: int) -> torch.Tensor:
    """What one expert gives for these rows."""
    inner = _product(experts, rows, "gate_up_proj" if experts.has_gate else "up_proj", expert)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = _product(experts, inner, "down_proj", expert)
    has_norm = getattr(experts, "has_post_expert_norm", False)  # since transformers 5.20 or so
    normed: torch.Tensor = experts.post_expert_norm(out) if has_norm else out
    return normed


def _product(experts: Any, rows: torch.Tensor, name: str, expert: int) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return F.linear(rows, weight.t() if experts.is_transposed else weight, bias)


def _is_dispatched(module: nn.Module) -> bool:
    """Whether its class's `forward` is that of transformers' decorator, which asks the registry."""
    forward = type(module).forward
    if not inspect.isfunction(forward):
        return False
    enclosed = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    return "experts_interface" in enclosed and enclosed["experts_interface"].cell_contents is ALL_EXPERTS_FUNCTIONS
