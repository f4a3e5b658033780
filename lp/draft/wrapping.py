"""Base class of draft sources that add tokens to the drafts of another one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from lp.draft.share import Share
from lp.draft.source import DraftSource, ShareInput, StepSamples, TokenPrice
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.sampling.top_logits import TopLogits

# Added tokens that count as accepted, and as tried, before a text begins.
PRIOR_ACCEPTED, PRIOR_TRIED = 9.0, 10.0
MEMORY_TOKENS = 64.0  # tried tokens that are remembered; older ones fade


class WrappingSource(DraftSource):
    """Base class of a draft source that adds tokens to the draft tree of another one.

    The wrapped source learns from all steps as if it were alone. Subclasses define `propose_share` and `follow`.

    Args:
        inner: the wrapped source.
    """

    def __init__(self, inner: DraftSource) -> None:
        self.num_logits = inner.num_logits
        self._inner = inner
        self._propose_inner = inner.propose_share
        self._accepted_tried = (PRIOR_ACCEPTED, PRIOR_TRIED)

    @property
    def added_prob(self) -> float:
        """Probability that an added token is accepted if the tokens before it are, as counted in this text."""
        accepted, tried = self._accepted_tried
        return accepted / tried

    def count(self, accepted: int, tried: int) -> None:
        """Record how added tokens fared, for `added_prob`.

        Args:
            accepted: added tokens that were accepted.
            tried: added tokens all of whose predecessors were accepted.
        """
        accepted_before, tried_before = self._accepted_tried
        share = min(1.0, MEMORY_TOKENS / (tried_before + tried))
        self._accepted_tried = ((accepted_before + accepted) * share, (tried_before + tried) * share)

    @abstractmethod
    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """Propose one rank's share of the draft tree: added tokens, and the wrapped source's."""

    @abstractmethod
    def follow(self, text: Sequence[int]) -> None:
        """Learn from the tokens that the text has grown by since the last call; called before each proposal, too."""

    def propose(self, text: Sequence[int], budget: int, window: WindowDrafts, price: TokenPrice | None, /) -> DraftTree:
        """Propose the whole draft tree, for a rank that drafts alone."""
        return self.propose_share(text, ShareInput(0, budget, [0], window, price)).draft

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """Let the wrapped source learn from the prompt's logits."""
        self._inner.begin(prompt, top_logits)

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Learn from a step, and let the wrapped source learn from it."""
        self.follow(text)
        self._inner.observe(text, num_new, samples)

    def ended(self, text: Sequence[int], prompt_tokens: int) -> None:
        """Tell the wrapped source that the text is finished."""
        self._inner.ended(text, prompt_tokens)

    def observe_part(self, text: Sequence[int], num_new: int, samples: StepSamples) -> Callable[[], None] | None:
        """Learn from a step; the wrapped source may leave a part of its learning for later, which is returned."""
        self.follow(text)
        return self._inner.observe_part(text, num_new, samples)
