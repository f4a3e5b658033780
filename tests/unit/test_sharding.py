"""Shares of a step: complete, closed under ancestors, owned once, and level. No processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest

from launch.bench.tables.shares import equal_counts, figure, step, table
from lp.draft.layout import StepLayout
from lp.parallel import sharding
from lp.parallel.sharding import EXACT_PIECES, EXACT_TRIES, ShardPlan
from tests.layouts import FIRST, chains, column_0, drawn_layout, layout_of, row_0

DOC = Path(__file__).resolve().parents[2] / "docs" / "lookahead-parallelism.md"


def check_plan(layout: StepLayout, plan: ShardPlan, ranks: int) -> None:
    """What must hold of any plan."""
    assert len(plan.nodes) == len(plan.owned) == ranks
    assert set().union(*plan.nodes) == set(range(len(layout)))
    for mine in plan.nodes:
        assert mine == sorted(set(mine)) and mine[0] == 0
        assert all(set(layout.path(node)) <= set(mine) for node in mine)
    assert sorted(node for mine in plan.owned for node in mine) == layout.sampled_nodes
    for rank, mine in enumerate(plan.owned):
        assert mine == sorted(mine)
        assert all(rank == min(r for r in range(ranks) if node in plan.nodes[r]) for node in mine)


def test_plans_are_complete_closed_and_owned_once(cases: Callable[[int, int], range]) -> None:
    """A node that nobody computes or reads, or a row without its ancestors, would be a wrong token."""
    for seed in cases(300, 5000):
        rng = random.Random(seed)
        layout, ranks = drawn_layout(rng), rng.randint(1, 10)
        check_plan(layout, ShardPlan.build(layout, ranks), ranks)


def fits(layout: StepLayout, ranks: int, limit: int) -> bool:
    """Whether any assignment of columns and candidate paths to ranks keeps all within `limit` rows: by trying all.

    Ranks with the same nodes are tried once, and a partial assignment is left when a rank is past the limit.
    """
    inner = set(layout.parents)
    ends = [*layout.last_level(), *(node for node in range(layout.num_window, len(layout)) if node not in inner)]
    pieces = sorted((frozenset(layout.path(node)) for node in ends), key=len, reverse=True)

    @cache
    def place(piece: int, loads: tuple[frozenset[int], ...]) -> bool:
        if piece == len(pieces):
            return True
        for rank, load in enumerate(loads):
            more = load | pieces[piece]
            if loads.index(load) == rank and len(more) <= limit:
                others = (*loads[:rank], *loads[rank + 1 :])
                if place(piece + 1, tuple(sorted((more, *others), key=sorted))):
                    return True
        return False

    return limit >= 1 and place(0, (frozenset([0]),) * ranks)


def forests(nodes: int) -> Iterator[list[list[int]]]:
    """Every forest of so many nodes, once, as the paths to its nodes; a token is a place among siblings."""

    def trees(size: int) -> Iterator[tuple]:
        yield from groves(size - 1, size - 1)

    def groves(size: int, largest: int) -> Iterator[tuple]:
        """Trees in descending order of size, and of shape where sizes are equal."""
        if size == 0:
            yield ()
            return
        for first in range(min(size, largest), 0, -1):
            for repeat in range(size // first, 0, -1):
                for firsts in combinations_with_replacement(list(trees(first)), repeat):
                    for rest in groves(size - first * repeat, first - 1):
                        yield (*firsts, *rest)

    def paths(grove: tuple, above: list[int]) -> Iterator[list[int]]:
        for i, tree in enumerate(grove):
            yield [*above, FIRST + i]
            yield from paths(tree, [*above, FIRST + i])

    for grove in groves(nodes, nodes):
        yield list(paths(grove, []))


def grafted(w: int, n: int, count: int, depth: int) -> Iterator[list[list[int]]]:
    """`count` chains of `depth`, behind every choice of places: `c`, along row 0, down column 0."""
    places = [row_0(j) for j in range(w)] + [column_0(k) for k in range(1, n - 1) if w]
    for chosen in combinations_with_replacement(places or [[]], count):
        yield [[*place, *(FIRST + 10 * i + k for k in range(depth))] for i, place in enumerate(chosen)]


def small_trees(w: int, n: int, drawn: int) -> Iterator[list[list[int]]]:
    """Candidate trees small enough to try every share of them."""
    for count, depth in product(range(7), range(1, 5)):
        yield chains(count, depth)
    for nodes in range(7):
        yield from forests(nodes)
    for count, depth in [(1, 2), (2, 1), (2, 3), (3, 2)]:
        yield from grafted(w, n, count, depth)
    rng = random.Random(f"{w} {n}")
    for _ in range(drawn):  # tries with long trunks, some of them grafted
        starts = [[], row_0(rng.randrange(w)) if w else [], column_0(n - 2) if w else []]
        yield [
            [*rng.choice(starts), *(FIRST + rng.randrange(2) for _ in range(rng.randint(1, 5)))]
            for _ in range(rng.randint(2, 6))
        ]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("w", range(6))
def test_small_shares_are_the_best_there_are(w: int, n: int, cases: Callable[[int, int], range]) -> None:
    """Unlevel shares make every rank wait for the largest: nothing would be wrong, and nothing faster."""
    for paths in small_trees(w, n, drawn=len(cases(60, 600))):
        layout = layout_of(w, n, paths)
        for ranks in range(1, 6):
            plan = ShardPlan.build(layout, ranks)
            most = plan.max_tokens
            assert not fits(layout, ranks, most - 1), f"{most} rows are not the fewest: W={w} N={n} R={ranks} {paths}"
            if ranks in (2, 3):
                check_plan(layout, plan, ranks)


def chains_optimum(w: int, n: int, g: int, ranks: int) -> int:
    """Fewest rows of the largest rank for chains of N - 1, by another way: how many chains fit beside the columns.

    Chains are all alike, so a share is a number of columns and of chains, and columns in order are best: dealing the
    same numbers in order of the ranks' last columns moves no rank's last column to the right.
    """
    limit = 0
    while True:
        limit += 1
        most = {0: 0}  # columns placed -> most chains placed
        for _ in range(ranks):
            after: dict[int, int] = {}
            for (start, placed), end in product(most.items(), range(w + 1)):
                rows = 1 if start == end else end + (end - start) * (n - 2)
                if start <= end and rows <= limit:
                    after[end] = max(after.get(end, 0), placed + (limit - rows) // (n - 1))
            most = after
        if most.get(w, -1) >= g:
            return limit


@pytest.mark.parametrize(
    ("w", "n", "g"), [(15, 5, 15), (10, 5, 10), (7, 5, 7), (20, 7, 20), (5, 4, 2), (0, 5, 15), (15, 5, 0)]
)
def test_shares_of_chains_are_the_best_up_to_64_ranks(w: int, n: int, g: int) -> None:
    """The search stops early where there are many pieces; at the usual shapes that must cost nothing."""
    for ranks in (*range(1, 17), 24, 32, 48, 64):
        layout = step(w, n, g)
        plan = ShardPlan.build(layout, ranks)
        assert plan.max_tokens == chains_optimum(w, n, g, ranks), ranks
        assert plan.max_tokens <= max(equal_counts(layout, ranks))
        check_plan(layout, plan, ranks)


def test_the_early_stop_costs_two_rows_at_most(
    cases: Callable[[int, int], range], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are many pieces the search ends early, which must stay a matter of a row, not of a bad share."""
    more = 0
    drawn = cases(60, 2000)
    for seed in drawn:
        rng = random.Random(seed)
        w, n, ranks = rng.randint(3, 16), rng.randint(3, 5), rng.randint(2, 8)
        paths = [[FIRST + min(int(rng.expovariate(0.7)), 6) for _ in range(n - 1)] for _ in range(rng.randint(6, 16))]
        layout = layout_of(w, n, paths)
        quick = ShardPlan.build(layout, ranks).max_tokens
        with monkeypatch.context() as patch:
            patch.setattr(sharding, "TRIES", 5000)
            patient = ShardPlan.build(layout, ranks).max_tokens
        assert patient <= quick <= patient + 2, seed
        more += quick > patient
    assert more <= len(drawn) // 8


def test_the_exact_search_is_never_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should small cases need more placements than they may try, the claim of the test above would rest on luck."""
    tried: list[int] = []
    ranks_of = sharding._Assignment._ranks
    monkeypatch.setattr(sharding._Assignment, "_ranks", lambda *args: tried.append(1) or ranks_of(*args))
    most = 0
    for seed in range(400):
        rng = random.Random(seed)
        layout = drawn_layout(rng, widest=5)
        ranks = rng.randint(2, 5)
        deal = sharding._Assignment(layout, [0] * ranks)
        if len(deal.pieces) <= EXACT_PIECES:
            tried.clear()
            deal._place(ShardPlan.build(layout, ranks).max_tokens - 1)
            most = max(most, len(tried))
    assert most < EXACT_TRIES / 2


def test_more_columns_than_recursion_allows() -> None:
    """W may be 4096: a search that recurses by piece would overflow the stack in the middle of a run."""
    layout = step(1500, 3, 10)
    check_plan(layout, ShardPlan.build(layout, 3), 3)


def test_the_page_shows_what_the_plan_does() -> None:
    """Tables and the worked figure are printed by scripts/tables.py shares; pasted ones go stale."""
    page = DOC.read_text(encoding="utf-8")
    for block in (table(15, 5, 15), table(60, 5, 60), figure(5, 4, 2, 2)):
        assert block in page
