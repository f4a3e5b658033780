"""The paper's own lookahead decoding, for comparison: an n-gram pool keyed by one token, and separate draft paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lp.checks import set_field
from lp.config import Ablation, LookaheadConfig
from lp.draft.registry import register_source
from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree, DraftTreeBuilder
from lp.removed_keys import RefusesRemoved

SHAPE = ("window_size", "ngram_size", "guess_set_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperConfig(RefusesRemoved):
    """Settings of the paper's own lookahead decoding, a baseline (`decoder=lookahead_paper`).

    Each step verifies the newest G n-grams that begin with the newest token. Each n-gram has a separate path of N - 1
    draft tokens.

    Args:
        window_size, ngram_size, guess_set_size: W, N and G of the paper.
        prompt_ngrams: whether n-grams of the prompt and of the accepted text enter the pool, too ("prompt as
            reference").
        warmup_steps: number of first steps that verify nothing and read no n-gram; the paper's code has N - 1.

    Raises:
        ValueError: a value is out of range; the message names the limit and a remedy.
    """

    window_size: int = 15
    ngram_size: int = 5
    guess_set_size: int = 15
    prompt_ngrams: bool = True
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        shape = self.shape()
        for name in SHAPE:
            set_field(self, name, getattr(shape, name))
        for name in ("prompt_ngrams", "warmup_steps"):
            set_field(self, name, getattr(shape.ablation, name))

    def shape(self) -> LookaheadConfig:
        """Return lookahead settings that describe the step size: the same W, N and G, and no top-k logits."""
        text = self.prompt_ngrams
        own = Ablation(prompt_ngrams=text, output_ngrams=text, warmup_steps=self.warmup_steps, num_logits=0)
        return LookaheadConfig(**{name: getattr(self, name) for name in SHAPE}, draft_depth=None, ablation=own)


@register_source("lookahead_paper", PaperConfig)
class PaperPool(DraftSource):
    """Draft source with the paper's n-gram pool (section 3.2): keeps the newest G n-grams for each first token.

    Args:
        config: settings, with N (tokens of an n-gram) and G (most n-grams to keep for a first token, and to draft in a
            step).
        prompt: token ids of the prompt; their n-grams are in the pool from the start if `config.prompt_ngrams` is set.
    """

    def __init__(self, config: PaperConfig, prompt: Sequence[int]) -> None:
        self.config = config
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> tails (N-1), newest last
        self._learn_text(prompt, len(prompt))

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """Draft the stored n-grams that begin with the newest token of the text, the newest n-gram first.

        Each n-gram becomes a separate path; paths share no nodes.

        Args:
            text: token ids of the prompt and the generated tokens.
            budget: most draft tokens.
        """
        builder = DraftTreeBuilder(budget, merge=False)
        for tail in reversed(self._tails.get(text[-1], {})):
            builder.add_path(tail)
        return builder.build()

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Store the step's n-grams in the pool: first the window's, then those that end with the text's new tokens.

        The latter are left out if `config.prompt_ngrams` is off.

        Args:
            text: token ids of the prompt and the generated tokens.
            num_new: number of tokens at the end of `text` that the step generated.
            samples: the step's samples, with the window's n-grams.
        """
        for ngram in samples.ngrams:
            self._add(ngram)
        self._learn_text(text, num_new)

    def _learn_text(self, text: Sequence[int], num_new: int) -> None:
        n = self.config.ngram_size
        if self.config.prompt_ngrams:
            for end in range(max(len(text) - num_new + 1, n), len(text) + 1):
                self._add(text[end - n : end])

    def _add(self, ngram: Sequence[int]) -> None:
        tails = self._tails.setdefault(ngram[0], {})
        tail = tuple(ngram[1:])
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self.config.guess_set_size:
            del tails[next(iter(tails))]
