"""The methods that lookahead is compared with: Jacobi decoding, the paper's own pool, and token recycling."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lp
from lp.draft.layout import StepLayout
from lp.draft.paper import PaperPool
from lp.draft.token_recycling import TokenRecycling, _static_tree
from lp.draft.window import LookaheadWindow, WindowSlice
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.layouts import NOTHING, path_to, walk_alone
from tests.support.pools import logits_of, reads_of
from tests.support.tiny_models import drawn_text, tiny_model

GREEDY_AND_COUPLED = [None, lp.SamplingParams(temperature=0.6, top_p=0.95, seed=5)]


def _drawn(rng: random.Random, method: str) -> tuple[Any, int]:
    """A config, and the draft tokens that it may take."""
    if method == "jacobi":
        jacobi = lp.JacobiConfig(num_tokens=rng.randint(1, 20))
        return jacobi, jacobi.num_tokens
    if method == "recycling":
        recycling = lp.RecyclingConfig(successors=rng.choice([1, 8, 100]), nodes=rng.randint(1, 40))
        return recycling, recycling.nodes
    paper = lp.PaperConfig(
        window_size=rng.randint(0, 8),
        ngram_size=rng.randint(2, 5),
        guess_set_size=rng.randint(0, 8),
        prompt_ngrams=rng.random() < 0.7,
        warmup_steps=rng.choice([0, 0, 3]),
    )
    return paper, paper.guess_set_size * (paper.ngram_size - 1)


@pytest.mark.parametrize("sampling", GREEDY_AND_COUPLED, ids=["greedy", "coupled"])
@pytest.mark.parametrize("method", ["paper", "recycling", "jacobi"])
def test_peers_are_exact_on_one_rank_and_two(
    method: str, sampling: lp.SamplingParams | None, cases: Callable[[int, int], range]
) -> None:
    """A peer that says other tokens, or takes more rows than it may, is no comparison."""
    accepted = 0
    for case in cases(5, 80):
        rng = random.Random(f"{method}-{case}")
        model = tiny_model(rng.choice(["llama", "gemma3", "mistral_sliding"]), seed=case % 8)
        ids, new = drawn_text(rng, rng.randint(1, 60)), rng.randint(1, 48)
        config, most = _drawn(rng, method)
        plain = lp.AutoregressiveDecoder(model).generate(ids, new, sampling)
        alone = lp.LookaheadDecoder(model, config).generate(ids, new, sampling)
        assert alone.tokens == plain.tokens, f"case {case}: {config}"
        assert all(step.num_draft <= most for step in alone.step_stats), f"case {case}: {config}"

        def body(context: ParallelContext, made: Any = (model, config, ids, new)) -> list[Any]:
            model, config, ids, new = made
            output = lp.LookaheadDecoder(model, config, context).generate(ids, new, sampling)
            return [output.tokens, [step.accepted for step in output.step_stats]]

        steps = [step.accepted for step in alone.step_stats]
        both = run_lockstep(2, body)
        assert both[0] == both[1] and both[0][0] == plain.tokens, f"case {case}: {config}"
        if method == "paper":  # recycling keeps the newest of a token's nodes, which are in another order on two ranks
            assert both[0][1] == steps, f"case {case}: {config}"
        accepted += sum(steps)
    assert accepted > 5, "hardly anything was ever accepted"


@pytest.mark.parametrize(
    ("config", "setting"), [(lp.PaperConfig, "guess_set_size"), (lp.RecyclingConfig, "successors")]
)
def test_settings_that_differ_are_named(config: Any, setting: str) -> None:
    """As for lookahead itself: ranks would lay out different steps."""
    model = tiny_model()

    def body(context: ParallelContext) -> None:
        lp.LookaheadDecoder(model, config(**{setting: 3 + context.rank}), context).generate([1, 2], 4)

    with pytest.raises(ValueError, match=f"the {setting} of rank 1 differs"):
        run_lockstep(2, body)


def test_paper_paths_lie_side_by_side(cases: Callable[[int, int], range]) -> None:
    """The paper's rows are 1 + W(N-1) - 1 of the window and (N-1) for every n-gram: sharing would flatter it."""
    for case in cases(30, 300):
        rng = random.Random(case)
        w, n, g = rng.randint(1, 8), rng.randint(2, 6), rng.randint(0, 8)
        config = lp.PaperConfig(window_size=w, ngram_size=n, guess_set_size=g)
        text = [rng.randrange(4) for _ in range(60)]
        tree = PaperPool(config, text).propose(text, g * (n - 1))
        window = LookaheadWindow(w, n, text)
        layout = StepLayout(window, WindowSlice(0, w, n - 1), tree, text[-1], len(text) - 1, 10**6)
        assert layout.num_window == w * (n - 1) and len(tree) == layout.num_nodes - layout.num_window <= g * (n - 1)
        assert len(tree) % (n - 1) == 0
        paths = [range(first, first + n - 1) for first in range(layout.num_window, layout.num_nodes, n - 1)]
        for path in paths:  # each begins behind `c`, and no node has two below it
            assert [layout.parents[node] for node in path] == [0, *path[:-1]]
        ngrams = [tuple(layout.tokens[node] for node in path) for path in paths]
        assert len(set(ngrams)) == len(ngrams)
        # The walk takes any of them, those that begin alike included.
        for path, ngram in zip(paths, ngrams, strict=True):
            after: dict[tuple[int, ...], int] = {ngram[:end]: ngram[end] for end in range(n - 1)}
            branches = {
                node: tuple(layout.tokens[s] for s in path_to(layout, node)[1:]) for node in layout.sampled_nodes
            }
            sampled = {node: after.get(branch, 99) for node, branch in branches.items()}
            outcome = walk_alone(layout, sampled, merge=False)
            assert outcome.tokens == [*ngram, 99] and len(path) == len(outcome.own_path) - 1
            assert tuple(layout.tokens[node] for node in outcome.own_path[1:]) == ngram


def test_paper_pool_keeps_the_newest() -> None:
    """LRU, as the reference has it: of a token's n-grams the oldest goes, and the newest is tried first."""
    pool = PaperPool(lp.PaperConfig(ngram_size=3, guess_set_size=2, prompt_ngrams=False), [7, 8, 9])
    assert len(pool.propose([7], 99)) == 0, "prompt_ngrams is off"
    for ngrams, expected in [
        ([(1, 2, 3), (1, 4, 5)], [4, 5, 2, 3]),
        ([(1, 2, 3)], [2, 3, 4, 5]),  # seen again
        ([(1, 6, 7)], [6, 7, 2, 3]),  # so the other goes
    ]:
        pool.observe([1, 1], 1, reads_of(0, [], logits_of([]), ngrams))
        assert pool.propose([1], 99).tokens == expected
    assert pool.propose([1], 3).tokens == [6, 7, 2], "cut at the budget"
    rng, pool = random.Random(0), PaperPool(lp.PaperConfig(ngram_size=4, guess_set_size=5), [1, 2, 3, 4])
    for _ in range(2000):
        ngrams = [tuple(rng.randrange(50) for _ in range(4)) for _ in range(10)]
        pool.observe([1, 1], 1, reads_of(0, [], NOTHING.top_logits, ngrams))
    assert sum(map(len, pool._tails.values())) <= 50 * 5


def test_paper_pool_learns_the_text_once() -> None:
    """Every n-gram of prompt and output, those across the seam included, and no other."""
    config = lp.PaperConfig(ngram_size=3, guess_set_size=99)
    rng = random.Random(0)
    text = [rng.randrange(9) for _ in range(80)]
    whole, pool, end = PaperPool(config, text), PaperPool(config, text[:5]), 5
    while end < len(text):
        moved = min(rng.randint(1, 6), len(text) - end)
        end += moved
        pool.observe(text[:end], moved, NOTHING)
    assert {c: list(tails) for c, tails in pool._tails.items()} == {c: list(t) for c, t in whole._tails.items()}
    assert sum(map(len, whole._tails.values())) == len({tuple(text[i : i + 3]) for i in range(78)})


def test_recycling_keeps_what_a_token_was_last_seen_with() -> None:
    """Successors by logit, of the newest row of their token; the tree is the likeliest of fixed shape."""
    source = TokenRecycling(lp.RecyclingConfig(successors=2, nodes=4))
    assert len(source.propose([1], 4)) == 0
    rows = logits_of([[(2, 5.0), (3, -1.0)], [(9, 0.0), (8, -2.0)], [(7, 1.5), (6, 1.0)]])
    source.observe([0, 1, 2], 1, reads_of(1, [(1, -1, 2), (2, 0, 9), (2, 0, 9)], rows))
    assert _static_tree(4, 2) == [(-1, 0), (-1, 1), (0, 0), (0, 1)]
    tree = source.propose([1], 99)
    assert (tree.tokens, tree.parents) == ([2, 3, 7, 6], [-1, -1, 0, 0])  # the last of the two rows of 2 counts
    assert source.propose([1], 2).tokens == [2, 3]


def test_jacobi_guesses_are_those_of_its_definition() -> None:
    """Each step's guesses are what the step before sampled behind its guesses; steps counted with nothing cached."""
    model, ids, size, new = tiny_model(seed=3), drawn_text(random.Random(8), 12), 5, 40
    output = lp.LookaheadDecoder(model, lp.JacobiConfig(num_tokens=size)).generate(ids, new, eos_token_id=())
    text, guesses, steps = [*ids], list[int](), list[int]()
    fresh = random.Random(0)
    while len(text) < len(ids) + new:
        while len(guesses) < size:
            guesses.append(fresh.choice(ids))
        with torch.no_grad():
            sampled = model(torch.tensor([[*text, *guesses]])).logits[0, len(text) - 1 :].argmax(-1).tolist()
        accepted = next((at for at, guess in enumerate(guesses) if guess != sampled[at]), size)
        text += sampled[: accepted + 1]
        guesses = sampled[accepted + 1 :]
        steps.append(accepted)
    assert output.tokens == text[len(ids) : len(ids) + new]
    assert [step.accepted for step in output.step_stats][:-1] == steps[:-1] and max(steps) > 0
