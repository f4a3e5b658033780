"""Divides a model among the ranks of a replica, by the model's own plan or a user's.

A plan is transformers' `base_model_tp_plan`, read as data. It maps patterns of module names, in which `*` is a layer's
number, to the way in which these modules are divided. Attention is divided by heads, so that each rank's KV cache holds
its own heads alone. Where there are fewer KV heads than ranks, several ranks hold the same head. Modules that a plan
does not name are whole on every rank. No other module of lp reads plans.

T: ranks of the replica; H: query heads; G: KV heads; D: head dimension; V: vocabulary size; I: inner size of an MLP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from lp.errors import UserError
from lp.models.part import Part
from lp.models.quantised_parts import part_of_tensor
from lp.models.recurrent_layers import recurrent_layer
from lp.models.sharded_layers import RowWiseLinear, ShardedEmbedding, ShardedExperts, ShardedHead
from lp.parallel.replica import Replica

Plan = Mapping[str, str]
COLUMNS, ROWS, PACKED, EXPERTS, WHOLE = "colwise", "rowwise", "packed_colwise", "moe_tp_experts", "replicated"
# What lp does, by the style in a plan. transformers gathers outputs that its code splits after the product: lp splits
# the known ones before the product (`_FED_BY`), and leaves others whole.
STYLES = {
    "colwise": COLUMNS,
    "rowwise": ROWS,
    "packed_colwise": PACKED,
    "moe_tp_experts": EXPERTS,
    "colwise_gather_output": "gathered",
    "rowwise_split_input": "split",
    "replicated": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,
}
EMBEDDING = "embedding_rowwise"  # ignored in plans: embeddings and LM head are always divided by the vocabulary
_KV = {"k_proj", "v_proj"}
_FED_BY = {"o_proj": "qkv_proj", "down_proj": "gate_up_proj"}  # the layer before, whose output joins several
FORMAT = (
    'give lp.load(tp_plan=...) a dict as {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": '
    f'"rowwise", ...}}, with names of modules inside the base model and one of {", ".join(STYLES)}'
)


Parts = dict[str, Part]  # by name of the parameter; one that is missing is whole
Fetch = Callable[[str, nn.Parameter, Part | None], torch.Tensor]


def plan_of(model: PreTrainedModel, given: Plan | None = None) -> dict[str, str]:
    """Find out how the modules of a model are divided among ranks: by its config's plan, or by a user's.

    Args:
        model: the model.
        given: a user's plan in the place of the model's own, such as {"layers.*.mlp.up_proj": "colwise"}.

    Returns:
        For each pattern of full module names, in which `*` is a layer's number, a style such as COLUMNS.

    Raises:
        ValueError: there is no plan, it divides no module, or it has a style that is not known; names the problem and
            the format of a plan.
    """
    config = model.config.get_text_config()
    named = given or getattr(config, "base_model_tp_plan", None) or {}
    plan = {pattern: style for pattern, style in named.items() if style != EMBEDDING}
    if not plan:
        raise UserError(f"{type(model).__name__} has no plan of how it is divided among ranks; {FORMAT}")
    unknown = sorted({style for style in plan.values() if style not in STYLES})
    if unknown:
        raise UserError(f"the plan of {type(model).__name__} has {unknown[0]!r}, which is no known style; {FORMAT}")
    styles = {f"{_text_model(model)}.{pattern}": STYLES[style] for pattern, style in plan.items()}
    if not any(division_of(name, styles) for name, _ in model.named_modules()):
        raise UserError(f"the plan of {type(model).__name__} divides no module of it ({', '.join(styles)}); {FORMAT}")
    return styles


def _text_model(model: PreTrainedModel) -> str:
    """Name of the module that plans are written for: the text decoder, beside which a model may see images."""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "") or model.base_model_prefix


def divide(model: PreTrainedModel, replica: Replica, plan: Plan | None = None) -> PreTrainedModel:
    """Divide a model, which every rank of a replica has in memory, among these ranks, in place.

    Each rank keeps its own parts.

    Args:
        model: the whole model; equal on every rank.
        replica: the ranks that divide it.
        plan: a user's plan of how modules are divided; None takes the model's own plan.

    Returns:
        The given model.

    Raises:
        ValueError: the model cannot be divided so; names the obstacle.
    """
    return divided(model, replica, plan, _held)


def divided(model: PreTrainedModel, replica: Replica, plan: Plan | None, fetch: Fetch) -> PreTrainedModel:
    """Divide a model among the ranks of a replica, in place; a function gives this rank's part of each parameter.

    Args:
        model: the whole model; its parameters may be on torch's meta device.
        replica: the ranks that divide it.
        plan: a user's plan of how modules are divided; None takes the model's own plan.
        fetch: given a parameter's name, the whole parameter and the part that this rank holds (None: all of it),
            returns the values of that part.

    Returns:
        The given model, changed in place.
    """
    if replica.size == 1:
        return model
    styles = plan_of(model, plan)
    parts = parts_of(model, replica, styles)
    vocabulary = model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0]
    moved: dict[int, nn.Parameter] = {}  # by the id of the whole one: weights may be tied
    for name, parameter in model.named_parameters():
        values = fetch(name, parameter, parts.get(name))
        moved[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for module in model.modules():
        module._parameters.update({name: moved[id(one)] for name, one in module._parameters.items() if one is not None})
    _wrap(model, replica, styles, *vocabulary)
    return model


def _held(name: str, weight: nn.Parameter, part: Part | None) -> torch.Tensor:
    return weight.data if part is None else part_of_tensor(name, weight.data, part)


def parts_of(model: PreTrainedModel, replica: Replica, styles: Mapping[str, str]) -> Parts:
    """Find out which part of every parameter this rank holds, where ranks divide the model.

    Args:
        model: the whole model.
        replica: the ranks that divide it.
        styles: how its modules are divided, from `plan_of`.

    Returns:
        The part of each parameter, by the parameter's name. Parameters without an entry are whole on every rank.

    Raises:
        ValueError: the heads cannot be divided among so many ranks, or a module that the plan names is of a kind that
            cannot be divided.
    """
    heads = _Heads.of(model)
    heads.check(replica.size)
    parts: Parts = {}
    recurrent = {name for name, module in model.named_modules() if recurrent_layer(module)}
    for name, module in model.named_modules():
        style = division_of(name, styles)
        if style and name.rpartition(".")[0] in recurrent:
            raise UserError(f"{name} is in a recurrent layer, which every rank holds whole; leave it out of tp_plan")
        if style == COLUMNS:
            _check_linear(name, module)
            ranges = heads.ranges(name.rpartition(".")[2], module, replica)
            parts |= {f"{name}.{each}": Part(0, ranges) for each, _ in module.named_parameters(recurse=False)}
        elif style == ROWS:
            _check_linear(name, module)
            parts[f"{name}.weight"] = Part(1, (replica.part(module.in_features),))
        elif style == EXPERTS:
            parts |= _experts(name, module, replica, styles)
        if "sinks" in module._parameters and division_of(f"{name}.q_proj", styles) == COLUMNS:  # a score a head
            parts[f"{name}.sinks"] = Part(0, (replica.part(heads.queries),))
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        if (tokens := embedding.weight.shape[0]) < replica.size:
            raise UserError(
                f"tp is {replica.size}, but the model has {tokens} tokens; give parallel.tp at most {tokens}"
            )
        name = next(name for name, module in model.named_modules() if module is embedding)
        rows = Part(0, (replica.part(embedding.weight.shape[0]),))
        parts |= {f"{name}.{each}": rows for each, _ in embedding.named_parameters(recurse=False)}
    return parts


def style_of(name: str, styles: Mapping[str, str]) -> str | None:
    """Look up the style that a plan gives to a module; None: the plan does not name the module.

    Args:
        name: full name of the module, such as "model.layers.3.mlp.up_proj".
        styles: the plan's styles, from `plan_of`.
    """
    return styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def division_of(name: str, styles: Mapping[str, str]) -> str | None:
    """How lp divides a module among ranks: COLUMNS, ROWS or EXPERTS; None: every rank has all of the module.

    Some plans gather a layer's output, or split a layer's input. There lp divides the layers that it knows and leaves
    other layers whole.

    Args:
        name: full name of the module, such as "model.layers.3.mlp.up_proj".
        styles: the plan's styles, from `plan_of`.
    """
    style = style_of(name, styles)
    path, _, last = name.rpartition(".")
    if style == "gathered":
        return COLUMNS if last in _FED_BY.values() else None
    if style == "split":  # its inputs are divided if the layer before it is
        return ROWS if last in _FED_BY and style_of(f"{path}.{_FED_BY[last]}", styles) == "gathered" else None
    return style if style in (COLUMNS, ROWS, EXPERTS) else None


def _check_linear(name: str, module: nn.Module) -> None:
    if type(module) is not nn.Linear:
        raise UserError(
            f"{name} is a {type(module).__name__}; of those that a plan divides, plain linear layers alone can be: "
            "load the model without quantisation and adapters, or give another tp_plan"
        )


def _experts(name: str, module: nn.Module, replica: Replica, styles: Mapping[str, str]) -> Parts:
    """Parts of a layer's experts, (experts, rows, columns): gate and up projections by rows, down by columns."""
    parts: Parts = {}
    for each, weight in module.named_parameters(recurse=False):
        style = style_of(f"{name}.{each}", styles)
        if style == PACKED:
            parts[f"{name}.{each}"] = Part(1, _in_each(replica, *[weight.shape[1] // 2] * 2))
        elif style == ROWS:
            parts[f"{name}.{each}"] = Part(2, (replica.part(weight.shape[2]),))
        elif style is not None:
            raise UserError(f"the plan has {style!r} for {name}.{each}, a weight of experts; {FORMAT}")
    return parts


def _in_each(replica: Replica, *sizes: int) -> tuple[tuple[int, int], ...]:
    """This rank's part of each of several outputs that lie side by side."""
    ranges, start = [], 0
    for size in sizes:
        first, last = replica.part(size)
        ranges.append((start + first, start + last))
        start += size
    return tuple(ranges)


class _Heads(NamedTuple):
    """H, G and D of a model."""

    queries: int
    kv: int
    dimension: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Heads:
        config = model.config.get_text_config()
        try:
            queries = config.num_attention_heads
            kv = getattr(config, "num_key_value_heads", None) or queries
            dimension = getattr(config, "head_dim", None) or config.hidden_size // queries
        except RuntimeError as error:  # of transformers, where layers differ
            raise UserError(
                f"layers of {type(model).__name__} have different numbers or sizes of heads, which ranks can't divide; "
                "use parallel.tp=1"
            ) from error
        return cls(queries, kv, dimension)

    def check(self, size: int) -> None:
        """Refuse T ranks that heads cannot be divided among.

        Raises:
            ValueError: T and the heads, and what would do.
        """
        divisors = [t for t in range(1, self.queries + 1) if self.queries % t == 0]
        fitting = [t for t in divisors if self.kv % t == 0 or t % self.kv == 0]
        if size not in fitting:
            raise UserError(
                f"tp is {size}, but the model has {self.queries} attention heads and {self.kv} KV heads, which cannot "
                f"be divided among {size} ranks; give parallel.tp one of {', '.join(map(str, fitting))}"
            )

    def kv_heads(self, replica: Replica) -> tuple[int, int]:
        """This rank's KV heads: several ranks hold the same one where there are fewer of them than ranks."""
        first, last = replica.part(self.kv)
        return (first, last) if last > first and self.kv >= replica.size else (first, first + 1)

    def ranges(self, name: str, linear: Any, replica: Replica) -> tuple[tuple[int, int], ...]:
        """This rank's outputs of a layer that is divided by columns."""
        first, last = self.kv_heads(replica)
        kv = first * self.dimension, last * self.dimension
        if name in _KV:
            return (kv,)
        if name == "qkv_proj":
            queries = replica.part(self.queries * self.dimension)
            keys = self.queries * self.dimension
            values = keys + self.kv * self.dimension
            return (queries, (keys + kv[0], keys + kv[1]), (values + kv[0], values + kv[1]))
        if name == "gate_up_proj":
            return _in_each(replica, *[linear.out_features // 2] * 2)
        return (replica.part(linear.out_features),)


def _wrap(model: PreTrainedModel, replica: Replica, styles: Mapping[str, str], embedded: int, vocabulary: int) -> None:
    """Put the layers that talk to other ranks into their places, and correct the sizes that modules know."""
    heads = _Heads.of(model)
    first, last = heads.kv_heads(replica)
    queries, kv = heads.queries // replica.size, last - first
    config = model.config.get_text_config()
    config.head_dim = heads.dimension  # or it would follow from the number of heads
    config.num_attention_heads, config.num_key_value_heads = queries, kv
    known = {"num_heads": queries, "num_key_value_heads": kv, "num_key_value_groups": queries // kv}
    for name, module in [*model.named_modules()]:
        style = division_of(name, styles)
        children = {division_of(f"{name}.{child}", styles) for child, _ in module.named_children()}
        if hasattr(module, "num_key_value_groups") and COLUMNS in children:
            for attribute in known.keys() & vars(module).keys():
                setattr(module, attribute, known[attribute])
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
            if style == ROWS:
                _replace(model, name, _row_wise(module, replica))
        elif style == EXPERTS:
            for attribute in {"intermediate_dim", "intermediate_size"} & vars(module).keys():
                first, last = replica.part(getattr(module, attribute))
                setattr(module, attribute, last - first)
            _replace(model, name, ShardedExperts(module, replica))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.num_embeddings = embedding.weight.shape[0]
    padding = embedding.padding_idx
    embedding.padding_idx = None if padding is None or padding >= embedding.num_embeddings else padding
    model.set_input_embeddings(ShardedEmbedding(embedding, embedded, replica))
    model.set_output_embeddings(ShardedHead(head, vocabulary, replica))


def _row_wise(linear: nn.Linear, replica: Replica) -> RowWiseLinear:
    bias = linear.bias
    linear.bias = None  # type: ignore[assignment]
    return RowWiseLinear(linear, bias, replica)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, module)
