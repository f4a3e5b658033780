"""What the last step sampled, found by context, until it is merged into the pool.

Merging takes longer than all else that is learned from a step. On a device that runs beside the host it is done while
the next step is computed. The proposal before it looks here first, and finds what it would find in the merged pool.

n: nodes, at most; M: followers of a context.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lp.compiled import compiled_zeros, jit
from lp.draft.pool.tables import MAX_GUESS_ORDER, MAX_LOGITS_ORDER, M, Samples
from lp.sampling.top_logits import INVALID_TOKEN, LOGIT, TOKEN

NO_INTS = compiled_zeros(0, "i8")
NO_SAMPLES = Samples(
    tokens=NO_INTS,
    parents=NO_INTS,
    positions=NO_INTS,
    sampled=NO_INTS,
    starts=NO_INTS,
    top_tokens=compiled_zeros(0, "i4"),
    top_logits=compiled_zeros(0, "f4"),
)


class LastStep(NamedTuple):
    """The nodes of a step, listed by their tokens and by their depths; none where `counts` says so."""

    counts: Any  # int64 (2,): nodes, and tokens of `before`
    samples: Samples
    before: Any  # int64 (MAX_LOGITS_ORDER,): the text's tokens before node 0, the newest first
    newest: Any  # int64 (power of 2,): the newest node of the tokens that have this index; -1 for none
    older: Any  # int64 (n,): the next older one of the same index; -1 for none
    newest_at: Any  # int64 (n,): the newest node of a depth; -1 for none
    guesses_at: Any  # int64 (n * M,): of a depth, the tokens + 1 that its nodes sampled, the newest first; 0 is none
    # What was found for one context.
    nodes: Any  # int64 (MAX_LOGITS_ORDER + 1,): by order, whose logits; -1 for none
    guesses: Any  # int64 ((MAX_GUESS_ORDER + 1) * M,): by order, guesses + 1; 0 is none


def new_last_step(nodes: int) -> LastStep:
    """Allocate room for the last step of so many nodes."""
    return LastStep(
        counts=compiled_zeros(2, "i8"),
        samples=NO_SAMPLES,
        before=compiled_zeros(MAX_LOGITS_ORDER, "i8"),
        newest=compiled_zeros(1 << max(nodes, 1).bit_length(), "i8"),
        older=compiled_zeros(nodes, "i8"),
        newest_at=compiled_zeros(nodes, "i8"),
        guesses_at=compiled_zeros(nodes * M, "i8"),
        nodes=compiled_zeros(MAX_LOGITS_ORDER + 1, "i8"),
        guesses=compiled_zeros((MAX_GUESS_ORDER + 1) * M, "i8"),
    )


@jit
def index_step(step, text, end):
    """List the nodes of a step behind the text up to `end`."""
    samples = step.samples
    nodes = len(samples.tokens)
    step.counts[0] = nodes
    step.counts[1] = min(end - 1, MAX_LOGITS_ORDER)
    for back in range(step.counts[1]):
        step.before[back] = text[end - 2 - back]
    for index in range(len(step.newest)):
        step.newest[index] = -1
    for depth in range(nodes):
        step.newest_at[depth] = -1
    for node in range(nodes):
        if samples.sampled[node] == INVALID_TOKEN:
            continue
        index = samples.tokens[node] & len(step.newest) - 1
        step.older[node] = step.newest[index]
        step.newest[index] = node
        depth = samples.positions[node] - samples.positions[0]
        first = depth * M
        if step.newest_at[depth] < 0:
            for rank in range(M):
                step.guesses_at[first + rank] = 0
        step.newest_at[depth] = node
        guess = samples.sampled[node] + 1
        rank = 0
        while rank < M - 1 and step.guesses_at[first + rank] != guess and step.guesses_at[first + rank] != 0:
            rank += 1
        while rank > 0:
            step.guesses_at[first + rank] = step.guesses_at[first + rank - 1]
            rank -= 1
        step.guesses_at[first] = guess


@jit
def search_step(step, context, known, position):
    """Find the nodes with the newest `known` tokens of the context, and what they guessed for a position."""
    for order in range(MAX_LOGITS_ORDER + 1):
        step.nodes[order] = -1
    for index in range(len(step.guesses)):
        step.guesses[index] = 0
    if step.counts[0] == 0:
        return
    samples = step.samples
    depth = position - 1 - samples.positions[0]  # of the nodes that sample for this position
    if 0 <= depth < step.counts[0] and step.newest_at[depth] >= 0:
        step.nodes[0] = step.newest_at[depth]
        for rank in range(M):
            step.guesses[rank] = step.guesses_at[depth * M + rank]
    if known == 0:
        return
    node = step.newest[context.tokens[0] & len(step.newest) - 1]
    while node >= 0:
        alike = tokens_alike(step, context, min(known, MAX_LOGITS_ORDER), node)
        for order in range(1, alike + 1):
            if step.nodes[order] < 0:
                step.nodes[order] = node
        if samples.positions[node] == position - 1:
            for order in range(1, min(alike, MAX_GUESS_ORDER) + 1):
                add_older_guess(step.guesses, order * M, samples.sampled[node] + 1)
        node = step.older[node]


@jit
def tokens_alike(step, context, most, node):
    """How many of the newest tokens up to a node are those of the context."""
    samples = step.samples
    alike = 0
    while alike < most and node > 0 and samples.tokens[node] == context.tokens[alike]:
        node = samples.parents[node]
        alike += 1
    if node == 0 and alike < most and samples.tokens[0] == context.tokens[alike]:
        alike += 1
        back = 0
        while alike < most and back < step.counts[1] and step.before[back] == context.tokens[alike]:
            alike += 1
            back += 1
    return alike


@jit
def add_older_guess(guesses, first, guess):
    """Append a guess to a list of M, unless it is in it or there is no room."""
    for index in range(first, first + M):
        if guesses[index] == guess:
            return
        if guesses[index] == 0:
            guesses[index] = guess
            return


@jit
def logits_of_node(step, node, k):
    """The k-th best token of a node, and its logit."""
    at = 2 * (step.samples.starts[node] + k)
    return step.samples.top_tokens[at + TOKEN], step.samples.top_logits[at + LOGIT]
