"""The message of a step: what a rank sends to the others, an int64 tensor of fixed size, by one all-gather.

    [DIGEST, STOP, LENGTH, COUNT, best logits of `c`, one word a node, padding, top-k logits of every node, padding]

A word has a node's parent, its draft token, the sampled token, and the probability that it is accepted. Nodes are in
the rank's own order, in which parents come first; `c` is node 0. All but what was sampled is known before the forward
pass. The size is the same in every step: ranks whose states differ must still meet in one collective to find that out.
R: ranks; B: nodes of a rank, at most; K: top-k logits of a node; P: int64s of a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from lp.compiled import GOLDEN, I64, LOG2_E, MASK, U64, compiled_array, compiled_ints, jit, log, mix
from lp.config import MAX_STEP_TOKENS
from lp.draft.layout import StepLayout
from lp.draft.verify import RankTrees
from lp.errors import UserError
from lp.parallel.agreement import check_calls
from lp.sampling.top_logits import INVALID_TOKEN, pack_top_logits, unpack_top_logits
from lp.to_device import to_device

DIGEST, STOP, LENGTH, COUNT, BEST = range(5)  # where the header has them
NUM_BEST = 4  # logits of `c` that ranks compare
HEADER = BEST + NUM_BEST  # int64s of the header
# Bits of a word, from the lowest: probability, sampled token, draft token, parent; the sign bit is not used.
PROB_BITS = 8
TOKEN_BITS = 21
SAMPLED_SHIFT = PROB_BITS
DRAFT_SHIFT = SAMPLED_SHIFT + TOKEN_BITS
PARENT_SHIFT = DRAFT_SHIFT + TOKEN_BITS
assert MAX_STEP_TOKENS <= 1 << 63 - PARENT_SHIFT
# Probabilities are sent as powers of 2 ** -(1 / PROB_STEPS), to the nearest; code 0 is none.
PROB_STEPS = 10
PROB_CODES = 1 << PROB_BITS
PROBS = compiled_array(np.array([0.0, *(2.0 ** (-code / PROB_STEPS) for code in range(PROB_CODES - 1))]))
LEAST_PROB = PROBS[PROB_CODES - 1]
TOKEN_MASK = (1 << TOKEN_BITS) - 1


class Stop(IntFlag):
    """Why a rank wants all to stop; the step whose message carries a flag adds no tokens."""

    NONE = 0
    INTERRUPTED = 1  # Ctrl-C or SIGTERM
    FAILED = 2  # something raised on that rank alone: a callback, a criterion, a processor, the model
    EOS = 4  # this and the next ones: found by rank 0, with the LENGTH of the text then
    MAX_LENGTH = 8
    CRITERIA = 16
    STOP_STRING = 32
    CONTEXT = 64
    PARTED = 128  # ranks of a replica, which tensor parallelism divides the model among, have different states


class Header(NamedTuple):
    """The first int64s of a message.

    Attributes:
        digest: digest of everything that ranks must have alike.
        stop: why this rank wants all to stop.
        length: generated tokens to return then.
    """

    digest: int
    stop: Stop
    length: int


class Sampled(NamedTuple):
    """What a rank's forward pass gave, on its device.

    Attributes:
        tokens: int64 (n,), of its sampled nodes.
        top_logits: int64 (n, K), packed.
        best: int64 (NUM_BEST,), the best logits of `c` before any processor, packed; None where nobody compares them.
    """

    tokens: torch.Tensor
    top_logits: torch.Tensor
    best: torch.Tensor | None = None


@dataclass(frozen=True)
class MessageShape:
    """What a message has room for.

    Attributes:
        nodes: B.
        num_logits: K.
    """

    nodes: int
    num_logits: int

    @cached_property
    def size(self) -> int:
        """P, the number of int64s of a message."""
        return HEADER + self.nodes * (1 + self.num_logits)

    def room(self, ranks: int) -> RankTrees:
        """Room for what as many ranks have in their messages."""
        return RankTrees.room(ranks, self.nodes, [HEADER + self.nodes, self.size, self.num_logits])


def check_vocabulary(size: int) -> None:
    """Refuse tokens that a word has no room for.

    Raises:
        ValueError: the vocabulary's size and the limit.
    """
    if size > INVALID_TOKEN:
        raise UserError(
            f"the model has {size} tokens; ranks exchange at most {INVALID_TOKEN}: use a smaller vocabulary"
        )


def best_logits(logits: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The best logits of `c`, packed: (NUM_BEST,), or of several texts (Q, NUM_BEST).

    Args:
        logits: (n, V), before any processor.
        rows: int64 (Q,), those of each text's `c`; None: there is one text, and its first row is.
    """
    packed = pack_top_logits(logits[:1] if rows is None else logits.index_select(0, rows), NUM_BEST)
    if (found := packed.shape[1]) < NUM_BEST:
        packed = torch.cat([packed, packed[:, -1:].expand(-1, NUM_BEST - found)], 1)
    return packed[0] if rows is None else packed


def state_digest(previous: int, *parts: Sequence[int] | np.ndarray) -> int:
    """A 63-bit digest of the previous one and these lists of ints: for mistakes, not for malice."""
    values = [previous]
    for part in parts:
        values.append(len(part))
        values.extend(part)  # += would add an array's values to them
    return int(_digest(compiled_ints(values)))


@jit
def _digest(values):  # type: ignore[no-untyped-def]
    digest = GOLDEN
    for index in range(len(values)):
        digest = mix(((digest ^ U64(values[index])) * GOLDEN + GOLDEN) & MASK)
    return I64(digest >> U64(1))


def known_part(header: Header, layout: StepLayout, shape: MessageShape) -> np.ndarray:
    """What of a message is known before the forward pass: its header and words, without what is sampled.

    Returns:
        int64 (HEADER + B,).
    """
    known = np.zeros(HEADER + shape.nodes, np.int64)
    _fill_header_and_words(compiled_array(known), layout.nodes, layout.num_nodes, *map(int, header))
    return known


@jit
def _fill_header_and_words(message, nodes, count, digest, stop, length):  # type: ignore[no-untyped-def]
    message[DIGEST], message[STOP], message[LENGTH], message[COUNT] = digest, stop, length, count
    for node in range(count):
        word = max(nodes.parents[node], 0) << PARENT_SHIFT | nodes.tokens[node] << DRAFT_SHIFT
        if not nodes.sampled[node]:
            word |= INVALID_TOKEN << SAMPLED_SHIFT
        message[HEADER + node] = word | prob_code(nodes.accept_probs[node])


@jit
def prob_code(prob):  # type: ignore[no-untyped-def]
    """The code of a probability, of which PROBS has the value."""
    if not prob > 0:
        return 0
    steps = math.floor(-PROB_STEPS * log(min(prob, 1.0)) * LOG2_E + 0.5) if prob > LEAST_PROB else PROB_CODES - 2
    return 1 + min(I64(steps), PROB_CODES - 2)


def pack(header: Header, layout: StepLayout, sampled: Sampled, shape: MessageShape) -> torch.Tensor:
    """This rank's message (P,), on the device of what was sampled."""
    device = sampled.tokens.device
    if device.type != "cpu":
        messages = torch.zeros(1, shape.size, dtype=torch.int64, device=device)
        known = to_device(known_part(header, layout, shape), device)[None]
        write(messages, known, to_device(layout.sampled_nodes, device), sampled, shape)
        return messages[0]
    message = np.zeros(shape.size, np.int64)
    tokens, top_logits = (compiled_array(tensor.numpy()) for tensor in (sampled.tokens, sampled.top_logits))
    numbers = (layout.num_nodes, *map(int, header), shape.nodes, shape.num_logits)
    _fill_message(compiled_array(message), layout.nodes, tokens, top_logits, *numbers)
    if sampled.best is not None:
        message[BEST:HEADER] = sampled.best.numpy()
    return torch.from_numpy(message)


def write(
    messages: torch.Tensor, known: torch.Tensor, nodes: torch.Tensor, sampled: Sampled, shape: MessageShape
) -> None:
    """Write the messages of several texts on a device, as a captured step can.

    Q: texts.

    Args:
        messages: int64 (Q, P); top-k logits stay as they are where none are taken.
        known: int64 (Q, HEADER + B), as `known_part` makes it.
        nodes: int64 (n,), where each sampled node is: text * B + node; Q * B for padding.
        sampled: what these nodes sampled; `best` is (Q, NUM_BEST).
    """
    texts, count = len(messages), shape.nodes
    words = torch.zeros(texts * count + 1, dtype=torch.int64, device=messages.device)  # the last one takes the padding
    words.index_copy_(0, nodes, sampled.tokens << SAMPLED_SHIFT)
    end = HEADER + count
    messages[:, :HEADER] = known[:, :HEADER]
    messages[:, HEADER:end] = known[:, HEADER:] | words[:-1].view(texts, count)
    if sampled.best is not None:
        messages[:, BEST:HEADER] = sampled.best
    if taken := sampled.top_logits.shape[1]:
        room = torch.zeros(texts * count + 1, shape.num_logits, dtype=torch.int64, device=messages.device)
        room[:, :taken].index_copy_(0, nodes, sampled.top_logits)
        messages[:, end:] = room[:-1].view(texts, -1)


@jit
def _fill_message(message, nodes, tokens, top_logits, count, digest, stop, length, room, num_logits):  # type: ignore[no-untyped-def]
    _fill_header_and_words(message, nodes, count, digest, stop, length)
    index = 0
    for node in range(count):
        if nodes.sampled[node]:
            message[HEADER + node] |= tokens[index] << SAMPLED_SHIFT
            at = HEADER + room + node * num_logits
            for k in range(top_logits.shape[1]):
                message[at + k] = top_logits[index, k]
            index += 1


def sampled_at_c(messages: np.ndarray) -> int:
    """The token that rank 0 sampled at `c`, of messages as `unpack` takes them."""
    return int(messages[0, HEADER]) >> SAMPLED_SHIFT & TOKEN_MASK


def unpack(
    messages: np.ndarray, trees: RankTrees, step: int, rounding: float, name_of: Callable[[int], str] = str
) -> tuple[Stop, int]:
    """Read the messages of all ranks.

    Args:
        messages: int64 (R, P), of all ranks.
        trees: gets the ranks' trees; it is made by `MessageShape.room`.
        step: number of the decode step, for errors.
        rounding: by what share logits may differ among ranks.
        name_of: what errors call a rank.

    Returns:
        Why any rank wants to stop, and rank 0's generated tokens to return then.

    Raises:
        RuntimeError: ranks' digests differ, so their states do, or what their models compute, or a message has no tree;
            names ranks and step.
    """
    alike, best_alike, broken, stops, length = _read(trees, compiled_array(messages))
    stop = Stop(stops)
    if not alike and Stop.FAILED not in stop:  # a rank may have failed before it knew its state
        check_digests(messages, step, name_of)
    if not stop and not best_alike:
        check_best(messages[:, BEST:HEADER], step, rounding, name_of)
    if broken >= 0:
        raise RuntimeError(
            f"the message of rank {name_of(broken)} at step {step} is no tree of 1 to {trees.parents.shape[1]} nodes, "
            "parents first, so the job stops before a wrong token is used; run the same version of this package on "
            "every rank"
        )
    return stop, length


@jit
def _read(trees, messages):  # type: ignore[no-untyped-def]
    """Read the words.

    Returns:
        Whether digests and best logits are alike, the first rank that sent no tree, which compiled code would follow
        beyond its arrays, or -1, the reasons to stop, and rank 0's length.
    """
    alike = best_alike = True
    broken = -1
    stops = 0
    for rank in range(len(messages)):
        alike = alike and messages[rank, DIGEST] == messages[0, DIGEST]
        for at in range(BEST, HEADER):
            best_alike = best_alike and messages[rank, at] == messages[0, at]
        stops |= messages[rank, STOP]
        # What ranks at another call have sent may be no message of a step.
        trees.counts[rank] = min(max(messages[rank, COUNT], 0), trees.parents.shape[1])
        is_tree = trees.counts[rank] == messages[rank, COUNT] and trees.counts[rank] > 0
        for node in range(trees.counts[rank]):
            word = messages[rank, HEADER + node]
            is_tree = is_tree and 0 <= word >> PARENT_SHIFT < max(node, 1)
            trees.parents[rank, node] = word >> PARENT_SHIFT
            trees.tokens[rank, node] = word >> DRAFT_SHIFT & TOKEN_MASK
            trees.sampled[rank, node] = word >> SAMPLED_SHIFT & TOKEN_MASK
            trees.probs[rank, node] = PROBS[word & PROB_CODES - 1]
        if not is_tree and broken < 0:
            broken = rank
    return alike, best_alike, broken, stops, messages[0, LENGTH]


def check_digests(messages: np.ndarray, step: int, name_of: Callable[[int], str] = str) -> None:
    """Refuse to go on where ranks' states differ.

    Args:
        messages: (R, P).
        step: number of the decode step, for the error.

    Raises:
        RuntimeError: names the ranks that differ, and the step.
    """
    digests = messages[:, DIGEST]
    if (digests == digests[0]).all():
        return
    check_calls(messages)
    odd, rest = _odd_ones(digests[:, None] == digests, name_of)
    raise RuntimeError(
        f"rank {odd} differs from rank {rest} at step {step}: their tokens, windows or draft trees are not the same, "
        "so the job stops before a wrong token is used"
    )


def check_best(best: np.ndarray, step: int, rounding: float, name_of: Callable[[int], str] = str) -> None:
    """Refuse to go on where the models of ranks do not compute the same: all ranks compute `c`.

    Args:
        best: int64 (R, NUM_BEST), the best logits of `c`, packed.
        step: number of the decode step, for the error.
        rounding: by what share of the largest logit they may differ.

    Raises:
        RuntimeError: names the ranks that differ, the step, and by how much.
    """
    if len(best) == 1 or (best == best[0]).all():
        return
    tokens, logits = unpack_top_logits(best)
    ranks = range(len(best))
    limit = rounding * max(1.0, float(np.abs(logits[np.isfinite(logits)]).max(initial=0.0)))
    if any(_largest_gap(tokens, logits, rank) <= limit for rank in ranks):
        return  # all are like one of them, though two of them may lie on either side of it
    gaps = np.array([[_gap(tokens, logits, one, other) for other in ranks] for one in ranks])
    alike = gaps <= limit
    odd, rest = _odd_ones(alike, name_of)
    raise RuntimeError(
        f"the model of rank {odd} computes other logits than that of rank {rest} at step {step}: they differ by "
        f"{gaps.max():.3g}, where rounding allows {limit:.3g}, so the job stops before a wrong token is used; give "
        "every rank the same weights"
    )


@jit
def _largest_gap(tokens, logits, rank):  # type: ignore[no-untyped-def]
    """The largest of the gaps between a rank and all others."""
    largest = 0.0
    for other in range(len(tokens)):
        largest = max(largest, _gap(tokens, logits, rank, other))
    return largest


@jit
def _gap(tokens, logits, one, other):  # type: ignore[no-untyped-def]
    """The least by which two ranks' logits differ, for the best tokens of either; inf beside a NaN.

    Args:
        tokens, logits: (R, NUM_BEST).
    """
    best = range(tokens.shape[1])
    gap = 0.0
    for a, b in ((one, other), (other, one)):
        least = logits[b, 0]
        for index in best:
            least = min(least, logits[b, index])
        for index in best:
            logit = logits[a, index]
            theirs = min(least, logit)  # a token that is not among their best has at most their least
            for other_index in best:
                if tokens[b, other_index] == tokens[a, index]:
                    theirs = logits[b, other_index]
            if logit != theirs:
                difference = abs(logit - theirs)
                gap = max(gap, math.inf if math.isnan(difference) else difference)
    return gap


def _odd_ones(alike: np.ndarray, name_of: Callable[[int], str]) -> tuple[str, str]:
    """The ranks to blame, and the others: those unlike the rank that most are like; of as many, unlike the lowest.

    Args:
        alike: (R, R) bool.
    """
    with_most = alike[alike.sum(1).argmax()]
    odd, rest = (", ".join(map(name_of, np.flatnonzero(ranks).tolist())) for ranks in (~with_most, with_most))
    return odd, rest
