"""A path that is drafted before what another source drafts: a share of both.

R: ranks; B: the most step tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp.draft.share import Share
from lp.draft.source import ProposeShare, ShareInput
from lp.draft.tree import DraftTree


def paying_length(step: ShareInput, accept_probs: Sequence[float]) -> int:
    """How many tokens of a path to draft, the same on every rank: as many as have room, and pay.

    Args:
        step: what a share is grown from, on any rank.
        accept_probs: by token of the path, the probability that it is accepted with those before it.
    """
    most = min(int(step.rooms[0]), len(accept_probs))
    price = step.price
    if price is None or most <= 0:
        return max(most, 0)
    others = price.base_tokens - int(step.base_tokens[step.rank])  # of other texts that take the step
    base = others + int(step.base_tokens[0])
    seconds = np.asarray(price.seconds)[base : base + most + 1]
    worth = np.concatenate([[0.0], np.cumsum(accept_probs[: len(seconds) - 1])]) - price.tokens_per_s * seconds
    return int(worth.argmax())


def share_with_path(
    propose_share: ProposeShare, text: Sequence[int], step: ShareInput, path: Sequence[int], probs: Sequence[float]
) -> Share:
    """Another source's share, grown in the room that a path leaves; the first rank computes the path.

    Nodes that repeat the path's share its nodes in the step.

    Args:
        propose_share: the other source's `propose_share`.
        text, step: arguments of `propose_share`.
        path: tokens, no more than there is room for.
        probs: by token, the probability that it is accepted with those before it.
    """
    if not path:
        return propose_share(text, step)
    base_tokens = np.array(step.base_tokens)
    base_tokens[0] += len(path)
    price = step.price
    if price is not None and step.rank == 0:
        price = price._replace(base_tokens=price.base_tokens + len(path))
    others = propose_share(text, step._replace(base_tokens=base_tokens, price=price))
    if step.rank:
        return others
    draft = others.draft
    stated = draft.accept_probs if len(draft.accept_probs) else np.zeros(len(draft))
    parents = np.asarray(draft.parents, np.int64)
    tree = DraftTree(
        tokens=np.concatenate([np.asarray(path, np.int64), np.asarray(draft.tokens, np.int64)]),
        parents=np.concatenate([np.arange(-1, len(path) - 1), np.where(parents < 0, -1, parents + len(path))]),
        accept_probs=np.concatenate([np.asarray(probs, np.float64), np.asarray(stated, np.float64)]),
        merge=draft.merge,
    )
    return Share(tree, others.common)
