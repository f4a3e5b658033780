"""The K best logits of nodes in the form that messages between ranks carry; no other module knows this format.

One int64 holds a token and its logit: token << 32 | the bits of the logit as float32. n: nodes, V: vocabulary, K:
`num_logits`.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

# Which half of an int64 an int32 view shows first depends on the machine's byte order.
TOKEN, LOGIT = (1, 0) if sys.byteorder == "little" else (0, 1)
INVALID_TOKEN = (1 << 21) - 1  # the token of a node whose scores are NaN or infinite; messages have 21 bits a token


class TopLogits(NamedTuple):
    """The K best tokens of n nodes with their logits, best first; the arrays may be strided views.

    Attributes:
        tokens: token ids, int32 (n, K).
        logits: logits after the logits processors, float32 (n, K); NaN is replaced by -inf.
    """

    tokens: np.ndarray
    logits: np.ndarray

    @classmethod
    def empty(cls) -> TopLogits:
        """Make a TopLogits without nodes: arrays of shape (0, 0)."""
        return cls(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))


def pack_top_logits(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Find the k best tokens of every node, and pack them with their logits for a message between ranks.

    Args:
        scores: (n, V), a row for each of n nodes, a column for each token of the vocabulary.
        k: how many tokens to take for every node; if k is larger than V, V tokens.

    Returns:
        int64 (n, min(k, V)), best first, on the device of `scores`; each number holds a token and its logit.
    """
    import torch  # here: draft sources, which the apps list for `--help`, need numpy alone

    top = scores.float().topk(min(k, scores.shape[-1]))
    values = top.values.nan_to_num(-math.inf, math.inf, -math.inf)
    return top.indices << 32 | values.view(torch.int32).long() & 0xFFFFFFFF


def unpack_top_logits(packed: np.ndarray) -> TopLogits:
    """Unpack the tokens and logits that a message carries, without a copy; undoes `pack_top_logits`.

    Args:
        packed: int64 (n, K), for each of n nodes K numbers that each hold a token and its logit.
    """
    packed = np.ascontiguousarray(packed)
    return TopLogits(packed.view(np.int32)[:, TOKEN::2], packed.view(np.float32)[:, LOGIT::2])


def pack_again(top_logits: TopLogits) -> np.ndarray:
    """Pack top logits for a message between ranks, int64 (n, K); undoes `unpack_top_logits`."""
    packed = np.empty((*top_logits.tokens.shape, 2), np.int32)
    packed[..., TOKEN] = top_logits.tokens
    packed[..., LOGIT] = np.ascontiguousarray(top_logits.logits).view(np.int32)
    return packed.view(np.int64)[..., 0]
