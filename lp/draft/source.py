"""The interface of a draft source: it proposes a draft tree for every step, and learns from the sampled tokens.

`lp.draft.registry` tells how to add one.
n: sampled nodes of a step; K: `num_logits`, the top-k logits of each; L: tokens of the prompt behind what was cached;
R: ranks; `c`: the newest token of the text.
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
    """The samples and logits of one step, gathered from all ranks, from which a draft source learns.

    All ranks get the same. A node that several ranks computed is listed once. The next step overwrites the arrays: a
    source that keeps some of them must copy them.

    Attributes:
        tokens, positions, parents: token, position and parent of every node, parents before children; node 0 is `c`,
            the newest token of the text before the step, and its parent is -1.
        sampled: the token sampled at each node; INVALID_TOKEN if none was sampled.
        packed: int64, one-dimensional, with the top-k logits of all nodes in packed form; `top_logits` unpacks them.
        starts: index in `packed` at which the top-k logits of each node begin.
        num_logits: K, top-k logits of a node.
        ngrams: the window's new n-grams, tuples of N tokens, at most one for each column.
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
        """Make StepSamples from unpacked top-k logits.

        Args:
            tokens, positions, parents, sampled, ngrams: see the attributes.
            top_logits: top-k logits of every node, one row for each: (nodes, K).
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
        """The K largest logits, with their tokens, at each of `nodes`: (n, K)."""
        starts = np.asarray(self.starts)[self.nodes]
        return unpack_top_logits(self.packed[starts[:, None] + np.arange(self.num_logits)])


class TokenPrice(NamedTuple):
    """The price of draft tokens: a source that states accept probabilities drafts none that costs more than it gains.

    Attributes:
        tokens_per_s: generated tokens that a second is worth: what decoding otherwise makes in it; 0: draft tokens
            cost nothing.
        base_tokens: step tokens of the rank without draft tokens.
        seconds: float64, the time of a step by its number of tokens, at least up to base_tokens + budget.
        marginal_seconds: float64, by number of step tokens, the least seconds that one more costs (see StepTimes).
        exploration_bonus: generated tokens that even a rejected draft token is worth, because its logits are learned.
        exploration_tokens: number of draft tokens of a step that get this bonus.
        calibration: factor on the probability that a token is accepted, given that its parent is.
        depth_discount: a path of d tokens has its probability multiplied by 1 / (1 + depth_discount x d).
        least_tokens: most step tokens of any rank without draft tokens. All ranks wait for that one, so draft tokens of
            this rank are free up to this size.
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
        """The price of steps in which up to `num_tokens` tokens cost nothing."""
        nothing = compiled_array(np.zeros(num_tokens + 1))
        return cls(tokens_per_s=0.0, base_tokens=0, seconds=nothing, marginal_seconds=nothing)


class ShareInput(NamedTuple):
    """How much one rank may draft in a step: the input of `DraftSource.propose_share`.

    Attributes:
        rank: the rank that drafts.
        budget: B, the most step tokens of any rank.
        base_tokens: (R,), step tokens of each rank without draft tokens: catch-up tokens (accepted tokens whose KV it
            lacks), `c`, and its part of the window.
        window: paths of the rank's part of the window, which are drafts at no cost.
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
        """Number of draft tokens that each rank has room for: int64 (R,)."""
        return np.maximum(np.minimum(self.budget - np.asarray(self.base_tokens, np.int64), self.max_draft), 0)


class DraftSource(ABC):
    """Proposes draft tokens for one text; every `generate` call has a source of its own.

    Subclasses must define `propose`; the other methods do nothing, or build on it. A source must be deterministic: each
    rank has an instance, all are called alike, and each rank computes its own share of the proposed tree.

    Attributes:
        num_logits: K, how many of the largest logits the source wants to see of every sampled node; 0 for none.
        divides: whether `propose_share` grows each rank's share by itself; ranks then divide a fixed budget among them.
        accepted_prediction: tokens of the caller's predicted text that were accepted as draft tokens.
    """

    num_logits: int = 0
    divides: bool = False
    accepted_prediction: int = 0

    @abstractmethod
    def propose(self, text: Sequence[int], budget: int, window: WindowDrafts, price: TokenPrice | None, /) -> DraftTree:
        """Propose the draft tree of the next step, behind text[-1].

        Args:
            text: prompt and generated tokens.
            budget: most draft tokens, without those that repeat the window's drafts.
            window: paths of the lookahead window, which are drafts at no cost.
            price: what step tokens cost, for sources that state accept probabilities; None: nothing.
        """

    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """Propose one rank's share of the draft tree.

        Unless a subclass overrides it, every rank proposes the whole tree and takes its part (`cut_tree`).

        Args:
            text: prompt and generated tokens.
            step: the rank, its room for draft tokens, and their price.
        """
        alone = len(step.base_tokens) == 1  # else window and price are the rank's own, and the tree is to be all ranks'
        window = step.window if alone else WindowDrafts()
        tree = self.propose(text, int(step.rooms.sum()), window, step.price if alone else None)
        return cut_tree(tree, step.budget, np.asarray(step.base_tokens).tolist(), step.rank)

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:  # noqa: B027
        """Learn from the prompt's logits, once after prefill; not called if `num_logits` is 0 or none were computed.

        Args:
            prompt: the prompt's last L tokens; the tokens before them were cached by an earlier text, without logits.
            top_logits: top-k logits at each of these tokens but the last, (L - 1, K).
        """

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:  # noqa: B027
        """Learn from a step.

        Args:
            text: prompt and generated tokens, those of the step included.
            num_new: how many tokens at its end the step generated.
            samples: tokens and logits of all nodes of the step.
        """

    def observe_part(self, text: Sequence[int], num_new: int, samples: StepSamples) -> Callable[[], None] | None:
        """Learn from a step in two parts: only what the next proposal needs, and the rest while a GPU computes.

        Called in place of `observe` where the host is idle during the forward pass; its arguments are the same.

        Returns:
            A function that learns the rest, called once, during the next forward pass; None if nothing is left.
        """
        self.observe(text, num_new, samples)
        return None

    def ended(self, text: Sequence[int], prompt_tokens: int) -> None:  # noqa: B027
        """Called once when the text is finished, to keep something of it for later texts; not if the call failed.

        Args:
            text: prompt and generated tokens.
            prompt_tokens: how many tokens at its beginning are the prompt.
        """


ProposeShare = Callable[[Sequence[int], ShareInput], Share]
