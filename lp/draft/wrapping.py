"""What draft sources have in common that add to what another one drafts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from lp.draft.share import Share
from lp.draft.source import DraftSource, ShareInput, StepSamples, TokenPrice
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.sampling.top_logits import TopLogits

# What is known before a text begins of the tokens that are added.
PRIOR_ACCEPTED, PRIOR_TRIED = 9.0, 10.0
MEMORY_TOKENS = 64.0  # tried tokens that count


class WrappingSource(DraftSource):
    """A draft source around another one, which learns from all steps as if it were alone.

    Args:
        inner: the other source.
    """

    def __init__(self, inner: DraftSource) -> None:
        self.num_logits = inner.num_logits
        self._inner = inner
        self._propose_inner = inner.propose_share
        self._accepted_tried = (PRIOR_ACCEPTED, PRIOR_TRIED)

    @property
    def added_prob(self) -> float:
        """Probability that an added token is accepted, if those before it are."""
        accepted, tried = self._accepted_tried
        return accepted / tried

    def count(self, accepted: int, tried: int) -> None:
        """Learn of added tokens how many were accepted, of those whose predecessors were."""
        accepted_before, tried_before = self._accepted_tried
        share = min(1.0, MEMORY_TOKENS / (tried_before + tried))
        self._accepted_tried = ((accepted_before + accepted) * share, (tried_before + tried) * share)

    @abstractmethod
    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """The rank's share of the draft tree."""

    @abstractmethod
    def follow(self, text: Sequence[int]) -> None:
        """Take in the text's new tokens."""

    def propose(self, text: Sequence[int], budget: int, window: WindowDrafts, price: TokenPrice | None, /) -> DraftTree:
        """The whole draft tree, where one rank drafts alone."""
        return self.propose_share(text, ShareInput(0, budget, [0], window, price)).draft

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """What the other source learns of it."""
        self._inner.begin(prompt, top_logits)

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Learn from a step, as the other source does."""
        self.follow(text)
        self._inner.observe(text, num_new, samples)

    def ended(self, text: Sequence[int], prompt_tokens: int) -> None:
        """Let the other source know."""
        self._inner.ended(text, prompt_tokens)

    def observe_part(self, text: Sequence[int], num_new: int, samples: StepSamples) -> Callable[[], None] | None:
        """Learn what the next proposal needs, and leave the rest for later, as the other source does."""
        self.follow(text)
        return self._inner.observe_part(text, num_new, samples)
