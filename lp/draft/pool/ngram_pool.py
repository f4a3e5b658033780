"""The pool (paper section 3.2): proposes what may follow the text, from all that was read and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lp.compiled import compiled_array, compiled_ints
from lp.config import LookaheadConfig
from lp.draft.pool.growth import TRUNK_NODES, StepInput, divide, grow, new_tree
from lp.draft.pool.mixture import learn_text, new_predictor
from lp.draft.pool.tables import (
    GUESS,
    LOGITS,
    MAX_CONTEXT,
    TEXT,
    WINDOW,
    Samples,
    Tables,
    add_ngrams,
    add_samples,
    add_text,
)
from lp.draft.share import Share
from lp.draft.source import ShareInput, StepSamples, TokenPrice
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.sampling.top_logits import TopLogits

NO_DRAFTS = WindowDrafts()
NOTHING = compiled_ints([])
ALL_MINE = compiled_array(np.ones(1))  # the block of a rank that is alone


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
        self._predictor = new_predictor(self.num_logits, sources, noise if config.renoise else None)
        self._tables = tables
        tables.clock[0] += 1  # so that what the prompt leaves is newer than an empty entry
        tables.clock[1] += 1
        nodes = 2 + config.draft_budget + config.window_size + config.ngram_size
        self._tree = new_tree(nodes)
        self._free = TokenPrice.free(len(self._tree.tokens))
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
        return self.propose_share(text, ShareInput(0, budget, [0], window, price)).draft

    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """A rank's share of that tree."""
        self._catch_up(text)
        rooms = step.rooms
        price = step.price or self._free
        own = StepInput(
            newest=self._newest(),
            position=self._length - 1,
            budget=rooms[step.rank],
            max_depth=self.config.depth,
            level_0=compiled_ints(step.window.level_0),
            column_0=compiled_ints(step.window.column_0),
            rank=step.rank,
            block_ends=compiled_array(np.cumsum(rooms) / max(sum(rooms), 1)) if len(rooms) > 1 else ALL_MINE,
        )
        trunk = self._grow_trunk(own, price) if len(rooms) > 1 else 0
        taken = grow(self._tables, self._predictor, self._tree, trunk, own, price)
        tree = self._tree
        order = np.asarray(tree.order)[1:taken]
        draft = DraftTree(
            tokens=np.asarray(tree.tokens)[order].tolist(),
            parents=(np.asarray(tree.places)[np.asarray(tree.parents)[order]] - 1).tolist(),
            accept_probs=np.asarray(tree.accept_probs)[order].tolist(),
        )
        if not trunk:
            return Share(draft)
        tokens = np.asarray(tree.tokens)[1:trunk].tolist()
        return Share(draft, DraftTree(tokens, (np.asarray(tree.parents)[1:trunk] - 1).tolist()))

    def _grow_trunk(self, own: StepInput, price: TokenPrice) -> int:
        """Grow and divide what all ranks have alike, whatever their windows and prices; returns its nodes."""
        alike = own._replace(budget=TRUNK_NODES - 1, level_0=NOTHING, column_0=NOTHING)
        free = self._free._replace(calibration=price.calibration, depth_discount=price.depth_discount)
        trunk = grow(self._tables, self._predictor, self._tree, 0, alike, free)
        divide(self._tree, trunk, own)
        return int(trunk)

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """Remember the logits behind the prompt's tokens."""
        nodes = range(len(prompt) - 1)
        samples = StepSamples(prompt, nodes, range(-1, len(nodes) - 1), nodes, prompt[1:], top_logits, ())
        self._add_samples(compiled_ints(prompt[:1]), samples, self._predictor.sources & 1 << LOGITS)

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Learn the weights from the step's tokens, then remember what it read and sampled."""
        tables, sources = self._tables, self._predictor.sources
        self._catch_up(text[: len(text) - num_new])
        start = self._length
        newest = self._newest()
        tables.clock[0] += 1
        self._extend(text[len(text) - num_new :])
        if self.config.learn:
            learn_text(tables, self._predictor, self._known_text(), start)
        self._add_samples(newest, samples, sources)
        if sources >> WINDOW & 1 and samples.ngrams:
            tokens = compiled_ints([token for ngram in samples.ngrams for token in ngram])
            add_ngrams(tables, self._predictor.context, tokens, len(samples.ngrams[0]))
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
        add_text(self._tables, self._predictor.context, self._known_text(), start)

    def _add_samples(self, newest: Any, samples: StepSamples, sources: int) -> None:
        arrays = Samples(
            tokens=compiled_ints(samples.tokens),
            parents=compiled_ints(samples.parents),
            positions=compiled_ints(samples.positions),
            nodes=compiled_ints(samples.nodes),
            sampled=compiled_ints(samples.sampled),
            top_tokens=compiled_array(samples.top_logits.tokens),
            top_logits=compiled_array(samples.top_logits.logits),
        )
        add_samples(self._tables, self._predictor.context, newest, arrays, sources)

    def _known_text(self) -> Any:
        return compiled_array(self._text[: self._length])

    def _newest(self) -> Any:
        """The text's last tokens, the newest first."""
        return compiled_array(self._text[max(self._length - MAX_CONTEXT, 0) : self._length][::-1].copy())

    def _extend(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._text):
            self._text = np.concatenate([self._text, np.zeros(end, np.int64)])
        self._text[self._length : end] = tokens
        self._length = end
