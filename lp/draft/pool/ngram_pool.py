"""The pool (paper section 3.2): proposes what may follow the text, from all that was read and sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp.compiled import U64, compiled_array, compiled_ints
from lp.config import LookaheadConfig
from lp.draft.pool.growth import Limits, grow, new_tree
from lp.draft.pool.mixture import Switches, learn_text, new_prediction
from lp.draft.pool.tables import (
    GUESS,
    LOGITS,
    MAX_CONTEXT,
    TEXT,
    WINDOW,
    Samples,
    Tables,
    TextEnd,
    add_ngrams,
    add_samples,
    add_text,
)
from lp.draft.source import StepSamples, TokenPrice
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.sampling.noise import sequence_key
from lp.sampling.top_logits import TopLogits

NO_DRAFTS = WindowDrafts()


class NGramPool:
    """The main draft source: text and window n-grams, guesses by position and top-k logits, in one mixture.

    Args:
        config: its kinds of memory, depth and shape.
        prompt: the text so far.
        noise: (seed, sequence) of the sampler's noise; None where tokens are not sampled under it.
        tables: what it remembers, new or of an earlier text.
    """

    def __init__(
        self, config: LookaheadConfig, prompt: Sequence[int], noise: tuple[int, int] | None, tables: Tables
    ) -> None:
        self.config = config
        self.num_logits = len(tables.logits_tokens) // len(tables.logits_keys)
        kinds = {TEXT: True, WINDOW: config.window_ngrams, GUESS: config.position_guesses, LOGITS: self.num_logits > 0}
        sources = sum(1 << kind for kind, is_on in kinds.items() if is_on)
        noisy = noise is not None and config.renoise
        self._switches = Switches(sources, U64(sequence_key(*noise)) if noise and noisy else U64(0), noisy)
        self._tables = tables
        tables.clock[0] += 1  # so that what the prompt leaves is newer than an empty entry
        tables.clock[1] += 1
        nodes = 2 + config.draft_budget + config.window_size + config.ngram_size
        self._prediction = new_prediction(self.num_logits)
        self._tree = new_tree(nodes)
        self._text = np.zeros(2 * len(prompt) + 1024, np.int64)
        self._length = 0
        self._extend(prompt)
        if config.prompt_ngrams:
            self._add_text(0)

    def propose(
        self,
        text: Sequence[int],
        budget: int,
        window: WindowDrafts = NO_DRAFTS,
        price: TokenPrice | None = None,
    ) -> DraftTree:
        """The tree of the tokens most likely to be accepted, as far as they pay; what the window has costs nothing."""
        self._catch_up(text)
        nodes = grow(
            self._tables,
            self._prediction,
            self._tree,
            self._text_end(),
            self._switches,
            Limits(budget, self.config.depth),
            WindowDrafts(compiled_ints(window.level_0), compiled_ints(window.column_0)),
            price or TokenPrice.free(budget),
        )
        tree = self._tree
        return DraftTree(
            tokens=np.asarray(tree.tokens)[1:nodes].tolist(),
            parents=(np.asarray(tree.parents)[1:nodes] - 1).tolist(),
            accept_probs=np.asarray(tree.accept_probs)[1:nodes].tolist(),
        )

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """Remember the logits behind the prompt's tokens."""
        nodes = range(len(prompt) - 1)
        samples = StepSamples(prompt, nodes, range(-1, len(nodes) - 1), nodes, prompt[1:], top_logits, ())
        text_end = TextEnd(compiled_ints(prompt[:1]), 0)
        self._add_samples(text_end, samples, self._switches.sources & 1 << LOGITS)

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Learn the weights from the step's tokens, then remember what it read and sampled."""
        tables, sources = self._tables, self._switches.sources
        self._catch_up(text[: len(text) - num_new])
        start = self._length
        text_end = self._text_end()
        tables.clock[0] += 1
        self._extend(text[len(text) - num_new :])
        if self.config.learn:
            learn_text(tables, self._prediction, self._known_text(), start, self._switches)
        self._add_samples(text_end, samples, sources)
        if sources >> WINDOW & 1 and samples.ngrams:
            tokens = compiled_ints([token for ngram in samples.ngrams for token in ngram])
            add_ngrams(tables, self._prediction.context, tokens, len(samples.ngrams[0]))
        if self.config.output_ngrams:
            self._add_text(start)

    def _catch_up(self, text: Sequence[int]) -> None:
        """Take in tokens of steps that were not observed."""
        start = self._length
        if start < len(text):
            self._extend(text[start:])
            if self.config.output_ngrams:
                self._add_text(start)

    def _add_text(self, start: int) -> None:
        add_text(self._tables, self._prediction.context, self._known_text(), start)

    def _add_samples(self, text_end: TextEnd, samples: StepSamples, sources: int) -> None:
        arrays = Samples(
            tokens=compiled_ints(samples.tokens),
            parents=compiled_ints(samples.parents),
            positions=compiled_ints(samples.positions),
            nodes=compiled_ints(samples.nodes),
            sampled=compiled_ints(samples.sampled),
            top_tokens=compiled_array(samples.top_logits.tokens),
            top_logits=compiled_array(samples.top_logits.logits),
        )
        add_samples(self._tables, self._prediction.context, text_end, arrays, sources)

    def _known_text(self) -> np.ndarray:
        return compiled_array(self._text[: self._length])

    def _text_end(self) -> TextEnd:
        newest = self._text[max(self._length - MAX_CONTEXT, 0) : self._length][::-1]
        return TextEnd(compiled_array(newest.copy()), self._length - 1)

    def _extend(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._text):
            self._text = np.concatenate([self._text, np.zeros(end, np.int64)])
        self._text[self._length : end] = tokens
        self._length = end
