"""Puts a path of draft tokens that looks certain, such as a predicted text, before the draft tree of another source.

R: number of ranks; B: most step tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp.draft.share import Share
from lp.draft.source import ProposeShare, ShareInput
from lp.draft.tree import DraftTree


def paying_length(step: ShareInput, accept_probs: Sequence[float]) -> int:
    """How many tokens of a path to draft, to maximise the expected accepted tokens less the price of their time.

    Rank 0 computes the path. Every rank calculates the same number.

    Args:
        step: how many draft tokens each rank may compute, and what they cost.
        accept_probs: probability, for each token of the path, that this token and all tokens before it are accepted.
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
    """Draft a path on rank 0, and let another draft source use the room that is left on all ranks.

    Tokens of the other source that repeat the path are not computed twice.

    Args:
        propose_share: the other source's method `propose_share`.
        text, step: arguments for `propose_share`; the path's tokens are first subtracted from rank 0's room.
        path: token ids, at most as many as rank 0 has room for.
        probs: probability, for each token of the path, that this token and all tokens before it are accepted.

    Returns:
        This rank's part of the draft tree; on rank 0 it begins with the path.
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
