"""Peers of the pool behind the same protocol: what others published, as they published it."""

from __future__ import annotations

from collections.abc import Sequence

from lp.config import PaperConfig
from lp.draft.source import StepSamples
from lp.draft.tree import DraftTree
from lp.sampling.top_logits import TopLogits


class PaperPool:
    """The paper's pool (section 3.2): the newest n-grams behind one token, as many paths side by side.

    Args:
        config: N, and G n-grams kept of a token and tried a step.
        prompt: its n-grams are known from the start, if wanted.
    """

    num_logits = 0

    def __init__(self, config: PaperConfig, prompt: Sequence[int]) -> None:
        self.config = config
        self._behind: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> tails (N-1), newest last
        self._learn_text(prompt, len(prompt))

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """The newest n-grams behind text[-1]; no two share a row."""
        tree = DraftTree(budget, merge=False)
        for tail in reversed(self._behind.get(text[-1], {})):
            tree.add_path(tail)
        return tree

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """Nothing: it reads no logits."""

    def observe(self, text: Sequence[int], moved: int, seen: StepSamples) -> None:
        """The window's n-grams, then the text's."""
        for ngram in seen.ngrams:
            self._add(ngram)
        self._learn_text(text, moved)

    def _learn_text(self, text: Sequence[int], moved: int) -> None:
        n = self.config.ngram_size
        if self.config.prompt_ngrams:
            for end in range(max(len(text) - moved + 1, n), len(text) + 1):
                self._add(text[end - n : end])

    def _add(self, ngram: Sequence[int]) -> None:
        tails = self._behind.setdefault(ngram[0], {})
        tail = tuple(ngram[1:])
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self.config.guess_set_size:
            del tails[next(iter(tails))]
