"""Base class of draft sources that add tokens to the draft tree of another draft source."""

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
    """Base class of a draft source that adds tokens to the draft tree of another draft source.

    The wrapped source learns from all steps as if it were alone. Subclasses define `propose_share` and `follow`.

    Args:
        inner: the wrapped draft source.
    """

    def __init__(self, inner: DraftSource) -> None:
        self.num_logits = inner.num_logits
        self._inner = inner
        self._propose_inner = inner.propose_share
        self._accepted_tried = (PRIOR_ACCEPTED, PRIOR_TRIED)

    @property
    def added_prob(self) -> float:
        """Estimated probability that an added draft token is accepted, given that all tokens before it are.

        The estimate starts from a prior, and then follows the tokens that were added earlier in this text.
        """
        accepted, tried = self._accepted_tried
        return accepted / tried

    def count(self, accepted: int, tried: int) -> None:
        """Record how many added draft tokens were accepted, to update the estimate `added_prob`.

        Args:
            accepted: number of added tokens that were accepted.
            tried: number of added tokens before which all tokens were accepted.
        """
        accepted_before, tried_before = self._accepted_tried
        share = min(1.0, MEMORY_TOKENS / (tried_before + tried))
        self._accepted_tried = ((accepted_before + accepted) * share, (tried_before + tried) * share)

    @abstractmethod
    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """Propose one rank's part of the draft tree: added tokens, and tokens from the wrapped source.

        Args:
            text: token ids of the prompt and the generated tokens.
            step: how many draft tokens each rank may compute, and what they cost.
        """

    @abstractmethod
    def follow(self, text: Sequence[int]) -> None:
        """Learn from the tokens that were appended to the text since the last call.

        It is called after each step, and also before each proposal.

        Args:
            text: token ids of the prompt and the generated tokens.
        """

    def propose(self, text: Sequence[int], budget: int, window: WindowDrafts, price: TokenPrice | None, /) -> DraftTree:
        """Propose the whole draft tree, for a rank that drafts alone.

        Args:
            text: token ids of the prompt and the generated tokens.
            budget: most draft tokens, without tokens that repeat the window's.
            window: paths of the lookahead window; tokens on these paths are drafted at no cost.
            price: what step tokens cost; None: nothing.
        """
        return self.propose_share(text, ShareInput(0, budget, [0], window, price)).draft

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """Let the wrapped source learn from the prompt's logits, once after prefill.

        Args:
            prompt: last tokens of the prompt; earlier tokens have no logits: they were cached, or are not read.
            top_logits: top-k logits at each of these tokens but the last.
        """
        self._inner.begin(prompt, top_logits)

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Learn from a decode step, and let the wrapped source learn from it, too.

        Args:
            text: token ids of the prompt and the generated tokens, including the step's.
            num_new: number of tokens at the end of `text` that the step generated.
            samples: tokens, samples and logits at all nodes of the step.
        """
        self.follow(text)
        self._inner.observe(text, num_new, samples)

    def ended(self, text: Sequence[int], prompt_tokens: int) -> None:
        """Tell the wrapped source that the text is finished.

        Args:
            text: token ids of the prompt and the generated tokens.
            prompt_tokens: number of tokens at the beginning of `text` that are the prompt.
        """
        self._inner.ended(text, prompt_tokens)

    def observe_part(self, text: Sequence[int], num_new: int, samples: StepSamples) -> Callable[[], None] | None:
        """Learn from a decode step, but let the wrapped source leave a part of its learning for later.

        Args:
            text: token ids of the prompt and the generated tokens, including the step's.
            num_new: number of tokens at the end of `text` that the step generated.
            samples: tokens, samples and logits at all nodes of the step.

        Returns:
            A function that learns the rest; None if nothing is left to learn.
        """
        self.follow(text)
        return self._inner.observe_part(text, num_new, samples)
