"""Checks an attention kernel: records what a model's layers pass to it, and compares its output with exact attention.

H: query heads, T: step tokens, N: keys, D: head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "lp_recorded"
_CALLS = "_lp_attention_calls"  # attribute of a config: the function that `_recorded` calls, and its list of calls
# A kernel's error may be this many times that of plain products in its dtype, since it may round at other places.
SLACK = 4
OTHERWISE = ("softcap", "s_aux", "position_bias")  # arguments by which a function computes more than softmax(q k) v


@dataclass(frozen=True)
class Call:
    """Input and output of one recorded call of an attention function.

    H: query heads, T: tokens, N: keys, D: head dimension.

    Attributes:
        layer: index of the layer that made the call.
        q_HTD, k_HND, v_HND: queries, keys and values; each KV head is repeated for all its query heads.
        out_HTD: what the function returned.
        scale: factor on the scores.
    """

    layer: int
    q_HTD: torch.Tensor
    k_HND: torch.Tensor
    v_HND: torch.Tensor
    out_HTD: torch.Tensor
    scale: float

    def errors(self, visible_TN: torch.Tensor) -> tuple[float, float]:
        """Compare the recorded output with exact attention, computed in float64.

        Args:
            visible_TN: bool (T, N), which of the first N keys each of the first T tokens sees; the call may have had
                more of both.

        Returns:
            (error, allowed): the kernel's largest error of any token in any head, and the largest error that rounding
            explains. Both are relative to the norm of sum(p |v|), p being the attention weights and v the values.
        """
        num_tokens, num_keys = visible_TN.shape
        dtype = self.q_HTD.dtype
        q, k, v = self.q_HTD[:, :num_tokens], self.k_HND[:, :num_keys], self.v_HND[:, :num_keys]
        scores = (q.double() @ k.double().mT * self.scale).masked_fill(~visible_TN, -torch.inf)
        p = scores.softmax(-1)
        exact, size = p @ v.double(), (p @ v.double().abs()).norm(dim=-1)

        def error(out: torch.Tensor) -> float:
            return float(((out.double() - exact).norm(dim=-1) / size).nan_to_num(0.0, torch.inf).max())

        rounded = (q @ k.mT * self.scale).masked_fill(~visible_TN, -torch.inf).softmax(-1, torch.float32).to(dtype) @ v
        return error(self.out_HTD[:, :num_tokens]), SLACK * (error(rounded) + torch.finfo(dtype).eps / 2)


@contextmanager
def recorded(model: PreTrainedModel, implementation: str) -> Iterator[list[Call]]:
    """Context manager that records the calls of a model's attention function; it gives the list of recorded calls.

    Calls that compute more than softmax attention, such as capped scores or sinks, are not recorded.

    Args:
        model: the model; nothing else may use it meanwhile, since its config is changed.
        implementation: transformers' name of the attention function that the model uses.
    """
    calls: list[Call] = []
    AttentionInterface.register(NAME, _recorded)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    for config in configs:
        vars(config)[_CALLS] = (ALL_ATTENTION_FUNCTIONS[implementation], calls)
    model.set_attn_implementation(NAME)
    try:
        yield calls
    finally:
        model.set_attn_implementation(implementation)
        for config in configs:
            del vars(config)[_CALLS]


def _recorded(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> Any:
    function: Callable[..., Any]
    config: Any = module.config
    function, calls = vars(config)[_CALLS]
    result = function(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    plain = all(kwargs.get(name) is None for name in OTHERWISE) and key.shape[2] == value.shape[2]
    if plain and query.shape[1] % key.shape[1] == 0 and isinstance(module.layer_idx, int):
        repeats = query.shape[1] // key.shape[1]
        k_HND, v_HND = (states[0].repeat_interleave(repeats, 0) for states in (key, value))
        out_HTD = result[0][0].transpose(0, 1)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        calls.append(Call(module.layer_idx, query[0].clone(), k_HND, v_HND, out_HTD.clone(), scale))
    return result
