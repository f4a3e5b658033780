"""The pool's draft tree, grown best first: always by the token most likely to be accepted, as long as it pays."""

from __future__ import annotations

from typing import Any, NamedTuple

from lp.compiled import compiled_zeros, jit
from lp.draft.pool.mixture import MAX_CHOICES, predict
from lp.draft.pool.tables import MAX_CONTEXT, fill_context_of_node

MIN_PROB = 1e-7  # of being accepted, below which no token enters the tree


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
    num_choices: Any  # int64 (nodes,)
    best_choice: Any  # int64 (nodes,): index of the likeliest choice that is not in the tree yet
    best_prob: Any  # float64 (nodes,): of that choice being accepted
    choice_tokens: Any  # int64 (nodes * MAX_CHOICES,)
    choice_probs: Any  # float64 (nodes * MAX_CHOICES,): behind the node; 0 for what is in the tree


class Limits(NamedTuple):
    """How large the tree may become."""

    num_tokens: int  # that it may add to the step
    depth: int


def new_tree(nodes: int) -> GrowingTree:
    """Room for trees of so many nodes."""
    dtypes = {"accept_probs": "f8", "best_prob": "f8", "choice_probs": "f8"}
    widths = {"choice_tokens": MAX_CHOICES, "choice_probs": MAX_CHOICES}
    fields = GrowingTree._fields
    return GrowingTree(*(compiled_zeros(nodes * widths.get(name, 1), dtypes.get(name, "i8")) for name in fields))


@jit
def grow(tables, prediction, tree, text_end, switches, limits, window, price):
    """Grow the tree behind `c`.

    A node that repeats a draft of the window is free. The tree is cut where its probabilities less its price add up to
    most, and ends where no larger one could pay.

    Args:
        tables: Tables.
        prediction: Prediction.
        tree: GrowingTree, whose size bounds the tree as well.
        text_end: TextEnd.
        switches: Switches.
        limits: Limits.
        window: WindowDrafts, as arrays.
        price: TokenPrice.

    Returns:
        Its number of nodes, node 0 included.
    """
    base = price.base_tokens
    worth = best_worth = -price.tokens_per_s * price.seconds[base]
    best_nodes = nodes = 1
    num_tokens = 0
    tree.tokens[0] = text_end.tokens[0]
    tree.parents[0] = -1
    tree.depths[0] = 0
    tree.accept_probs[0] = 1.0
    tree.level_0[0] = 0
    tree.column_0[0] = 0
    predict_choices(tables, prediction, tree, 0, text_end, switches, price)
    while nodes < len(tree.tokens):
        parent = likeliest_parent(tree, nodes)
        prob = tree.best_prob[parent]
        if prob < MIN_PROB:
            break
        choice = tree.best_choice[parent]
        token = tree.choice_tokens[choice]
        level_0 = repeats(window.level_0, tree.level_0[parent], token)
        column_0 = repeats(window.column_0, tree.column_0[parent], token)
        if level_0 < 0 and column_0 < 0:
            bonus = price.exploration_bonus if num_tokens < price.exploration_tokens else 0.0
            if num_tokens == limits.num_tokens:
                break
            if prob + bonus <= price.tokens_per_s * price.marginal_seconds[base + num_tokens]:
                break
            cost = price.seconds[base + num_tokens + 1] - price.seconds[base + num_tokens]
            worth += bonus - price.tokens_per_s * cost
            num_tokens += 1
        tree.tokens[nodes] = token
        tree.parents[nodes] = parent
        tree.depths[nodes] = tree.depths[parent] + 1
        tree.accept_probs[nodes] = prob
        tree.level_0[nodes] = level_0
        tree.column_0[nodes] = column_0
        tree.best_prob[nodes] = 0.0
        tree.choice_probs[choice] = 0.0
        find_best_choice(tree, parent)
        if tree.depths[nodes] < limits.depth:
            predict_choices(tables, prediction, tree, nodes, text_end, switches, price)
        worth += prob
        nodes += 1
        if worth > best_worth:
            best_worth, best_nodes = worth, nodes
    return best_nodes


@jit
def predict_choices(tables, prediction, tree, node, text_end, switches, price):
    """Predict what follows a node."""
    known = fill_context_of_node(prediction.context, tree.tokens, tree.parents, node, text_end.tokens, MAX_CONTEXT)
    depth = tree.depths[node]
    choices, _ = predict(tables, prediction, known, text_end.position + depth + 1, switches)
    discount = price.depth_discount
    calibrated = price.calibration * (1 + discount * depth) / (1 + discount * (depth + 1))
    base = node * MAX_CHOICES
    for index in range(choices):
        tree.choice_tokens[base + index] = prediction.tokens[index]
        tree.choice_probs[base + index] = prediction.scores[index] * calibrated
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
