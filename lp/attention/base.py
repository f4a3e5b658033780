"""The interface of attention backends, and views, which tell a backend which keys each token of a step sees.

T: step tokens, L: cached tokens (the token in cache slot i has position i), C: cache slots, N: keys of an attention
call, that is L + T, or C if the cache slots are given.
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
    """The limit on which tokens a token sees in layers with local attention: a sliding window or a chunk.

    Attributes:
        size: number of tokens of a window or chunk.
        chunked: True: the text is cut into chunks at multiples of `size`, and a token sees the tokens of its own chunk
            up to itself (Llama 4). False: a token sees the last `size` tokens, itself included.
    """

    size: int
    chunked: bool = False

    def starts(self, positions: torch.Tensor) -> torch.Tensor:
        """The first position that a token at each of these positions sees; may be negative.

        Args:
            positions: positions of tokens, in any shape; the result has the same shape.
        """
        return positions // self.size * self.size if self.chunked else positions - self.size + 1


@dataclass(frozen=True)
class StepView:
    """Which keys each token of one sequence's step sees; a backend makes a mask from it.

    Every token sees all cached tokens, and those tokens of the step that `visible_TT` allows, unless a window hides
    them. T: tokens of the step.

    Attributes:
        visible_TT: bool, whether each token of the step (row) sees each token of the step (column).
        positions_T: int64, position of each token in the text.
        length: number of cached tokens, L; or number of cache slots, C, if `slot_mapping_T` is given.
        slot_mapping_T: int64, the cache slot of each token of the step. Slots before the first one hold cached tokens,
            slots after the last one are empty. None: the keys are the L cached ones, followed by the step's.
        window: the window of layers with local attention; None: layers with full attention.
        dtype: dtype of the model, and of masks that are added to scores.
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
        """Get the view of the same step for layers with another window; None: for layers with full attention."""
        return self if window == self.window else replace(self, window=window)

    def visible_TN(self) -> torch.Tensor:
        """Make the mask over all N keys: bool (T, N), whether each of the T step tokens sees each key."""
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
    """Which keys each token sees in a step of several sequences: a token sees keys of its own sequence only.

    Attributes:
        parts: a view for each sequence, without `slot_mapping_T`. The keys of the sequences follow each other in this
            order.
    """

    parts: list[StepView]
    sees_everything: ClassVar[bool] = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model, and of masks that are added to scores."""
        return self.parts[0].dtype

    def within(self, window: Window | None) -> ForestView:
        """Get the view of the same step for layers with another window; None: for layers with full attention."""
        return ForestView([part.within(window) for part in self.parts])

    def visible_TN(self) -> torch.Tensor:
        """Make the mask over all N keys: bool (T, N), whether each of the T step tokens sees each key."""
        visible_TN: torch.Tensor = torch.block_diag(*(part.visible_TN() for part in self.parts))
        return visible_TN


@dataclass(frozen=True)
class PooledView:
    """Which keys each token sees in a captured step (recorded as a CUDA graph) whose sequences share one pool of slots.

    The graph is replayed for other sequences, so the places of the sequences in the pool are tensors. The keys are
    those of all N slots of the pool. T: tokens of the step.

    Attributes:
        visible_TT, positions_T, window, dtype: see `StepView`; a token sees no token of another sequence.
        slots_T: int64, the slot of each token's own key.
        first_slots_T: int64, for each token the first slot of its sequence.
        lengths_T: int64, for each token the number of cached tokens of its sequence.
        sequences_Q4: int64, for each of Q sequences (first token, number of tokens, first slot, number of cached
            tokens).
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
        """Get the view of the same step for layers with another window; None: for layers with full attention."""
        return self if window == self.window else replace(self, window=window)

    def visible_TN(self) -> torch.Tensor:
        """Make the mask over all N slots of the pool: bool (T, N), whether each of the T step tokens sees each key."""
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
    """Turn a bool mask into numbers to add to attention scores: 0 for keys that are seen, else the dtype's minimum.

    Args:
        visible: bool (T, N), whether each of T tokens sees each of N keys.
        dtype: dtype of the result.

    Returns:
        (1, 1, T, N).
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


class AttentionBackend:
    """A way to compute attention in a tree-shaped step: an attention function that transformers knows, and its masks.

    A backend is a subclass in a file of its own, registered as `lp.attention.registry` describes.

    Args:
        name: the name by which users choose the backend, as in `attention=NAME`.

    Attributes:
        implementation: transformers' name for the attention function.
        alternative: name of the backend that an error proposes if this backend can't be used; None: it proposes none.
        replaces: attention implementations, by backend names or by transformers' names. With `attention=auto`, this
            backend is used for models that were loaded with one of them, if possible.
        priority: order among backends that replace the same implementation; `auto` tries the largest number first.
        loadable: whether transformers can load a model with `implementation`. Errors advise it for models whose
            attention can't be changed later.
        omits_trivial_masks: whether the mask may be None for a single token that sees everything.
        takes_parts: whether the attention function, in a step of several sequences, takes a separate tensor of keys and
            of values for each sequence (`lp.attention.parts.InParts`). If not, it gets one tensor for all, and a mask.
        takes_pools: whether the attention function, in a step of several sequences that is recorded as a CUDA graph,
            reads the keys of each sequence only. If not, it reads all slots of the pool that the sequences share, under
            a mask.
        capture_obstacle: why steps with this backend can't be recorded as CUDA graphs; None: they can.
        compiles: whether torch.compile can compile a step with this backend's masks.
        depth: how many positions after the last token of the text a step may reach at most; None: no limit.
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
        """Why a model can't run with this backend, as an error message with a remedy; None: no reason is known."""
        return None

    def replaced_in(self, model: PreTrainedModel) -> tuple[str, ...]:
        """The attention implementations that `auto` replaces by this backend for one model; by default `replaces`."""
        return self.replaces

    def install(self) -> None:
        """Register the attention function with transformers, unless transformers has it; may be called repeatedly."""

    def mask(self, view: View) -> Mask:
        """Make the mask that the attention function gets in a step; by default numbers to add to the scores of keys.

        Args:
            view: which keys each token of the step sees.
        """
        return additive_mask(view.visible_TN(), view.dtype)

    def forward_arguments(
        self, slot_mapping_T: torch.Tensor, sequences_Q4: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Extra arguments for the model's forward in a captured step, which its layers pass to the attention function.

        A captured step is recorded as a CUDA graph.

        Args:
            slot_mapping_T: int64, the cache slot of each token of the step.
            sequences_Q4: int64, for a step of several sequences: for each sequence (first token, number of tokens,
                first slot, number of cached tokens). None: the step has one sequence.

        Returns:
            The arguments, by name.
        """
        return {}


def has_sinks(model: PreTrainedModel) -> bool:
    """Whether a model's layers have attention sinks: a parameter `sinks` with a learned score for each head."""
    return any(module._parameters.get("sinks") is not None for module in model.modules())


def score_obstacle(
    model: PreTrainedModel, name: str, remedy: str = "choose attention=eager", takes_sinks: bool = False
) -> str | None:
    """Why a model can't use torch's fused attention: its scores are capped, or transformers has no sdpa for it.

    Args:
        model: the model.
        name: name of the backend that was asked for.
        remedy: what the message advises.
        takes_sinks: whether the backend computes attention sinks. If it does, a model with sinks is not refused for
            lack of sdpa, since its sinks alone may be the reason why transformers has none.

    Returns:
        An error message with a remedy; None: there is no obstacle.
    """
    architecture = type(model).__name__
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        return f"{architecture} caps its attention scores, which {name} leaves out; {remedy}"
    if not (getattr(model, "_supports_sdpa", True) or (takes_sinks and has_sinks(model))):
        return f"{architecture} has no sdpa attention in transformers; {remedy}"
    return None
