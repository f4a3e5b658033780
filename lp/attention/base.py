"""What an attention backend is, and what a step shows it.

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
    """Which of the keys up to its own position a token sees, in layers with local attention.

    Attributes:
        size: number of tokens.
        chunked: it sees those of its own chunk, which begins at a multiple of `size` (Llama 4); else the last ones, its
            own included.
    """

    size: int
    chunked: bool = False

    def starts(self, positions: torch.Tensor) -> torch.Tensor:
        """The first position that a token at each of these sees."""
        return positions // self.size * self.size if self.chunked else positions - self.size + 1


@dataclass(frozen=True)
class StepView:
    """Which keys the tokens of a step see, in layers of one kind.

    Attributes:
        visible_TT: bool, which tokens of the step each one sees.
        positions_T: int64.
        length: L, all seen by every token of the step, but for a window; C, if `slot_mapping_T` is given.
        slot_mapping_T: int64, the cache slot of each token of the step: a token sees the slots before the first one,
            and none behind the last. None: the step's keys follow the cached ones.
        window: what a layer with local attention sees; None: full attention.
        dtype: the model's dtype, which an additive mask has.
    """

    visible_TT: torch.Tensor
    positions_T: torch.Tensor
    length: int
    slot_mapping_T: torch.Tensor | None
    window: Window | None
    dtype: torch.dtype

    @property
    def sees_everything(self) -> bool:
        """It has a single token, which sees all keys."""
        return len(self.positions_T) == 1 and self.slot_mapping_T is None and self.window is None

    def within(self, window: Window | None) -> StepView:
        """What layers with this window see; None: with full attention."""
        return self if window == self.window else replace(self, window=window)

    def visible_TN(self) -> torch.Tensor:
        """Which keys each token sees, bool (T, N)."""
        device = self.visible_TT.device
        num_tokens = len(self.visible_TT)
        if self.slot_mapping_T is None:
            key_positions_N = torch.cat([torch.arange(self.length, device=device), self.positions_T])
            cached_TL = self.visible_TT.new_ones(num_tokens, self.length)
            visible_TN = torch.cat([cached_TL, self.visible_TT], 1)
        else:
            first_slot = self.slot_mapping_T[0]
            index_C = torch.arange(self.length, device=device) - first_slot  # of the step's tokens; cached: negative
            token_C = index_C.clamp(0, num_tokens - 1)
            visible_TN = (index_C < 0) | (index_C < num_tokens) & self.visible_TT[:, token_C]
            key_positions_N = torch.where(index_C < 0, index_C + first_slot, self.positions_T[token_C])
        if self.window is not None:
            visible_TN = visible_TN & (key_positions_N >= self.window.starts(self.positions_T)[:, None])
        return visible_TN


@dataclass(frozen=True)
class ForestView:
    """Which keys the tokens of several sequences see, side by side in one step: each sees those of its own.

    Attributes:
        parts: one for each sequence, `slot_mapping_T` None. The keys are those of the sequences, one behind the other.
    """

    parts: list[StepView]
    sees_everything: ClassVar[bool] = False

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.parts[0].dtype

    def within(self, window: Window | None) -> ForestView:
        """What layers with this window see; None: with full attention."""
        return ForestView([part.within(window) for part in self.parts])

    def visible_TN(self) -> torch.Tensor:
        """Which keys each token sees, bool (T, N)."""
        visible_TN: torch.Tensor = torch.block_diag(*(part.visible_TN() for part in self.parts))
        return visible_TN


@dataclass(frozen=True)
class PooledView:
    """Which keys the tokens of a captured step see, where all sequences lie in one pool: where each begins is data.

    The keys are those of all slots of the pool, N of them.

    Attributes:
        visible_TT, positions_T, window, dtype: see `StepView`; a token sees none of another sequence.
        slots_T: int64, where each token's own keys lie.
        first_slots_T, lengths_T: int64, of each token's sequence: its first slot, and L.
        sequences_Q4: int64, each sequence's first token, number of tokens, first slot and number of cached tokens.
        num_slots: N.
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
        """What layers with this window see; None: with full attention."""
        return self if window == self.window else replace(self, window=window)

    def visible_TN(self) -> torch.Tensor:
        """Which keys each token sees, bool (T, N)."""
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
    """A 4-D mask to be added to the scores, (1, 1, T, N), from a bool one, (T, N)."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


class AttentionBackend:
    """A way to compute the attention of a tree-shaped step: a function that transformers knows by name, and its masks.

    A backend is a subclass in a file of its own, registered as `lp.attention.registry` describes.

    Args:
        name: what users choose it by.

    Attributes:
        implementation: transformers' name of the attention function.
        alternative: the backend to propose where this one cannot be used.
        replaces: attention that a model was loaded with, by the name of its backend or by transformers' name, instead
            of which `auto` takes this one where it is fit.
        priority: order among several backends that replace the same one: `auto` tries the largest first.
        loadable: whether transformers loads a model with `implementation`, for those that cannot change it later.
        omits_trivial_masks: whether it takes None for the mask of a single token that sees everything.
        takes_parts: where a step has tokens of several sequences, its function is given keys and values as
            `lp.attention.parts.InParts`; else those of all sequences in one, with a mask over all of them.
        takes_pools: whether captured steps of several sequences on a GPU read the keys of each one alone; else all
            slots of the pool, with a mask.
        capture_obstacle: why its steps cannot be captured; None: they can.
        compiles: torch.compile takes a step with its masks.
        depth: positions behind the cached ones that a step may reach; None: any number.
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
        """Why a model cannot run with it, and the remedy; None: nothing known speaks against it."""
        return None

    def replaced_in(self, model: PreTrainedModel) -> tuple[str, ...]:
        """Attention of this model that `auto` replaces: `replaces`, unless a backend knows better."""
        return self.replaces

    def install(self) -> None:
        """Make `implementation` known to transformers, if it is not transformers' own. Doing it again is harmless."""

    def mask(self, view: View) -> Mask:
        """The mask of a step: by default additive, over all keys."""
        return additive_mask(view.visible_TN(), view.dtype)

    def forward_arguments(
        self, slot_mapping_T: torch.Tensor, sequences_Q4: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Keyword arguments for the model, which its layers hand to the attention function of a captured step.

        Args:
            slot_mapping_T: int64, the cache slots of the step's tokens.
            sequences_Q4: int64, of a step of several sequences: of each its first token, its tokens, its first slot and
                its cached tokens.
        """
        return {}


def has_sinks(model: PreTrainedModel) -> bool:
    """Whether layers have attention sinks: `sinks`, a score for each head, which transformers hands on as `s_aux`."""
    return any(module._parameters.get("sinks") is not None for module in model.modules())


def score_obstacle(
    model: PreTrainedModel, name: str, remedy: str = "choose attention=eager", takes_sinks: bool = False
) -> str | None:
    """Why a model cannot run with torch's fused attention functions, in the words of `AttentionBackend.unfit`.

    Args:
        model: the model that is to run.
        name: the backend that is asked for.
        remedy: what the user is told to do instead.
        takes_sinks: the backend computes attention sinks, for lack of which transformers has no sdpa for a model.
    """
    architecture = type(model).__name__
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        return f"{architecture} caps its attention scores, which {name} leaves out; {remedy}"
    if not (getattr(model, "_supports_sdpa", True) or (takes_sinks and has_sinks(model))):
        return f"{architecture} has no sdpa attention in transformers; {remedy}"
    return None
