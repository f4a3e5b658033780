"""Fused layers: the decoder of a causal LM in few operations, equal to the model's own but for rounding.

T: step tokens, E: hidden size, H: query heads, G: KV heads, D: head dimension, V: vocabulary size, F: inner size of an
MLP.

One matrix product computes queries, keys and values, and another one gate and up projection. Queries and keys are
rotated together. Output projections add their result to the residual themselves. Embedding, rotary frequencies, LM
head, attention function and KV cache are the model's own, and so are all parts that are not known exactly: see
`lp.models.architectures`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lp.models.architectures import (
    HOOKS,
    Architecture,
    NormRule,
    Unknown,
    architecture_of,
    check_unhooked,
    is_plain_mlp,
    is_unhooked,
    running,
)
from lp.models.kernel_choice import NO_KERNELS, LayerKernels, LayerShape, choose_kernels
from lp.models.kv_cache import StaticKVCache
from lp.models.layer_operations import Norm, rotate
from lp.models.releases import cache_keyword
from lp.models.sharded_layers import RowWiseLinear, ShardedHead
from lp.models.skipped_layer import NoHead
from lp.models.weight_layout import is_mergeable, laid_out
from lp.parallel.replica import Replica

logger = logging.getLogger(__name__)
OWN_SETTINGS_STAY = ("torch.nn.", "transformers.models.")  # modules whose settings nobody changes once they are made
SILU = (nn.SiLU, SiLUActivation)
HELD = {"_modules", "_parameters", "_buffers"}
PLAIN = (bool, int, float, str, list, set, tuple, dict, type(None))


class Output(NamedTuple):
    """The result of a forward pass over fused layers: the logits, under the name that transformers' output uses."""

    logits: torch.Tensor


def fuse(model: PreTrainedModel) -> FusedModel | None:
    """Fuse the layers of a model, over the same weights; None: some part of the model is not transformers' own."""
    try:
        return FusedModel(model)
    except Unknown as reason:
        logger.info("layers run as they are: %s", reason)
        return None


def model_state(model: nn.Module) -> list[tuple[Any, ...]]:
    """A record of all that fusing a model depends on: if it differs later, the model must be fused again.

    It lists the modules, their hooks and modes, and where the weights lie in memory. Changes to weights in place leave
    it equal, since fused layers use the same memory.
    """
    state = []
    unseen = [model]
    while unseen:
        module = unseen.pop()
        attributes = vars(module)
        hooks = [key for name in HOOKS for key in attributes[name]]
        tensors = [*attributes["_parameters"].values()]
        settings = None
        if not type(module).__module__.startswith(OWN_SETTINGS_STAY):  # an adapter's are changed in place
            tensors += attributes["_buffers"].values()
            settings = repr(
                [(name, value) for name, value in attributes.items() if isinstance(value, PLAIN) and name not in HELD]
            )
        weights = [(id(tensor), tensor.data_ptr(), tensor.dtype) for tensor in tensors if tensor is not None]
        state.append((module, type(module), module.training, "forward" in attributes, hooks, weights, settings))
        unseen += [child for child in attributes["_modules"].values() if child is not None]
    return state


class FusedModel:
    """A causal LM with fused layers, which decode steps call like transformers' own model, with batch size 1.

    Args:
        model: the model, in eval mode; its own modules and weights are used as they are at each call.

    Raises:
        Unknown: some part of the model is not exactly transformers' own; the message names it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config
        self.architecture = architecture_of(model)
        self._cache_keyword = cache_keyword(model)
        self._decoder = model.model
        self._device = model.model.embed_tokens.weight.device
        layers = running(model.model.layers[: model.config.num_hidden_layers])
        if len({(weight.dtype, weight.device) for weight in model.parameters()}) > 1:
            raise Unknown("its weights have several dtypes or devices")
        self._layers = [_Layer(layer, self.architecture) for layer in layers]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # merged weights leave the memory of those before, which no compiler's kernel gets
        self._norm = _norm_of(model.model.norm, self.architecture.norm)
        self._lm_head = _lm_head(model)
        self._rotary_kinds = {layer.kind if self.architecture.rotary_by_kind else None for layer in self._layers}
        self._eager = sys.modules[type(model).__module__].eager_attention_forward
        self.kernels = NO_KERNELS

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any,
        use_cache: bool = True,
        logits_to_keep: int | torch.Tensor = 0,
        **keywords: Any,
    ) -> Any:
        """Run a forward pass of the fused layers; where these do not apply, as under autocast, of the model itself.

        Args:
            input_ids, position_ids: (1, T) int64.
            attention_mask: mask of a step for all layers, or a dict of masks by kind of layer; None: one token that
                sees everything.
            use_cache: True, as transformers' models take it.
            logits_to_keep: number of last tokens whose logits are computed, 0 for all; or a tensor of indices.
            keywords: the cache, which the KV is written to, under the model's own name for it; others are for the
                attention function.

        Returns:
            `logits` (1, tokens, V), with other fields if the model itself had to run. Of a model that is divided among
            ranks, this rank's part of the vocabulary, unless the model itself had to run.
        """
        keywords |= {"position_ids": position_ids, "use_cache": use_cache}
        if (attention_mask is None and input_ids.shape[1] > 1) or torch.is_autocast_enabled(self._device.type):
            return self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                logits_to_keep=logits_to_keep,
                **keywords,
            )
        cache = keywords.pop(self._cache_keyword)
        scaled = self.architecture.multipliers
        # A copy or a product: the layers add to it in place, and a hook may have kept the embedding.
        embedded_TE = self._decoder.embed_tokens(input_ids)[0]
        x_TE = embedded_TE * self._decoder.embedding_multiplier if scaled else embedded_TE.clone()
        rotations = {kind: self._rotation(x_TE, position_ids, kind) for kind in self._rotary_kinds}
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self._eager)
        slots_T = None
        if not torch.compiler.is_compiling() and isinstance(cache, StaticKVCache):
            slots_T = cache.slot_mapping
        attend = _Attend(function, cache, keywords, slots_T, NO_KERNELS if slots_T is None else self.kernels)
        for layer in self._layers:
            rotation = rotations[layer.kind if self.architecture.rotary_by_kind else None]
            mask = attention_mask[layer.kind] if isinstance(attention_mask, dict) else attention_mask
            x_TE = layer(x_TE, rotation, mask, attend)
        kept = logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else slice(-logits_to_keep, None)
        return Output(self._scaled(self._lm_head(_normed(self._norm, x_TE[kept], attend.kernels))[None]))

    def choose_kernels(self, replica: Replica, may_round: bool = True) -> LayerKernels:
        """Choose the Triton kernels that are right and fast on the model's device, and use them in captured steps.

        Args:
            replica: the ranks that the model is divided among, which choose the same kernels.
            may_round: whether a kernel may round differently from torch's operations; False: only moves between cache
                slots, which do not round, are left to a kernel.

        Returns:
            The kernels that are used.
        """
        layer = self._layers[0]
        mlp = layer.mlp
        shape = LayerShape(
            hidden_size=len(self._norm.weight),
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.attention.head_dim,
            intermediate_size=mlp.gate_up.num_outputs // 2 if isinstance(mlp, _Mlp) else len(self._norm.weight),
            norm=self.architecture.norm,
            dtype=self._norm.weight.dtype,
            device=self._device,
        )
        kernels = choose_kernels(shape, replica)
        self.kernels = kernels if may_round else LayerKernels(move_slots=kernels.move_slots)
        return self.kernels

    def first_layer(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> FusedModel:
        """Make a copy with the first layer alone, over the same weights, to estimate the time of the whole model.

        Args:
            around: given the layer, returns the function to call instead of it, such as one that calls the layer and
                times it.
        """
        shallow = copy(self)
        first = self._layers[0]
        shallow._layers = [cast(_Layer, _Around(first.kind, around(first)))]
        return shallow

    def _rotation(self, x_TE: torch.Tensor, position_ids: torch.Tensor, kind: str | None) -> _Rotation:
        """Cosines of the model's own rotary angles, and sines whose first half is negated, (T, 1, D) each."""
        given = () if kind is None else (kind,)
        cos_1TD, sin_1TD = self._decoder.rotary_emb(x_TE[None], position_ids, *given)
        wide = torch.promote_types(x_TE.dtype, cos_1TD.dtype)
        first, second = sin_1TD.to(wide).chunk(2, -1)
        return cos_1TD.to(wide).transpose(0, 1), torch.cat([-first, second], -1).transpose(0, 1)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self.architecture.multipliers:
            logits = logits / self.config.logits_scaling
        cap = self.config.final_logit_softcapping if self.architecture.capped_logits else None
        return logits if cap is None else torch.tanh(logits / cap) * cap


# Cosines, and sines whose first half is negated: (T, 1, D) each.
_Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Attend:
    """What the layers of one pass share.

    Attributes:
        function: computes attention.
        cache: takes keys and values.
        keywords: arguments for the attention function, besides a layer's own.
        slots_T: int64, the cache slots that a captured step writes its KV to; None: the pass is no captured step.
        kernels: kernels that run instead of torch's operations in this pass.
    """

    function: Callable[..., Any]
    cache: Any
    keywords: dict[str, Any]
    slots_T: torch.Tensor | None
    kernels: LayerKernels


@dataclass(frozen=True)
class _Around:
    """Stands in for a layer, and runs it within another function.

    Attributes:
        kind: kind of the layer, such as "sliding_attention".
        call: the function around the layer.
    """

    kind: str | None
    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, architecture: Architecture) -> None:
        attention = self.attention = layer.self_attn
        kinds = getattr(attention.config, "layer_types", None)
        self.kind: str | None = kinds[attention.layer_idx] if kinds else None
        self.window_holder = {"attention": attention, "config": attention.config, None: None}[architecture.window]
        self.softcap = architecture.softcap
        self.has_rotary = bool(getattr(attention, "use_rope", True))  # of SmolLM3
        names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        self.qkv = _Projection(attention, *names)
        self.out = _Projection(attention, "o_proj")
        self.num_heads = attention.o_proj.in_features // attention.head_dim  # H
        self.num_kv_heads = self.num_heads // attention.num_key_value_groups  # G
        if self.qkv.num_outputs != (self.num_heads + 2 * self.num_kv_heads) * attention.head_dim:
            raise Unknown("its projections have other sizes than its heads")
        modules: dict[str | None, Any] = {**layer._modules, **attention._modules}
        places = (*architecture.attention_norms, *architecture.mlp_norms, "q_norm", "k_norm")
        norms = [_norm_of(modules[place], architecture.norm) if place in modules else None for place in places]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp, self.q_norm, self.k_norm = norms
        self.multiplier: float = layer.residual_multiplier if architecture.multipliers else 1.0
        self.mlp = _Mlp(layer.mlp) if is_plain_mlp(layer.mlp, architecture.prefix) else layer.mlp

    def __call__(self, x_TE: torch.Tensor, rotation: _Rotation, mask: Any, attend: _Attend) -> torch.Tensor:
        """The residual stream after the layer, (T, E), in the memory of the one before it."""
        kernels = attend.kernels
        h_TE = x_TE if self.before_attention is None else _normed(self.before_attention, x_TE, kernels)
        out = self._attention(h_TE, rotation, mask, attend)
        x_TE = self._add(x_TE, self.out, out, self.after_attention)
        h_TE = x_TE if self.before_mlp is None else _normed(self.before_mlp, x_TE, kernels)
        if isinstance(self.mlp, _Mlp):
            return self._add(x_TE, self.mlp.down, self.mlp.activated(h_TE, kernels), self.after_mlp)
        h_TE = self.mlp(h_TE[None])[0]
        return x_TE.add_(h_TE if self.after_mlp is None else self.after_mlp(h_TE), alpha=self.multiplier)

    def _attention(self, h_TE: torch.Tensor, rotation: _Rotation, mask: Any, attend: _Attend) -> torch.Tensor:
        """Attention up to the input of the output projection: (T, H * D)."""
        attention = self.attention
        num_tokens = len(h_TE)
        states = self.qkv(h_TE).view(num_tokens, -1, attention.head_dim)  # (T, H + 2 G, D)
        rotated = states[:, : -self.num_kv_heads]  # queries, then keys
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = rotated.split([self.num_heads, self.num_kv_heads], 1)
            rotated = torch.cat([self.q_norm.of_heads(queries), self.k_norm.of_heads(keys)], 1)
        values = states[:, -self.num_kv_heads :]
        by_kernel = attend.kernels.rotate_and_store if self.has_rotary and attend.slots_T is not None else None
        whole = attend.cache.whole(attention.layer_idx) if by_kernel else None
        if by_kernel and whole:
            k_1GND, v_1GND = whole
            queries = by_kernel(rotated, values, *rotation, k_1GND, v_1GND, attend.slots_T)
            q_1HTD = queries.transpose(0, 1)[None]
        else:
            if self.has_rotary:
                rotated = rotate(rotated, *rotation)
            q_1HTD = rotated[:, : self.num_heads].transpose(0, 1)[None]
            k_1GTD = rotated[:, self.num_heads :].transpose(0, 1)[None]
            k_1GND, v_1GND = attend.cache.update(k_1GTD, values.transpose(0, 1)[None], attention.layer_idx)
        keywords = attend.keywords
        if self.window_holder is not None:
            keywords = keywords | {"sliding_window": getattr(self.window_holder, "sliding_window", None)}
        if self.softcap:
            keywords = keywords | {"softcap": attention.attn_logit_softcapping}
        out_1THD, _ = attend.function(
            attention, q_1HTD, k_1GND, v_1GND, mask, dropout=0.0, scaling=attention.scaling, **keywords
        )
        out_TE: torch.Tensor = out_1THD.reshape(num_tokens, -1)
        return out_TE

    def _add(self, x_TE: torch.Tensor, projection: _Projection, h: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """The residual stream with a projection of `h` added to it in place."""
        if norm is None:
            return projection.added_to(x_TE, h, self.multiplier)
        return x_TE.add_(norm(projection(h)), alpha=self.multiplier)


class _Mlp:
    """A gated MLP without its last product, `down`, which the caller adds to the residual."""

    def __init__(self, mlp: Any) -> None:
        names = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
        self.gate_up = _Projection(mlp, *names)
        self.down = _Projection(mlp, "down_proj")
        self.activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
        self._is_plain_silu = type(self.activation) in SILU and is_unhooked(self.activation)

    def activated(self, h_TE: torch.Tensor, kernels: LayerKernels = NO_KERNELS) -> torch.Tensor:
        """The MLP's hidden states, activated and gated, (T, F): what `down` projects."""
        gate, up = self.gate_up.in_parts(h_TE, 2)
        if kernels.silu_times is not None and self._is_plain_silu:
            return kernels.silu_times(gate, up)
        activated_TF: torch.Tensor = self.activation(gate).mul_(up)
        return activated_TF


class _Projection:
    """Linear layers with a common input (tokens, inputs) as one: (tokens, all outputs), summed over ranks if need be.

    Attributes:
        num_outputs: outputs of all these layers together.
    """

    def __init__(self, module: nn.Module, *names: str) -> None:
        layers = [getattr(module, name) for name in names]
        row_wise = layers[0] if isinstance(layers[0], RowWiseLinear) else None
        if row_wise is not None:
            check_unhooked(row_wise)
        self._replica = row_wise.replica if row_wise else None
        self._bias = row_wise.bias if row_wise else None
        linears: list[Any] = [row_wise.linear] if row_wise else layers
        if not is_mergeable(linears):
            raise Unknown(f"a projection is no plain linear layer, but {type(linears[0]).__name__}")
        for linear in linears:
            check_unhooked(linear)
        weights = laid_out([linear.weight for linear in linears])
        has_bias = linears[0].bias is not None
        self._sizes = [len(weight) for weight in weights]
        self._matrices = [weight.t() for weight in weights]  # (inputs, outputs): views, which follow the weights
        self._biases = laid_out([linear.bias for linear in linears]) if has_bias else [None] * len(weights)
        self.num_outputs = sum(self._sizes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._replica is not None:
            summed = self._replica.all_reduce(_product(x, self._matrices[0], None))
            return summed if self._bias is None else summed.add_(self._bias)
        if len(self._matrices) == 1:
            return _product(x, self._matrices[0], self._biases[0])
        if torch.compiler.is_compiling():  # which fuses what it likes, and takes no part of a tensor to write to
            return torch.cat(self._products(x), -1)
        out = x.new_empty(len(x), self.num_outputs)
        for matrix, bias, part in zip(self._matrices, self._biases, out.split_with_sizes(self._sizes, -1), strict=True):
            if bias is None:
                torch.mm(x, matrix, out=part)
            else:
                torch.addmm(bias, x, matrix, out=part)
        return out

    def in_parts(self, x: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        """The outputs as one part for each linear layer, all of one size: (tokens, num_outputs / count) each."""
        if len(self._matrices) == count:
            return self._products(x)
        return self(x).chunk(count, -1)

    def _products(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [_product(x, matrix, bias) for matrix, bias in zip(self._matrices, self._biases, strict=True)]

    def added_to(self, x_TE: torch.Tensor, h: torch.Tensor, multiplier: float) -> torch.Tensor:
        """`x_TE` with the projection of `h` added to it in place."""
        if self._biases[0] is None and self._replica is None:
            return x_TE.addmm_(h, self._matrices[0], alpha=multiplier)
        return x_TE.add_(self(h), alpha=multiplier)


def _product(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


def _normed(norm: Norm, x_TE: torch.Tensor, kernels: LayerKernels) -> torch.Tensor:
    if kernels.normalize is None:
        return norm(x_TE)
    return kernels.normalize(x_TE, norm.weight, norm.eps, norm.rule is NormRule.ROUNDED, norm.rule is NormRule.OFFSET)


def _lm_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that gives logits, from (tokens, E) to (tokens, V): the module itself, if it is not plain."""
    head: Any = model.lm_head
    if isinstance(head, NoHead):
        return partial(_called, head)
    tied = head.weight is model.model.embed_tokens.weight
    if isinstance(head, ShardedHead):
        check_unhooked(head)
        return _projection_of(head, tied)
    if not tied:
        with contextlib.suppress(Unknown):
            return _Projection(model, "lm_head")
    return partial(_called, head)


def _projection_of(head: ShardedHead, tied: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that gives this rank's part of the logits."""
    return partial(_called, head.linear) if tied else _Projection(head, "linear")


def _called(head: Any, x: torch.Tensor) -> torch.Tensor:
    """The module itself, called as transformers does: a hook may look at the shape."""
    logits: torch.Tensor = head(x[None])
    return logits[0]


def _norm_of(module: Any, rule: NormRule) -> Norm:
    return Norm(module.weight, module.eps if rule is NormRule.OFFSET else module.variance_epsilon, rule)
