"""Jacobi decoding, a baseline: each step drafts a block of guessed tokens, and refines the guesses for the next step.

Source: "Accelerating Transformer Inference for Translation via Parallel Decoding" (arXiv 2305.10427). Lookahead
decoding starts from this method (arXiv 2402.02057, section 2). After each step the block moves on past the generated
tokens, and is filled up to its full size again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from lp.checks import check_count
from lp.config import LookaheadConfig, windowless
from lp.draft.registry import register_source
from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree
from lp.removed_keys import RefusesRemoved
from lp.sampling.top_logits import INVALID_TOKEN


@dataclass(frozen=True, kw_only=True, slots=True)
class JacobiConfig(RefusesRemoved):
    """Settings of Jacobi decoding, a baseline (`decoder=jacobi`): a block of guesses is refined from step to step.

    Args:
        num_tokens: size of the block: the draft tokens of each step.

    Raises:
        ValueError: a value is out of range; the message names the limit and a remedy.
    """

    num_tokens: int = 16

    def __post_init__(self) -> None:
        check_count(self, "num_tokens", 1, 1024, "try 16")

    def shape(self) -> LookaheadConfig:
        """Return lookahead settings that describe the step size: no window, at most `num_tokens` draft tokens."""
        return windowless(self.num_tokens)


@register_source("jacobi", JacobiConfig)
class Jacobi(DraftSource):
    """Draft source of Jacobi decoding: drafts a block of guesses; the tokens sampled there become the next guesses.

    Args:
        config: settings, with the size of the block.
        prompt: token ids of the prompt; the first guesses are drawn from them at random, with a fixed seed.
    """

    def __init__(self, config: JacobiConfig, prompt: Sequence[int]) -> None:
        self.config = config
        self._random = Random(0)
        self._prompt = list(prompt)
        self._guesses: list[int] = []

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """Draft the block of guesses as one path, filled up to its full size with random tokens from the prompt.

        Args:
            text: not used.
            budget: most draft tokens; the path is cut to this length.
        """
        while len(self._guesses) < self.config.num_tokens:
            self._guesses.append(self._random.choice(self._prompt))
        guesses = self._guesses[:budget]
        return DraftTree(guesses, list(range(-1, len(guesses) - 1)))

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Make the tokens that were sampled at rejected nodes of the path the guesses for the next step.

        Args:
            text: not used.
            num_new: number of tokens that the step generated.
            samples: the sampled token at each node of the step.
        """
        behind = [int(token) for token in samples.sampled][num_new:]  # the nodes are the path, `c` first
        end = behind.index(INVALID_TOKEN) if INVALID_TOKEN in behind else len(behind)
        self._guesses = behind[:end]
