"""The interface of attention backends, and the views that tell them which keys the tokens of a step see.

T: step tokens, L: cached tokens (the token in cache slot i has position i), C: cache slots, N: keys of an attention
call, L + T, or C where the cache slots are given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

Mask = torch.Tensor | BlockMask


@dataclass(frozen=True)
class Window:
    """The limit of what a token sees in layers with local attention: a sliding window or a chunk.

    Attributes:
        size: number of tokens of a window or chunk.
        chunked: True: a token sees the tokens up to itself of its own chunk, which begins at a multiple of `size`
            (Llama 4). False: it sees the last `size` tokens, itself included.
    """

    size: int
    chunked: bool = False

    def starts(self, positions: torch.Tensor) -> torch.Tensor:
        """The first position that tokens at these positions see, in the shape of `positions`; may be negative."""
        return positions // self.size * self.size if self.chunked else positions - self.size + 1


@dataclass(frozen=True)
class StepView:
    """Which keys the tokens of a step of one sequence see, from which a backend makes a mask.

    Every token sees all cached tokens, and step tokens by `visible_TT`, as far as a window allows it.

    Attributes:
        visible_TT: bool, which tokens of the step each one sees.
        positions_T: int64, position of each token in the text.
        length: L, number of cached tokens; or C, number of cache slots, if `slot_mapping_T` is given.
        slot_mapping_T: int64, the cache slot of each token of the step; slots before the first one are cached tokens,
            those behind the last are empty. None: the keys are the L cached ones, then the step's.
        window: the window of layers with local attention; None: full attention.
        dtype: dtype of the model, and of additive masks.
    """

    visible_TT: torch.Tensor
    positions_T: torch.Tensor
    length: int
    slot_mapping_T: torch.Tensor | None
    window: Window | None
    dtype: torch.dtype

    @property
    def sees_everything(self) -> bool:
        """Whether the step is a single token that sees all keys, so that it needs no mask."""
        return len(self.positions_T) == 1 and self.slot_mapping_T is None and self.window is None

    def within(self, window: Window | None) -> StepView:
        """The view of this step in layers with another window; None: full attention."""
        return self if window == self.window else replace(self, window=window)

    def visible_TN(self) -> torch.Tensor:
        """Make the mask over all keys: bool (T, N), whether each token sees each key."""
        device = self.visible_TT.device
        num_tokens = len(self.visible_TT)
        if self.slot_mapping_T is None:
            key_positions_N = torch.cat([torch.arange(self.length, device=device), self.positions_T])
            cached_TL = self.visible_TT.new_ones(num_tokens, self.length)
            visible_TN = torch.cat([cached_TL, self.visible_TT], 1)
        else:
            first_slot = self.slot_mapping_T[0]
            index_C = torch.arange(self.length, device=device) - first_slot  # step token's index; cached: negative
            token_C = index_C.clamp(0, num_tokens - 1)
            visible_TN = (index_C < 0) | (index_C < num_tokens) & self.visible_TT[:, token_C]
            key_positions_N = torch.where(index_C < 0, index_C + first_slot, self.positions_T[token_C])
        if self.window is not None:
            visible_TN = visible_TN & (key_positions_N >= self.window.starts(self.positions_T)[:, None])
        return visible_TN


@dataclass(frozen=True)
class ForestView:
    """Which keys the tokens of a step of several sequences see: a token sees keys of its own sequence alone.

    Attributes:
        parts: view of each sequence, without `slot_mapping_T`; the N keys are those of the sequences, one after the
            other.
    """

    parts: list[StepView]
    sees_everything: ClassVar[bool] = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model, and of additive masks."""
        return self.parts[0].dtype

    def within(self, window: Window | None) -> ForestView:
        """The view of this step in layers with another window; None: full attention."""
        return ForestView([part.within(window) for part in self.parts])

    def visible_TN(self) -> torch.Tensor:
        """Make the mask over all keys: bool (T, N), whether each token sees each key."""
        visible_TN: torch.Tensor = torch.block_diag(*(part.visible_TN() for part in self.parts))
        return visible_TN


@dataclass(frozen=True)
class PooledView:
    """Which keys the tokens of a captured step see, whose sequences all have their caches in one pool of slots.

    A CUDA graph replays the step for other sequences: so their places in the pool are tensors. The keys are those of
    all N slots.

    Attributes:
        visible_TT, positions_T, window, dtype: see `StepView`; a token sees no token of another sequence.
        slots_T: int64, the slot of each token's own key.
        first_slots_T: int64, for each token the first slot of its sequence.
        lengths_T: int64, for each token the number of cached tokens of its sequence.
        sequences_Q4: int64, for each sequence (first token, number of tokens, first slot, number of cached tokens).
        num_slots: N, number of slots of the pool.
    """

    visible_TT: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    first_slots_T: torch.Tensor
    lengths_T: torch.Tensor
    sequences_Q4: torch.Tensor
    num_slots: int
    window: Window | None
    dtype: torch.dtype
    sees_everything: ClassVar[bool] = False

    def within(self, window: Window | None) -> PooledView:
        """The view of this step in layers with another window; None: full attention."""
        return self if window == self.window else replace(self, window=window)

    def visible_TN(self) -> torch.Tensor:
        """Make the mask over all slots: bool (T, N), whether each token sees each key."""
        slots_N = torch.arange(self.num_slots, device=self.slots_T.device)
        key_positions_TN = slots_N - self.first_slots_T[:, None]
        cached_TN = (key_positions_TN >= 0) & (key_positions_TN < self.lengths_T[:, None])
        own_TT = self.visible_TT
        if self.window is not None:
            starts_T1 = self.window.starts(self.positions_T)[:, None]
            cached_TN = cached_TN & (key_positions_TN >= starts_T1)
            own_TT = own_TT & (self.positions_T >= starts_T1)
        return cached_TN.index_copy(1, self.slots_T, own_TT)


View = StepView | ForestView | PooledView


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn a bool mask (T, N) into one (1, 1, T, N) of numbers to be added to the scores: 0, or the dtype's least."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


class AttentionBackend:
    """A way to compute the attention of a tree-shaped step: a function that transformers knows by name, and its masks.

    A backend is a subclass in a file of its own, registered as `lp.attention.registry` describes.

    Args:
        name: what users choose it by, as in `attention=NAME`.

    Attributes:
        implementation: transformers' name of the attention function.
        alternative: name of the backend to propose if this one can't be used; None: there is none.
        replaces: attention implementations, by the names of backends or by transformers' names; `attention=auto` uses
            this backend for models that were loaded with one of them, if it can.
        priority: order among backends that replace the same implementation: `auto` tries the largest first.
        loadable: whether transformers can load a model with `implementation`; errors advise it for models that can't
            change their attention later.
        omits_trivial_masks: whether None may be the mask of a single token that sees everything.
        takes_parts: whether the attention function, in a step of several sequences, takes keys and values as
            `lp.attention.parts.InParts`; if not, it gets those of all sequences in one tensor, under a mask.
        takes_pools: whether the attention function, in a captured step of several sequences on a GPU, reads only the
            keys of each sequence; if not, it reads all slots of the pool, under a mask.
        capture_obstacle: why steps with this backend can't be captured in a CUDA graph; None: they can.
        compiles: whether torch.compile can compile a step with its masks.
        depth: most positions behind the cached ones that a step may reach; None: no limit.
    """

    implementation: str
    alternative: str | None = "eager"
    replaces: tuple[str, ...] = ()
    priority: int = 0
    loadable: bool = False
    omits_trivial_masks: bool = False
    takes_parts: bool = False
    takes_pools: bool = False
    capture_obstacle: str | None = None
    compiles: bool = True
    depth: int | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def unfit(self, model: PreTrainedModel) -> str | None:
        """Why a model can't run with this backend, with the remedy, as an error message; None: no reason is known."""
        return None

    def replaced_in(self, model: PreTrainedModel) -> tuple[str, ...]:
        """The implementations that `auto` replaces by this backend for a given model: `replaces`, unless overridden."""
        return self.replaces

    def install(self) -> None:
        """Register `implementation` with transformers, unless it is transformers' own; may be called again."""

    def mask(self, view: View) -> Mask:
        """Make the mask that the attention function gets in a step: by default an additive one over all keys.

        Args:
            view: which keys the tokens of the step see.
        """
        return additive_mask(view.visible_TN(), view.dtype)

    def forward_arguments(
        self, slot_mapping_T: torch.Tensor, sequences_Q4: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Further keyword arguments of the model in a captured step, which its layers hand to the attention function.

        Args:
            slot_mapping_T: int64, the cache slots of the step's tokens.
            sequences_Q4: int64, for a step of several sequences, for each of them (first token, number of tokens, first
                slot, number of cached tokens); None: one sequence.
        """
        return {}


def has_sinks(model: PreTrainedModel) -> bool:
    """Whether a model's layers have attention sinks: a parameter `sinks`, with a learned score for each head."""
    return any(module._parameters.get("sinks") is not None for module in model.modules())


def score_obstacle(
    model: PreTrainedModel, name: str, remedy: str = "choose attention=eager", takes_sinks: bool = False
) -> str | None:
    """Why a model can't run with torch's fused attention functions: capped scores, or no sdpa in transformers.

    Args:
        model: the model.
        name: name of the backend that was asked for.
        remedy: what the message advises.
        takes_sinks: whether the backend computes attention sinks: because of them alone transformers may have no sdpa
            for a model.

    Returns:
        A message as `AttentionBackend.unfit` returns it; None: nothing stands against it.
    """
    architecture = type(model).__name__
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        return f"{architecture} caps its attention scores, which {name} leaves out; {remedy}"
    if not (getattr(model, "_supports_sdpa", True) or (takes_sinks and has_sinks(model))):
        return f"{architecture} has no sdpa attention in transformers; {remedy}"
    return None
