"""The pool's draft tree, grown best first: the token most likely to be accepted is added next, as long as it pays.

A token pays if its expected gain is larger than the price of the time that it takes. The R ranks divide the tree, and
each rank grows only its own part:

1. All ranks grow the same small tree, called the trunk. No rank has to compute all of it.
2. Tokens that may follow the trunk's nodes, but are not in the trunk, are listed in preorder and divided into R blocks,
   one for each rank. The trunk's nodes are assigned to blocks as well.
3. Each rank continues to grow the tree from its own block alone. It computes the trunk nodes of its block, and their
   ancestors.

`c` is the newest token of the text, the root of the tree. A node's choices are the tokens that are predicted to follow
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lp.compiled import compiled_zeros, jit
from lp.draft.pool.mixture import MATCH, MAX_CHOICES, NOTHING_KNOWN, predict
from lp.draft.pool.tables import fill_context_of_node
from lp.draft.source import TokenPrice

MIN_PROB = 1e-7  # a token less likely to be accepted than this never enters the tree
TRUNK_NODES = 16  # `c` included. Better than 32, by tokens per step measured on 8 ranks x 64 tokens
ABSENT = -1  # place of a trunk node that the rank does not compute


class GrowingTree(NamedTuple):
    """A draft tree while it grows, as arrays that functions compiled by numba fill.

    Node 0 is the root, the newest token of the text. Each node has up to MAX_CHOICES choices: tokens predicted to
    follow the node, which may become its children.
    """

    tokens: Any  # int64 (nodes,)
    parents: Any  # int64 (nodes,): -1 for node 0
    depths: Any  # int64 (nodes,): 0 for node 0
    accept_probs: Any  # float64 (nodes,): probability that the node and all its ancestors are accepted
    level_0: Any  # int64 (nodes,): the column of window level 0 that it repeats, -1 for none
    column_0: Any  # int64 (nodes,): the level of window column 0 that it repeats, -1 for none
    blocks: Any  # int64 (nodes,): the rank whose block a trunk node belongs to
    places: Any  # int64 (nodes,): its index in `order`, ABSENT for a trunk node that the rank does not compute
    order: Any  # int64 (nodes,): the nodes that the rank computes, parents first
    matches: Any  # int64 (nodes * MATCH,): the match of the text up to the node in a corpus, see `Predictor.match`
    num_choices: Any  # int64 (nodes,): number of choices of the node
    best_choice: Any  # int64 (nodes,): index of the likeliest choice that is not in the tree yet
    best_prob: Any  # float64 (nodes,): probability that this choice is accepted with all nodes before it
    choice_tokens: Any  # int64 (nodes * MAX_CHOICES,): token of each choice
    choice_probs: Any  # float64 (nodes * MAX_CHOICES,): given the node; 0 once in the tree, or in another rank's block


class StepInput(NamedTuple):
    """The input from which one rank grows its part of a step's draft tree: the text, the rank, and its limits."""

    text: Any  # int64: prompt and generated tokens
    length: int  # tokens of the text; the last one is `c`
    budget: int  # tokens that the tree may add to the rank's step
    max_depth: int  # most tokens of a path after `c`
    level_0: Any  # int64: the paths of the window that the rank computes anyway, see WindowDrafts
    column_0: Any  # int64
    rank: int  # the rank that grows its share
    rooms: Any  # int64 (R,): most draft tokens of each rank


class Proposal(NamedTuple):
    """The draft tree that `propose` has grown on one rank, as arrays that functions compiled by numba fill.

    It consists of the nodes that the rank computes, and of the trunk: the small tree that all ranks have in common.
    """

    tokens: Any  # int64 (nodes,)
    parents: Any  # int64 (nodes,): -1 for `c`, which is not listed itself
    accept_probs: Any  # float64 (nodes,)
    trunk_tokens: Any  # int64 (TRUNK_NODES,)
    trunk_parents: Any  # int64 (TRUNK_NODES,)

    @classmethod
    def room(cls, nodes: int) -> Proposal:
        """Allocate the arrays of a proposal, for at most `nodes` draft-tree nodes on this rank."""
        ints = (compiled_zeros(size, "i8") for size in (nodes, nodes, TRUNK_NODES, TRUNK_NODES))
        tokens, parents, *trunk = ints
        return cls(tokens, parents, compiled_zeros(nodes, "f8"), *trunk)


def new_tree(nodes: int) -> GrowingTree:
    """Allocate the arrays in which a draft tree grows, for at most `nodes` nodes besides TRUNK_NODES for the trunk.

    The trunk is the small tree that all ranks have in common.
    """
    dtypes = {"accept_probs": "f8", "best_prob": "f8", "choice_probs": "f8"}
    widths = {"choice_tokens": MAX_CHOICES, "choice_probs": MAX_CHOICES, "matches": MATCH}
    fields = GrowingTree._fields
    size = nodes + TRUNK_NODES
    return GrowingTree(*(compiled_zeros(size * widths.get(name, 1), dtypes.get(name, "i8")) for name in fields))


@jit
def propose(tables, predictor, tree, proposal, step, price, free):
    """Grow one rank's part of a step's draft tree (a function compiled by numba).

    With several ranks, it first grows the trunk, a small tree that is the same on all ranks. Then it continues from
    this rank's part of the trunk alone.

    Args:
        tables, predictor: Tables (the pool's memory) and Predictor (predicts next tokens from it).
        tree: GrowingTree, overwritten.
        proposal: Proposal, filled with this rank's nodes and the trunk.
        step: StepInput, with the text, the rank and its limits.
        price: TokenPrice: what draft tokens cost on this rank.
        free: TokenPrice by which tokens cost nothing, used for the trunk; its arrays must be long enough for all nodes.

    Returns:
        Number of draft-tree nodes on this rank, and number of trunk nodes (0 with a single rank); neither counts the
        root.
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
    """Grow the trunk: a small draft tree, the same on every rank, which `divide` then divides among the ranks.

    Args:
        tables, predictor: Tables (the pool's memory) and Predictor (predicts next tokens from it).
        tree: GrowingTree, overwritten.
        step: StepInput: the text, this rank's number, and limits on the tree's size and depth.
        price: TokenPrice of this rank: the step time that one more draft token costs. Only its calibration of
            acceptance probabilities and its discount for deeper nodes are used: costs differ among ranks, and the trunk
            must not.
        free: TokenPrice by which tokens cost nothing, used in place of this rank's costs; its arrays need an entry for
            each node.

    Returns:
        Number of nodes of the trunk, root included.
    """
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
    """Grow a draft tree, or one rank's part of it from a trunk: always add the token most likely to be accepted.

    The trunk is a small tree that all ranks have in common.

    A token that repeats a token of the rank's lookahead window costs nothing, since the rank computes it anyway.
    Growing ends where no larger tree could pay. Of all trees on the way, the result is the tree with the largest sum of
    accept probabilities less the price of its tokens.

    Args:
        tables, predictor: Tables (the pool's memory) and Predictor (predicts next tokens from it).
        tree: GrowingTree; the length of its arrays limits the number of nodes, too.
        trunk: number of trunk nodes in `tree`, which `divide` has divided among the ranks; 0: grow a new tree.
        step: StepInput, with the text, the rank and its limits.
        price: TokenPrice: what draft tokens cost on this rank.

    Returns:
        Number of nodes that the rank computes, root included; their indices are the first entries of `tree.order`.
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
    """Divide a trunk (a small tree equal on all ranks) among the ranks, in proportion to their room for draft tokens.

    It sets each trunk node's block, which is the rank that the node belongs to. Of the choices (tokens that may follow
    the trunk's nodes), it leaves only those that belong to this rank.

    Args:
        tree: GrowingTree that holds the trunk.
        trunk: number of nodes of the trunk.
        step: StepInput, with this rank and the room of every rank.
    """
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
    """Add a node's likeliest choice (a token predicted to follow it) to the tree, and predict the new node's choices.

    Args:
        tables, predictor: Tables (the pool's memory) and Predictor (predicts next tokens from it).
        tree: GrowingTree.
        parent: index of the node whose choice is added.
        node: index of the new node.
        step: StepInput; a new node at depth `max_depth` gets no choices.
        price: TokenPrice, whose calibration and depth discount correct the probabilities.
    """
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
    """Find the trunk node that a rank adds next to its part of the tree: the likeliest one in its block that it lacks.

    The trunk is a small tree that all ranks have in common; a rank's block is the part that belongs to this rank.

    Args:
        tree: GrowingTree whose trunk `divide` has divided.
        trunk: number of nodes of the trunk.
        rank: the rank.

    Returns:
        Index of the node; 0 if the rank lacks none.
    """
    best = 0
    for node in range(1, trunk):
        likelier = best == 0 or tree.accept_probs[node] > tree.accept_probs[best]
        if likelier and tree.blocks[node] == rank and tree.places[node] == ABSENT:
            best = node
    return best


@jit
def predict_choices(tables, predictor, tree, node, step, price):
    """Predict a node's choices: the tokens that may follow it, each with the probability to be accepted after the node.

    Args:
        tables, predictor: Tables (the pool's memory) and Predictor (predicts next tokens from it).
        tree: GrowingTree, whose arrays of choices are filled for this node.
        node: index of the node.
        step: StepInput, with the text.
        price: TokenPrice, whose calibration and depth discount correct the probabilities.
    """
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
    """Find a node's likeliest choice (a token predicted to follow it) that is not in the tree yet.

    It is stored as the node's `best_choice`, and the probability that it is accepted with all nodes before it as
    `best_prob`. Of equally likely choices the first is taken.

    Args:
        tree: GrowingTree.
        node: index of the node.
    """
    base = node * MAX_CHOICES
    best, prob = base, 0.0
    for choice in range(base, base + tree.num_choices[node]):
        if tree.choice_probs[choice] > prob:
            best, prob = choice, tree.choice_probs[choice]
    tree.best_choice[node] = best
    tree.best_prob[node] = tree.accept_probs[node] * prob


@jit
def likeliest_parent(tree, nodes):
    """Find the node of a growing draft tree to which a child should be added next.

    It is the node whose best choice (the likeliest predicted token that may become its child) is most likely to be
    accepted.

    Args:
        tree: GrowingTree.
        nodes: number of nodes in the tree so far.

    Returns:
        Index of the node.
    """
    parent = 0
    for node in range(1, nodes):
        if tree.best_prob[node] > tree.best_prob[parent]:
            parent = node
    return parent


@jit
def repeats(drafts, at, token):
    """Find a draft-tree node on a path of the lookahead window: such a node costs nothing, since it is computed anyway.

    Args:
        drafts: token ids on the window's path; the first is the newest token of the text.
        at: index of the node's parent on this path; -1 if the parent is not on the path.
        token: token id of the node.

    Returns:
        Index of the node on the path; -1 if the node is not on the path.
    """
    return at + 1 if 0 <= at < len(drafts) - 1 and drafts[at + 1] == token else -1
