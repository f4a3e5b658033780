"""How a step is shared among ranks, in Markdown: the tables and the worked figure of docs/lookahead-parallelism.md.

    python scripts/shares.py 15 5 15             # W N G: the table for 1..64 ranks
    python scripts/shares.py 5 4 2 --ranks 2     # the figure of one step

Candidates are G chains of N - 1 tokens that share nothing, which is the most rows that G can cost.
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
    """Rows of every rank when each gets as many columns and as many chains as the next, in order; at most one more."""
    inner = set(layout.parents)
    leaves = [node for node in range(layout.num_window, len(layout)) if node not in inner]
    rows = []
    for rank in range(ranks):
        given = [0]
        for pieces in (layout.last_level(), leaves):
            given += pieces[rank * len(pieces) // ranks : (rank + 1) * len(pieces) // ranks]
        rows.append(len({above for node in given for above in layout.path(node)}))
    return rows


def table(w: int, n: int, g: int) -> str:
    """The largest rank's rows and the mean, level shares against equal counts, by number of ranks."""
    layout = step(w, n, g)
    lines = [
        "| ranks | largest | mean | largest, equal counts | mean, equal counts |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for ranks in RANKS:
        cells = [str(ranks)]
        for rows in ([len(mine) for mine in ShardPlan.build(layout, ranks).nodes], equal_counts(layout, ranks)):
            cells += [str(max(rows)), f"{sum(rows) / ranks:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(w: int, n: int, g: int, ranks: int) -> str:
    """Which ranks compute each node, by position; where several do, the first tells the others what it reads off."""
    layout = step(w, n, g)
    plan = ShardPlan.build(layout, ranks)
    read = set(layout.sampled_nodes)

    def cell(node: int) -> str:
        who = "+".join(str(rank) for rank, mine in enumerate(plan.nodes) if node in mine)
        return who if node in read else f"({who})"

    columns = max(w + n - 2, n)
    lines = [
        f"| | {' | '.join('p' if i == 0 else f'p+{i}' for i in range(columns))} |",
        "| :--- |" + " :-: |" * columns,
    ]
    named = {f"row {k}": [layout.window_node(k, j) for j in range(layout.columns)] for k in range(n - 1)}
    first = layout.num_window
    named |= {f"candidate {i + 1}": [*range(first + i * (n - 1), first + (i + 1) * (n - 1))] for i in range(g)}
    for name, nodes in named.items():
        cells = [""] * columns
        for node in nodes:
            cells[layout.positions[node]] = cell(node)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, meaning in (("W", "columns"), ("N", "tokens of an n-gram"), ("G", "candidates")):
        parser.add_argument(name, type=int, help=meaning)
    parser.add_argument("--ranks", type=int, help="print the figure of one step on so many ranks, not the table")
    args = parser.parse_args()
    print(figure(args.W, args.N, args.G, args.ranks) if args.ranks else table(args.W, args.N, args.G))


if __name__ == "__main__":
    main()
