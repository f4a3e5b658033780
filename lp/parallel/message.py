"""The message of a decode step: all that a rank sends to the others, by one all-gather of int64 tensors.

    [DIGEST, STOP, LENGTH, COUNT, best logits of `c`, one word a node, padding, top-k logits of every node, padding]

A node is a token in the rank's part of the draft tree. Its word packs its parent, its draft token, the token sampled at
it, and the probability that it is accepted. Nodes are in the rank's own order, in which parents come first; `c`, the
newest token of the generated text, is node 0. Everything except the samples is known before the forward pass. Messages
have one size in all steps: ranks whose states differ must still meet in one collective to find that out.

R: ranks; B: nodes of a rank, at most; K: top-k logits of a node; P: int64s of a message; n: nodes that sample a token.
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

DIGEST, STOP, LENGTH, COUNT, BEST = range(5)  # indices in the message
NUM_BEST = 4  # largest logits of `c`, which ranks compare to see whether their models compute the same
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
    """The reasons to end generation, as flags that ranks send each other: if any rank sets a flag, all ranks stop.

    The step whose message has a flag generates no tokens.
    """

    NONE = 0
    INTERRUPTED = 1  # Ctrl-C or SIGTERM
    FAILED = 2  # something raised on that rank alone: a callback, a criterion, a processor, the model
    EOS = 4  # this and the next four: found by rank 0, which also sends the LENGTH of the text
    MAX_LENGTH = 8
    CRITERIA = 16
    STOP_STRING = 32
    CONTEXT = 64
    PARTED = 128  # ranks of a replica, which tensor parallelism divides the model among, have different states


class Header(NamedTuple):
    """The part of a rank's message that describes its state; it is known before the forward pass.

    Attributes:
        digest: digest of everything that must be equal on all ranks, see `state_digest`.
        stop: why this rank wants all ranks to stop; NONE: it does not.
        length: number of generated tokens to return if the ranks stop.
    """

    digest: int
    stop: Stop
    length: int


class Sampled(NamedTuple):
    """The results of a rank's forward pass and sampler, as tensors on its device.

    Attributes:
        tokens: int64 (n,), the token sampled at each of the n draft-tree nodes that sample one.
        top_logits: int64 (n, K), the K largest logits of these nodes; each int64 packs a token id and a float32 logit.
        best: int64 (NUM_BEST,), the largest logits of the newest token (the tree's root) before any logits processor,
            packed likewise; None if ranks do not compare them.
    """

    tokens: torch.Tensor
    top_logits: torch.Tensor
    best: torch.Tensor | None = None


@dataclass(frozen=True)
class MessageShape:
    """The size of the messages that ranks exchange in decode steps, the same for all steps and ranks of a generation.

    Attributes:
        nodes: B, most draft-tree nodes that a rank computes in a step.
        num_logits: K, how many top-k logits of each node are sent; 0: none.
    """

    nodes: int
    num_logits: int

    @cached_property
    def size(self) -> int:
        """P, the number of int64s in a message."""
        return HEADER + self.nodes * (1 + self.num_logits)

    def room(self, ranks: int) -> RankTrees:
        """Allocate the arrays into which `unpack` reads all ranks' messages.

        Args:
            ranks: number of ranks.
        """
        return RankTrees.room(ranks, self.nodes, [HEADER + self.nodes, self.size, self.num_logits])


def check_vocabulary(size: int) -> None:
    """Raise an error if the vocabulary is too large for the number of bits that messages use for a token id.

    Args:
        size: number of tokens in the vocabulary.

    Raises:
        ValueError: the vocabulary has more than INVALID_TOKEN tokens.
    """
    if size > INVALID_TOKEN:
        raise UserError(
            f"the model has {size} tokens; ranks exchange at most {INVALID_TOKEN}: use a smaller vocabulary"
        )


def best_logits(logits: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The largest logits of the newest token, with their token ids, packed.

    Ranks exchange them to see whether their models compute the same.

    Args:
        logits: (n, V), before any logits processor.
        rows: int64 (Q,), for each of Q sequences, the row that belongs to its newest token; None: a single sequence,
            whose newest token has row 0.

    Returns:
        int64 (NUM_BEST,) for a single sequence, else (Q, NUM_BEST); each int64 holds a token id and a float32 logit.
    """
    packed = pack_top_logits(logits[:1] if rows is None else logits.index_select(0, rows), NUM_BEST)
    if (found := packed.shape[1]) < NUM_BEST:
        packed = torch.cat([packed, packed[:, -1:].expand(-1, NUM_BEST - found)], 1)
    return packed[0] if rows is None else packed


def state_digest(previous: int, *parts: Sequence[int] | np.ndarray) -> int:
    """Extend a digest of a rank's state, which ranks compare in each step; it detects mistakes, not attacks.

    Args:
        previous: the digest before the last step.
        parts: lists of int64 numbers that are new in the state, such as the new tokens.

    Returns:
        The new digest, a number of 63 bits.
    """
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
    """Make the part of a message that is known before the forward pass.

    It is the header, and one word for each draft-tree node, without the token sampled there.

    Args:
        header: the rank's state.
        layout: the rank's nodes.
        shape: size of the message.

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
    """Round a probability to the code that messages send for it, 0 to PROB_CODES - 1; `PROBS[code]` is its value."""
    if not prob > 0:
        return 0
    steps = math.floor(-PROB_STEPS * log(min(prob, 1.0)) * LOG2_E + 0.5) if prob > LEAST_PROB else PROB_CODES - 2
    return 1 + min(I64(steps), PROB_CODES - 2)


def pack(header: Header, layout: StepLayout, sampled: Sampled, shape: MessageShape) -> torch.Tensor:
    """Make this rank's message for a decode step.

    Args:
        header: the rank's state.
        layout: the rank's draft-tree nodes.
        sampled: results of its forward pass.
        shape: size of the message.

    Returns:
        int64 (P,), on the device of `sampled`.
    """
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
    """Write the messages of Q sequences on a device, by operations that a CUDA graph can record.

    Args:
        messages: int64 (Q, P), filled; the part for top-k logits stays as it is if `sampled` has none.
        known: int64 (Q, HEADER + B), the part of each message that `known_part` makes.
        nodes: int64 (n,), place of each node that samples a token: index of its sequence * B + node; Q * B for padding.
        sampled: results at these nodes, for all sequences; `best` is (Q, NUM_BEST).
        shape: size of a message.
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
    """Read from all ranks' messages, int64 (R, P), the token that rank 0 sampled after the newest token.

    In a step of plain decoding there is no other sample.
    """
    return int(messages[0, HEADER]) >> SAMPLED_SHIFT & TOKEN_MASK


def unpack(
    messages: np.ndarray, trees: RankTrees, step: int, rounding: float, name_of: Callable[[int], str] = str
) -> tuple[Stop, int]:
    """Read the messages of all ranks, and check that the ranks agree.

    Args:
        messages: int64 (R, P), every rank's message.
        trees: arrays made by `MessageShape.room`, which get the draft trees of all ranks.
        step: number of the decode step, for error messages.
        rounding: how far ranks' logits of the newest token may differ, as a fraction of the largest logit.
        name_of: gives the name of a rank in error messages.

    Returns:
        The flags that any rank has set, and rank 0's number of generated tokens to return if ranks stop.

    Raises:
        RuntimeError: the ranks' states differ, or their models compute different logits, or a message holds no tree;
            the error names the ranks and the step.
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
    """Read the messages into `trees`.

    Returns:
        Whether all digests are equal; whether all best logits are; the first rank whose words are no tree, which
        compiled code would follow beyond its arrays, or -1; all flags of STOP; and rank 0's LENGTH.
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
    """Raise an error if the states of the ranks differ, or ranks are in different calls.

    Args:
        messages: int64 (R, P), every rank's message.
        step: number of the decode step, for the error message.
        name_of: gives the name of a rank in the error message.

    Raises:
        CallsDiffer: not all ranks are in a decode step.
        RuntimeError: the digests differ; the message names the ranks that differ from most others.
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
    """Raise an error if ranks' models compute different logits for the newest token, which all ranks compute.

    Args:
        best: int64 (R, NUM_BEST), every rank's largest logits of that token; each int64 packs a token id and a logit.
        step: number of the decode step, for the error message.
        rounding: how far logits may differ, as a fraction of the largest logit.
        name_of: gives the name of a rank in the error message.

    Raises:
        RuntimeError: logits differ by more; the message names the ranks that differ from most others, and by how much.
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
    """The least by which two ranks' logits must differ, given only the best ones of each; inf if one is NaN.

    Args:
        tokens, logits: (R, NUM_BEST), every rank's largest logits and their tokens.
        one, other: the two ranks.
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
    """Names of the ranks to blame, and of the others, which agree with the rank that most ranks agree with.

    Args:
        alike: bool (R, R), whether two ranks agree.
        name_of: gives the name of a rank.
    """
    with_most = alike[alike.sum(1).argmax()]
    odd, rest = (", ".join(map(name_of, np.flatnonzero(ranks).tolist())) for ranks in (~with_most, with_most))
    return odd, rest
