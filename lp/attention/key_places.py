"""Finds where the keys lie that each token of a forward pass attends to, for the backend `lp.attention.by_position`.

That backend adds up a token's keys by their positions: first the keys before position A(p), then the tail, which
has the keys from A(p) up to the token's own position p. Keys of the tail may be cached or in the step.
`lp.attention.by_position` defines A(p).

T: tokens of the forward pass, L: cached tokens, N: keys of all sequences, U: keys of a tail, Q: sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from lp.attention.base import PooledView, StepView, Window

DEPTH = 32  # most positions beyond the last token of the text that a step may reach
UNIT = 64  # tails begin at positions that are multiples of it
TILE = 256  # cached keys that are summed at once
TAIL = DEPTH + UNIT  # U
ROWS = 8  # a part of a pass is padded to a multiple of it: libraries have other kernels for a few rows


class KeyPlaces(NamedTuple):
    """Where the keys lie that each token of a forward pass attends to, if keys are added up in the order of positions.

    The keys of a token are cached keys, followed by its tail: the keys at the last positions up to the token itself.
    All are given as indices into the N keys of all sequences, where the keys of each sequence are consecutive. T:
    tokens, U: keys of a tail, Q: sequences. For a single sequence there may be more rows than tokens, up to a multiple
    of ROWS (8); the extra rows repeat the first one.

    Attributes:
        tail_starts_T: int64, the position at which each token's tail begins.
        window_starts_T: int64, the first position that each token sees because of a sliding window; may be negative.
        tail_keys_TU: int64, the index of the key at each position of a token's tail. If the token sees no key there, it
            is the index of the token's own key, since other memory may hold NaNs.
        seen_TU: bool, whether the token sees the key at each position of its tail.
        sequences_Q4: int64, for each sequence (first token, number of tokens, first key, number of cached tokens).
    """

    tail_starts_T: torch.Tensor
    window_starts_T: torch.Tensor
    tail_keys_TU: torch.Tensor
    seen_TU: torch.Tensor
    sequences_Q4: torch.Tensor

    def of_rows(self, rows: slice | torch.Tensor) -> KeyPlaces:
        """Keep only some tokens' rows, such as those of one sequence that is computed by itself.

        Args:
            rows: the rows to keep, as a slice or as indices.
        """
        starts_T, window_starts_T = self.tail_starts_T[rows], self.window_starts_T[rows]
        return KeyPlaces(starts_T, window_starts_T, self.tail_keys_TU[rows], self.seen_TU[rows], self.sequences_Q4)

    def padded(self) -> KeyPlaces:
        """Add rows up to a multiple of ROWS, as libraries have other kernels for few rows, which round differently."""
        count = len(self.tail_starts_T)
        rows = torch.arange(-(-count // ROWS) * ROWS, device=self.tail_starts_T.device)
        rows[count:] = 0
        return self if len(rows) == count else self.of_rows(rows)


class PlacesMask(torch.Tensor):
    """A mask that carries `KeyPlaces` through a model to the attention function; as a tensor it is only zeros.

    The zeros have the shape (1, 1, tokens, 1).

    Attributes:
        places: where the keys lie that each token attends to.
    """

    places: KeyPlaces
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, view: StepView | PooledView) -> PlacesMask:
        """Build the PlacesMask for a forward pass.

        Args:
            view: which keys each token of the forward pass sees.
        """
        mask = torch.zeros(1, 1, len(view.positions_T), 1).as_subclass(cls)
        mask.places = key_places(view)
        return mask


def key_places(view: StepView | PooledView) -> KeyPlaces:
    """Find where the keys of every token of a forward pass lie, by operations that a CUDA graph can record.

    Args:
        view: which keys each token sees. Each token must be the end of a path with one token at every position after
            the cached ones. Tokens of the text come first, in order.
    """
    positions_T = view.positions_T
    num_tokens = len(positions_T)
    starts_T = ((positions_T - DEPTH).div(UNIT, rounding_mode="floor") * UNIT).clamp(min=0)
    if isinstance(view, PooledView):
        first_keys_T, own_keys_T, sequences_Q4 = view.first_slots_T, view.slots_T, view.sequences_Q4
    else:
        first_keys_T = torch.zeros_like(positions_T)
        if view.slot_mapping_T is None:
            own_keys_T = torch.arange(view.length, view.length + num_tokens, device=positions_T.device)
            _check_depth(positions_T, starts_T, view.length)
        else:
            own_keys_T = view.slot_mapping_T
        sequences_Q4 = positions_T.new_zeros(1, 4)
        sequences_Q4[:, 1] = num_tokens
        sequences_Q4[:, 3] = own_keys_T[0]
    # A key at the place of its position is cached, or of a path whose tokens come in order. Keys of the step lie behind
    # all of these, so the largest number is that of a token of the path, where it has one at that position.
    in_tail_U = torch.arange(TAIL, device=positions_T.device)
    key_positions_TU = starts_T[:, None] + in_tail_U
    at_TT = positions_T - starts_T[:, None]
    elsewhere_TT = ~view.visible_TT.tril() | (at_TT < 0) | (at_TT >= TAIL)
    keys_TU = F.pad(first_keys_T[:, None] + key_positions_TU, (0, 1))
    at_TT = at_TT.masked_fill(elsewhere_TT, TAIL)
    keys_TU.scatter_reduce_(1, at_TT, own_keys_T.expand(num_tokens, -1), "amax")
    window = view.window or Window(torch.iinfo(torch.int32).max)
    window_starts_T = window.starts(positions_T)
    seen_TU = (key_positions_TU <= positions_T[:, None]) & (key_positions_TU >= window_starts_T[:, None])
    tail_keys_TU = torch.where(seen_TU, keys_TU[:, :TAIL], own_keys_T[:, None])
    places = KeyPlaces(starts_T, window_starts_T, tail_keys_TU, seen_TU, sequences_Q4)
    return places if isinstance(view, PooledView) else places.padded()


def _check_depth(positions_T: torch.Tensor, starts_T: torch.Tensor, length: int) -> None:
    """Assert that all keys before A(p) are at the places of their positions; on a GPU this is not checked."""
    if positions_T.device.type != "cpu" or (end := int(starts_T.max())) <= length:
        return
    in_order = torch.arange(length, end)
    assert torch.equal(positions_T[: len(in_order)], in_order), "the step goes too deep"
