"""Where the keys of a token lie that `lp.attention.by_position` adds up: cached ones in tiles, and its tail.

T: tokens of the pass, L: cached tokens, N: keys of all sequences, U: keys of a tail, Q: sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from lp.attention.base import PooledView, StepView, Window

DEPTH = 32  # positions behind the cached ones that a step may reach
UNIT = 64  # tails begin at multiples of it
TILE = 256  # cached keys that are summed at once
TAIL = DEPTH + UNIT  # U
ROWS = 8  # a part of a pass is padded to a multiple of it: libraries have other kernels for a few rows


class KeyPlaces(NamedTuple):
    """Where the keys of each token of a pass lie, in sequences that have a run of the N keys each.

    Behind the tokens of a sequence by itself there may be rows, to a multiple of ROWS, which see what the first does.

    Attributes:
        tail_starts_T: int64, A(p) of each token.
        window_starts_T: int64, the first position that each token sees; may be negative.
        tail_keys_TU: int64, which of the N keys are those of the positions from A(p) on; the token's own key in place
            of those that it does not see, which may be no numbers.
        seen_TU: bool, whether a token sees them: up to its own position, within its sliding window.
        sequences_Q4: int64, of each sequence its first token, its tokens, its first key and its cached tokens.
    """

    tail_starts_T: torch.Tensor
    window_starts_T: torch.Tensor
    tail_keys_TU: torch.Tensor
    seen_TU: torch.Tensor
    sequences_Q4: torch.Tensor

    def of_rows(self, rows: slice | torch.Tensor) -> KeyPlaces:
        """Keep the rows of some tokens, for a sequence that is computed by itself."""
        starts_T, window_starts_T = self.tail_starts_T[rows], self.window_starts_T[rows]
        return KeyPlaces(starts_T, window_starts_T, self.tail_keys_TU[rows], self.seen_TU[rows], self.sequences_Q4)

    def padded(self) -> KeyPlaces:
        """Add rows to a multiple of ROWS, since libraries compute a few rows otherwise."""
        count = len(self.tail_starts_T)
        rows = torch.arange(-(-count // ROWS) * ROWS, device=self.tail_starts_T.device)
        rows[count:] = 0
        return self if len(rows) == count else self.of_rows(rows)


class PlacesMask(torch.Tensor):
    """`KeyPlaces` in place of a mask, (1, 1, tokens, 1), on the host; it passes through a model as it is."""

    places: KeyPlaces
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, view: StepView | PooledView) -> PlacesMask:
        """Make the mask of a pass, whose tokens see what the view says."""
        mask = torch.zeros(1, 1, len(view.positions_T), 1).as_subclass(cls)
        mask.places = key_places(view)
        return mask


def key_places(view: StepView | PooledView) -> KeyPlaces:
    """Where the keys of each token lie. On a GPU nothing waits, and all but the number of tokens is data.

    Args:
        view: what tokens see, each the end of a path with one token at every position behind the cached ones.
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
    """Keys below A(p) are looked for at the places of their positions; a GPU is not waited for to know it."""
    if positions_T.device.type != "cpu" or (end := int(starts_T.max())) <= length:
        return
    in_order = torch.arange(length, end)
    assert torch.equal(positions_T[: len(in_order)], in_order), "the step goes too deep"
