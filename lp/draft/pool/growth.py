"""The pool's draft tree, grown best first: always by the token most likely to be accepted, as long as it pays.

Among R ranks every rank grows its own share of it. First all of them grow the same small trunk. The tokens that may
follow its nodes, and are not in it, are its open ends. In preorder they are divided into R blocks, and each rank grows
from its block alone. A trunk node is computed by the rank in whose block it lies, and by those that need it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lp.compiled import compiled_zeros, jit
from lp.draft.pool.mixture import MATCH, MAX_CHOICES, NOTHING_KNOWN, predict
from lp.draft.pool.tables import fill_context_of_node
from lp.draft.source import TokenPrice

MIN_PROB = 1e-7  # of being accepted, below which no token enters the tree
TRUNK_NODES = 16  # `c` included. Of 16 and 32, with S of 8 ranks x 64 tokens measured, the better
ABSENT = -1


class GrowingTree(NamedTuple):
    """Room for one tree; node 0 is `c`, the newest token of the text.

    A node's choices are the tokens that were predicted behind it.
    """

    tokens: Any  # int64 (nodes,)
    parents: Any  # int64 (nodes,): -1 for node 0
    depths: Any  # int64 (nodes,): 0 for node 0
    accept_probs: Any  # float64 (nodes,): of the node and all its ancestors
    level_0: Any  # int64 (nodes,): the column of window level 0 that it repeats, -1 for none
    column_0: Any  # int64 (nodes,): the level of window column 0 that it repeats, -1 for none
    blocks: Any  # int64 (nodes,): of a trunk node, the rank in whose block it lies
    places: Any  # int64 (nodes,): its index in `order`, ABSENT for a trunk node that the rank does not compute
    order: Any  # int64 (nodes,): the nodes that the rank computes, parents first
    matches: Any  # int64 (nodes * MATCH,): what a corpus has of the text up to the node, see `Predictor.match`
    num_choices: Any  # int64 (nodes,)
    best_choice: Any  # int64 (nodes,): index of the likeliest choice that is not in the tree yet
    best_prob: Any  # float64 (nodes,): of that choice being accepted
    choice_tokens: Any  # int64 (nodes * MAX_CHOICES,)
    choice_probs: Any  # float64 (nodes * MAX_CHOICES,): behind the node; 0 for what is in the tree, or another rank's


class StepInput(NamedTuple):
    """What the tree of one step is grown from."""

    text: Any  # int64: prompt and generated tokens
    length: int  # of the text; its newest token, `c`, is the last one
    budget: int  # tokens that the tree may add to the rank's step
    max_depth: int  # of the tree
    level_0: Any  # int64: the window's drafts that the rank has, see WindowDrafts
    column_0: Any  # int64
    rank: int
    rooms: Any  # int64 (R,): by rank, how many draft tokens it may have


class Proposal(NamedTuple):
    """Room for what `propose` gives: a rank's share, and what all ranks have alike."""

    tokens: Any  # int64 (nodes,)
    parents: Any  # int64 (nodes,): -1 for `c`, which is none of the nodes
    accept_probs: Any  # float64 (nodes,)
    trunk_tokens: Any  # int64 (TRUNK_NODES,)
    trunk_parents: Any  # int64 (TRUNK_NODES,)

    @classmethod
    def room(cls, nodes: int) -> Proposal:
        """Allocate room for a proposal whose share has at most so many nodes."""
        ints = (compiled_zeros(size, "i8") for size in (nodes, nodes, TRUNK_NODES, TRUNK_NODES))
        tokens, parents, *trunk = ints
        return cls(tokens, parents, compiled_zeros(nodes, "f8"), *trunk)


def new_tree(nodes: int) -> GrowingTree:
    """Room for trees of so many nodes, and a trunk."""
    dtypes = {"accept_probs": "f8", "best_prob": "f8", "choice_probs": "f8"}
    widths = {"choice_tokens": MAX_CHOICES, "choice_probs": MAX_CHOICES, "matches": MATCH}
    fields = GrowingTree._fields
    size = nodes + TRUNK_NODES
    return GrowingTree(*(compiled_zeros(size * widths.get(name, 1), dtypes.get(name, "i8")) for name in fields))


@jit
def propose(tables, predictor, tree, proposal, step, price, free):
    """Grow a rank's share; returns how many nodes it has, and how many the trunk has, without `c`.

    `free` is a price of none, for the trunk: the step times of the rank's may know fewer tokens than a trunk has.
    """
    trunk = 0
    if len(step.rooms) > 1:
        trunk = grow_trunk(tables, predictor, tree, step, price, free)
        divide(tree, trunk, step)
        for node in range(1, trunk):
            proposal.trunk_tokens[node - 1] = tree.tokens[node]
            proposal.trunk_parents[node - 1] = tree.parents[node] - 1
    taken = grow(tables, predictor, tree, trunk, step, price)
    for place in range(1, taken):
        node = tree.order[place]
        proposal.tokens[place - 1] = tree.tokens[node]
        proposal.parents[place - 1] = tree.places[tree.parents[node]] - 1
        proposal.accept_probs[place - 1] = tree.accept_probs[node]
    return taken - 1, max(trunk - 1, 0)


@jit
def grow_trunk(tables, predictor, tree, step, price, free):
    """Grow what all ranks have alike, whatever their windows and prices; returns its nodes."""
    nothing = step.rooms[:0]
    alike = StepInput(
        text=step.text,
        length=step.length,
        budget=TRUNK_NODES - 1,
        max_depth=step.max_depth,
        level_0=nothing,
        column_0=nothing,
        rank=step.rank,
        rooms=step.rooms,
    )
    unpriced = TokenPrice(
        tokens_per_s=0.0,
        base_tokens=0,
        seconds=free.seconds,
        marginal_seconds=free.marginal_seconds,
        exploration_bonus=0.0,
        exploration_tokens=0,
        calibration=price.calibration,
        depth_discount=price.depth_discount,
        least_tokens=0,
    )
    return grow(tables, predictor, tree, 0, alike, unpriced)


@jit
def grow(tables, predictor, tree, trunk, step, price):
    """Grow a tree behind `c`, or a rank's share of it behind a trunk.

    A node that repeats a draft of the rank's window is free. The tree is cut where its probabilities less its price add
    up to most, and ends where no larger one could pay.

    Args:
        tables: Tables.
        predictor: Predictor.
        tree: GrowingTree, whose size bounds the tree as well.
        trunk: nodes of the trunk, which `divide` has divided; 0 for none.
        step: StepInput.
        price: TokenPrice.

    Returns:
        Nodes that the rank computes, the first of `order`, node 0 included.
    """
    nodes = max(trunk, 1)
    base = price.base_tokens
    worth = best_worth = -price.tokens_per_s * price.seconds[max(base, price.least_tokens)]
    best_taken = taken = 1
    num_tokens = 0
    tree.order[0] = 0
    tree.places[0] = 0
    tree.level_0[0] = 0
    tree.column_0[0] = 0
    if trunk == 0:
        tree.tokens[0] = step.text[step.length - 1]
        tree.parents[0] = -1
        tree.depths[0] = 0
        tree.accept_probs[0] = 1.0
        predict_choices(tables, predictor, tree, 0, step, price)
    while nodes < len(tree.tokens):
        parent = likeliest_parent(tree, nodes)
        prob = tree.best_prob[parent]
        node = likeliest_trunk_node(tree, trunk, step.rank)
        in_trunk = node > 0 and tree.accept_probs[node] >= prob
        if in_trunk:
            prob = tree.accept_probs[node]
            parent = tree.parents[node]
        if prob < MIN_PROB:
            break
        above = parent
        needed = 0  # ancestors that the rank does not have yet
        while tree.places[above] == ABSENT:
            above = tree.parents[above]
            needed += 1
        token = tree.tokens[node] if in_trunk else tree.choice_tokens[tree.best_choice[parent]]
        cost = needed
        if needed or (
            repeats(step.level_0, tree.level_0[parent], token) < 0
            and repeats(step.column_0, tree.column_0[parent], token) < 0
        ):
            cost += 1
        if cost > 0:
            bonus = price.exploration_bonus if num_tokens < price.exploration_tokens else 0.0
            at = max(base + num_tokens, price.least_tokens)
            after = max(base + num_tokens + cost, price.least_tokens)
            if num_tokens + cost > step.budget:
                if needed == 0:
                    break
                if in_trunk:
                    tree.blocks[node] = -1  # no room for its ancestors: another node may have some
                else:
                    tree.choice_probs[tree.best_choice[parent]] = 0.0
                    find_best_choice(tree, parent)
                continue
            if after > at and prob + bonus <= price.tokens_per_s * price.marginal_seconds[at]:
                break
            worth += bonus - price.tokens_per_s * (price.seconds[after] - price.seconds[at])
            num_tokens += cost
        first = taken
        if in_trunk:
            last = node
        else:
            last = nodes
            add_best_choice(tables, predictor, tree, parent, nodes, step, price)
            nodes += 1
        taken += needed + 1
        place = taken - 1
        above = last
        for _ in range(needed + 1):
            tree.order[place] = above
            tree.places[above] = place
            above = tree.parents[above]
            place -= 1
        for place in range(first, taken):
            above = tree.order[place]
            tree.level_0[above] = repeats(step.level_0, tree.level_0[tree.parents[above]], tree.tokens[above])
            tree.column_0[above] = repeats(step.column_0, tree.column_0[tree.parents[above]], tree.tokens[above])
            worth += tree.accept_probs[above]
        if worth > best_worth:
            best_worth = worth
            best_taken = taken
    return best_taken


@jit
def divide(tree, trunk, step):
    """Divide a tree, grown as a trunk: find every node's block, and drop the choices that are not in the rank's."""
    ranks = len(step.rooms)
    room = 0
    for rank in range(ranks):
        room += step.rooms[rank]
    total = 0.0
    for node in range(trunk):
        for choice in range(node * MAX_CHOICES, node * MAX_CHOICES + tree.num_choices[node]):
            total += tree.accept_probs[node] * tree.choice_probs[choice]
    before = 0.0
    block = 0
    block_end = step.rooms[0]  # of all rooms, those up to the block's
    waiting = 1
    tree.order[0] = 0  # a stack of trunk nodes, for the preorder
    while waiting > 0:
        waiting -= 1
        node = tree.order[waiting]
        tree.blocks[node] = block
        tree.places[node] = ABSENT
        for choice in range(node * MAX_CHOICES, node * MAX_CHOICES + tree.num_choices[node]):
            worth = tree.accept_probs[node] * tree.choice_probs[choice]
            while block < ranks - 1 and (before + worth / 2) * max(room, 1) >= block_end * total:
                block += 1
                block_end += step.rooms[block]
            before += worth
            if block != step.rank:
                tree.choice_probs[choice] = 0.0
        find_best_choice(tree, node)
        for child in range(trunk - 1, node, -1):
            if tree.parents[child] == node:
                tree.order[waiting] = child
                waiting += 1


@jit
def add_best_choice(tables, predictor, tree, parent, node, step, price):
    """Make the best choice behind `parent` the new node `node`."""
    choice = tree.best_choice[parent]
    tree.tokens[node] = tree.choice_tokens[choice]
    tree.parents[node] = parent
    tree.depths[node] = tree.depths[parent] + 1
    tree.accept_probs[node] = tree.best_prob[parent]
    tree.best_prob[node] = 0.0
    tree.num_choices[node] = 0
    tree.choice_probs[choice] = 0.0
    find_best_choice(tree, parent)
    if tree.depths[node] < step.max_depth:
        predict_choices(tables, predictor, tree, node, step, price)


@jit
def likeliest_trunk_node(tree, trunk, rank):
    """The likeliest trunk node in the rank's block that it does not compute yet; 0 if there is none."""
    best = 0
    for node in range(1, trunk):
        likelier = best == 0 or tree.accept_probs[node] > tree.accept_probs[best]
        if likelier and tree.blocks[node] == rank and tree.places[node] == ABSENT:
            best = node
    return best


@jit
def predict_choices(tables, predictor, tree, node, step, price):
    """Predict what follows a node."""
    text, end = step.text, step.length
    context = predictor.context
    known = fill_context_of_node(context, tree.tokens, tree.parents, node, text, end, len(context.tokens))
    depth = tree.depths[node]
    if predictor.num_corpora > 0 and node > 0:
        for index in range(MATCH):
            predictor.before[index] = tree.matches[MATCH * tree.parents[node] + index]
    choices, _ = predict(tables, predictor, known, end + depth)
    if predictor.num_corpora > 0:
        for index in range(MATCH):
            tree.matches[MATCH * node + index] = predictor.match[index]
            predictor.before[index] = NOTHING_KNOWN[index]
    discount = price.depth_discount
    calibrated = price.calibration * (1 + discount * depth) / (1 + discount * (depth + 1))
    base = node * MAX_CHOICES
    for index in range(choices):
        tree.choice_tokens[base + index] = predictor.tokens[index]
        tree.choice_probs[base + index] = predictor.scores[index] * calibrated
    tree.num_choices[node] = choices
    find_best_choice(tree, node)


@jit
def find_best_choice(tree, node):
    """Find a node's likeliest choice that is not in the tree yet; of equals, the one voted for first."""
    base = node * MAX_CHOICES
    best, prob = base, 0.0
    for choice in range(base, base + tree.num_choices[node]):
        if tree.choice_probs[choice] > prob:
            best, prob = choice, tree.choice_probs[choice]
    tree.best_choice[node] = best
    tree.best_prob[node] = tree.accept_probs[node] * prob


@jit
def likeliest_parent(tree, nodes):
    """The node whose best choice is likeliest to be accepted; of equals, the first."""
    parent = 0
    for node in range(1, nodes):
        if tree.best_prob[node] > tree.best_prob[parent]:
            parent = node
    return parent


@jit
def repeats(drafts, at, token):
    """Where a child with this token stands in a path of the window's drafts, on which its parent is at `at`; or -1."""
    return at + 1 if 0 <= at < len(drafts) - 1 and drafts[at + 1] == token else -1
