"""Which slots of a step each rank computes (DESIGN section 2; paper section 4.2). Pure arithmetic, no processes.

W: columns, R: ranks, L: leaves of the candidate tree. A rank computes what it was given and the ancestors
of that, so its rows are a subtree that contains `c`. Columns and leaves are dealt in order: rank 0 gets the
first columns, which need the least of row 0. The deal minimises the largest rank's rows by searching for the
smallest limit M under which a dynamic program over ranks can place everything.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from lp.lookahead.layout import StepLayout


@dataclass(frozen=True, slots=True)
class Leaf:
    """A candidate path, seen as what a rank pays for it.

    Attributes:
        slot: its last slot.
        own: candidate slots on the path.
        shared: of these, how many the leaf before it in order has too.
        row_0, column_0: window slots on the path.
    """

    slot: int
    own: int
    shared: int
    row_0: int
    column_0: int


@dataclass(frozen=True)
class ShardPlan:
    """The slots of every rank, ascending, and who tells the others about which read-off.

    Attributes:
        slots: by rank, the slots it computes.
        reads: by rank, the read slots it owns: of the ranks that compute a slot, the lowest.
    """

    slots: list[list[int]]
    reads: list[list[int]]

    @property
    def most_reads(self) -> int:
        """Reads of the rank that owns most, which sizes the gathered tensor."""
        return max(map(len, self.reads))

    @property
    def most_rows(self) -> int:
        """Rows of the largest rank."""
        return max(map(len, self.slots))

    @classmethod
    def build(cls, layout: StepLayout, world_size: int) -> ShardPlan:
        """Share a layout among `world_size` ranks so that the largest has the fewest rows."""
        if world_size == 1:
            return cls([list(range(len(layout)))], [layout.reads])
        return cls._closed(layout, _Deal(layout, world_size).solve())

    @classmethod
    def _closed(cls, layout: StepLayout, given: list[list[int]]) -> ShardPlan:
        slots = [sorted({above for slot in [0, *mine] for above in layout.path(slot)}) for mine in given]
        owner: dict[int, int] = {}
        for rank, mine in enumerate(slots):
            for slot in mine:
                owner.setdefault(slot, rank)
        reads: list[list[int]] = [[] for _ in given]
        for slot in layout.reads:
            reads[owner[slot]].append(slot)
        return cls(slots, reads)


class _Deal:
    """Deals columns 0..W and leaves 0..L, both in order, to ranks 0..R."""

    def __init__(self, layout: StepLayout, world_size: int) -> None:
        self.layout, self.world_size = layout, world_size
        self.columns, self.column_rows = layout.columns, layout.rows - 1

    @cached_property
    def leaves(self) -> list[Leaf]:
        """Leaves by where they hang: column 0's first, then along row 0, so that a trunk is paid for once."""
        layout = self.layout
        parents = set(layout.parents)
        ends = [slot for slot in range(layout.n_window, len(layout)) if slot not in parents]
        paths = [layout.path(slot)[1:] for slot in ends]
        width = max(self.columns, 1)

        def window_part(path: list[int]) -> tuple[int, int]:
            inside = [slot for slot in path if slot < layout.n_window]
            on_row_0 = sum(slot < width for slot in inside)
            return on_row_0, len(inside) - on_row_0

        paths.sort(key=lambda path: (-window_part(path)[1], path))
        leaves, before = list[Leaf](), set[int]()
        for path in paths:
            own = {slot for slot in path if slot >= layout.n_window}
            leaves.append(Leaf(path[-1], len(own), len(own & before), *window_part(path)))
            before = own
        return leaves

    def solve(self) -> list[list[int]]:
        """The slots given to each rank, ancestors left out."""
        most = len(self.layout)
        # A bound that bisect can search: False until the limit suffices, True from there on.
        limit = bisect_left(range(most), True, lo=-(-most // self.world_size), key=lambda m: self._trail(m) is not None)
        trail = self._trail(limit)
        assert trail is not None
        given: list[list[int]] = []
        column, leaf = self.columns, len(self.leaves)
        for placed in reversed(trail):
            _, from_column, from_leaf = placed[column]
            columns = [self.layout.slot(self.layout.rows - 1, j) for j in range(from_column, column)]
            given.append(columns + [item.slot for item in self.leaves[from_leaf:leaf]])
            column, leaf = from_column, from_leaf
        return given[::-1]

    def _trail(self, limit: int) -> list[dict[int, tuple[int, int, int]]] | None:
        """By rank: columns placed so far -> (most leaves placed so far, columns and leaves before this rank)."""
        front, trail = {0: 0}, []
        for _ in range(self.world_size):
            placed: dict[int, tuple[int, int, int]] = {}
            for column, leaf in front.items():
                for end in range(column, self.columns + 1):
                    rows = self._column_rows(column, end)
                    if rows > limit:
                        break
                    reached = self._reach(leaf, rows, column, end, limit)
                    if reached > placed.get(end, (-1,))[0]:
                        placed[end] = (reached, column, leaf)
            trail.append(placed)
            front = {end: reached for end, (reached, _, _) in placed.items()}
        return trail if front.get(self.columns) == len(self.leaves) else None

    def _column_rows(self, start: int, end: int) -> int:
        """Rows of a rank with columns start..end-1: `c`, row 0 up to the last, and the columns' own."""
        return 1 if start == end else end + (end - start) * self.column_rows

    def _reach(self, leaf: int, rows: int, start: int, end: int, limit: int) -> int:
        """How far the leaves from `leaf` on fit beside these columns."""
        row_0 = end - 1 if end > start else 0
        column_0 = self.column_rows if start == 0 < end else 0
        first = leaf
        while leaf < len(self.leaves):
            item = self.leaves[leaf]
            rows += item.own - (item.shared if leaf > first else 0)
            rows += max(item.row_0 - row_0, 0) + max(item.column_0 - column_0, 0)
            if rows > limit:
                break
            row_0, column_0 = max(row_0, item.row_0), max(column_0, item.column_0)
            leaf += 1
        return leaf
