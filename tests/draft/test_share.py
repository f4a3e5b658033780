"""What each rank of a step computes: the window's columns, cuts through a tree, and the pool's own shares. No model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import inf

import numpy as np
import pytest

import lp
from lp.compiled import compiled_array
from lp.draft.pool.best_first_tree import TRUNK_NODES
from lp.draft.pool.ngram_pool import NGramPool
from lp.draft.share import Share, cut_tree, step_tokens
from lp.draft.source import DraftSource, ShareInput, TokenPrice
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts, WindowSlice, slice_window
from tests.support.layouts import Path, drawn_tree, tree_paths
from tests.support.pools import drawn_pool, drawn_step_times, share_of

NO_WINDOW = WindowDrafts()


def nodes_of(columns: int, end: int, levels: int) -> int:
    """Step tokens of so many columns up to `end`: level 0 up to there, and the columns' own entries below it."""
    return end + columns * (levels - 1) if columns else 1


def most_columns(w: int, n: int, rooms: Sequence[int]) -> int:
    """The most columns that ranks have room for, whatever block each of them takes, in the order of the ranks."""

    @cache
    def fits(rank: int, start: int, columns: int) -> bool:
        if rank == len(rooms):
            return start == columns
        ends = range(start + 1, columns + 1)
        fitting = (end for end in ends if nodes_of(end - start, end, n - 1) <= rooms[rank])
        return any(fits(rank + 1, end, columns) for end in (start, *fitting))

    return next(columns for columns in range(w, -1, -1) if fits(0, 0, columns))


def test_window_slices_have_every_column_once(cases: Callable[[int, int], range]) -> None:
    """A column that nobody has is never refreshed; one on two ranks is two samples of which neither is the window's."""
    dropped = 0
    for seed in cases(400, 4000):
        rng = random.Random(seed)
        w, n, ranks = rng.randint(0, 24), rng.randint(2, 7), rng.choice([1, 2, 3, 5, 8, 64, rng.randint(1, 64)])
        most = max(w + n - 2, 1) + rng.randint(0, w * n)
        rooms = tuple(most - rng.choice([0, 0, 0, rng.randrange(most)]) for _ in range(ranks))
        slices = slice_window(w, n, rooms)
        assert len(slices) == ranks
        have = sorted(column for own in slices for column in range(own.first, own.end))
        assert have == list(range(len(have))), f"seed {seed}: {slices}"
        for own, room in zip(slices, rooms, strict=True):
            assert own.levels == n - 1 and own.num_nodes == nodes_of(own.num_columns, own.end, n - 1)
            assert own.num_nodes <= max(room, 1), f"seed {seed}: {own} in {room}"
        if n == 2:
            assert sum(own.num_columns > 0 for own in slices) <= 1 and len(have) == min(w, max(rooms))
        elif ranks <= 8:
            assert len(have) == most_columns(w, n, rooms), f"seed {seed}: W={w} N={n} {rooms}"
        dropped += len(have) < w
    assert dropped > 20


def test_equal_ranks_have_as_many_columns_as_any_assignment(cases: Callable[[int, int], range]) -> None:
    """Columns on few ranks, the last ones first, must be no worse than any other assignment: by trying all of them."""
    for seed in cases(60, 400):
        rng = random.Random(seed)
        w, n, ranks = rng.randint(1, 5), rng.randint(3, 5), rng.randint(1, 3)
        room = rng.randint(1, w * n)
        kept = sum(own.num_columns for own in slice_window(w, n, (room,) * ranks))
        for columns in range(kept + 1, w + 1):
            for holders in product(range(ranks), repeat=columns):
                have = [[column for column in range(columns) if holders[column] == rank] for rank in range(ranks)]
                largest = max(nodes_of(len(own), own[-1] + 1, n - 1) for own in have if own)
                assert largest > room, f"seed {seed}: {columns} columns fit"


def test_a_window_of_one_level_lies_on_the_rank_with_most_room() -> None:
    """Level 0 on two ranks would be computed twice; on a rank that has to catch up it would not fit."""
    assert slice_window(5, 2, (9, 7, 9)) == (WindowSlice(0, 0, 1), WindowSlice(0, 0, 1), WindowSlice(0, 5, 1))
    assert slice_window(5, 2, (9, 7, 8))[0] == WindowSlice(0, 5, 1)


def test_more_columns_than_recursion_allows() -> None:
    """W may be 4096: a search that recurses by column overflows the stack, one that tries every size takes minutes."""
    config = lp.LookaheadConfig(window_size=1500, ngram_size=5, guess_set_size=10)
    assert step_tokens(config) == 1500 * 4 + 10 * 4
    assert sum(own.num_columns for own in slice_window(4096, 3, (100,) * 3)) == most_columns(150, 3, (100,) * 3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16, 64])
def test_ranks_have_room_for_the_fixed_step(ranks: int, cases: Callable[[int, int], range]) -> None:
    """Ranks divide a fixed step: with less it would draft less than asked, with more it would be another step."""
    for seed in cases(60, 600):
        rng = random.Random(seed)
        config = lp.LookaheadConfig(
            window_size=rng.randint(0, 24), ngram_size=rng.randint(2, 7), guess_set_size=rng.randint(0, 24)
        )
        w, n = config.window_size, config.ngram_size

        def holds(budget: int, shape: tuple[int, int, int] = (w, n, config.draft_budget)) -> bool:
            w, n, drafts = shape
            slices = slice_window(w, n, (budget,) * ranks)
            window = sum(own.num_nodes for own in slices)
            return sum(own.num_columns for own in slices) == w and window + drafts <= budget * ranks

        budget = step_tokens(config, ranks)
        least = w + n - 2 if w else 1
        assert budget >= least and holds(budget), f"seed {seed}: {config}"
        assert ranks * budget >= max(w, 1) + w * (n - 2) + config.draft_budget
        assert budget == least or not holds(budget - 1), f"seed {seed}: {config} takes more than it needs"
        if ranks == 1:
            assert budget == max(w, 1) + w * (n - 2) + config.draft_budget
        bounds = lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=config.guess_set_size, adaptive=True)
        assert step_tokens(bounds, ranks) == step_tokens(config, 1), "the bounds of an adaptive step are a rank's"


def check_draft(draft: DraftTree) -> list[Path]:
    """Parents come first, and are there; returns the nodes' paths."""
    assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
    assert len(draft.tokens) == len(draft.parents) and len(draft.accept_probs) in (0, len(draft))
    return tree_paths(draft)


def preorder(tree: DraftTree) -> list[list[int]]:
    """The nodes of a tree, each as the list of nodes that leads to it, parents before children."""

    def below(node: int, above: list[int]) -> list[list[int]]:
        path = [*above, node]
        found = [path]
        for child in range(len(tree)):
            if tree.parents[child] == node:
                found += below(child, path)
        return found

    return [path for node in range(len(tree)) if tree.parents[node] == -1 for path in below(node, [])]


def best_cut(paths: list[list[int]], base: Sequence[int], budget: int) -> tuple[int, float]:
    """The best cut into one block a rank, by trying all: how many paths fit, and the smallest largest step of them."""

    @cache
    def largest(rank: int, start: int, end: int) -> float:
        if rank == len(base):
            return 0 if start == end else inf
        tries = []
        for cut in range(start, end + 1):
            size = base[rank] + len({node for path in paths[start:cut] for node in path})
            if cut > start and size > budget:
                break
            tries.append(max(size, largest(rank + 1, cut, end)))
        return min(tries)

    fitting = max(end for end in range(len(paths) + 1) if largest(0, 0, end) < inf)
    return fitting, largest(0, 0, fitting)


def test_cuts_are_the_best_there_are(cases: Callable[[int, int], range]) -> None:
    """A node lost although it fits is a draft token less; unlevel shares make every rank wait for the largest."""
    whole = part = 0
    for seed in cases(400, 4000):
        rng = random.Random(seed)
        tree = drawn_tree(rng, rng.randint(0, 10), rng.randint(1, 3), twins=rng.random() < 0.2)
        base = [rng.choice([1, 1, 2, 5]) for _ in range(rng.randint(2, 4))]
        budget = rng.choice([0, rng.randint(1, 14)])
        shares = [cut_tree(tree, budget, base, rank) for rank in range(len(base))]
        where = f"seed {seed}: {tree}, {base}, {budget}"
        paths = [path for path in preorder(tree) if len(path) <= budget - min(base)]
        fitting, largest = best_cut(paths, base, budget) if paths else (0, 0)
        found = []
        for share, own in zip(shares, base, strict=True):
            draft = share.draft
            assert share.common == tree and draft.merge == tree.merge, "the digest compares the whole tree"
            assert len(draft) <= max(budget - own, 0), where
            nodes = [find(tree, draft, node) for node in range(len(draft))]
            assert nodes == sorted(set(nodes)), where
            found.append(set(nodes))
        expected = {node for path in paths[:fitting] for node in path}
        assert set().union(*found) == expected, where
        if fitting == len(paths) and paths:
            assert max(own + len(nodes) for own, nodes in zip(base, found, strict=True)) == max(largest, *base), where
        whole += 0 < fitting == len(tree)
        part += fitting < len(tree)
    assert whole > 50 and part > 50


def find(tree: DraftTree, draft: DraftTree, node: int) -> int:
    """The node of the whole tree that a share's node is: the one with the same probability, in the same place."""
    found = list(tree.accept_probs).index(draft.accept_probs[node])  # drawn, and so different
    assert draft.tokens[node] == tree.tokens[found]
    parent = draft.parents[node]
    assert tree.parents[found] == (find(tree, draft, parent) if parent >= 0 else -1)
    return found


def test_a_rank_alone_has_the_whole_tree() -> None:
    """What repeats the window is free, so a tree may be larger than the room: nothing of it may be cut off."""
    tree = drawn_tree(random.Random(0), 20, 3)
    assert cut_tree(tree, 5, [1], 0) == Share(tree)


def test_trees_of_arrays_are_cut_as_those_of_lists() -> None:
    """A source of one's own may propose arrays: of an array's truth numpy knows nothing."""
    tree = DraftTree([1, 2, 3, 4], [-1, 0, -1, 2], [0.9, 0.5, 0.3, 0.1])
    arrays = DraftTree(np.array(tree.tokens), np.array(tree.parents), np.array(tree.accept_probs))
    for rank in range(2):
        ours, theirs = cut_tree(arrays, 4, [1, 1], rank).draft, cut_tree(tree, 4, [1, 1], rank).draft
        assert len(theirs) > 0 and (list(ours.tokens), list(ours.accept_probs)) == (theirs.tokens, theirs.accept_probs)


def test_a_source_without_shares_is_cut() -> None:
    """Every rank asks for the tree of all ranks' rooms, and for none of its own window's drafts: they differ."""
    asked: list[tuple[int, WindowDrafts]] = []

    class Source(DraftSource):
        def propose(
            self, text: Sequence[int], budget: int, window: WindowDrafts, price: TokenPrice | None
        ) -> DraftTree:
            asked.append((budget, window))
            return DraftTree([1, 2, 3], [-1, -1, -1])

    propose_share = Source().propose_share
    window = WindowDrafts([5, 1], [])
    shares = [propose_share([5], ShareInput(rank, 6, [4, 5, 9], window, None)) for rank in range(3)]
    assert asked == [(2 + 1 + 0, NO_WINDOW)] * 3
    assert [share.draft.tokens for share in shares] == [[1, 2], [3], []]
    propose_share([5], ShareInput(0, 6, [4], window, None))
    assert asked[-1] == (2, window), "a rank alone has drafts of the window for nothing"


RANKS = [*range(1, 9), 16]


def drawn_shares(rng: random.Random, ranks: int) -> tuple[NGramPool, list[int], list[ShareInput]]:
    """A pool, its text, and what each rank would be asked for."""
    pool, text = drawn_pool(rng, draft_depth=rng.choice([1, 3, 12]), guess_set_size=200, adaptive=True)
    base = [rng.choice([1, 1, 1, 3, 9]) for _ in range(ranks)]
    budget = rng.choice([1, 4, 12, 40])
    known = tree_paths(pool.propose(text, 20))
    inputs = []
    for rank in range(ranks):
        window = NO_WINDOW
        if rng.random() < 0.4:  # one that guesses what the pool does
            along = rng.choice([(), *known])
            window = WindowDrafts([text[-1], *along, 3], [text[-1], *along[:1], 5] if rng.random() < 0.5 else [])
        inputs.append(ShareInput(rank, budget, base, window, None))
    return pool, text, inputs


def paid(share: Share, window: WindowDrafts) -> int:
    """Nodes that do not repeat a draft of the rank's window."""
    free = {tuple(chain[1:end]) for chain in window for end in range(2, len(chain) + 1)}
    return sum(path not in free for path in tree_paths(share.draft))


@pytest.mark.parametrize("ranks", RANKS)
def test_pool_shares_divide_one_tree(ranks: int, cases: Callable[[int, int], range]) -> None:
    """Shares of trees that differ do not add up, and look like drift; a node on two ranks is waste."""
    nodes = shared = 0
    for seed in cases(40, 400):
        rng = random.Random(f"{seed} {ranks}")
        pool, text, inputs = drawn_shares(rng, ranks)
        shares = [share_of(pool, text, each) for each in inputs]
        assert [share_of(pool, text, each) for each in inputs] == shares, "the same again"
        common = shares[0].common
        assert all(share.common == common for share in shares), f"seed {seed}: ranks grew different trunks"
        trunk = set(check_draft(common))
        assert len(trunk) == len(common) <= TRUNK_NODES - 1 and (ranks > 1 or not trunk)
        whole = pool.propose(text, 600)
        probs = dict(zip(tree_paths(whole), whole.accept_probs, strict=True))
        holders: dict[Path, list[int]] = {}
        for share, each in zip(shares, inputs, strict=True):
            paths = check_draft(share.draft)
            assert len(set(paths)) == len(paths), f"seed {seed}: rank {each.rank} has a node twice"
            assert paid(share, each.window) <= each.rooms[each.rank], f"seed {seed}: rank {each.rank} has no room"
            for path, prob in zip(paths, share.draft.accept_probs, strict=True):
                holders.setdefault(path, []).append(each.rank)
                assert probs.get(path, prob) == prob, "to the last bit: a probability decides what is accepted first"
        assert all(path in trunk for path, by in holders.items() if len(by) > 1), f"seed {seed}: {holders}"
        full = [paid(share, each.window) == each.rooms[each.rank] for share, each in zip(shares, inputs, strict=True)]
        assert trunk <= holders.keys() or any(full), f"seed {seed}: trunk nodes are lost although there is room"
        if min(inputs[0].rooms) >= TRUNK_NODES:
            assert trunk <= holders.keys(), f"seed {seed}"
        nodes += len(holders)
        shared += any(len(by) > 1 for by in holders.values())
    assert nodes > 100 and (shared or ranks == 1)


def test_the_share_of_one_rank_is_the_whole_tree(cases: Callable[[int, int], range]) -> None:
    """One rank must not draft otherwise because there might have been more."""
    for seed in cases(60, 600):
        pool, text, inputs = drawn_shares(random.Random(seed), 1)
        (only,) = inputs
        share = share_of(pool, text, only)
        assert share.draft == pool.propose(text, only.rooms[0], only.window) and not share.common.tokens


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shares_are_worth_nearly_what_one_tree_is(ranks: int, cases: Callable[[int, int], range]) -> None:
    """R ranks of B tokens should find what one of R x B would: blocks of little worth are slower, never wrong."""
    found = best = 0.0
    for seed in cases(40, 400):
        pool, text = drawn_pool(random.Random(seed), draft_depth=12, guess_set_size=200, adaptive=True)
        inputs = [ShareInput(rank, 17, [1] * ranks, NO_WINDOW, None) for rank in range(ranks)]
        union: dict[Path, float] = {}
        for each in inputs:
            draft = share_of(pool, text, each).draft
            union |= dict(zip(tree_paths(draft), draft.accept_probs, strict=True))
        found += sum(union.values())
        best += sum(pool.propose(text, 16 * ranks).accept_probs)
    assert 0.9 * best < found <= best * (1 + 1e-9)


def test_a_rank_drafts_for_nothing_up_to_the_largest(cases: Callable[[int, int], range]) -> None:
    """While another rank computes a window, tokens cost no time: a rank that leaves them out wastes its turn."""
    grew = 0
    for seed in cases(60, 600):
        rng = random.Random(seed)
        pool, text = drawn_pool(rng, guess_set_size=60)
        times = drawn_step_times(rng)
        seconds, marginal = compiled_array(times.seconds_by_tokens), compiled_array(times.marginal_seconds)
        least = rng.choice([0, 8, 20])
        dear = TokenPrice(1e9, 1, seconds, marginal, least_tokens=least)
        window = [1, least or 1]
        shares = [
            share_of(pool, text, ShareInput(rank, 40, window, NO_WINDOW, dear._replace(base_tokens=window[rank])))
            for rank in range(2)
        ]
        free = share_of(pool, text, ShareInput(0, 40, window, NO_WINDOW, None))
        if times.seconds_by_tokens[least] < times.seconds_by_tokens[least + 1 :].min():
            assert shares[0].draft.tokens == free.draft.tokens[: max(least - 1, 0)], f"seed {seed}"
            assert len(shares[1].draft) == 0
            grew += len(shares[0].draft) > 0
    assert grew > 5


def test_the_trunk_is_the_same_whatever_the_step_times_know() -> None:
    """Those of small steps end before a trunk does: what lies behind them in memory would be read as times."""
    pool, text = drawn_pool(random.Random(3), draft_depth=12, guess_set_size=200)
    common = share_of(pool, text, ShareInput(0, 4, [1, 1], NO_WINDOW, None)).common
    assert len(common) == TRUNK_NODES - 1
    memory = np.array([1.0] * 5 + [np.nan] * 100)
    few = TokenPrice(1.0, 1, *(compiled_array(memory[:5]) for _ in range(2)))
    assert share_of(pool, text, ShareInput(0, 4, [1, 1], NO_WINDOW, few)).common == common


def test_a_rank_without_room_drafts_nothing() -> None:
    """Catch-up tokens may fill a step: a block of the tree for that rank would be lost."""
    pool, text = drawn_pool(random.Random(3), draft_depth=12, guess_set_size=200)
    shares = [share_of(pool, text, ShareInput(rank, 20, [1, 20, 25], NO_WINDOW, None)) for rank in range(3)]
    assert [len(share.draft) for share in shares[1:]] == [0, 0]
    assert shares[0].draft.tokens and set(tree_paths(shares[0].common)) <= set(tree_paths(shares[0].draft))
    nothing = [share_of(pool, text, ShareInput(rank, 0, [1, 1], NO_WINDOW, None)).draft for rank in range(2)]
    assert [len(draft) for draft in nothing] == [0, 0], "a step that drafts nothing has a budget of 0"
