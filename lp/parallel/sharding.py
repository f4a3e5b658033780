"""Which nodes of a step each rank computes (docs/lookahead-parallelism.md). Pure arithmetic.

A rank computes the pieces assigned to it, which are window columns and draft paths, and the ancestors of their nodes:
a subtree that contains `c`. Sets of nodes are ints, one bit a node: a union is `|`, its size `bit_count`.
W: columns, R: ranks, M: the limit, which is the most tokens a rank may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from operator import or_

import numpy as np

from lp.draft.layout import StepLayout

EXACT_PIECES = 12  # up to so many pieces the assignment is optimal
EXACT_TRIES = 5000  # placements tried for one limit, far more than EXACT_PIECES pieces need
TRIES = 100  # the same for more pieces


@dataclass(frozen=True)
class ShardPlan:
    """The nodes of every rank, ascending, and which rank sends what was sampled at a node.

    Attributes:
        nodes: by rank, the nodes it computes.
        owned: by rank, the sampled nodes it owns: of the ranks that compute a node, the lowest.
    """

    nodes: list[list[int]]
    owned: list[list[int]]

    @property
    def max_owned(self) -> int:
        """Nodes of the rank that owns most, which sizes the message."""
        return max(map(len, self.owned))

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest rank."""
        return max(map(len, self.nodes))

    @classmethod
    def build(cls, layout: StepLayout, world_size: int, catch_up_counts: Sequence[int] = ()) -> ShardPlan:
        """Share a layout among `world_size` ranks so that the largest share is as small as can be.

        Args:
            layout: the step's tree.
            world_size: R.
            catch_up_counts: catch-up tokens of every rank, which count as its tokens; none if empty.
        """
        if world_size == 1:
            return cls([list(range(len(layout)))], [layout.sampled_nodes])
        nodes, owned = [], []
        unowned = sum(1 << node for node in layout.sampled_nodes)
        for load in _Assignment(layout, catch_up_counts or [0] * world_size).solve():
            nodes.append(_members(load))
            owned.append(_members(load & unowned))
            unowned &= ~load
        return cls(nodes, owned)


def _members(load: int) -> list[int]:
    """The nodes of a set, ascending."""
    return [node for node, bit in enumerate(bin(load)[:1:-1]) if bit == "1"]


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank computes in a step: its catch-up tokens, then its nodes (T tokens).

    Attributes:
        tokens, positions: (T,).
        visible: (T, T) bool, which tokens each one sees besides the cached prefix.
        sample_at: indices of the nodes that the rank owns, in node order.
        index_of: the index of every node it computes.
        catch_up: number of catch-up tokens, which come first.
    """

    tokens: list[int]
    positions: list[int]
    visible: np.ndarray
    sample_at: list[int]
    index_of: dict[int, int]
    catch_up: int

    @classmethod
    def build(cls, layout: StepLayout, plan: ShardPlan, rank: int, catch_up: Sequence[int]) -> RankShare:
        """The share of a rank that still lacks the KV of the tokens `catch_up`, which end right before `c`."""
        nodes, missing = plan.nodes[rank], len(catch_up)
        index_of = dict(zip(nodes, range(missing, missing + len(nodes)), strict=True))
        visible = layout.visible()
        if len(nodes) < len(visible):
            visible = visible[np.ix_(nodes, nodes)]
        if missing:
            below = visible
            visible = np.tri(missing + len(nodes), dtype=bool)
            visible[missing:, missing:] = below
        start = layout.positions[0] - missing
        return cls(
            [*catch_up, *map(layout.tokens.__getitem__, nodes)],
            [*range(start, start + missing), *map(layout.positions.__getitem__, nodes)],
            visible,
            [*map(index_of.__getitem__, plan.owned[rank])],
            index_of,
            missing,
        )

    def padded(self, num_tokens: int) -> RankShare:
        """The same with tokens added up to `num_tokens`, which nothing sees and nothing is sampled at."""
        more = num_tokens - len(self.tokens)
        if more <= 0:
            return self
        visible = np.eye(num_tokens, dtype=bool)
        visible[: len(self.tokens), : len(self.tokens)] = self.visible
        tokens = self.tokens + self.tokens[:1] * more
        positions = self.positions + self.positions[:1] * more
        return replace(self, tokens=tokens, positions=positions, visible=visible)


class _Assignment:
    """Assigns columns, from the last, and then draft paths, in the tree's order, to the first rank with room.

    The last column brings all of level 0, so a rank that has it should have as many columns as fit. The limit starts
    at what every assignment needs and grows until one is found; one that fails tries other ranks, the last pieces
    first, until nothing is left to try or TRIES placements are spent.
    """

    def __init__(self, layout: StepLayout, catch_up_counts: Sequence[int]) -> None:
        self.layout = layout
        self.world_size = len(catch_up_counts)
        self.catch_up_counts = catch_up_counts
        above: list[int] = []  # of every node, the path from `c` to it
        for node, parent in enumerate(layout.parents):
            above.append((above[parent] if parent >= 0 else 0) | 1 << node)
        inner = set(layout.parents)
        leaves = [node for node in range(layout.num_window, len(layout)) if node not in inner]
        columns = [above[node] for node in reversed(layout.last_level())]
        self.pieces = columns + [above[node] for node in sorted(leaves, key=layout.path)]
        self.rests = [*accumulate(reversed(self.pieces), or_)][::-1]  # what a piece and those after it need

    def solve(self) -> list[int]:
        """The nodes of each rank."""
        loads = next(loads for limit in count(self._least_limit()) if (loads := self._place(limit)))
        return [load & (1 << len(self.layout)) - 1 for load in loads]

    def _empty(self) -> list[int]:
        """Loads to begin with, the last rank's first: `c`, and catch-up tokens as bits that no node has."""
        loads = []
        bit = len(self.layout)
        for missing in reversed(self.catch_up_counts):
            loads.append(1 | ((1 << missing) - 1) << bit)
            bit += missing
        return loads

    def _least_limit(self) -> int:
        """A limit below which no assignment exists: tokens that the ranks have together against those they need."""
        own = (
            len(self.layout)
            - self.layout.num_window
            + self.layout.columns * (self.layout.levels - 1)
            + sum(self.catch_up_counts)
        )
        longest = max([1 + max(self.catch_up_counts), *(piece.bit_count() for piece in self.pieces)])
        return next(limit for limit in count(longest) if own + self._repeated_tokens(limit) <= limit * self.world_size)

    def _repeated_tokens(self, limit: int) -> int:
        """Tokens for `c` and level 0 over all ranks, at least: one each, or up to the rank's last column."""
        end = self.layout.columns
        column_tokens = self.layout.levels - 1
        tokens = self.world_size
        while end > 0:
            tokens += end - 1
            end = end - (limit - end) // column_tokens if column_tokens and end < limit else 0
        return tokens

    def _place(self, limit: int) -> list[int] | None:
        """Place all pieces within the limit by depth-first search; None if no assignment was found."""
        loads = self._empty()
        if not self.pieces:
            return loads[::-1]
        left = EXACT_TRIES if len(self.pieces) <= EXACT_PIECES else TRIES + len(self.pieces)
        failed: set[tuple[object, ...]] = set()
        placed: list[tuple[int, int]] = []  # by piece, its rank and that rank's load before
        trying = [iter(self._ranks(0, loads, limit, failed))]
        while trying and left:
            rank = next(trying[-1], None)
            if rank is None:  # back to the piece before, and on to its next rank
                trying.pop()
                if placed:
                    last, load = placed.pop()
                    loads[last] = load
                continue
            placed.append((rank, loads[rank]))
            loads[rank] |= self.pieces[len(trying) - 1]
            if len(placed) == len(self.pieces):
                return loads[::-1]  # the last columns are the last rank's
            left -= 1
            trying.append(iter(self._ranks(len(trying), loads, limit, failed)))
        return None

    def _ranks(self, piece: int, loads: list[int], limit: int, failed: set[tuple[object, ...]]) -> list[int]:
        """Ranks worth trying for a piece: of those alike in tokens and in what later pieces share, the first."""
        rest = self.rests[piece]
        room = limit * len(loads)
        assigned = 0
        states = []
        for load in loads:
            tokens, shared = load.bit_count(), load & rest
            room -= tokens
            assigned |= shared
            states.append((tokens, shared))
        key = (piece, *sorted(states))
        if key in failed or (rest & ~assigned).bit_count() > room:
            return []
        failed.add(key)  # it comes again only after it has failed
        alike = {state: rank for rank, state in reversed([*enumerate(states)])}
        return sorted(rank for rank in alike.values() if (loads[rank] | self.pieces[piece]).bit_count() <= limit)
