"""The n-gram pool (paper section 3.2): drafts tokens from the text so far and from what earlier steps have sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lp.compiled import compiled_array, compiled_ints, jit
from lp.config import LookaheadConfig
from lp.draft.pool.best_first_tree import Proposal, StepInput, new_tree, propose
from lp.draft.pool.corpus import Corpus
from lp.draft.pool.last_step import index_step, new_last_step
from lp.draft.pool.mixture import learn_text, new_predictor
from lp.draft.pool.tables import GUESS, LOGITS, TEXT, WINDOW, Samples, Tables, add_ngrams, add_samples, add_text
from lp.draft.share import Share
from lp.draft.source import DraftSource, ShareInput, StepSamples, TokenPrice
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.sampling.top_logits import TopLogits

NO_DRAFTS = WindowDrafts()


class _Text(NamedTuple):
    """The text and its new part, as compiled functions take them."""

    tokens: Any  # int64, with room after the text
    start: int  # index of the first new token
    length: int  # tokens of the text


class NGramPool(DraftSource):
    """Draft source of `decoder=lookahead`: drafts the tokens that several kinds of memory together find likeliest.

    It remembers n-grams of the text and of the lookahead window, tokens sampled for coming positions, and top-k logits.
    It can also look in model n-grams (logits measured once for the model) and in corpora (indexes of files). A mixture
    model (`lp.draft.pool.mixture`) turns all of these into probabilities.

    Args:
        config: settings: which kinds of memory to use, and how deep and large the draft tree may become.
        prompt: token ids of the prompt.
        noise: (seed, sequence number) of the sampler's Gumbel noise, which is added to remembered logits to foresee
            samples; None if the sampler uses no such noise.
        tables: memory to begin with: empty tables, or tables that earlier texts have filled.
        model_ngrams: array of a file of `lp.draft.pool.model_ngrams`; None: no model n-grams are used.
        temperature: temperature of the sampler.
        corpora: corpora to search, the most important first.
        on_end: function that is called with the prompt and the generated tokens when the text is finished.
    """

    divides = True

    def __init__(
        self,
        config: LookaheadConfig,
        prompt: Sequence[int],
        noise: tuple[int, int] | None,
        tables: Tables,
        model_ngrams: np.ndarray | None = None,
        temperature: float = 1.0,
        corpora: Sequence[Corpus] = (),
        on_end: Callable[[Sequence[int], Sequence[int]], None] | None = None,
    ) -> None:
        self.config = config
        self._on_end = on_end
        self.num_logits = len(tables.logits_tokens) // len(tables.logits_keys)
        parts = config.ablation
        kinds = {TEXT: True, WINDOW: parts.window_ngrams, GUESS: parts.position_guesses, LOGITS: self.num_logits > 0}
        sources = sum(1 << kind for kind, is_on in kinds.items() if is_on)
        noise = noise if parts.renoise else None
        model_ngrams = model_ngrams if self.num_logits else None
        self._predictor = new_predictor(self.num_logits, sources, noise, model_ngrams, temperature, corpora)
        self._last_step = self._predictor.last_step
        self._tables = tables
        tables.clock[0] += 1  # so that what the prompt leaves is newer than an empty entry
        tables.clock[1] += 1
        size = 2 + config.draft_budget + config.window_size + config.ngram_size
        self._tree = new_tree(size)
        self._proposal = Proposal.room(len(self._tree.tokens))
        self._free = TokenPrice.free(len(self._tree.tokens))
        self._text = np.zeros(2 * len(prompt) + 1024, np.int64)
        self._length = 0
        known = self._take_in(prompt, len(prompt))
        if parts.prompt_ngrams:
            add_text(tables, self._predictor.context, *known)

    def propose(
        self,
        text: Sequence[int],
        budget: int,
        window: WindowDrafts = NO_DRAFTS,
        price: TokenPrice | None = None,
    ) -> DraftTree:
        """Propose the whole draft tree: the likeliest tokens, as far as they are worth their price.

        Args:
            text: token ids of the prompt and the generated tokens.
            budget: most draft tokens, without tokens that repeat the window's.
            window: paths of the lookahead window, whose tokens cost nothing.
            price: what step tokens cost; None: nothing.
        """
        draft = self.propose_share(text, ShareInput(0, budget, [0], window, price)).draft
        return DraftTree(*(np.asarray(field).tolist() for field in (draft.tokens, draft.parents, draft.accept_probs)))

    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """Grow one rank's part of the draft tree, without growing the other ranks' parts.

        Args:
            text: token ids of the prompt and the generated tokens.
            step: how many draft tokens each rank may compute, and what they cost.
        """
        self._catch_up(text, len(text))
        rooms = step.rooms
        own = StepInput(
            text=compiled_array(self._text),
            length=self._length,
            budget=rooms[step.rank],
            max_depth=self.config.depth,
            level_0=compiled_ints(step.window.level_0),
            column_0=compiled_ints(step.window.column_0),
            rank=step.rank,
            rooms=compiled_ints(rooms),
        )
        price = step.price or self._free
        found = self._proposal
        count, trunk = propose(self._tables, self._predictor, self._tree, found, own, price, self._free)
        tokens, parents, accept_probs = (np.array(field[:count]) for field in found[:3])
        draft = DraftTree(tokens, parents, accept_probs)
        if not trunk:
            return Share(draft)
        return Share(draft, DraftTree(found.trunk_tokens[:trunk].tolist(), found.trunk_parents[:trunk].tolist()))

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """Remember the top-k logits that prefill computed at the prompt's tokens.

        Args:
            prompt: last tokens of the prompt; earlier tokens have no logits: they were cached, or are not read.
            top_logits: top-k logits at each of these tokens but the last.
        """
        first = self._length - len(prompt)  # tokens before these have no logits
        count = len(prompt) - 1
        positions = range(first, first + count)
        samples = StepSamples.of(prompt[:-1], positions, range(-1, count - 1), prompt[1:], top_logits)
        sources = self._predictor.sources & 1 << LOGITS
        known = compiled_array(self._text)
        add_samples(self._tables, self._predictor.context, known, first + 1, _compiled_samples(samples), sources)

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Train the mixture's weights by the step's new tokens, then remember the step's n-grams, samples and logits.

        Args:
            text: token ids of the prompt and the generated tokens, including the step's.
            num_new: number of tokens at the end of `text` that the step generated.
            samples: tokens, samples and logits at all nodes of the step.
        """
        known = self._learn(text, num_new, samples)
        predictor, arrays = self._predictor, _compiled_samples(samples)
        add_samples(self._tables, predictor.context, known.tokens, known.start, arrays, predictor.sources)

    def observe_part(self, text: Sequence[int], num_new: int, samples: StepSamples) -> Callable[[], None]:
        """Learn from a step like `observe`, but let the returned function store the step's samples in the tables later.

        Until this function is called, proposals find the samples in a small index of the last step.

        Args:
            text: token ids of the prompt and the generated tokens, including the step's.
            num_new: number of tokens at the end of `text` that the step generated.
            samples: tokens, samples and logits at all nodes of the step.
        """
        known = self._learn(text, num_new, samples)
        if len(samples.tokens) > len(self._last_step.older):
            self._last_step = new_last_step(2 * len(samples.tokens))
        arrays = _compiled_samples(samples)
        last_step = self._last_step._replace(samples=arrays)
        predictor = self._predictor = self._predictor._replace(last_step=last_step)
        index_step(last_step, known.tokens, known.start)

        def merge() -> None:
            add_samples(self._tables, predictor.context, known.tokens, known.start, arrays, predictor.sources)
            last_step.counts[0] = 0

        return merge

    def ended(self, text: Sequence[int], prompt_tokens: int) -> None:
        """Hand the finished text over to the function `on_end`, which the pool was made with.

        Args:
            text: token ids of the prompt and the generated tokens.
            prompt_tokens: number of tokens at the beginning of `text` that are the prompt.
        """
        if self._on_end is not None:
            self._on_end(text[:prompt_tokens], text[prompt_tokens:])

    def _learn(self, text: Sequence[int], num_new: int, samples: StepSamples) -> _Text:
        """Append the step's tokens, learn from them and from the window's n-grams, and return the text as it is now."""
        self._catch_up(text, len(text) - num_new)
        self._tables.clock[0] += 1
        known = self._take_in(text, len(text))
        parts, ngrams = self.config.ablation, samples.ngrams
        tokens = compiled_ints([token for ngram in ngrams for token in ngram])
        length = len(ngrams[0]) if ngrams else 1
        _learn(self._tables, self._predictor, known, tokens, length, parts.learn, parts.output_ngrams)
        return known

    def _catch_up(self, text: Sequence[int], end: int) -> None:
        """Append tokens up to `end` that plain steps generated, of which `observe` is not told, and learn from them."""
        if self._length < end:
            known = self._take_in(text, end)
            if self.config.ablation.output_ngrams:
                add_text(self._tables, self._predictor.context, *known)

    def _take_in(self, text: Sequence[int], end: int) -> _Text:
        """Append the tokens up to `end` to the own copy of the text, and return it with the new part marked."""
        start = self._length
        if end > len(self._text):
            self._text = np.concatenate([self._text, np.zeros(end, np.int64)])
        self._text[start:end] = text[start:end]
        self._length = end
        return _Text(compiled_array(self._text), start, end)


@jit
def _learn(tables, predictor, text, ngrams, length, weights_too, text_too):  # type: ignore[no-untyped-def]
    if weights_too:
        learn_text(tables, predictor, text.tokens, text.start, text.length)
    if predictor.sources >> WINDOW & 1:
        add_ngrams(tables, predictor.context, ngrams, length)
    if text_too:
        add_text(tables, predictor.context, text.tokens, text.start, text.length)


def _compiled_samples(samples: StepSamples) -> Samples:
    """A step's samples as compiled functions take them; arrays are not copied."""
    ints = (samples.tokens, samples.positions, samples.parents, samples.sampled, samples.starts)
    tokens, positions, parents, sampled, starts = (compiled_array(np.asarray(each, np.int64)) for each in ints)
    packed = samples.packed
    return Samples(
        tokens=tokens,
        parents=parents,
        positions=positions,
        sampled=sampled,
        starts=starts,
        top_tokens=compiled_array(packed.view(np.int32)),
        top_logits=compiled_array(packed.view(np.float32)),
    )
