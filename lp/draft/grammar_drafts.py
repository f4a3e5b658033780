"""Drafting for a text that has to follow a grammar, such as a JSON schema.

Draft tokens that the grammar forbids would be rejected for certain, so they are left out. Where the grammar allows only
one continuation, the tokens that spell this continuation are drafted. They are called forced tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lp.draft.path_first import paying_length, share_with_path
from lp.draft.share import Share
from lp.draft.source import DraftSource, ShareInput
from lp.draft.tree import DraftTree
from lp.draft.wrapping import WrappingSource
from lp.sampling.grammar import Cursor, common_length


class GrammarDrafts(WrappingSource):
    """Wraps another draft source for a text with a grammar: removes forbidden draft tokens, and adds forced ones.

    Forced tokens spell the only characters that the grammar allows next, such as `"name":` after `{`. The model may
    spell these characters with other tokens, so forced tokens are verified like all draft tokens.

    Args:
        inner: the wrapped draft source.
        cursor: finds what the grammar allows after the text so far; this text alone uses it.
        prompt_tokens: number of prompt tokens; the grammar applies only to the generated tokens after the prompt.
    """

    def __init__(self, inner: DraftSource, cursor: Cursor, prompt_tokens: int) -> None:
        super().__init__(inner)
        self._cursor = cursor
        self._prompt_tokens = prompt_tokens
        self._seen = prompt_tokens

    @property
    def accepted_prediction(self) -> int:  # type: ignore[override]
        """Number of accepted draft tokens from the caller's predicted text, as the wrapped source counts them."""
        return self._inner.accepted_prediction

    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """Propose one rank's part of the draft tree, without tokens that the grammar forbids and with forced tokens.

        Forced tokens spell the only characters that the grammar allows next.

        Args:
            text: token ids of the prompt and the generated tokens.
            step: how many draft tokens each rank may compute, and what they cost.
        """
        self.follow(text)
        if not self._cursor.go_to(text[self._prompt_tokens :]) or self._cursor.matcher.ended:
            return self._propose_inner(text, step)
        prob = self.added_prob
        forced = self._forced()
        probs = [prob**depth for depth in range(1, len(forced) + 1)]
        forced = forced[: paying_length(step, probs)]
        share = share_with_path(self._propose_inner, text, step, forced, probs[: len(forced)])
        return replace(share, draft=self._grown(share.draft, step, prob))

    def follow(self, text: Sequence[int]) -> None:
        """Learn from the text's new tokens how often forced tokens are accepted.

        Forced tokens spell the only characters that the grammar allows next. The property `added_prob` is estimated
        from these counts.

        Args:
            text: token ids of the prompt and the generated tokens.
        """
        new = text[self._seen :]
        if not new or not self._cursor.go_to(text[self._prompt_tokens : self._seen]):
            return
        self._seen = len(text)
        accepted = tried = at = 0
        while at < len(new) and not self._cursor.matcher.ended:
            forced = self._cursor.matcher.forced()
            same = common_length(forced, new[at:])
            accepted += same
            tried += min(same + 1, len(forced), len(new) - at)
            for token in new[at : at + max(same, 1)]:
                self._cursor.go_on(token)
            at += max(same, 1)
        self.count(accepted, tried)

    def _forced(self) -> list[int]:
        """The forced tokens at the cursor, up to the first one that the grammar does not accept after all."""
        forced = self._cursor.matcher.forced()
        taken = 0
        while taken < len(forced) and self._cursor.go_on(forced[taken]):
            taken += 1
        self._cursor.go_back(taken)
        return forced[:taken]

    def _grown(self, tree: DraftTree, step: ShareInput, prob: float) -> DraftTree:
        """Remove a draft tree's forbidden nodes, and add forced tokens after the others where they pay.

        Args:
            tree: this rank's draft tree.
            step: the rank's room for draft tokens, and their price.
            prob: probability that a forced token is accepted, given the tokens before it.
        """
        tokens, parents = np.asarray(tree.tokens).tolist(), np.asarray(tree.parents).tolist()
        branches: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            branches.append([*branches[parent], token] if parent >= 0 else [token])
        allowed: set[int] = set()
        spans: dict[int, list[int]] = {}
        for node, is_allowed in self._cursor.visit(branches):
            if is_allowed:
                allowed.add(node)
                if span := self._forced():
                    spans[node] = span
        grown = GrownTree(tree, sorted(allowed), step)
        for node in sorted(spans, key=grown.prob_of, reverse=True):
            grown.add_path(node, spans[node], prob)
        return grown.tree()


class GrownTree:
    """Builds a new draft tree: keeps some nodes of a given tree, and adds paths of tokens after these nodes.

    Args:
        given: the draft tree from which nodes are kept.
        kept: indices of the nodes of `given` to keep, ascending; with a node, all its ancestors must be kept.
        step: how many draft tokens each rank may compute, and what they cost.
    """

    def __init__(self, given: DraftTree, kept: Sequence[int], step: ShareInput) -> None:
        self._room = int(step.rooms[step.rank])
        self._price = step.price
        self._merge = given.merge
        self._stated = len(given.accept_probs) > 0
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._probs: list[float] = []
        self._children: dict[tuple[int, int], int] = {}
        self._places: dict[int, int] = {}  # by node of the given tree, its index in this one
        for node in kept:
            parent = self._places.get(int(given.parents[node]), -1)
            prob = float(given.accept_probs[node]) if self._stated else 0.0
            self._places[node] = self._child(parent, int(given.tokens[node]), prob)

    def prob_of(self, node: int) -> float:
        """Probability that a kept node and all its ancestors are accepted; 0 if the given tree states no probabilities.

        Args:
            node: index of the kept node in the given tree.
        """
        return self._probs[self._places[node]]

    def add_path(self, node: int, path: Sequence[int], prob: float) -> None:
        """Add a path of draft tokens after a kept node, as far as there is room and each token is worth its time.

        Args:
            node: index of the kept node in the given tree.
            path: token ids; the first one becomes a child of the node.
            prob: probability that a token of the path is accepted, given that all tokens before it are.
        """
        place = self._places[node]
        for token in path:
            accept_prob = self._probs[place] * prob
            known = self._children.get((place, token))
            if known is None:
                if not self._pays(accept_prob):
                    return
                known = self._child(place, token, accept_prob)
            self._probs[known] = max(self._probs[known], accept_prob)
            place = known

    def tree(self) -> DraftTree:
        """Return the new draft tree: the kept nodes of the given tree and the added tokens."""
        return DraftTree(self._tokens, self._parents, self._probs if self._stated else (), self._merge)

    def _child(self, parent: int, token: int, prob: float) -> int:
        """Index of the child with this token, added if there is none; a tree that does not merge gets a new one."""
        place = self._children.get((parent, token)) if self._merge else None
        if place is None:
            place = self._children[parent, token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
            self._probs.append(prob)
        self._probs[place] = max(self._probs[place], prob)
        return place

    def _pays(self, accept_prob: float) -> bool:
        """Whether there is room for one more token, and its accept probability is above the price of its time."""
        draft_tokens = len(self._tokens)
        if draft_tokens >= self._room:
            return False
        price = self._price
        if price is None:
            return True
        at = min(max(price.base_tokens + draft_tokens, price.least_tokens), len(price.marginal_seconds) - 1)
        return accept_prob > price.tokens_per_s * float(price.marginal_seconds[at])
