"""THE gathered tensor of a step: what one rank tells the others, in one int64 row of fixed size.

    [DIGEST, FLAGS, LENGTH, tokens of the owned reads in node order, three an int64, padding, their top_logits, padding]

Every rank knows the global layout, so which node a token belongs to is not sent. The size is that of a full step
whatever this one needs: ranks whose states differ must still meet in one collective to learn that they do.
R: ranks; P: int64s a rank sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from functools import reduce
from operator import or_

import numpy as np
import torch

from lp.draft.layout import StepLayout
from lp.parallel.agreement import check_calls
from lp.parallel.sharding import ShardPlan
from lp.sampling import top_logits as wire
from lp.sampling.sampler import INVALID_TOKEN
from lp.sampling.top_logits import TopLogits

DIGEST, FLAGS, LENGTH, HEADER = 0, 1, 2, 3
BITS = 21  # of a token; three fit an int64 and its sign
SHIFTS = (0, BITS, 2 * BITS)
SPARE_READS = 12  # candidates that share prefixes divide less evenly than a full step's, which share nothing


class Stop(IntFlag):
    """Why a rank wants all to stop; the step that carries a flag adds no tokens."""

    NONE = 0
    INTERRUPTED = 1  # Ctrl-C or SIGTERM
    FAILED = 2  # something raised on that rank alone: a callback, a criterion, a processor, the model
    EOS, MAX_LENGTH, CRITERIA, STOP_STRING, CONTEXT = 4, 8, 16, 32, 64  # rank 0's verdict, with the LENGTH kept


@dataclass(frozen=True, slots=True)
class MessageShape:
    """What a row has room for.

    Attributes:
        reads: owned reads.
        top_logits: K, kept tokens of each.
    """

    reads: int
    num_logits: int

    @classmethod
    def of(cls, full: ShardPlan, num_logits: int) -> MessageShape:
        """For all steps of a generation, given the plan of the largest, `layout.largest_layout`."""
        return cls(full.max_owned + SPARE_READS, num_logits)

    def holding(self, plan: ShardPlan) -> MessageShape:
        """The same, or larger where the step's reads need it."""
        return MessageShape(max(self.reads, plan.max_owned), self.num_logits)

    @property
    def words(self) -> int:
        """Int64s of the tokens."""
        return -(-self.reads // len(SHIFTS))

    @property
    def size(self) -> int:
        """P, int64s of the row."""
        return HEADER + self.words + self.reads * self.num_logits


def check_vocabulary(size: int) -> None:
    """Refuse tokens that a third of an int64 cannot hold.

    Raises:
        ValueError: the vocabulary's size and the limit.
    """
    if size > INVALID_TOKEN:
        raise ValueError(
            f"the model has {size} tokens; ranks exchange at most {INVALID_TOKEN}: use a smaller vocabulary"
        )


def pack(
    header: tuple[int, Stop, int], tokens: torch.Tensor, top_logits: torch.Tensor, plan: ShardPlan, shape: MessageShape
) -> torch.Tensor:
    """This rank's row, on the device of `tokens`: P int64s, or more where the step's reads need more.

    Args:
        header: digest, flags, generated tokens to keep.
        tokens: what this rank's owned reads say, in node order.
        top_logits: (len(tokens), K), as `lp.sampling.top_logits.pack` makes them.
        plan: the step's.
        shape: of the rows of this generation.
    """
    held = shape.holding(plan)
    row = tokens.new_zeros(held.size)
    row[:HEADER] = torch.tensor(header)
    for place, shift in enumerate(SHIFTS):
        mine = tokens[place :: len(SHIFTS)]
        row[HEADER : HEADER + len(mine)] |= mine << shift
    start = HEADER + held.words
    row[start : start + top_logits.numel()] = top_logits.flatten()
    return row


def gather(
    row: torch.Tensor, shape: MessageShape, all_gather: Callable[[torch.Tensor], torch.Tensor], step: int
) -> torch.Tensor:
    """Every rank's row, by one all-gather of P int64s; what is beyond follows once the digests agree.

    Returns:
        (R, at least P), on the host.

    Raises:
        RuntimeError: ranks' digests differ, so their states do; names ranks and step.
        CallsDiffer: another rank is in no step.
    """
    first, *beyond = row.split(shape.size)
    gathered = all_gather(first)
    _check_digests(gathered.numpy(), step)
    return torch.cat([gathered, *map(all_gather, beyond)], dim=1) if beyond else gathered


def agree(
    header: tuple[int, Stop, int],
    token: torch.Tensor,
    shape: MessageShape,
    all_gather: Callable[[torch.Tensor], torch.Tensor],
    step: int,
    ranks: int,
) -> tuple[int, Stop, int]:
    """Of a step that every rank computes alike: rank 0's token (1,), the union of flags, rank 0's length.

    In a row of the usual size, so that a rank that takes it for another kind of step is told.

    Raises:
        RuntimeError: as `gather`.
    """
    _, flags, length = header
    if ranks == 1:  # what packing takes would be felt in every plain step
        return int(token), flags, length
    row = token.new_zeros(shape.size)
    row[:HEADER], row[HEADER : HEADER + 1] = torch.tensor(header), token
    rows = gather(row, shape, all_gather, step)[:, : HEADER + 1].tolist()
    return rows[0][HEADER], Stop(reduce(or_, (row[FLAGS] for row in rows))), rows[0][LENGTH]


def _check_digests(gathered: np.ndarray, step: int) -> None:
    digests = gathered[:, DIGEST]
    if (digests == digests[0]).all():
        return
    check_calls(gathered)
    # The odd one out is to blame, whichever rank that is; of as many on each side, those that differ from rank 0.
    shared = [(digests == digest).sum() for digest in digests]
    alike = digests == digests[shared.index(max(shared))]
    odd, rest = (", ".join(map(str, np.flatnonzero(ranks))) for ranks in (~alike, alike))
    raise RuntimeError(
        f"rank {odd} differs from rank {rest} at step {step}: their tokens, windows or candidates are not the same, "
        "so the job stops before it could say anything wrong"
    )


def unpack(
    gathered: torch.Tensor, plan: ShardPlan, layout: StepLayout, shape: MessageShape
) -> tuple[dict[int, int], TopLogits, Stop, int]:
    """All ranks' read-offs by node and their top_logits (reads, K), in node order, the union of flags, rank 0's length.

    Args:
        gathered: (R, at least P) int64, on the host.
    """
    rows, held = gathered.numpy(), shape.holding(plan)
    end = HEADER + held.words
    tokens = (rows[:, HEADER:end, None] >> np.array(SHIFTS) & (1 << BITS) - 1).reshape(len(rows), -1)  # (R, reads)
    tops = rows[:, end : end + held.reads * held.num_logits].reshape(len(rows), held.reads, held.num_logits)
    order = np.argsort(np.concatenate(plan.owned), kind="stable")  # by node, however many ranks there are
    ranks = np.repeat(np.arange(len(rows)), [len(nodes) for nodes in plan.owned])[order]
    places = np.concatenate([np.arange(len(nodes)) for nodes in plan.owned])[order]
    chosen, top_logits = tokens[ranks, places], wire.unpack(tops[ranks, places])
    read = dict(zip(layout.sampled_nodes, chosen.tolist(), strict=True))
    return read, top_logits, Stop(int(np.bitwise_or.reduce(rows[:, FLAGS]))), int(rows[0, LENGTH])
