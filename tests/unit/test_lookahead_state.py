"""Window, candidate tree, layout, verification and prompt lookup, without a model."""

from __future__ import annotations

import numpy as np
import pytest

from lp.draft.layout import StepLayout, ancestors
from lp.draft.prompt_lookup import PromptLookup, PromptLookupConfig
from lp.draft.tree import DraftTree, DraftTreeBuilder
from lp.draft.verify import walk
from lp.draft.window import LookaheadWindow
from tests.layouts import NOTHING


def _tree(*paths: list[int], budget: int = 100) -> DraftTree:
    builder = DraftTreeBuilder(budget)
    for path in paths:
        builder.add_path(path)
    return builder.build()


def _layout(w: int, n: int, tree: DraftTree, limit: int = 10**6, position: int = 9) -> StepLayout:
    window = LookaheadWindow(w, n, [5])
    window.levels = [[100 * k + j for j in range(w)] for k in range(n - 1)]  # every entry says where it stands
    return StepLayout(window, tree, 5, position, limit)


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
    """The tree of lp/draft/layout.py, node by node: each sees the path to it and nothing of another branch."""
    layout = _layout(4, 4, _tree([41, 42, 43], [41, 49], [100, 200, 50]), position=20)
    visible = layout.visible()
    for j in range(4):
        for k in range(3):
            node = layout.window_node(k, j)
            assert layout.positions[node] == 20 + j + k
            seen = {layout.window_node(0, i) for i in range(j + 1)} | {
                layout.window_node(i, j) for i in range(1, k + 1)
            }
            assert set(np.flatnonzero(visible[node])) == seen
    own = range(layout.num_window, len(layout))
    assert [layout.tokens[s] for s in own] == [41, 42, 43, 49, 50]  # 100, 200 are column 0's nodes already
    for node in own:
        assert layout.positions[node] == layout.positions[layout.parents[node]] + 1
        assert set(np.flatnonzero(visible[node])) == set(layout.path(node))
    assert layout.parents[layout.num_window + 4] == layout.window_node(2, 0)


@pytest.mark.parametrize("w", [0, 1, 5])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("room", [0, 1, 2, 4, 30])
def test_layout_stays_below_the_limit(w: int, n: int, room: int) -> None:
    """A node at or past the limit has no position embedding; `c` alone is always there."""
    layout = _layout(w, n, _tree([1, 2, 3, 4, 5]), limit=10 + room, position=9)
    assert max(layout.positions) < 10 + room
    assert layout.positions[0] == 9 and 0 in layout.sampled_nodes
    assert len(layout.last_level()) == layout.columns <= w
    assert set(layout.last_level()) <= set(layout.sampled_nodes)
    assert layout.sampled_nodes == sorted(set(layout.sampled_nodes))


def test_ancestors_extend_a_known_part() -> None:
    """The cached window part must not leak visibility into the candidates."""
    parents = [-1, 0, 1, 0, 3, 1, 5]
    whole = ancestors(parents)
    assert (ancestors(parents, ancestors(parents[:3])) == whole).all()
    assert whole[6].tolist() == [True, True, False, False, False, True, True]


def test_walk_follows_the_truth_only() -> None:
    """Accepting a child the model did not choose is the one unforgivable fault."""
    layout = _layout(3, 3, _tree([1, 2, 3], [4, 5]))
    read = dict.fromkeys(layout.sampled_nodes, 77)
    assert walk(layout, read).tokens == [77]
    node = {layout.tokens[s]: s for s in range(layout.num_window, len(layout))}
    read |= {0: 4, node[4]: 5, node[5]: 6}
    outcome = walk(layout, read)
    assert (outcome.tokens, outcome.path, outcome.accepted) == ([4, 5, 6], [0, node[4], node[5]], 2)
    assert walk(layout, read, depth=0).tokens == [4]
    assert walk(layout, read, depth=1).tokens == [4, 5]


def test_walk_through_row_0_and_column_0() -> None:
    """Both are candidates at no extra row; where both carry the token, the deeper one must be found."""
    window = LookaheadWindow(3, 4, [5])
    window.levels = [[5, 1, 2], [1, 101, 102], [200, 201, 202]]  # row 0 and column 0 agree on the next token
    layout = StepLayout(window, _tree(), 5, 9, 10**6)
    read = dict.fromkeys(layout.sampled_nodes, 0) | {
        0: 1,
        1: 200,
        layout.window_node(1, 0): 200,
        layout.window_node(2, 0): 33,
    }
    outcome = walk(layout, read)
    assert outcome.tokens == [1, 200, 33]
    assert outcome.path == [0, layout.window_node(1, 0), layout.window_node(2, 0)]
    assert outcome.sampled_at == [
        0,
        layout.window_node(0, 1),
        layout.window_node(2, 0),
    ]  # row 0's word was taken, column 0's path was


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
