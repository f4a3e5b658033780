"""The interface of a draft source, which proposes a draft tree for every decode step and learns from sampled tokens.

`lp.draft.registry` tells how to add a draft source.
n: number of sampled nodes in a step; K: `num_logits`, number of top-k logits at each node; L: number of prompt tokens
that were not cached; R: number of ranks; `c`: the newest token of the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lp.compiled import compiled_array
from lp.config import MAX_STEP_TOKENS
from lp.draft.share import Share, cut_tree
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.sampling.top_logits import INVALID_TOKEN, TopLogits, pack_again, unpack_top_logits

Ints = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Samples and logits of one decode step, gathered from all ranks, from which a draft source learns.

    They are equal on all ranks. A node that several ranks computed is listed once. The next step overwrites the arrays,
    so a source must copy what it keeps.

    Attributes:
        tokens, positions, parents: token id, position in the text, and index of the parent of every node, parents
            before children; node 0 is the newest token of the text before the step, and its parent is -1.
        sampled: token id that was sampled at each node; INVALID_TOKEN if none was sampled.
        packed: int64, one-dimensional, top-k logits of all nodes in packed form; the property `top_logits` unpacks
            them.
        starts: index in `packed` at which the top-k logits of each node begin.
        num_logits: K, number of top-k logits at a node.
        ngrams: new n-grams from the lookahead window, tuples of N token ids, at most one for each column.
    """

    tokens: Ints
    positions: Ints
    parents: Ints
    sampled: Ints
    packed: np.ndarray
    starts: Ints
    num_logits: int
    ngrams: Sequence[tuple[int, ...]]

    @classmethod
    def of(
        cls,
        tokens: Ints,
        positions: Ints,
        parents: Ints,
        sampled: Ints,
        top_logits: TopLogits,
        ngrams: Sequence[tuple[int, ...]] = (),
    ) -> StepSamples:
        """Build the samples of a decode step from top-k logits that are not packed yet.

        Args:
            tokens, positions, parents, sampled, ngrams: see the attributes.
            top_logits: top-k logits at every node, one row for each: (nodes, K).
        """
        packed = pack_again(top_logits)
        count, num_logits = packed.shape
        starts = np.arange(count) * num_logits
        return cls(tokens, positions, parents, sampled, packed.reshape(-1), starts, num_logits, ngrams)

    @property
    def nodes(self) -> list[int]:
        """Indices of the nodes at which a token was sampled: (n,)."""
        return np.flatnonzero(np.asarray(self.sampled) != INVALID_TOKEN).tolist()

    @property
    def top_logits(self) -> TopLogits:
        """The K largest logits, with their token ids, at each sampled node (each node in `nodes`): (n, K)."""
        starts = np.asarray(self.starts)[self.nodes]
        return unpack_top_logits(self.packed[starts[:, None] + np.arange(self.num_logits)])


class TokenPrice(NamedTuple):
    """What draft tokens cost, so that a draft source which states accept probabilities drafts only tokens that pay.

    Attributes:
        tokens_per_s: generated tokens that a second of step time must bring, as decoding otherwise generates about so
            many; 0: draft tokens cost nothing.
        base_tokens: number of step tokens on this rank without draft tokens.
        seconds: float64, time of a step by its number of tokens, at least up to base_tokens + budget.
        marginal_seconds: float64, least seconds that one more token costs, by number of step tokens (see StepTimes).
        exploration_bonus: value of a draft token even if it is rejected, in generated tokens, because the pool learns
            its logits.
        exploration_tokens: number of draft tokens in a step that get this bonus.
        calibration: factor by which the probability of each token, given that its parent is accepted, is multiplied.
        depth_discount: constant x in the factor 1 / (1 + x * d) by which the probability of a path of d tokens is
            multiplied.
        least_tokens: step tokens, without draft tokens, of the rank that has most. All ranks wait for this rank, so
            draft tokens on other ranks are free up to this number.
    """

    tokens_per_s: float
    base_tokens: int
    seconds: Any
    marginal_seconds: Any
    exploration_bonus: float = 0.0
    exploration_tokens: int = 0
    calibration: float = 1.0
    depth_discount: float = 0.0
    least_tokens: int = 0

    @classmethod
    def free(cls, num_tokens: int) -> TokenPrice:
        """Make a price at which draft tokens cost nothing, for steps of at most `num_tokens` tokens."""
        nothing = compiled_array(np.zeros(num_tokens + 1))
        return cls(tokens_per_s=0.0, base_tokens=0, seconds=nothing, marginal_seconds=nothing)


class ShareInput(NamedTuple):
    """How many draft tokens each rank may compute in a step, and what they cost: input of `DraftSource.propose_share`.

    Attributes:
        rank: the rank that drafts.
        budget: B, the most step tokens of any rank.
        base_tokens: (R,), number of step tokens that each rank has without draft tokens: catch-up tokens (accepted
            tokens whose KV it lacks), the newest token of the text, and its part of the lookahead window.
        window: paths of this rank's part of the window; tokens on these paths are drafted at no cost.
        price: what the rank's step tokens cost; None: nothing.
        max_draft: most draft tokens of any rank.
    """

    rank: int
    budget: int
    base_tokens: Sequence[int] | np.ndarray
    window: WindowDrafts
    price: TokenPrice | None
    max_draft: int = MAX_STEP_TOKENS

    @property
    def rooms(self) -> np.ndarray:
        """Number of draft tokens that each rank has room for, int64 (R,)."""
        return np.maximum(np.minimum(self.budget - np.asarray(self.base_tokens, np.int64), self.max_draft), 0)


class DraftSource(ABC):
    """Proposes draft tokens for one text; every `generate` call has its own draft source.

    Subclasses must define `propose`; all other methods have defaults. A source must be deterministic: every rank has an
    instance, all instances get the same calls, and each rank computes its own part of the proposed tree.

    Attributes:
        num_logits: K, number of top-k logits that the source wants to see at every sampled node; 0 for none.
        divides: whether `propose_share` is overridden to grow each rank's part by itself; all ranks then divide a fixed
            budget among them.
        accepted_prediction: number of accepted draft tokens that came from the caller's predicted text.
    """

    num_logits: int = 0
    divides: bool = False
    accepted_prediction: int = 0

    @abstractmethod
    def propose(self, text: Sequence[int], budget: int, window: WindowDrafts, price: TokenPrice | None, /) -> DraftTree:
        """Propose the draft tree of the next step; its root is text[-1].

        Args:
            text: token ids of the prompt and the generated tokens.
            budget: most draft tokens, without tokens that repeat the window's.
            window: paths of the lookahead window; tokens on these paths are drafted at no cost.
            price: what step tokens cost, for sources that state accept probabilities; None: nothing.
        """

    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """Propose one rank's part of the draft tree.

        By default, every rank proposes the whole tree with `propose` and takes its part with `cut_tree`.

        Args:
            text: token ids of the prompt and the generated tokens.
            step: how many draft tokens each rank may compute, and what they cost.
        """
        alone = len(step.base_tokens) == 1  # else window and price are the rank's own, and the tree is to be all ranks'
        window = step.window if alone else WindowDrafts()
        tree = self.propose(text, int(step.rooms.sum()), window, step.price if alone else None)
        return cut_tree(tree, step.budget, np.asarray(step.base_tokens).tolist(), step.rank)

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:  # noqa: B027
        """Learn from the prompt's logits, once after prefill.

        It is not called if `num_logits` is 0, or if no logits were computed.

        Args:
            prompt: last L tokens of the prompt. The tokens before them have no logits: they were cached by an earlier
                text, or are more than the budget reads.
            top_logits: top-k logits at each of these tokens but the last, (L - 1, K).
        """

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:  # noqa: B027
        """Learn from a decode step: from the tokens it generated, and from what was sampled at all its nodes.

        Args:
            text: token ids of the prompt and the generated tokens, including the step's.
            num_new: number of tokens at the end of `text` that the step generated.
            samples: tokens, samples and logits at all nodes of the step.
        """

    def observe_part(self, text: Sequence[int], num_new: int, samples: StepSamples) -> Callable[[], None] | None:
        """Learn from a decode step in two parts: at once what the next proposal needs, the rest while a GPU computes.

        It is called instead of `observe`, with the same arguments, where the host is idle during the forward pass.

        Args:
            text: token ids of the prompt and the generated tokens, including the step's.
            num_new: number of tokens at the end of `text` that the step generated.
            samples: tokens, samples and logits at all nodes of the step.

        Returns:
            A function that learns the rest, to be called once, during the next forward pass; None if nothing is left to
            learn.
        """
        self.observe(text, num_new, samples)
        return None

    def ended(self, text: Sequence[int], prompt_tokens: int) -> None:  # noqa: B027
        """Called once when the text is finished, so that the source can keep something for later texts.

        It is not called if the `generate` call has failed.

        Args:
            text: token ids of the prompt and the generated tokens.
            prompt_tokens: number of tokens at the beginning of `text` that are the prompt.
        """


ProposeShare = Callable[[Sequence[int], ShareInput], Share]
