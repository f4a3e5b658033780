"""The message of a step: what a rank sends to the others, an int64 tensor of fixed size, by one all-gather.

    [DIGEST, STOP, LENGTH, tokens of the owned nodes in node order, three an int64, padding, top-k logits, padding]

Every rank knows the layout, so which node a token belongs to is not sent. The size is that of the largest step whatever
this one needs: ranks whose states differ must still meet in one collective to find that out.
R: ranks; P: int64s of a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import numpy as np
import torch

from lp.draft.layout import StepLayout
from lp.errors import UserError
from lp.parallel.agreement import check_calls
from lp.parallel.sharding import ShardPlan
from lp.sampling.sampler import INVALID_TOKEN
from lp.sampling.top_logits import TopLogits, unpack_top_logits

DIGEST, STOP, LENGTH = range(3)  # where the header has them
HEADER = 3  # int64s of the header
TOKEN_BITS = 21  # three tokens fit an int64 and its sign
TOKEN_SHIFTS = (0, TOKEN_BITS, 2 * TOKEN_BITS)
# Room for nodes beyond a largest step's: draft paths that share prefixes divide less evenly among ranks than those of
# the largest step, which share nothing. A step that needs more sends the rest in a second all-gather.
SPARE_NODES = 12

AllGather = Callable[[torch.Tensor], torch.Tensor]


class Stop(IntFlag):
    """Why a rank wants all to stop; the step whose message carries a flag adds no tokens."""

    NONE = 0
    INTERRUPTED = 1  # Ctrl-C or SIGTERM
    FAILED = 2  # something raised on that rank alone: a callback, a criterion, a processor, the model
    EOS, MAX_LENGTH, CRITERIA, STOP_STRING, CONTEXT = (
        4,
        8,
        16,
        32,
        64,
    )  # found by rank 0, with the LENGTH of the text then


class Header(NamedTuple):
    """The first int64s of a message.

    Attributes:
        digest: of everything that ranks must have alike.
        stop: why this rank wants all to stop.
        length: generated tokens to return then.
    """

    digest: int
    stop: Stop
    length: int


class Gathered(NamedTuple):
    """What all ranks sent in a step.

    Attributes:
        sampled: the token of every sampled node.
        top_logits: of the sampled nodes, in node order.
        stop: why any rank wants to stop.
        length: rank 0's generated tokens to return then.
    """

    sampled: dict[int, int]
    top_logits: TopLogits
    stop: Stop
    length: int


@dataclass(frozen=True, slots=True)
class MessageShape:
    """What a message has room for.

    Attributes:
        nodes: owned nodes.
        num_logits: K, top-k logits of each.
    """

    nodes: int
    num_logits: int

    @classmethod
    def of(cls, largest: ShardPlan, num_logits: int) -> MessageShape:
        """For all steps of a generation, given the plan of the largest, `layout.largest_layout`."""
        return cls(largest.max_owned + SPARE_NODES, num_logits)

    def holding(self, plan: ShardPlan) -> MessageShape:
        """The same, or larger where the step's nodes need it."""
        return MessageShape(max(self.nodes, plan.max_owned), self.num_logits)

    @property
    def token_words(self) -> int:
        """Int64s of the tokens."""
        return -(-self.nodes // len(TOKEN_SHIFTS))

    @property
    def size(self) -> int:
        """P, int64s of the message."""
        return HEADER + self.token_words + self.nodes * self.num_logits


def check_vocabulary(size: int) -> None:
    """Refuse tokens that a third of an int64 cannot hold.

    Raises:
        ValueError: the vocabulary's size and the limit.
    """
    if size > INVALID_TOKEN:
        raise UserError(
            f"the model has {size} tokens; ranks exchange at most {INVALID_TOKEN}: use a smaller vocabulary"
        )


def pack(
    header: Header, tokens: torch.Tensor, top_logits: torch.Tensor, plan: ShardPlan, shape: MessageShape
) -> torch.Tensor:
    """This rank's message, on the device of `tokens`: P int64s, or more where the step's nodes need more.

    Args:
        header: of the message.
        tokens: sampled at this rank's owned nodes, in node order.
        top_logits: (len(tokens), K), as `lp.sampling.top_logits.pack_top_logits` makes them.
        plan: the step's.
        shape: of this generation's messages.
    """
    held = shape.holding(plan)
    message = tokens.new_zeros(held.size)
    message[:HEADER] = torch.tensor(header)
    for third, shift in enumerate(TOKEN_SHIFTS):
        part = tokens[third :: len(TOKEN_SHIFTS)]
        message[HEADER : HEADER + len(part)] |= part << shift
    start = HEADER + held.token_words
    message[start : start + top_logits.numel()] = top_logits.flatten()
    return message


def gather(message: torch.Tensor, shape: MessageShape, all_gather: AllGather, step: int) -> torch.Tensor:
    """Every rank's message, by one all-gather of P int64s; what is beyond follows once the digests agree.

    Returns:
        (R, at least P), on the host.

    Raises:
        RuntimeError: ranks' digests differ, so their states do; names ranks and step.
    """
    first, *rest = message.split(shape.size)
    gathered = all_gather(first)
    _check_digests(gathered.numpy(), step)
    return torch.cat([gathered, *map(all_gather, rest)], dim=1) if rest else gathered


def gather_plain(
    header: Header, token: torch.Tensor, shape: MessageShape, all_gather: AllGather, step: int, ranks: int
) -> tuple[int, Stop, int]:
    """Of a plain step, which every rank computes alike: rank 0's token (1,), why any rank wants to stop, the length.

    The message has the usual size, so that a rank that takes it for another kind of step finds out.

    Raises:
        RuntimeError: as `gather`.
    """
    if ranks == 1:  # packing would be felt in every plain step
        return int(token), header.stop, header.length
    message = token.new_zeros(shape.size)
    message[:HEADER] = torch.tensor(header)
    message[HEADER] = token[0]
    messages = gather(message, shape, all_gather, step).numpy()
    return int(messages[0, HEADER]), _any_stop(messages), int(messages[0, LENGTH])


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
        f"rank {odd} differs from rank {rest} at step {step}: their tokens, windows or draft trees are not the same, "
        "so the job stops before a wrong token is used"
    )


def unpack(messages: torch.Tensor, plan: ShardPlan, layout: StepLayout, shape: MessageShape) -> Gathered:
    """What the ranks' messages (R, at least P), on the host, have about the nodes of this layout."""
    words = messages.numpy()
    ranks = len(words)
    held = shape.holding(plan)
    end = HEADER + held.token_words
    tokens = words[:, HEADER:end, None] >> np.array(TOKEN_SHIFTS) & (1 << TOKEN_BITS) - 1
    tokens = tokens.reshape(ranks, -1)  # (R, owned nodes)
    top_logits = words[:, end : end + held.nodes * held.num_logits].reshape(ranks, held.nodes, held.num_logits)
    order = np.argsort(np.concatenate(plan.owned), kind="stable")  # in node order, however many ranks there are
    owner = np.repeat(np.arange(ranks), [len(nodes) for nodes in plan.owned])[order]
    index = np.concatenate([np.arange(len(nodes)) for nodes in plan.owned])[order]
    sampled = dict(zip(layout.sampled_nodes, tokens[owner, index].tolist(), strict=True))
    return Gathered(sampled, unpack_top_logits(top_logits[owner, index]), _any_stop(words), int(words[0, LENGTH]))


def _any_stop(messages: np.ndarray) -> Stop:
    return Stop(int(np.bitwise_or.reduce(messages[:, STOP])))
