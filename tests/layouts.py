"""Step layouts by shape, for tests of the arithmetic that need no model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from lp.draft.layout import StepLayout
from lp.draft.source import StepSamples
from lp.draft.tree import DraftTree, DraftTreeBuilder
from lp.draft.window import LookaheadWindow
from lp.sampling.top_logits import TopLogits

NOTHING = StepSamples([], [], [], [], [], TopLogits.empty(), [])  # what a source learns besides the text
FIRST = 1000  # tokens from here on stand in no window entry


def layout_of(w: int, n: int, paths: Iterable[Sequence[int]], limit: int = 10**6, position: int = 9) -> StepLayout:
    """A window whose entry [k][j] is 100 k + j, and these candidate paths behind `c`."""
    window = LookaheadWindow(w, n, [5])
    window.levels = [[100 * k + j for j in range(w)] for k in range(n - 1)]
    builder = DraftTreeBuilder(10**6)
    for path in paths:
        builder.add_path(path)
    return StepLayout(window, builder.build(), 5, position, limit)


def path_tree(accept_probs: Sequence[float]) -> DraftTree:
    """One path of token 1 with these probabilities."""
    return DraftTree([1] * len(accept_probs), list(range(-1, len(accept_probs) - 1)), accept_probs)


def row_0(j: int) -> list[int]:
    """The path along row 0 to column j."""
    return list(range(1, j + 1))


def column_0(k: int) -> list[int]:
    """The path down column 0 to row k."""
    return [100 * i for i in range(1, k + 1)]


def chains(count: int, depth: int) -> list[list[int]]:
    """Paths that share nothing."""
    return [[FIRST + 10 * i + k for k in range(depth)] for i in range(count)]


def drawn_layout(rng: random.Random, widest: int = 12) -> StepLayout:
    """Any shape: no window, no candidates, tries, paths along the window, and the end of the context."""
    w, n = rng.randint(0, widest), rng.randint(2, 6)
    paths = []
    for _ in range(rng.randint(0, 10)):
        start: list[int] = []
        if w and rng.random() < 0.3:
            start = row_0(rng.randint(0, w - 1)) if rng.random() < 0.5 else column_0(rng.randint(0, n - 2))
        paths.append([*start, *(FIRST + rng.randrange(3) for _ in range(rng.randint(1, 5)))])
    near = rng.random() < 0.3
    return layout_of(w, n, paths, limit=10 + rng.randint(0, w + n) if near else 10**6)
