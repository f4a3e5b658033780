"""The union of all ranks' trees and the walk through it, against plain Python; and it keeps a distribution."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from lp.draft.layout import StepLayout
from lp.draft.tree import DraftTree
from lp.draft.verify import UnionTree
from lp.draft.window import LookaheadWindow, WindowSlice, WindowSlices
from lp.sampling.sampler import INVALID_TOKEN, accept_or_resample
from tests.support.layouts import FAR, Path, drawn_ranks, expected_and_accepted, paths_of, trees_of, walk_alone

Sampled = list[dict[int, int]]  # by rank, what its sampled nodes sampled


def node_paths(layout: StepLayout) -> list[Path]:
    """The path of every node of a rank, tokens behind `c` up to it: paths name nodes alike on all ranks."""
    return [(), *paths_of(layout.tokens[1:].tolist(), (layout.parents[1:] - 1).tolist())]


@dataclass
class Oracle:
    """The union as a table: of every path of tokens that a walk may take, what the lowest rank that has it says.

    Attributes:
        sampled: by path.
        speakers: (rank, its node), by path.
        probs: stated by the first rank that states one, by path.
        nodes: by rank, its first node of every path.
        aside: window nodes that no walk reaches.
        drafted: paths that some rank drafts and no lower one has.
    """

    sampled: dict[Path, int] = field(default_factory=dict)
    speakers: dict[Path, tuple[int, int]] = field(default_factory=dict)
    probs: dict[Path, float] = field(default_factory=dict)
    nodes: list[dict[Path, int]] = field(default_factory=list)
    aside: int = 0
    drafted: int = 0

    @classmethod
    def of(cls, layouts: Sequence[StepLayout], sampled: Sampled, merge: bool) -> Oracle:
        found = cls()
        for rank, layout in enumerate(layouts):
            below = node_paths(layout)
            mine: dict[Path, int] = {}
            for node, path in enumerate(below):
                is_window = 0 < node < layout.num_window
                if is_window and not (merge and layout.reachable[node]):
                    found.aside += 1
                    continue
                if path not in found.sampled:
                    found.sampled[path] = sampled[rank].get(node, INVALID_TOKEN)
                    found.speakers[path] = rank, node
                    found.drafted += node >= layout.num_window
                if layout.accept_probs[node] and path not in found.probs:
                    found.probs[path] = layout.accept_probs[node]
                mine.setdefault(path, node)
            found.nodes.append(mine)
        return found

    def walk(self, most: int) -> list[int]:
        """The accepted tokens and the bonus token."""
        tokens = [self.sampled[()]]
        while len(tokens) <= most and self.sampled.get(tuple(tokens), INVALID_TOKEN) != INVALID_TOKEN:
            tokens.append(self.sampled[tuple(tokens)])
        return tokens


def drawn_samples(rng: random.Random, layouts: Sequence[StepLayout]) -> Sampled:
    """Mostly tokens that stand behind the node on some rank, so that walks go far; ranks need not agree."""
    children: dict[Path, list[int]] = {}
    by_rank = []
    for layout in layouts:
        below = node_paths(layout)
        by_rank.append(below)
        for path in below[1:]:
            children.setdefault(path[:-1], []).append(path[-1])
    alike = rng.random()  # how often ranks sample the same at the same path
    agreed: dict[Path, int] = {}
    never = rng.choice([0.0, 0.0, 0.1])  # scores that are not finite

    def draw(path: Path) -> int:
        return rng.choice(children[path]) if path in children and rng.random() < 0.9 else 77

    sampled: Sampled = []
    for layout, below in zip(layouts, by_rank, strict=True):
        own = {}
        for node in layout.sampled_nodes:
            token = agreed.setdefault(below[node], draw(below[node])) if rng.random() < alike else draw(below[node])
            own[node] = INVALID_TOKEN if rng.random() < never else token
        sampled.append(own)
    return sampled


def slices_of(layouts: Sequence[StepLayout]) -> WindowSlices:
    return WindowSlices(layout.columns for layout in layouts)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_union_and_walk_equal_the_table(ranks: int, cases: Callable[[int, int], range]) -> None:
    """A child that nobody sampled, a rank that speaks out of turn, a node held by nobody: each is a wrong text."""
    deep = several = invalid = twins = 0
    union, size = UnionTree(1, 1), 0
    for seed in cases(150, 1500):
        rng = random.Random(f"{seed} {ranks}")
        layouts, budget = drawn_ranks(rng, ranks)
        sampled = drawn_samples(rng, layouts)
        merge = rng.random() < 0.8
        if merge is False:  # as a source that lays paths side by side: the window's are none of them
            layouts = [without_merging(layout) for layout in layouts]
            sampled = drawn_samples(rng, layouts)
        if budget > size or seed % 3 == 0:  # else the last step's arrays serve again, as in a text
            union, size = UnionTree(ranks, budget), budget
        trees = trees_of(layouts, sampled, size)
        union.merge(trees, slices_of(layouts), merge)
        oracle = Oracle.of(layouts, sampled, merge)
        where = f"seed {seed}"

        assert union.num_nodes == len(oracle.sampled) + oracle.aside, where
        assert union.num_draft == oracle.drafted, where
        paths: list[Path] = [(), *paths_of(union.tokens[1:].tolist(), (union.parents[1:] - 1).tolist())]
        assert union.parents[0] == -1 and (union.parents[1:] < np.arange(1, union.num_nodes)).all(), where
        assert [len(path) for path in paths] == union.depths.tolist(), where
        numbers: dict[Path, int] = {}
        for node, path in enumerate(paths):
            rank, own = divmod(int(union.sources[node]), size)
            assert union.speaker(node) == rank
            assert layouts[rank].tokens[own] == union.tokens[node], where
            assert sampled[rank].get(own, INVALID_TOKEN) == union.sampled[node], where
            if oracle.speakers.get(path) == (rank, own):
                numbers[path] = node
        assert numbers.keys() == oracle.sampled.keys(), f"{where}: a path has another speaker, or none"
        speakers, own_nodes = np.divmod(union.sources, size)
        assert (union.starts == 7 + 100 * size * speakers + 3 * own_nodes).all(), f"{where}: of `trees_of`"
        assert union.stated_probs().tolist() == sorted(oracle.probs.values(), reverse=True), where

        if oracle.sampled[()] == INVALID_TOKEN:
            continue  # which the step refuses
        most = rng.choice([0, 1, 2, FAR])
        tokens = oracle.walk(most)
        expected, accepted = expected_and_accepted(oracle.probs, tokens)
        for rank, mine in enumerate(oracle.nodes):
            outcome = union.walk(rank, most)
            assert (outcome.tokens, outcome.accepted) == (tokens, len(tokens) - 1), where
            assert outcome.path == [numbers[tuple(tokens[:end])] for end in range(len(tokens))], where
            held = [tuple(tokens[:end]) in mine for end in range(len(tokens))]
            assert outcome.held[rank] == sum(held) and held == sorted(held, reverse=True), where
            below = node_paths(layouts[rank])
            assert [below[node] for node in outcome.own_path] == [tuple(tokens[:end]) for end in range(sum(held))], (
                where
            )
            assert outcome.own_path[0] == 0
            assert outcome.expected == pytest.approx(expected) and outcome.accepted_drafts == accepted, where
        last = union.speaker(outcome.path[-1])
        assert outcome.held[last] == len(tokens), "who sends the KV of the path has all of it"
        deep += len(tokens) > 3
        several += 0 < min(outcome.held) < max(outcome.held)
        invalid += oracle.sampled.get(tuple(tokens)) == INVALID_TOKEN
        twins += any(
            len(mine) < layout.num_nodes - oracle.aside for mine, layout in zip(oracle.nodes, layouts, strict=True)
        )
    assert deep > 5 and (several > 10 or ranks == 1) and twins, (deep, several, twins)
    assert invalid, "no walk ended before a node whose scores are not finite"


def without_merging(layout: StepLayout) -> StepLayout:
    """A rank's layout as a source would have it whose nodes are never merged with others of the same token."""
    window = LookaheadWindow(0, layout.columns.levels + 1, [5])
    window.levels = [[]] * layout.columns.levels
    own = range(layout.num_window, layout.num_nodes)
    index = {node: at for at, node in enumerate(own)}
    draft = DraftTree(
        [int(layout.tokens[node]) for node in own],
        [index.get(int(layout.parents[node]), -1) for node in own],
        [float(layout.accept_probs[node]) for node in own],
        merge=False,
    )
    none = WindowSlice(0, 0, layout.columns.levels)
    made = StepLayout(window, none, draft, int(layout.tokens[0]), 9, FAR, layout.catch_up)
    assert made.num_nodes == 1 + len(own), "nothing is merged"
    return made


def path_layout(*paths: Sequence[int], probs: Sequence[float] = ()) -> StepLayout:
    """A rank without a window that drafts these paths."""
    tokens: list[int] = []
    parents: list[int] = []
    for path in paths:
        for at, token in enumerate(path):
            parents.append(len(tokens) - 1 if at else -1)
            tokens.append(token)
    return StepLayout(LookaheadWindow(0, 2, [5]), WindowSlice(0, 0, 1), DraftTree(tokens, parents, probs), 5, 9, FAR)


def test_the_lowest_rank_speaks_though_another_walks_further() -> None:
    """Where two ranks compute a node, a near-tie may give them two tokens: the longer walk must not decide."""
    layouts = [path_layout([1, 2]), path_layout([1, 2, 3])]
    sampled = [{0: 9, 1: 2, 2: 3}, {0: 1, 1: 2, 2: 3, 3: 4}]
    union = UnionTree(2, 4)
    union.merge(trees_of(layouts, sampled, 4), slices_of(layouts), True)
    outcome = union.walk(1, FAR)
    assert (outcome.tokens, outcome.path, outcome.held, outcome.own_path) == ([9], [0], [1, 1], [0])
    sampled[0][0] = 1
    union.merge(trees_of(layouts, sampled, 4), slices_of(layouts), True)
    outcome = union.walk(0, FAR)
    assert (outcome.tokens, outcome.held, outcome.own_path) == ([1, 2, 3, 4], [3, 4], [0, 1, 2])
    assert [union.speaker(node) for node in outcome.path] == [0, 0, 0, 1]


def test_walks_go_on_across_ranks_windows() -> None:
    """Level 0 of one rank and column 0 of another may begin alike: one node stands for both, and both may follow."""
    window = LookaheadWindow(3, 4, [5])
    window.levels = [[5, 1, 2], [1, 8, 8], [2, 8, 8]]  # level 0 is 5, 1, 2 and column 0 is 5, 1, 2
    slices = WindowSlices([WindowSlice(0, 1, 3), WindowSlice(1, 3, 3)])
    layouts = [StepLayout(window, own, DraftTree(), 5, 9, FAR) for own in slices]
    assert [layout.tokens.tolist() for layout in layouts] == [[5, 1, 2], [5, 1, 2, 8, 8, 8, 8]]
    sampled = [{0: 1, 1: 2, 2: 30}, {0: 1, 1: 7, 2: 31, 5: 0, 6: 0}]
    for merge, tokens in ((True, [1, 2, 30]), (False, [1])):
        union = UnionTree(2, 7)
        union.merge(trees_of(layouts, sampled, 7), slices, merge)
        outcome = union.walk(1, FAR)
        assert outcome.tokens == tokens and outcome.held == [len(tokens)] * 2
        assert outcome.own_path == list(range(len(tokens))) and union.num_draft == 0


def test_expected_drafts_are_those_of_the_branch_taken() -> None:
    """Two branches on two ranks, of which one is true for two tokens; the step's last token is the model's own."""
    first = path_layout([5], [6, 7, 8], probs=[0.2, 0.5, 0.4, 0.1])
    second = path_layout([4], [6, 7], probs=[0.1, 0.5, 0.4])
    union = UnionTree(2, 5)
    for said, expected, accepted in (
        ([6, 7, 9], 0.8 + 0.8 + 0.25, 2),
        ([6, 7, 8, 1], 0.8 + 0.8 + 0.25, 3),  # nothing is expected behind the end
        ([9], 0.8, 0),
    ):
        path = dict(zip((0, 2, 3, 4), said, strict=False))
        sampled = [{node: path.get(node, 77) for node in range(5)}, dict.fromkeys(range(4), 77)]
        union.merge(trees_of([first, second], sampled, 5), slices_of([first, second]), True)
        outcome = union.walk(0, FAR)
        assert outcome.tokens == said
        assert (outcome.expected, outcome.accepted_drafts) == (pytest.approx(expected), accepted)
    bare = path_layout([6])
    union.merge(trees_of([bare], [{0: 6, 1: 1}], 5), slices_of([bare]), True)
    outcome = union.walk(0, FAR)
    assert (outcome.expected, outcome.accepted_drafts) == (0.0, 0), "nothing is stated"


VOCABULARY, DEPTH = 3, 3


def model_distribution(path: Sequence[int]) -> torch.Tensor:
    """What the model gives behind a path, far from even, and another for every path."""
    generator = torch.Generator().manual_seed(1 + sum((token + 1) * 7**at for at, token in enumerate(path)))
    return torch.rand(VOCABULARY, generator=generator, dtype=torch.float64).softmax(0)


# By number of ranks, draft trees that share prefixes, siblings in another order, and one that others lack.
SHARED_TREES = {
    2: [path_layout([0, 1], [2]), path_layout([0, 1, 2], [1])],
    3: [path_layout([0, 1], [2]), path_layout([1, 0]), path_layout([0, 2], [0, 1])],
}
SHARED_TREES[3][2] = StepLayout(
    LookaheadWindow(0, 2, [5]), WindowSlice(0, 0, 1), DraftTree([1, 0, 2, 1], [-1, -1, 1, 1]), 5, 9, FAR
)

Rule = Callable[[list[StepLayout], Sampled, UnionTree, int], list[int]]


def union_rule(layouts: list[StepLayout], sampled: Sampled, union: UnionTree, budget: int) -> list[int]:
    """Walk the union of all ranks' trees, as the runtime does."""
    union.merge(trees_of(layouts, sampled, budget), slices_of(layouts), True)
    return union.walk(0, FAR).tokens


def longest_own_walk(layouts: list[StepLayout], sampled: Sampled, union: UnionTree, budget: int) -> list[int]:
    """The planted wrong rule: of the walks of the ranks' own trees, the longest."""
    walks = [walk_alone(layout, own).tokens for layout, own in zip(layouts, sampled, strict=True)]
    return max(walks, key=len)


def p_of_rule(ranks: int, draws: int, rule: Rule) -> float:
    """p of the chi-square test of the first DEPTH tokens of steps by rejection sampling, each rank by draws of its own.

    What a step leaves open is drawn from the model.
    """
    layouts = SHARED_TREES[ranks]
    budget = max(layout.num_nodes for layout in layouts)
    union = UnionTree(ranks, budget)
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    rest = torch.Generator().manual_seed(99)
    counts = torch.zeros(VOCABULARY**DEPTH, dtype=torch.float64)
    asked = []
    for layout in layouts:
        below = node_paths(layout)
        drafts = layout.drafts()
        asked.append([(model_distribution(path), drafts.get(node, [])) for node, path in enumerate(below)])
    model = {(): model_distribution(())}
    for _ in range(draws):
        sampled = [
            {node: accept_or_resample(probs.clone(), drafts, generator) for node, (probs, drafts) in enumerate(own)}
            for own, generator in zip(asked, generators, strict=True)
        ]
        tokens = rule(layouts, sampled, union, budget)[:DEPTH]
        while len(tokens) < DEPTH:
            behind = model.setdefault(tuple(tokens), model_distribution(tokens))
            tokens.append(int(torch.multinomial(behind, 1, generator=rest)))
        counts[sum(token * VOCABULARY**at for at, token in enumerate(reversed(tokens)))] += 1
    expected = torch.ones(1, dtype=torch.float64)
    paths: list[Path] = [()]
    for _ in range(DEPTH):
        expected = torch.cat([expected[at] * model_distribution(path) for at, path in enumerate(paths)])
        paths = [(*path, token) for path in paths for token in range(VOCABULARY)]
    statistic = ((counts - expected * draws) ** 2 / (expected * draws)).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("ranks", SHARED_TREES)
def test_walked_tokens_have_the_models_distribution(ranks: int, cases: Callable[[int, int], range]) -> None:
    """Who speaks must not depend on what was sampled, or some texts come too often."""
    assert p_of_rule(ranks, len(cases(2000, 40000)), union_rule) > 0.001


@pytest.mark.parametrize("ranks", SHARED_TREES)
def test_the_longest_of_the_ranks_walks_is_caught(ranks: int) -> None:
    """The test above can tell: the longest walk favours the tokens that were drafted."""
    assert p_of_rule(ranks, 2000, longest_own_walk) < 0.001
