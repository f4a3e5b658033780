"""How a step is shared among ranks, by their number.

    python scripts/tables.py shares 15 5 15             # W N G: the table for 1..64 ranks
    python scripts/tables.py shares 5 4 2 --ranks 2     # which of 2 ranks computes each node of the window

W and G are of the whole step, as in a fixed budget. No rank has tokens to catch up on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import lp
from launch.bench.table_text import markdown
from lp.draft.share import step_tokens
from lp.draft.window import WindowSlice, slice_window
from lp.parallel.message import MessageShape

from .harness import Command, option

RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def shared(w: int, n: int, g: int, ranks: int) -> tuple[int, tuple[WindowSlice, ...]]:
    """B, the step tokens of each rank, and the number of the window's columns that each rank has."""
    config = lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g)
    budget = step_tokens(config, ranks)
    return budget, slice_window(w, n, (budget,) * ranks)


def table(w: int, n: int, g: int, num_logits: int = 16) -> str:
    """The table of what every rank computes in a step, a line for each number of ranks."""
    lines = []
    for ranks in RANKS:
        budget, slices = shared(w, n, g, ranks)
        message_bytes = 8 * MessageShape(budget, num_logits).size
        columns = runs([own.num_columns for own in slices])
        lines.append((str(ranks), str(budget), columns, f"{message_bytes:,}", str(ranks * budget)))
    return markdown(("ranks", "B", "columns by rank", "message, bytes", "tokens, ranks x B"), lines)


def runs(counts: Sequence[int]) -> str:
    """Counts in order, equal neighbours together: `0 (3 ranks), 2, 4`."""
    found = [(count, len(list(equal))) for count, equal in groupby(counts)]
    return ", ".join(f"{count} ({ranks} ranks)" if ranks > 1 else str(count) for count, ranks in found)


def figure(w: int, n: int, g: int, ranks: int) -> str:
    """Which ranks compute each node of the window, by position, and each rank's nodes. In brackets: not sampled."""
    budget, slices = shared(w, n, g, ranks)
    positions = max(w, 1) + n - 2
    lines = []
    for level in range(n - 1):
        cells = [""] * positions
        for j in range(w if level else max(w, 1)):
            owners = [rank for rank, own in enumerate(slices) if has_node(own, level, j)]
            named = f"{owners[0]}-{owners[-1]}" if len(owners) > 2 else "+".join(map(str, owners))
            is_sampled = level in (0, n - 2) or j == 0
            cells[level + j] = named if is_sampled else f"({named})"
        lines.append((f"level {level}", *cells))
    by_position = markdown(("", *("p" if i == 0 else f"p+{i}" for i in range(positions))), lines)
    by_rank = [
        (str(rank), str(own.num_columns), str(own.num_nodes), str(budget - own.num_nodes))
        for rank, own in enumerate(slices)
    ]
    return f"{by_position}\n{markdown(('rank', 'columns', 'window nodes, c among them', 'draft tokens'), by_rank)}"


def has_node(own: WindowSlice, level: int, j: int) -> bool:
    """Whether a rank computes the node of this level and column."""
    return j < own.level_0_nodes if level == 0 else own.first <= j < own.end


@dataclass(kw_only=True)
class Shares(Command):
    """Prints how a step is shared, by number of ranks; with --ranks, who computes each node of the window."""

    W: int = option(help="columns")
    N: int = option(help="tokens of an n-gram")
    G: int = option(help="of G x (N - 1) draft tokens")
    num_logits: int = option(16, "K, top-k logits of a node in the messages")
    ranks: int | None = option(None, "print the window on this many ranks, not the table")

    def run(self) -> None:
        shape = self.W, self.N, self.G
        print(figure(*shape, self.ranks) if self.ranks else table(*shape, self.num_logits))
