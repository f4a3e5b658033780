"""THE gathered tensor of a step: what one rank tells the others, in one int64 row of fixed size.

    [DIGEST, FLAGS, LENGTH, tokens of the owned reads in slot order, three an int64, padding]

Every rank knows the global layout, so which slot a token belongs to is not sent. The size is that of a full step
whatever this one needs: ranks whose states differ must still meet in one collective to learn that they do.
R: ranks; P: int64s a rank sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from enum import IntFlag

import numpy as np
import torch

from lp.lookahead.layout import StepLayout
from lp.lookahead.sharding import ShardPlan

DIGEST, FLAGS, LENGTH, HEADER = 0, 1, 2, 3
BITS = 21  # of a token; three fit an int64 and its sign
SHIFTS = (0, BITS, 2 * BITS)
SPARE_READS = 12  # candidates that share prefixes divide less evenly than a full step's, which share nothing


class Stop(IntFlag):
    """Why a rank wants all to stop; the step that carries a flag adds no tokens."""

    NONE = 0
    INTERRUPTED = 1  # Ctrl-C or SIGTERM
    FAILED = 2  # a callback or criterion raised
    EOS, MAX_LENGTH, CRITERIA, STOP_STRING, CONTEXT = 4, 8, 16, 32, 64  # rank 0's verdict, with the LENGTH kept


def chain_digest(previous: int, *parts: Sequence[int]) -> int:
    """A 63-bit digest of the previous one and these lists of ints, equal on every machine."""
    hasher = hashlib.blake2b(previous.to_bytes(8, "little"), digest_size=8)
    for part in parts:
        hasher.update(len(part).to_bytes(4, "little"))
        hasher.update(np.asarray(part, dtype="<i8").tobytes())
    return int.from_bytes(hasher.digest(), "little") >> 1


def text_digest(text: str) -> int:
    """A 63-bit digest of a text."""
    return chain_digest(0, list(text.encode()))


def row_size(full: ShardPlan) -> int:
    """P for all steps of a generation.

    Args:
        full: the plan of the largest step, `layout.full_layout`.
    """
    return HEADER + _words(full.most_reads + SPARE_READS)


def _words(reads: int) -> int:
    return -(-reads // len(SHIFTS))


def check_vocabulary(size: int) -> None:
    """Refuse tokens that a third of an int64 cannot hold.

    Raises:
        ValueError: the vocabulary's size and the limit.
    """
    if size > 1 << BITS:
        raise ValueError(f"the model has {size} tokens; ranks exchange at most {1 << BITS}: use a smaller vocabulary")


def pack(header: tuple[int, int, int], tokens: torch.Tensor, plan: ShardPlan, size: int) -> torch.Tensor:
    """This rank's row, on the device of `tokens`: `size` int64s, or more where the step's reads need more.

    Args:
        header: digest, flags, generated tokens to keep.
        tokens: what this rank's owned reads say, in slot order.
        plan: the step's.
        size: P.
    """
    words = max(size - HEADER, _words(plan.most_reads))
    padded = tokens.new_zeros(words * len(SHIFTS))
    padded[: len(tokens)] = tokens
    packed = (padded.view(words, len(SHIFTS)) << tokens.new_tensor(SHIFTS)).sum(-1)
    return torch.cat([tokens.new_tensor(header), packed])


def gather(row: torch.Tensor, size: int, all_gather: Callable[[torch.Tensor], torch.Tensor], step: int) -> torch.Tensor:
    """Every rank's row, by one all-gather of `size` int64s; what is beyond follows once the digests agree.

    Returns:
        (R, at least P), on the host.

    Raises:
        RuntimeError: ranks' digests differ, so their states do; names ranks and step.
    """
    first, *beyond = row.split(size)
    gathered = all_gather(first)
    _check_digests(gathered[:, DIGEST].numpy(), step)
    return torch.cat([gathered, *map(all_gather, beyond)], dim=1)


def _check_digests(digests: np.ndarray, step: int) -> None:
    if (digests == digests[0]).all():
        return
    # The odd one out is to blame, whichever rank that is; of as many on each side, those that differ from rank 0.
    shared = [(digests == digest).sum() for digest in digests]
    alike = digests == digests[shared.index(max(shared))]
    odd, rest = (", ".join(map(str, np.flatnonzero(ranks))) for ranks in (~alike, alike))
    raise RuntimeError(
        f"rank {odd} differs from rank {rest} at step {step}: their tokens, windows or candidates are not the same, "
        "so the job stops before it could say anything wrong"
    )


def unpack(gathered: torch.Tensor, plan: ShardPlan, layout: StepLayout) -> tuple[dict[int, int], Stop, int]:
    """All ranks' read-offs by slot, in slot order, the union of their flags, and rank 0's length.

    Args:
        gathered: (R, at least P) int64, on the host.
    """
    rows = gathered.numpy()
    tokens = (rows[:, HEADER:, None] >> np.array(SHIFTS) & (1 << BITS) - 1).reshape(len(rows), -1)  # (R, reads)
    said: dict[int, int] = {}
    for rank, slots in enumerate(plan.reads):
        said.update(zip(slots, tokens[rank, : len(slots)].tolist(), strict=True))
    read = {slot: said[slot] for slot in layout.reads}  # an order that does not depend on the number of ranks
    return read, Stop(int(np.bitwise_or.reduce(rows[:, FLAGS]))), int(rows[0, LENGTH])
