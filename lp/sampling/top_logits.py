"""What nodes sampled, and their K best logits, as a message carries them: the one module that knows the wire format.

One int64 holds a pair: token << 32 | the bits of its float32 logit.
n: nodes; V: vocabulary; K: `num_logits`.
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
    """The K best tokens of n nodes with their logits, best first. The arrays may be strided views.

    Attributes:
        tokens: int32 (n, K).
        logits: float32 (n, K), after the logits processors; a NaN is -inf.
    """

    tokens: np.ndarray
    logits: np.ndarray

    @classmethod
    def empty(cls) -> TopLogits:
        """The top logits of no nodes: arrays of shape (0, 0)."""
        return cls(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))


def pack_top_logits(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best tokens of every node with their logits, packed for a message between ranks.

    Args:
        scores: (n, V).
        k: how many tokens to take of every node; at most V are taken.

    Returns:
        int64 (n, min(k, V)), best first, on the device of `scores`.
    """
    import torch  # here: draft sources, which the apps list for `--help`, need numpy alone

    top = scores.float().topk(min(k, scores.shape[-1]))
    values = top.values.nan_to_num(-math.inf, math.inf, -math.inf)
    return top.indices << 32 | values.view(torch.int32).long() & 0xFFFFFFFF


def unpack_top_logits(packed: np.ndarray) -> TopLogits:
    """Tokens and logits from a message's packed ones, without a copy: the reverse of `pack_top_logits`.

    Args:
        packed: int64 (n, K).
    """
    packed = np.ascontiguousarray(packed)
    return TopLogits(packed.view(np.int32)[:, TOKEN::2], packed.view(np.float32)[:, LOGIT::2])


def pack_again(top_logits: TopLogits) -> np.ndarray:
    """Pack top logits for a message, int64 (n, K): the reverse of `unpack_top_logits`."""
    packed = np.empty((*top_logits.tokens.shape, 2), np.int32)
    packed[..., TOKEN] = top_logits.tokens
    packed[..., LOGIT] = np.ascontiguousarray(top_logits.logits).view(np.int32)
    return packed.view(np.int64)[..., 0]
