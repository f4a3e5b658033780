"""The recurrent layers of transformers' models, and how each runs over the draft tree of a decode step.

In a decode step, functions of this module replace the forward of these layers, on the runner's own view of the model.
For every node of the tree, they compute what the layer's own forward would compute for one more token after the node's
ancestors. Prefill and all other layers run the model's own code.

T: step tokens, E: hidden size, C: channels of the convolution, H: heads, R, D: rows and columns of a head's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from lp.errors import UserError
from lp.models.recurrent_states import DTYPE, LayerState, RecurrentShape, RecurrentStates
from lp.models.releases import cache_in
from lp.models.skipped_layer import SkippedLayer
from lp.models.tree_recurrence import StepTree, convolution, gated_delta_rule, state_space

RECURRENT_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # of layers, as configs name them
NO_LIMIT = (0.0, float("inf"))  # of a time step, which is positive anyway
L2_EPSILON = 1e-6  # of the norm of queries and keys in transformers' and flash-linear-attention's delta rule

Step = Callable[[Any, torch.Tensor, LayerState, StepTree], torch.Tensor]  # of a module: (T, E) to (T, E)


@dataclass(frozen=True)
class RecurrentLayer:
    """How to run one class of recurrent layers over a tree of tokens.

    Attributes:
        shape: given a layer of the class, returns the shape of the state that it keeps.
        step: computes a layer's forward over the tree of a step, (T, E) to (T, E), and keeps what advances the layer's
            state along accepted tokens.
    """

    shape: Callable[[Any], RecurrentShape]
    step: Step


def _shape(conv: nn.Module, **state: int) -> RecurrentShape:
    """Shape of a layer with this convolution, whose weight is (C, 1, K)."""
    weight: Any = conv.weight
    return RecurrentShape(len(weight), weight.shape[2], weight.dtype, weight.device, **state)


def _delta_shape(layer: Any) -> RecurrentShape:
    return _shape(
        layer.conv1d,
        heads=layer.num_v_heads,
        rows=layer.head_k_dim,
        columns=layer.head_v_dim,
        left_heads=layer.num_k_heads,
        right_heads=layer.num_v_heads,
    )


def _qwen3_next(layer: Any, x_TE: torch.Tensor, state: LayerState, tree: StepTree) -> torch.Tensor:
    qkvz, ba = layer.in_proj_qkvz(x_TE[None]), layer.in_proj_ba(x_TE[None])
    q, k, v, z, b, a = (part[0] for part in layer.fix_query_key_value_ordering(qkvz, ba))
    qkv_TC = torch.cat([part.flatten(1) for part in (q, k, v)], 1)
    o_THD = _delta_rule(layer, qkv_TC, b.sigmoid(), a, state, tree)
    out_TE: torch.Tensor = layer.out_proj(_gated(layer.norm, o_THD, z))
    return out_TE


def _qwen3_5(layer: Any, x_TE: torch.Tensor, state: LayerState, tree: StepTree) -> torch.Tensor:
    beta_TH = layer.in_proj_b(x_TE).sigmoid()
    o_THD = _delta_rule(layer, layer.in_proj_qkv(x_TE), beta_TH, layer.in_proj_a(x_TE), state, tree)
    out_TE: torch.Tensor = layer.out_proj(_gated(layer.norm, o_THD, layer.in_proj_z(x_TE)))
    return out_TE


def _olmo_hybrid(layer: Any, x_TE: torch.Tensor, state: LayerState, tree: StepTree) -> torch.Tensor:
    qkv_TC = torch.cat([layer.q_proj(x_TE), layer.k_proj(x_TE), layer.v_proj(x_TE)], 1)
    beta_TH = layer.b_proj(x_TE).sigmoid()
    if layer.allow_neg_eigval:
        beta_TH = 2 * beta_TH
    o_THD = _delta_rule(layer, qkv_TC, beta_TH, layer.a_proj(x_TE), state, tree)
    out_TE: torch.Tensor = layer.o_proj(_gated(layer.o_norm, o_THD, layer.g_proj(x_TE)))
    return out_TE


def _delta_rule(
    layer: Any, qkv_TC: torch.Tensor, beta_TH: torch.Tensor, a_TH: torch.Tensor, state: LayerState, tree: StepTree
) -> torch.Tensor:
    """The gated delta rule between projections and norm, (T, H, D)."""
    mixed_TC = _convolved(layer.conv1d, layer.activation, qkv_TC, state, tree)
    q_TC, k_TC, v_TC = mixed_TC.to(DTYPE).split([layer.key_dim, layer.key_dim, layer.value_dim], 1)
    q_HTR, k_HTR = (_unit(_by_head(part, layer.head_k_dim)) for part in (q_TC, k_TC))
    g_TH = -layer.A_log.float().exp() * F.softplus(a_TH.float() + layer.dt_bias)
    g_HT = g_TH.to(DTYPE).T.contiguous()
    repeats = layer.num_v_heads // layer.num_k_heads
    o_HTD, delta_HTD = gated_delta_rule(
        tree,
        state.state_HRD,
        q_HTR.repeat_interleave(repeats, 0) * layer.head_k_dim**-0.5,
        k_HTR.repeat_interleave(repeats, 0),
        _by_head(v_TC, layer.head_v_dim),
        g_HT,
        beta_TH.to(DTYPE).T,
    )
    state.keep(qkv_TC, k_HTR, delta_HTD, g_HT)
    return o_HTD.transpose(0, 1).to(qkv_TC.dtype)


def _gated(norm: nn.Module, o_THD: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Each head's output, normed and gated: (T, H D)."""
    num_tokens, _, columns = o_THD.shape
    gated_TC: torch.Tensor = norm(o_THD.reshape(-1, columns), gate.reshape(-1, columns)).reshape(num_tokens, -1)
    return gated_TC


def _unit(x_HTR: torch.Tensor) -> torch.Tensor:
    return x_HTR * torch.rsqrt((x_HTR * x_HTR).sum(-1, keepdim=True) + L2_EPSILON)


def _mamba2_shape(layer: Any) -> RecurrentShape:
    return _shape(
        layer.conv1d,
        heads=layer.num_heads,
        rows=layer.head_dim,
        columns=layer.ssm_state_size,
        left_heads=layer.num_heads,
        right_heads=layer.n_groups,
    )


def _mamba2(layer: Any, x_TE: torch.Tensor, state: LayerState, tree: StepTree) -> torch.Tensor:
    projected = layer.in_proj(x_TE)
    gate, mixed_TC, dt_TH = projected.split([layer.intermediate_size, layer.conv_dim, layer.num_heads], 1)
    o_THR = _state_space(layer, mixed_TC, dt_TH, state, tree)
    out_TE: torch.Tensor = layer.out_proj(layer.norm(o_THR.flatten(1), gate).to(x_TE.dtype))
    return out_TE


def _falcon_h1(layer: Any, x_TE: torch.Tensor, state: LayerState, tree: StepTree) -> torch.Tensor:
    projected = layer.in_proj(x_TE * layer.ssm_in_multiplier) * layer.mup_vector[0]
    gate, mixed_TC, dt_TH = projected.split([layer.intermediate_size, layer.conv_dim, layer.num_heads], 1)
    o_TC = _state_space(layer, mixed_TC, dt_TH, state, tree).flatten(1)
    gated = layer.norm(o_TC, gate) if layer.mamba_rms_norm else o_TC * F.silu(gate)
    out_TE: torch.Tensor = layer.out_proj(gated.to(x_TE.dtype))
    return out_TE


def _state_space(
    layer: Any, mixed_TC: torch.Tensor, dt_TH: torch.Tensor, state: LayerState, tree: StepTree
) -> torch.Tensor:
    """Mamba-2 between projections and norm, (T, H, R)."""
    per_group = layer.n_groups * layer.ssm_state_size
    convolved_TC = _convolved(layer.conv1d, layer.activation, mixed_TC, state, tree)
    x_TC, b_TC, c_TC = convolved_TC.to(DTYPE).split([layer.intermediate_size, per_group, per_group], 1)
    dt_HT = F.softplus(dt_TH + layer.dt_bias.to(dt_TH.dtype)).to(DTYPE).T
    if layer.time_step_limit not in (None, NO_LIMIT):
        limited = dt_HT.clamp(*layer.time_step_limit)  # see limits_prompt
        dt_HT = torch.where(tree.roots_T & state.first_step, limited, dt_HT)
    g_HT = -layer.A_log.float().exp().to(DTYPE)[:, None] * dt_HT
    x_HTR = _by_head(x_TC, layer.head_dim)
    b_FTD, c_FTD = (_by_head(part, layer.ssm_state_size) for part in (b_TC, c_TC))
    left_HTR = x_HTR * dt_HT[..., None]
    o_HTR = state_space(tree, state.state_HRD, c_FTD, b_FTD, left_HTR, g_HT)
    state.keep(mixed_TC, left_HTR, b_FTD, g_HT)
    o_HTR = o_HTR + x_HTR * layer.D.to(DTYPE)[:, None, None]
    o_THR: torch.Tensor = o_HTR.transpose(0, 1).to(mixed_TC.dtype)
    return o_THR


def _lfm2_shape(layer: Any) -> RecurrentShape:
    return _shape(layer.conv)


def _lfm2(layer: Any, x_TE: torch.Tensor, state: LayerState, tree: StepTree) -> torch.Tensor:
    before_TE, after_TE, mixed_TE = layer.in_proj(x_TE).chunk(3, 1)
    inputs_TE = before_TE * mixed_TE
    convolved_TE = _convolved(layer.conv, None, inputs_TE, state, tree)
    state.keep(inputs_TE)
    out_TE: torch.Tensor = layer.out_proj(after_TE * convolved_TE)
    return out_TE


def _convolved(
    conv: Any, activation: str | None, inputs_TC: torch.Tensor, state: LayerState, tree: StepTree
) -> torch.Tensor:
    output_TC = convolution(tree, state.last_CK, inputs_TC, conv.weight.squeeze(1), conv.bias)
    if activation is not None:
        output_TC = ACT2FN[activation](output_TC)
    return output_TC.to(inputs_TC.dtype)


def _by_head(x_TC: torch.Tensor, size: int) -> torch.Tensor:
    """Split channels into heads of this size: (heads, T, size)."""
    x_HTD: torch.Tensor = x_TC.unflatten(1, (-1, size)).transpose(0, 1)
    return x_HTD


_MAMBA2 = RecurrentLayer(_mamba2_shape, _mamba2)
_QWEN3_5 = RecurrentLayer(_delta_shape, _qwen3_5)
_LFM2 = RecurrentLayer(_lfm2_shape, _lfm2)

# By the name of transformers' module and of the class.
LAYERS = {
    ("qwen3_next", "Qwen3NextGatedDeltaNet"): RecurrentLayer(_delta_shape, _qwen3_next),
    ("qwen3_5", "Qwen3_5GatedDeltaNet"): _QWEN3_5,
    ("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"): _QWEN3_5,
    ("olmo_hybrid", "OlmoHybridGatedDeltaNet"): RecurrentLayer(_delta_shape, _olmo_hybrid),
    ("bamba", "BambaMixer"): _MAMBA2,
    ("granitemoehybrid", "GraniteMoeHybridMambaLayer"): _MAMBA2,
    ("nemotron_h", "NemotronHMamba2Mixer"): _MAMBA2,
    ("zamba2", "Zamba2MambaMixer"): _MAMBA2,
    ("falcon_h1", "FalconH1Mixer"): RecurrentLayer(_mamba2_shape, _falcon_h1),
    ("mamba2", "Mamba2Mixer"): _MAMBA2,
    ("lfm2", "Lfm2ShortConv"): _LFM2,
    ("lfm2_moe", "Lfm2MoeShortConv"): _LFM2,
}

MODEL_TYPES = {kind for name, _ in LAYERS for kind in (name, f"{name}_text")}  # of configs
TRANSFORMERS_KEEPS_STATES = hasattr(Cache, "get_conv_state")  # in its cache: from 5.21 on


def recurrent_layer(module: nn.Module) -> RecurrentLayer | None:
    """Tell how to run a module over a tree of tokens; None: it is not exactly one of transformers' recurrent layers.

    A subclass is not taken for such a layer, since it may compute anything.
    """
    found = type(module)
    path = found.__module__
    name = path.rpartition(".modeling_")[2]
    if path != f"transformers.models.{name}.modeling_{name}":
        return None
    return LAYERS.get((name, found.__name__))


def tree_forward(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Give the function that replaces a recurrent layer's forward, so that a decode step runs it over a draft tree.

    It is called with the layer's copy in a view of the model (a copy of the modules over the same weights), the copy's
    own forward and the arguments of the call. Other passes run the copy's own forward.

    Args:
        module: any module of the model.

    Returns:
        The function; None for a module that is not a recurrent layer, which keeps its own forward.
    """
    layer = recurrent_layer(module)
    if layer is None:
        return None
    step = layer.step

    def forward(copy: Any, own_forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        states = getattr(cache_in(kwargs), "recurrent", None)
        if not isinstance(states, RecurrentStates) or states.tree is None:
            return own_forward(*args, **kwargs)
        hidden_1TE = args[0] if args else kwargs["hidden_states"]
        tree = states.tree_on(hidden_1TE.device)
        return step(copy, hidden_1TE[0], states.layers[copy.layer_idx], tree)[None]

    return forward


def recurrent_shapes(model: nn.Module, kinds: list[str]) -> dict[int, RecurrentShape]:
    """Shapes of the states that the recurrent layers of a model keep, by index of the layer, to allocate the states.

    Args:
        model: the model; layers that a view skips are left out.
        kinds: the kind of every layer as the config names it, such as "linear_attention".

    Raises:
        ValueError: a recurrent layer has a class that is not known, or weights that are offloaded.
    """
    shapes = {module.layer_idx: layer.shape(module) for module, layer in _found(model)}
    skipped = {module.index for module in model.modules() if isinstance(module, SkippedLayer)}
    missing = [i for i, kind in enumerate(kinds) if kind in RECURRENT_KINDS and i not in shapes and i not in skipped]
    if missing:
        raise UserError(
            f"{type(model).__name__} has recurrent layers ({', '.join(map(str, missing[:8]))}) of a class that is not "
            "transformers' own; decode it with AutoregressiveDecoder"
        )
    if any(shape.device.type == "meta" for shape in shapes.values()):
        raise UserError(
            f"{type(model).__name__} has recurrent layers whose weights are offloaded, which a step reads where they "
            "are; load it on devices that hold all of it, or decode it with AutoregressiveDecoder"
        )
    return shapes


def limits_prompt(model: nn.Module) -> bool:
    """Whether the model computes a token of a prompt in another way than a generated token.

    Transformers keeps the time steps (dt) of Mamba-2 within the config's limits in passes of several tokens, but not in
    passes of one token.
    """
    return any(getattr(module, "time_step_limit", None) not in (None, NO_LIMIT) for module, _ in _found(model))


def _found(model: nn.Module) -> Iterator[tuple[Any, RecurrentLayer]]:
    for module in model.modules():
        if layer := recurrent_layer(module):
            yield module, layer
