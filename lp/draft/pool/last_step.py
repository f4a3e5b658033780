"""A small index of the last decode step's samples, which is searched until they are merged into the pool's tables.

Merging takes longer than everything else that is learned from a step. Where a GPU computes beside the host, samples are
merged while the GPU computes the next step. The draft tree of that step is proposed before the merge. So the proposal
looks in this index first, and finds what it would find in merged tables.

A guess is a token that was sampled at some node for a position of the text. Its order is the number of tokens before
the position that are known to match.

n: most nodes of a step; M: number of followers that are stored for a context.
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
    """Samples of the last decode step before they are merged into the pool's tables, listed by token and by depth.

    The depth of a node is its position in the text less the position of node 0. The lists are empty if `counts[0]` is
    0.
    """

    counts: Any  # int64 (2,): number of nodes, and of tokens in `before`
    samples: Samples
    before: Any  # int64 (MAX_LOGITS_ORDER,): the text's tokens before node 0, the newest first
    newest: Any  # int64 (power of 2,): by the low bits of a token, the last node that has such a token; -1 for none
    older: Any  # int64 (n,): by node, the node before it with the same low bits; -1 for none
    newest_at: Any  # int64 (n,): by depth, the last node there; -1 for none
    guesses_at: Any  # int64 (n * M,): by depth, tokens + 1 that its nodes sampled, the newest first; 0 is none
    # The result of `search_step`.
    nodes: Any  # int64 (MAX_LOGITS_ORDER + 1,): by order, the node whose logits to use; -1 for none
    guesses: Any  # int64 ((MAX_GUESS_ORDER + 1) * M,): by order, guessed tokens + 1, the newest first; 0 is none


def new_last_step(nodes: int) -> LastStep:
    """Allocate an empty index for the samples of decode steps with at most `nodes` nodes."""
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
    """Index the samples of a decode step, so that `search_step` finds them.

    Args:
        step: LastStep with the samples; its lists are overwritten.
        text: int64, token ids of the prompt and the generated tokens.
        end: length of the text before the step; the last of these tokens is node 0 of the step.
    """
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
    """Look up which samples of the last decode step match a context, to predict the token at a position of the text.

    It fills `step.nodes` (nodes whose top-k logits to use) and `step.guesses` (tokens sampled for this position), both
    by the number of tokens that match.

    Args:
        step: LastStep that `index_step` has filled; nothing is found in an empty one.
        context: Context, with the tokens before the position, the newest first.
        known: number of tokens in the context.
        position: position in the text of the token to predict, from 0.
    """
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
    """Count how many of a context's newest tokens match the tokens that end with a node of the last decode step.

    Args:
        step: LastStep, with the nodes and the text before them.
        context: Context, the newest token first.
        most: most tokens to compare.
        node: index of the node.
    """
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
    """Append a guessed token to one list in `guesses`, unless this list is full or has the token already.

    Args:
        guesses: int64, lists of M entries each; an entry is a token id plus 1, or 0 if it is empty.
        first: index at which the list begins.
        guess: token id plus 1.
    """
    for index in range(first, first + M):
        if guesses[index] == guess:
            return
        if guesses[index] == 0:
            guesses[index] = guess
            return


@jit
def logits_of_node(step, node, k):
    """Return the token with the k-th largest logit at a node of the last decode step, and this logit.

    Args:
        step: LastStep, with the top-k logits.
        node: index of the node.
        k: rank of the logit, from 0.
    """
    at = 2 * (step.samples.starts[node] + k)
    return step.samples.top_tokens[at + TOKEN], step.samples.top_logits[at + LOGIT]
