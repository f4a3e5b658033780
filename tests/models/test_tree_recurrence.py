"""Recurrent layers over a tree, against the recurrence along every path."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from lp.draft.layout import ancestors
from lp.models.tree_recurrence import StepTree, advanced_state, convolution, decays, gated_delta_rule, state_space

HEADS, ROWS, COLUMNS, TAPS = 3, 5, 4, 4
EXACT = 1e-12  # float64, of numbers around 1


def drawn_parents(rng: random.Random, nodes: int) -> list[int]:
    """Draw the parents of a forest: several nodes may continue the prefix itself, as the padding of a step does."""
    stays = rng.random()
    return [at - 1 if rng.random() < stays else rng.randrange(-1, at) for at in range(nodes)]


def path(parents: list[int], node: int) -> list[int]:
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def drawn(cases: range) -> Iterator[tuple[list[int], StepTree, Callable[..., torch.Tensor]]]:
    for seed in cases:
        rng = random.Random(seed)
        parents = drawn_parents(rng, rng.randint(1, 40))
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        yield parents, StepTree.of(torch.from_numpy(ancestors(parents)), TAPS), numbers


def test_tree_of_a_small_forest() -> None:
    """Who comes before whom, written out: a node, its sibling, a child of the first, and one more root."""
    tree = StepTree.of(torch.from_numpy(ancestors([-1, 0, 0, 1, -1])), 4)
    assert tree.roots_T.tolist() == [True, False, False, False, True]
    assert tree.earlier_TK.tolist() == [[-3, -2, -1, 0], [-2, -1, 0, 1], [-2, -1, 0, 2], [-1, 0, 1, 3], [-3, -2, -1, 4]]


def test_gated_delta_rule_is_the_recurrence_along_every_path(cases: Callable[[int, int], range]) -> None:
    """A decay, a sign or an ancestor wrong in the triangular system, or in the state behind a path."""
    for parents, tree, numbers in drawn(cases(30, 300)):
        count = len(parents)
        state, g = numbers(HEADS, ROWS, COLUMNS), -numbers(HEADS, count).abs()
        q, k, v = numbers(HEADS, count, ROWS), numbers(HEADS, count, ROWS), numbers(HEADS, count, COLUMNS)
        k = k / k.norm(dim=-1, keepdim=True)
        beta = 2 * numbers(HEADS, count).sigmoid()  # up to 2, as with negative eigenvalues
        o, delta = gated_delta_rule(tree, state, q, k, v, g, beta)
        for node in range(count):
            s = state
            nodes = path(parents, node)
            for i in nodes:
                s = s * g[:, i, None, None].exp()
                error = beta[:, i, None] * (v[:, i] - torch.einsum("hrd,hr->hd", s, k[:, i]))
                s = s + k[:, i, :, None] * error[:, None]
            torch.testing.assert_close(o[:, node], torch.einsum("hrd,hr->hd", s, q[:, node]), atol=EXACT, rtol=EXACT)
            behind = advanced_state(state[None], k[None, :, nodes], delta[None, :, nodes], g[None, :, nodes])
            torch.testing.assert_close(behind[0], s, atol=EXACT, rtol=EXACT)


def test_state_space_is_the_recurrence_along_every_path(cases: Callable[[int, int], range]) -> None:
    """A decay or an ancestor of Mamba-2 that is wrong in the sum over a path, or in the state behind it."""
    for parents, tree, numbers in drawn(cases(30, 300)):
        count = len(parents)
        state, g = numbers(2 * HEADS, ROWS, COLUMNS), -numbers(2 * HEADS, count).abs()
        x, b, c = numbers(2 * HEADS, count, ROWS), numbers(HEADS, count, COLUMNS), numbers(HEADS, count, COLUMNS)
        o = state_space(tree, state, c, b, x, g)
        b, c = (shared.repeat_interleave(2, 0) for shared in (b, c))
        for node in range(count):
            s = state
            nodes = path(parents, node)
            for i in nodes:
                s = s * g[:, i, None, None].exp() + x[:, i, :, None] * b[:, i, None]
            torch.testing.assert_close(o[:, node], torch.einsum("hrd,hd->hr", s, c[:, node]), atol=EXACT, rtol=EXACT)
            behind = advanced_state(state[None], x[None, :, nodes], b[None, :, nodes], g[None, :, nodes])
            torch.testing.assert_close(behind[0], s, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
def test_convolution_is_that_of_every_path(taps: int, cases: Callable[[int, int], range]) -> None:
    """An input of a sibling, or of the prefix taken from the wrong end; fewer taps than the tree was made for."""
    for parents, tree, numbers in drawn(cases(20, 200)):
        count = len(parents)
        last, inputs = numbers(3, taps), numbers(count, 3)
        weight, bias = numbers(3, taps), numbers(3)
        output = convolution(tree, last, inputs, weight, bias)
        without_bias = convolution(tree, last, inputs, weight, None)
        for node in range(count):
            text = torch.cat([last, inputs[path(parents, node)].T], 1)[:, -taps:]
            torch.testing.assert_close(output[node], (text * weight).sum(1) + bias, atol=EXACT, rtol=EXACT)
            torch.testing.assert_close(without_bias[node], (text * weight).sum(1), atol=EXACT, rtol=EXACT)


def test_strong_decays_do_not_overflow() -> None:
    """exp(G_i - G_j) of nodes that are no ancestors may be infinite, and infinite times 0 is NaN."""
    tree = StepTree.of(torch.from_numpy(ancestors([-1, 0, 0, 1])), 2)
    g = torch.tensor([[-1.0, -900.0, -1.0, -900.0]])
    ones = torch.ones(1, 4, 2)
    o, delta = gated_delta_rule(tree, torch.ones(1, 2, 2), ones, ones, ones, g, torch.ones(1, 4))
    assert o.isfinite().all() and delta.isfinite().all()
    assert state_space(tree, torch.ones(1, 2, 2), ones, ones, ones, g).isfinite().all()


def test_a_token_that_forgets_all_does_not_blur_those_behind_it() -> None:
    """Sums of log decays in float32 would be off by 4e-4 behind a token of -5000: the weights of all later tokens."""
    count = 6
    tree = StepTree.of(torch.ones(count, count).tril().bool(), 2)
    g = torch.tensor([[-5000.0, -0.01, -0.02, -0.03, -0.04, -0.05]])
    _, between = decays(tree, g)
    expected = torch.tensor([0.02, 0.03, 0.04, 0.05], dtype=torch.float64).neg().sum().exp().item()
    assert between[0, 5, 1].item() == pytest.approx(expected, rel=1e-6)
    state = advanced_state(
        torch.zeros(1, 1, 1, 1), torch.eye(count)[None, None, :, 1:2], torch.ones(1, 1, count, 1), g[None]
    )
    assert state.item() == pytest.approx(expected, rel=1e-6)
