"""How a step is shared among ranks: the tables and the worked figure of docs/lookahead-parallelism.md.

    python scripts/tables.py shares 15 5 15             # W N G: the table for 1..64 ranks
    python scripts/tables.py shares 5 4 2 --ranks 2     # the figure of one step

The draft tree is G chains of N - 1 tokens without a shared prefix, which is the most nodes that G can cost.
"""

from __future__ import annotations

import argparse

import lp
from lp.draft.layout import StepLayout, largest_layout
from lp.parallel.sharding import ShardPlan

RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def step(w: int, n: int, g: int) -> StepLayout:
    """A step of W columns and G chains."""
    return largest_layout(lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g, draft_depth=None))


def equal_counts(layout: StepLayout, ranks: int) -> list[int]:
    """Tokens of every rank when each gets as many columns and chains as the next, in order; at most one more."""
    inner = set(layout.parents)
    leaves = [node for node in range(layout.num_window, len(layout)) if node not in inner]
    counts = []
    for rank in range(ranks):
        pieces = [0]
        for level in (layout.last_level(), leaves):
            pieces += level[rank * len(level) // ranks : (rank + 1) * len(level) // ranks]
        counts.append(len({above for node in pieces for above in layout.path(node)}))
    return counts


def table(w: int, n: int, g: int) -> str:
    """The largest rank's tokens and the mean, level shares against equal counts, by number of ranks."""
    layout = step(w, n, g)
    lines = [
        "| ranks | largest | mean | largest, equal counts | mean, equal counts |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for ranks in RANKS:
        level_shares = [len(nodes) for nodes in ShardPlan.build(layout, ranks).nodes]
        cells = [str(ranks)]
        for counts in (level_shares, equal_counts(layout, ranks)):
            cells += [str(max(counts)), f"{sum(counts) / ranks:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(w: int, n: int, g: int, ranks: int) -> str:
    """Which ranks compute each node, by position; where several do, the first sends its sample. (r): not sampled."""
    layout = step(w, n, g)
    plan = ShardPlan.build(layout, ranks)
    sampled = set(layout.sampled_nodes)

    def cell(node: int) -> str:
        owners = "+".join(str(rank) for rank, nodes in enumerate(plan.nodes) if node in nodes)
        return owners if node in sampled else f"({owners})"

    columns = max(w + n - 2, n)
    lines = [
        f"| | {' | '.join('p' if i == 0 else f'p+{i}' for i in range(columns))} |",
        "| :--- |" + " :-: |" * columns,
    ]
    named = {f"level {k}": [layout.window_node(k, j) for j in range(layout.columns)] for k in range(n - 1)}
    first = layout.num_window
    named |= {f"draft {i + 1}": [*range(first + i * (n - 1), first + (i + 1) * (n - 1))] for i in range(g)}
    for name, nodes in named.items():
        cells = [""] * columns
        for node in nodes:
            cells[layout.positions[node]] = cell(node)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, meaning in (("W", "columns"), ("N", "tokens of an n-gram"), ("G", "chains of draft tokens")):
        parser.add_argument(name, type=int, help=meaning)
    parser.add_argument("--ranks", type=int, help="print the figure of one step on this many ranks, not the table")


def run(args: argparse.Namespace) -> None:
    print(figure(args.W, args.N, args.G, args.ranks) if args.ranks else table(args.W, args.N, args.G))
