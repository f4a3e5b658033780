"""Step layouts by shape, for tests of the arithmetic that need no model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lp.budget.calibration import DraftRecord
from lp.compiled import compiled_array
from lp.draft.layout import StepLayout, ancestors
from lp.draft.source import StepSamples
from lp.draft.tree import DraftTree, DraftTreeBuilder
from lp.draft.verify import Outcome, RankTrees, UnionTree
from lp.draft.window import LookaheadWindow, WindowSlice, WindowSlices, slice_window
from lp.sampling.sampler import INVALID_TOKEN
from lp.sampling.top_logits import TopLogits

NOTHING = StepSamples.of([], [], [], [], TopLogits.empty())  # what a source learns besides the text
FIRST = 1000  # tokens from here on stand in no window entry
FAR = 10**6  # a limit that nothing reaches

Path = tuple[int, ...]  # the tokens behind `c` up to a node, which name it whatever its number


def window_of(w: int, n: int) -> LookaheadWindow:
    """A window whose entry [k][j] is 100 k + j, so that every entry says where it stands."""
    window = LookaheadWindow(w, n, [5])
    window.levels = [[100 * k + j for j in range(w)] for k in range(n - 1)]
    return window


def layout_of(w: int, n: int, paths: Iterable[Sequence[int]], limit: int = FAR, position: int = 9) -> StepLayout:
    """A step on one rank: the columns of `window_of` that the limit leaves, and these draft paths behind `c`."""
    builder = DraftTreeBuilder(FAR)
    for path in paths:
        builder.add_path(path)
    columns = WindowSlice(0, max(min(w, limit - position - n + 2), 0), n - 1)
    return StepLayout(window_of(w, n), columns, builder.build(), 5, position, limit)


def visible_of(layout: StepLayout) -> np.ndarray:
    """The mask of a step, bool (T, T): which step tokens each of them sees, itself included."""
    return ancestors(layout.step_parents)


def node_of(layout: StepLayout, level: int, column: int) -> int:
    """The node of a window entry that the rank has."""
    columns = layout.columns
    below = columns.level_0_nodes + (level - 1) * columns.num_columns + column - columns.first
    return column if level == 0 else below


def path_to(layout: StepLayout, node: int) -> list[int]:
    """The nodes from `c` to this one, both included."""
    path = [node]
    while layout.parents[path[-1]] >= 0:
        path.append(int(layout.parents[path[-1]]))
    return path[::-1]


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """The path of every node, which names it in a test: the tokens behind the root up to it; -1 is the root."""
    paths: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def tree_paths(tree: DraftTree) -> list[Path]:
    """The path of every node of a draft tree, to compare trees whose nodes are numbered differently."""
    return paths_of(tree.tokens, tree.parents)


def trees_of(layouts: Sequence[StepLayout], sampled: Sequence[Mapping[int, int]], budget: int) -> RankTrees:
    """What the ranks' messages have in them; what lies behind a rank's nodes is what was there before.

    Args:
        layouts: by rank.
        sampled: by rank, what its sampled nodes sampled.
        budget: B.
    """
    rng = np.random.default_rng(len(layouts))
    shape = len(layouts), budget
    parents, tokens, chosen = (rng.integers(0, budget, shape) for _ in range(3))
    probs = rng.random(shape)
    for rank, (layout, own) in enumerate(zip(layouts, sampled, strict=True)):
        size = layout.num_nodes
        parents[rank, :size] = np.maximum(layout.parents, 0)
        tokens[rank, :size] = layout.tokens
        probs[rank, :size] = layout.accept_probs
        chosen[rank, :size] = [own.get(node, INVALID_TOKEN) for node in range(size)]
    counts = np.array([layout.num_nodes for layout in layouts])
    arrays = (parents, tokens, chosen, probs, counts, np.array([7, 100 * budget, 3]))
    return RankTrees(*map(compiled_array, arrays))


def walk_alone(layout: StepLayout, sampled: Mapping[int, int], most: int = FAR, merge: bool = True) -> Outcome:
    """The walk through one rank's tree, as if there were no other ranks, to compare with the walk of the union."""
    union = UnionTree(1, layout.num_nodes)
    union.merge(trees_of([layout], [sampled], layout.num_nodes), WindowSlices([layout.columns]), merge)
    return union.walk(0, most)


def expected_and_accepted(probs: Mapping[Path, float], new_tokens: Sequence[int]) -> tuple[float, int]:
    """Along new tokens, what the children of each node expected, given the node; and what the text has of them."""
    node: Path = ()
    expected, accepted = 0.0, 0
    for token in new_tokens:
        above = probs[node] if node else 1.0
        expected += sum(prob / above for path, prob in probs.items() if path[:-1] == node)
        node = (*node, token)
        if node not in probs:
            break
        accepted += 1
    return expected, min(accepted, len(new_tokens) - 1)  # the last token is the model's own


def record_of(tree: DraftTree, new_tokens: Sequence[int]) -> DraftRecord:
    """What became of a draft tree in a step that added these tokens."""
    probs = dict(zip(tree_paths(tree), tree.accept_probs, strict=True))
    return DraftRecord(sorted(probs.values(), reverse=True), *expected_and_accepted(probs, new_tokens))


def path_tree(accept_probs: Sequence[float]) -> DraftTree:
    """One path of token 1 with these probabilities."""
    return DraftTree([1] * len(accept_probs), list(range(-1, len(accept_probs) - 1)), accept_probs)


def row_0(j: int) -> list[int]:
    """The path along level 0 to column j."""
    return list(range(1, j + 1))


def column_0(k: int) -> list[int]:
    """The path down column 0 to level k."""
    return [100 * i for i in range(1, k + 1)]


def chains(count: int, depth: int) -> list[list[int]]:
    """A draft tree of `count` paths of `depth` tokens that share no token."""
    return [[FIRST + 10 * i + k for k in range(depth)] for i in range(count)]


def drawn_layout(rng: random.Random, widest: int = 12) -> StepLayout:
    """Any shape: no window, no candidates, tries, paths along the window, and the end of the context."""
    w, n = rng.randint(0, widest), rng.randint(2, 6)
    near = rng.random() < 0.3
    return layout_of(w, n, _drawn_paths(rng, w, n), limit=10 + rng.randint(0, w + n) if near else FAR)


def _drawn_paths(rng: random.Random, w: int, n: int) -> list[list[int]]:
    paths = []
    for _ in range(rng.randint(0, 10)):
        start: list[int] = []
        if w and rng.random() < 0.3:
            start = row_0(rng.randint(0, w - 1)) if rng.random() < 0.5 else column_0(rng.randint(0, n - 2))
        paths.append([*start, *(FIRST + rng.randrange(3) for _ in range(rng.randint(1, 5)))])
    return paths


def drawn_tree(rng: random.Random, nodes: int, kinds: int, first: int = FIRST, twins: bool = False) -> DraftTree:
    """A draft tree of at most so many nodes with probabilities; with `twins` siblings may have the same token."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    taken: set[tuple[int, int]] = set()
    stays = rng.random()  # how often a node continues the last one
    for _ in range(nodes):
        parent = len(tokens) - 1 if rng.random() < stays else rng.randrange(-1, len(tokens))
        token = first + rng.randrange(kinds)
        if (parent, token) in taken and not twins:
            continue
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        probs.append((probs[parent] if parent >= 0 else 1.0) * rng.uniform(0.1, 0.9))
    return DraftTree(tokens, parents, probs, merge=not twins)


def drawn_ranks(rng: random.Random, ranks: int, kinds: int = 3) -> tuple[list[StepLayout], int]:
    """The layouts of ranks that share one window, and B: trees that overlap, catch-up tokens, the end of the context.

    The window's tokens may be those of the trees, so that paths along it meet draft paths.
    """
    w, n = rng.randint(0, 8), rng.randint(2, 5)
    window = window_of(w, n)
    first = FIRST
    if rng.random() < 0.5:
        window.levels = [[rng.randrange(kinds) for _ in range(w)] for _ in range(n - 1)]
        first = 0
    position = 9
    limit = position + 1 + rng.randint(0, w + n) if rng.random() < 0.3 else FAR
    columns = max(min(w, limit - position - n + 2), 0)
    lacking = [rng.choice([0, 0, 1, 3]) for _ in range(ranks)]
    most = max(columns + n - 2, 1) + max(lacking) + rng.randint(0, 12)
    slices = slice_window(columns, n, tuple(most - count for count in lacking))
    whole = drawn_tree(rng, rng.randint(0, 30), kinds, first)
    merge = rng.random() < 0.8
    layouts = []
    for own, count in zip(slices, lacking, strict=True):
        room = most - count - own.num_nodes
        draft = _drawn_part(rng, whole, room) if rng.random() < 0.7 else drawn_tree(rng, room, kinds, first)
        draft = DraftTree(draft.tokens, draft.parents, draft.accept_probs, merge)
        catch_up = [7] * count
        layouts.append(StepLayout(window, own, draft, 5, position, limit, catch_up))
    return layouts, most


def _drawn_part(rng: random.Random, tree: DraftTree, room: int) -> DraftTree:
    """Draw some nodes of a tree with their ancestors, at most `room`: the part that a rank drafts."""
    kept: set[int] = set()
    for node in rng.sample(range(len(tree)), len(tree)):
        path = {node}
        while (node := tree.parents[node]) >= 0:
            path.add(node)
        if len(kept | path) <= room:
            kept |= path
    nodes = sorted(kept)
    index = {node: at for at, node in enumerate(nodes)}
    return DraftTree(
        [tree.tokens[node] for node in nodes],
        [index.get(tree.parents[node], -1) for node in nodes],
        [tree.accept_probs[node] for node in nodes],
    )
