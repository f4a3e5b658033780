"""What a draft source is: it proposes a draft tree for every step, and learns from what the step sampled.

`lp.draft.registry` tells how to add one.
n: sampled nodes of a step; K: `num_logits`, the top-k logits of each; L: tokens of the prompt behind what was cached.
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
    """What the nodes of a step sampled on all ranks, the same on every rank: each path of tokens behind `c` once.

    The next step overwrites the arrays: a source that keeps some copies them.

    Attributes:
        tokens, positions, parents: all nodes, in topological order: their tokens, positions and parents; node 0 is `c`,
            whose parent is -1.
        sampled: the token that each node sampled; INVALID_TOKEN where it sampled none.
        packed: int64, one-dimensional: has the nodes' top-k logits, packed.
        starts: where in `packed` each node's top-k logits begin.
        num_logits: K.
        ngrams: the window's new n-grams, of N tokens, one a column.
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
        """Samples of nodes with these top-k logits, one row a node."""
        packed = pack_again(top_logits)
        count, num_logits = packed.shape
        starts = np.arange(count) * num_logits
        return cls(tokens, positions, parents, sampled, packed.reshape(-1), starts, num_logits, ngrams)

    @property
    def nodes(self) -> list[int]:
        """Numbers of the nodes that sampled a token: (n,)."""
        return np.flatnonzero(np.asarray(self.sampled) != INVALID_TOKEN).tolist()

    @property
    def top_logits(self) -> TopLogits:
        """Top-k logits of `nodes`: (n, K)."""
        starts = np.asarray(self.starts)[self.nodes]
        return unpack_top_logits(self.packed[starts[:, None] + np.arange(self.num_logits)])


class TokenPrice(NamedTuple):
    """What the tokens of a step cost, for sources that know how likely each of theirs is to be accepted.

    Attributes:
        tokens_per_s: what a second is worth; 0: step tokens cost nothing.
        base_tokens: step tokens that there are without a draft.
        seconds: float64, the time of a step by its tokens, at least up to base_tokens + budget.
        marginal_seconds: float64, by step tokens, the least that one more costs, as in StepTimes.
        exploration_bonus: what a draft token is worth even if it is rejected, for the logits that it leaves.
        exploration_tokens: how many draft tokens of a step have that bonus.
        calibration: factor on the probability that a token is accepted, given that its parent is.
        depth_discount: factor 1 / (1 + depth_discount x d) on the probability that a path of d tokens is accepted.
        least_tokens: tokens of the step that another rank computes anyway: up to here a rank's tokens cost nothing.
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
        """A price at which so many step tokens cost nothing."""
        nothing = compiled_array(np.zeros(num_tokens + 1))
        return cls(tokens_per_s=0.0, base_tokens=0, seconds=nothing, marginal_seconds=nothing)


class ShareInput(NamedTuple):
    """What one rank's share of a step is grown from.

    Attributes:
        rank: the rank whose share it is.
        budget: B, the most step tokens of every rank.
        base_tokens: by rank, (R,), step tokens without a draft: catch-up tokens, `c`, the rank's part of the window.
        window: what the rank's part of the window proposes at no cost.
        price: what the rank's step tokens cost; None: nothing.
        max_draft: the most draft tokens of every rank.
    """

    rank: int
    budget: int
    base_tokens: Sequence[int] | np.ndarray
    window: WindowDrafts
    price: TokenPrice | None
    max_draft: int = MAX_STEP_TOKENS

    @property
    def rooms(self) -> np.ndarray:
        """How many draft tokens each rank may have: int64 (R,)."""
        return np.maximum(np.minimum(self.budget - np.asarray(self.base_tokens, np.int64), self.max_draft), 0)


class DraftSource(ABC):
    """Proposes draft tokens for one text; every `generate` call has its own.

    All ranks call it alike, with equal arguments but for the rank, and each computes its own share of what it proposes:
    it must be deterministic. `propose` is all that it must have.

    Attributes:
        num_logits: K, top-k logits that it wants of every sampled node; 0 for none.
        divides: `propose_share` grows each rank's part alone, so that ranks can divide a fixed budget.
        accepted_prediction: tokens of the caller's prediction that were accepted as draft tokens.
    """

    num_logits: int = 0
    divides: bool = False
    accepted_prediction: int = 0

    @abstractmethod
    def propose(self, text: Sequence[int], budget: int, window: WindowDrafts, price: TokenPrice | None, /) -> DraftTree:
        """A draft tree behind text[-1].

        Args:
            text: prompt and generated tokens.
            budget: most nodes, not counting those that repeat the window's drafts.
            window: what the window proposes at no cost.
            price: what step tokens cost, for sources that state probabilities; None: nothing.
        """

    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """One rank's share: a cut through the whole tree, which every rank proposes, unless the source `divides`."""
        alone = len(step.base_tokens) == 1  # else window and price are the rank's own, and the tree is to be all ranks'
        window = step.window if alone else WindowDrafts()
        tree = self.propose(text, int(step.rooms.sum()), window, step.price if alone else None)
        return cut_tree(tree, step.budget, np.asarray(step.base_tokens).tolist(), step.rank)

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:  # noqa: B027
        """Learn from the logits of the prompt's tokens but the last, (L - 1, K). Called where they are computed.

        Args:
            prompt: the prompt's last L tokens; those before them were cached by an earlier text, and have no logits.
            top_logits: top-k logits of these tokens but the last, (L - 1, K).
        """

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:  # noqa: B027
        """Learn from a step, whose `num_new` tokens end the text."""

    def observe_part(self, text: Sequence[int], num_new: int, samples: StepSamples) -> Callable[[], None] | None:
        """Learn what the next proposal needs, where a device computes beside the host.

        Returns:
            What learns the rest, called once, while the next step is computed; None: nothing is left.
        """
        self.observe(text, num_new, samples)
        return None

    def ended(self, text: Sequence[int], prompt_tokens: int) -> None:  # noqa: B027
        """The text has ended, after all that it learned from. Not called where it failed.

        Args:
            text: prompt and generated tokens.
            prompt_tokens: how many of them are the prompt.
        """


ProposeShare = Callable[[Sequence[int], ShareInput], Share]
