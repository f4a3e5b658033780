"""Window, candidate tree, layout, verification and prompt lookup, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from lp.draft.layout import StepLayout, ancestors
from lp.draft.prompt_lookup import PromptLookup, PromptLookupConfig
from lp.draft.tree import DraftTree, DraftTreeBuilder
from lp.draft.window import LookaheadWindow, WindowDrafts, WindowSlice
from lp.models.kv_cache import StaticKVCache
from lp.models.tree_pass import TreePass
from tests.support.layouts import NOTHING, drawn_ranks, layout_of, node_of, path_to, visible_of, walk_alone, window_of


def _tree(*paths: list[int], budget: int = 100) -> DraftTree:
    builder = DraftTreeBuilder(budget)
    for path in paths:
        builder.add_path(path)
    return builder.build()


@pytest.mark.parametrize(("w", "n"), [(1, 2), (4, 2), (1, 5), (5, 3), (6, 5)])
@pytest.mark.parametrize("moved", [1, 2, 3, 9])
def test_window_entries_keep_their_position(w: int, n: int, moved: int) -> None:
    """A column shifted by one too many would guess for the wrong position for ever after."""
    window = LookaheadWindow(w, n, [7, 8, 9])
    position = 50
    window.levels = [[position + j + k for j in range(w)] for k in range(n - 1)]  # entry = the position it guesses
    new = [position + j + n - 1 for j in range(w)]
    text = [0] * (position + moved) + [position + moved]  # the last token carries its own position too
    window.advance(text, moved, new)
    for k, row in enumerate(window.levels):
        assert len(row) == w
        kept = max(w - (moved - 1), 1 if k == 0 else 0)
        assert row[:kept] == [position + moved + j + k for j in range(kept)]


def test_fresh_columns_continue_their_neighbour() -> None:
    """A column of unrelated tokens guesses nothing until its rows have all been replaced."""
    window = LookaheadWindow(4, 4, [7, 8, 9])
    position = 50
    window.levels = [[position + j + k for j in range(4)] for k in range(3)]
    text = [0] * (position + 2) + [position + 2]
    window.advance(text, 2, [position + j + 3 for j in range(4)])
    assert [row[3] for row in window.levels[:2]] == [position + 2 + 3, position + 2 + 4]


def test_a_new_window_s_last_guesses_depend_on_the_text_alone() -> None:
    """Where a step took a whole window's positions, its columns are those of a window that begins at that text."""
    text = random.Random(3).sample(range(1000), 57)
    window = LookaheadWindow(6, 4, text[:40])
    window.advance(text, 17, [1] * 6)
    fresh = LookaheadWindow(6, 4, text)
    assert window.levels[-1] == fresh.levels[-1]
    assert [level[0] for level in window.levels] == [level[0] for level in fresh.levels]


def test_what_a_rank_need_not_draft_again() -> None:
    """Draft tokens that the window has are its nodes: level 0 up to the rank's last column, and column 0."""
    window = LookaheadWindow(3, 4, [1])
    window.levels = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert window.drafts(WindowSlice(0, 2, 3)) == ([1, 2], [1, 4, 7])
    assert window.drafts(WindowSlice(2, 3, 3)) == ([1, 2, 3], [])
    assert window.drafts(WindowSlice(0, 0, 3)) == WindowDrafts()


def test_window_starts_filled_from_text() -> None:
    """An empty or random start costs N - 1 steps that find nothing."""
    text = list(range(1000, 1030))
    window = LookaheadWindow(6, 4, text)
    assert window.levels[0][0] == text[-1]
    for j in range(1, 6):
        column = [row[j] for row in window.levels]
        start = text.index(column[0])
        assert column == [text[(start + k) % len(text)] for k in range(3)]


def test_ngrams_follow_columns() -> None:
    """An n-gram read across columns instead of down one would never come true."""
    window = LookaheadWindow(3, 3, [1])
    window.levels = [[1, 2, 3], [4, 5, 6]]
    assert window.ngrams([7, 8, 9]) == [(1, 4, 7), (2, 5, 8), (3, 6, 9)]


def test_layout_positions_and_visibility() -> None:
    """The tree of lp/draft/layout.py, node by node: each sees the path that leads to it, nothing of another branch."""
    layout = layout_of(4, 4, [[41, 42, 43], [41, 49], [100, 200, 50]], position=20)
    visible = visible_of(layout)
    for j in range(4):
        for k in range(3):
            node = node_of(layout, k, j)
            assert layout.positions[node] == 20 + j + k
            seen = {node_of(layout, 0, i) for i in range(j + 1)} | {node_of(layout, i, j) for i in range(1, k + 1)}
            assert set(np.flatnonzero(visible[node])) == seen
    own = range(layout.num_window, layout.num_nodes)
    assert [layout.tokens[s] for s in own] == [41, 42, 43, 49, 50]  # 100, 200 are column 0's nodes already
    for node in own:
        assert layout.positions[node] == layout.positions[layout.parents[node]] + 1
        assert set(np.flatnonzero(visible[node])) == set(path_to(layout, node))
    assert layout.parents[layout.num_window + 4] == node_of(layout, 2, 0)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 1), (0, 3), (2, 3), (3, 6), (5, 6)])
def test_a_slice_is_part_of_the_whole_window(n: int, first: int, end: int) -> None:
    """A rank's columns are those of the whole window, to the token, the position and all that they see."""
    whole, slice_ = layout_of(6, n, []), WindowSlice(first if n > 2 else 0, end, n - 1)
    drafts = _tree([41, 42], [1, 50])  # the second begins as level 0 does, if the rank has it
    layout = StepLayout(window_of(6, n), slice_, drafts, 5, 9, 10**6, catch_up=[7, 8])
    assert layout.num_window == slice_.num_nodes
    entries = [(0, j) for j in range(slice_.level_0_nodes)]
    entries += [(k, j) for k in range(1, n - 1) for j in range(slice_.first, slice_.end)]
    nodes = [node_of(whole, k, j) for k, j in entries]
    assert [layout.tokens[node] for node in range(layout.num_window)] == [whole.tokens[node] for node in nodes]
    assert [layout.positions[node] for node in range(layout.num_window)] == [whole.positions[node] for node in nodes]
    tokens, positions = layout.step_tokens, layout.step_positions
    visible = visible_of(layout)
    missing, window = 2, layout.num_window
    assert (
        visible[missing : missing + window, missing : missing + window] == visible_of(whole)[np.ix_(nodes, nodes)]
    ).all()
    assert visible[missing:, :missing].all() and (visible[:missing] == np.tri(2, len(tokens), dtype=bool)).all()
    assert tokens.tolist() == [7, 8, *layout.tokens] and positions.tolist() == [7, 8, *layout.positions]
    assert layout.num_tokens == len(tokens) == 2 + layout.num_nodes
    if slice_.num_columns:
        sampling = range(slice_.first_of_last_level, slice_.first_of_last_level + slice_.num_columns)
        assert [layout.tokens[node] for node in sampling] == window_of(6, n).levels[-1][slice_.first : slice_.end] or (
            n == 2 and sampling[0] == 0
        )
        assert set(sampling) <= set(layout.sampled_nodes)
    reached = {node for node, (k, j) in enumerate(entries) if k == 0 or j == 0} | set(range(window, layout.num_nodes))
    assert set(np.flatnonzero(layout.reachable)) == reached <= set(layout.sampled_nodes)
    shares_level_0 = slice_.level_0_nodes > 1
    assert layout.num_nodes == window + 4 - shares_level_0
    at_50 = layout.tokens.tolist().index(50)
    assert layout.branch_tokens(at_50) == [1, 50] and layout.reachable[layout.parents[at_50]]


def test_a_draft_beyond_the_limit_leaves_the_others_in() -> None:
    """The limit is of positions: a path that is cut there must not cost the paths that come after it."""
    draft = DraftTree([1, 2, 3, 4, 5], [-1, 0, 1, -1, 3])  # two paths: of three tokens, then of two
    layout = StepLayout(window_of(0, 2), WindowSlice(0, 0, 1), draft, 9, 9, 12)
    paths = [layout.branch_tokens(node) for node in range(layout.num_window, layout.num_nodes)]
    assert paths == [[1], [1, 2], [4], [4, 5]]


@pytest.mark.parametrize("missing", [0, 3])
def test_padding_is_seen_by_nothing(missing: int) -> None:
    """Tokens that make a step as large as a faster one must not change what the others see."""
    layout = StepLayout(window_of(3, 3), WindowSlice(0, 3, 2), _tree([41, 42]), 5, 9, 10**6, catch_up=[1] * missing)
    tokens, positions = layout.step_tokens, layout.step_positions
    cache = StaticKVCache(1, 64)
    whole = TreePass(tokens, positions, layout.step_parents, cache, layout.sampled_tokens, True, 7, "sql")
    more_tokens, more_positions, more_parents, *rest = whole.padded(4)
    assert rest == [*whole[3:]], "all but its tokens is as it was"
    visible, more_visible = visible_of(layout), ancestors(more_parents)
    size = len(tokens)
    assert (more_tokens[:size] == tokens).all() and (more_positions[:size] == positions).all()
    assert len(more_tokens) == size + 4
    assert (more_visible[:size, :size] == visible).all() and not more_visible[:size, size:].any()
    assert (more_visible[size:, size:] == np.eye(4, dtype=bool)).all() and not more_visible[size:, :size].any()


@pytest.mark.parametrize("w", [0, 1, 5])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("room", [0, 1, 2, 4, 30])
def test_layout_stays_below_the_limit(w: int, n: int, room: int) -> None:
    """A node at or past the limit has no position embedding; `c` alone is always there."""
    layout = layout_of(w, n, [[1, 2, 3, 4, 5]], limit=10 + room, position=9)
    assert max(layout.positions) < 10 + room
    assert layout.positions[0] == 9 and 0 in layout.sampled_nodes
    assert layout.sampled_nodes.tolist() == sorted(set(layout.sampled_nodes.tolist()))


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (DraftTree([1, 2], [-1]), "2 tokens, 1 parents and 0 accept_probs"),
        (DraftTree([1, 2], [-1, 0], [0.5]), "2 tokens, 2 parents and 1 accept_probs"),
        (DraftTree([1, 2], [1, -1]), "comes before its parent"),
        (DraftTree([1], [0]), "comes before its parent"),
        (DraftTree([1], [10**9]), "comes before its parent"),
    ],
)
def test_a_draft_tree_that_is_none_is_refused(draft: DraftTree, says: str) -> None:
    """A source of the user's may have a fault: compiled code would read memory that is not the tree's."""
    with pytest.raises(ValueError, match=says):
        StepLayout(window_of(0, 2), WindowSlice(0, 0, 1), draft, 5, 9, 10**6)


def test_ancestors_of_a_tree() -> None:
    """A node sees its ancestors and itself."""
    whole = ancestors([-1, 0, 1, 0, 3, 1, 5])
    assert whole[6].tolist() == [True, True, False, False, False, True, True]


def test_nodes_see_their_ancestors_alone(cases: Callable[[int, int], range]) -> None:
    """The window's part of the mask is stored, the draft tree's is filled in, each behind the catch-up tokens."""
    for seed in cases(100, 1000):
        layouts, _ = drawn_ranks(random.Random(seed), 1 + seed % 4)
        for layout in layouts:
            visible, missing = visible_of(layout), len(layout.catch_up)
            assert (visible[missing:, missing:] == ancestors(layout.parents)).all(), f"seed {seed}"
            assert visible[missing:, :missing].all() and not visible[:missing, missing:].any()
            assert (visible[:missing, :missing] == np.tri(missing, dtype=bool)).all()


def test_walk_follows_the_truth_only() -> None:
    """Accepting a child the model did not choose is the one unforgivable fault."""
    layout = layout_of(3, 3, [[1, 2, 3], [4, 5]])
    read = dict.fromkeys(layout.sampled_nodes, 77)
    assert walk_alone(layout, read).tokens == [77]
    node = {int(layout.tokens[s]): s for s in range(layout.num_window, layout.num_nodes)}
    read |= {0: 4, node[4]: 5, node[5]: 6}
    outcome = walk_alone(layout, read)
    assert (outcome.tokens, outcome.own_path, outcome.accepted) == ([4, 5, 6], [0, node[4], node[5]], 2)
    assert walk_alone(layout, read, most=0).tokens == [4]
    assert walk_alone(layout, read, most=1).tokens == [4, 5]


def test_walk_through_row_0_and_column_0() -> None:
    """Both are candidates at no extra node; where both carry the token, the deeper one must be found."""
    window = LookaheadWindow(3, 4, [5])
    window.levels = [[5, 1, 2], [1, 101, 102], [200, 201, 202]]  # row 0 and column 0 agree on the next token
    layout = StepLayout(window, WindowSlice(0, 3, 3), _tree(), 5, 9, 10**6)
    read = dict.fromkeys(layout.sampled_nodes, 0) | {
        0: 1,
        1: 200,
        node_of(layout, 1, 0): 200,
        node_of(layout, 2, 0): 33,
    }
    outcome = walk_alone(layout, read)
    assert outcome.tokens == [1, 200, 33]
    assert outcome.own_path == [0, 1, node_of(layout, 2, 0)]  # row 0's node stands for both that carry the token


def test_drafts_behind_a_node_are_those_of_its_walk() -> None:
    """Rejection sampling tries them one by one: one that is missing or twice there gives another distribution."""
    window = LookaheadWindow(3, 4, [5])
    window.levels = [[5, 1, 2], [1, 101, 102], [200, 201, 202]]
    layout = StepLayout(window, WindowSlice(0, 3, 3), _tree([1, 9], [4], [1, 200]), 5, 9, 10**6)
    nine, four = layout.num_window, layout.num_window + 1
    assert (
        layout.drafts() == {0: [1, 4], 1: [2, 200, 9]}
        and layout.tokens[nine:].tolist() == [9, 4]
        and four not in layout.drafts()
    )
    without = StepLayout(window, WindowSlice(1, 3, 3), _tree([1, 9], [4]), 5, 9, 10**6)
    assert without.drafts() == {0: [1, 4], 1: [2, 9]}, "column 0 is another rank's"
    apart = DraftTree([1, 9, 1, 8], [-1, 0, -1, 2], merge=False)
    side_by_side = StepLayout(window, WindowSlice(0, 3, 3), apart, 5, 9, 10**6)
    first = side_by_side.num_window
    assert side_by_side.drafts() == {0: [1], first: [9], first + 2: [8]}


def test_tree_shares_prefixes_within_budget() -> None:
    """Nodes spent twice on one prefix are rows wasted; a budget exceeded breaks the buffers."""
    tree = _tree([1, 2, 3], [1, 2, 4], [1, 5], budget=5)
    assert (tree.tokens, tree.parents) == ([1, 2, 3, 4, 5], [-1, 0, 1, 1, 0])
    assert len(_tree(*[[i, i] for i in range(9)], budget=5)) == 5


def test_prompt_lookup_longest_then_earliest() -> None:
    """As transformers' own: the longest run of last tokens, its first occurrence."""
    text = [1, 2, 3, 9, 2, 7, 8, 1, 2]
    source = PromptLookup(PromptLookupConfig(max_matching_ngram=2), text)
    assert source.propose(text, 3).tokens == [3, 9, 2]
    source = PromptLookup(PromptLookupConfig(max_matching_ngram=1), text)
    assert source.propose(text, 2).tokens == [3, 9]
    source.observe([*text, 42, 8], 2, NOTHING)
    assert source.propose([*text, 42, 8], 2).tokens == [1, 2]
