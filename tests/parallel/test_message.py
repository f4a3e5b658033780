"""The message of a step: what ranks pack is what each of them reads, and it says which rank has gone astray."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

import lp
from lp.draft.layout import StepLayout
from lp.draft.share import step_tokens
from lp.draft.tree import DraftTree
from lp.draft.verify import RankTrees
from lp.draft.window import LookaheadWindow, WindowSlice
from lp.parallel import message
from lp.parallel.message import Header, MessageShape, Sampled, Stop
from lp.sampling.sampler import INVALID_TOKEN
from lp.sampling.top_logits import pack_top_logits, unpack_top_logits
from tests.support.layouts import FAR, drawn_ranks, layout_of, path_tree

LARGEST_TOKEN = INVALID_TOKEN - 1
ROUNDING = 1e-3


class Read(NamedTuple):
    """What a rank reads in the messages of all: reasons to stop, rank 0's length, and the trees as numpy's arrays."""

    stop: Stop
    length: int
    trees: RankTrees


def read_of(messages: np.ndarray, shape: MessageShape, step: int = 0) -> Read:
    trees = shape.room(len(messages))
    stop, length = message.unpack(messages, trees, step, ROUNDING)
    return Read(stop, length, RankTrees(*map(np.asarray, trees)))


def trade(messages: Sequence[torch.Tensor], shape: MessageShape, step: int = 0) -> Read:
    """What every rank reads in the messages of all, which must not depend on the rank; they must have one size."""
    assert {len(mine) for mine in messages} == {shape.size}
    everyone = torch.stack([*messages]).numpy()
    by_rank = [read_of(everyone, shape, step) for _ in messages]
    for other in by_rank[1:]:
        assert other[:2] == by_rank[0][:2]
        assert (other.trees.counts == by_rank[0].trees.counts).all()
        for rank, count in enumerate(other.trees.counts):  # what lies behind is no message's
            for mine, theirs in zip(by_rank[0].trees[:4], other.trees[:4], strict=True):
                assert (mine[rank, :count] == theirs[rank, :count]).all()
    return by_rank[0]


def drawn_top(rng: random.Random) -> int:
    """A kept token and its logit, of either sign."""
    bits = int(np.float32(rng.choice([0.0, rng.gauss(0, 9), -np.inf])).view(np.uint32))
    return rng.choice([0, LARGEST_TOKEN, rng.randrange(10**5)]) << 32 | bits


def sampled_of(
    rng: random.Random, layout: StepLayout, k: int, best: torch.Tensor | None = None
) -> tuple[Sampled, list[list[int]]]:
    """What a forward pass may have given: tokens, some of scores that are NaN, and top-k logits."""
    nodes = layout.sampled_nodes
    tokens = [rng.choice([0, LARGEST_TOKEN, INVALID_TOKEN, rng.randrange(10**5)]) for _ in nodes]
    tops = [[drawn_top(rng) for _ in range(k)] for _ in nodes]
    return Sampled(torch.tensor(tokens), torch.tensor(tops, dtype=torch.int64).view(len(nodes), k), best), tops


def test_what_is_packed_is_read(cases: Callable[[int, int], range]) -> None:
    """A token read for the node beside its own is a wrong text on every rank alike, which no digest would show."""
    for seed in cases(200, 2000):
        rng = random.Random(seed)
        ranks = 1 + seed % 5
        layouts, budget = drawn_ranks(rng, ranks, kinds=rng.choice([3, 2**20]))
        shape = MessageShape(budget, num_logits=rng.choice([0, 0, 1, 3, 16]))
        assert max(layout.num_nodes for layout in layouts) <= budget
        flags = [rng.choice([Stop.NONE, Stop.NONE, Stop.INTERRUPTED, Stop.EOS, Stop.FAILED]) for _ in range(ranks)]
        best = torch.tensor([drawn_top(rng) for _ in range(message.NUM_BEST)])
        given = [sampled_of(rng, layout, shape.num_logits, best) for layout in layouts]
        messages = [
            message.pack(Header(7, flags[rank], 10 + rank), layout, given[rank][0], shape)
            for rank, layout in enumerate(layouts)
        ]
        assert {len(each) for each in messages} == {shape.size}, "the size may not depend on the step"
        gathered = trade(messages, shape)
        assert (gathered.stop, gathered.length) == (Stop(sum({int(flag) for flag in flags})), 10)
        trees = gathered.trees
        assert trees.counts.tolist() == [layout.num_nodes for layout in layouts]
        for rank, layout in enumerate(layouts):
            size = layout.num_nodes
            assert trees.tokens[rank, :size].tolist() == layout.tokens.tolist(), f"seed {seed}"
            assert trees.parents[rank, 1:size].tolist() == layout.parents[1:].tolist(), f"seed {seed}"
            assert trees.parents[rank, 0] == 0
            sampled, tops = given[rank]
            expected = dict(zip(layout.sampled_nodes, sampled.tokens.tolist(), strict=True))
            assert trees.sampled[rank, :size].tolist() == [expected.get(node, INVALID_TOKEN) for node in range(size)]
            for read, sent in zip(trees.probs[rank, :size].tolist(), layout.accept_probs, strict=True):
                least = max(sent, message.PROBS[-1])
                assert read == 0 == sent or 2**-0.05 <= read / least <= 2**0.05, "to the nearest of the codes"
            first, of_rank, of_node = trees.logits_at.tolist()
            starts = first + rank * of_rank + layout.sampled_nodes * of_node
            read_tops = unpack_top_logits(
                torch.stack(messages).view(-1).numpy()[starts[:, None] + np.arange(shape.num_logits)]
            )
            sent_tops = unpack_top_logits(np.array(tops, np.int64).reshape(len(starts), shape.num_logits))
            assert read_tops.tokens.tolist() == sent_tops.tokens.tolist()
            assert read_tops.logits.tolist() == sent_tops.logits.tolist()


@pytest.mark.parametrize(
    ("prob", "code"),
    [(0.0, 0), (1.0, 1), (2**-0.049, 1), (2**-0.051, 2), (0.5, 11), (2.0**-25.4, 255), (1e-30, 255), (5e-324, 255)],
)
def test_probabilities_are_sent_to_the_nearest_code(prob: float, code: int) -> None:
    """A probability of none must stay none, and a small one must not become none or wrap around."""
    layout = StepLayout(LookaheadWindow(0, 2, [5]), WindowSlice(0, 0, 1), path_tree([prob]), 5, 9, FAR)
    shape = MessageShape(2, 0)
    sent = message.pack(Header(7, Stop.NONE, 0), layout, sampled_of(random.Random(0), layout, 0)[0], shape)
    read = trade([sent], shape).trees.probs[0]
    assert int(sent[message.HEADER + 1]) % 256 == code
    assert read.tolist() == [0.0, message.PROBS[code]] and message.PROBS[0] == 0
    assert (np.diff(message.PROBS[1:]) < 0).all() and message.PROBS[1] == 1


def test_all_bits_of_a_word_are_apart() -> None:
    """The largest step, token and probability side by side: one bit too many changes its neighbour."""
    nodes = lp.config.MAX_STEP_TOKENS
    draft = DraftTree([LARGEST_TOKEN] * (nodes - 1), range(-1, nodes - 2), [1.0] * (nodes - 1))
    layout = StepLayout(LookaheadWindow(0, 2, [5]), WindowSlice(0, 0, 1), draft, 5, 9, FAR)
    shape = MessageShape(nodes, 0)
    sampled = Sampled(torch.full((nodes,), LARGEST_TOKEN), torch.zeros(nodes, 0, dtype=torch.int64))
    sent = message.pack(Header(7, Stop.NONE, 0), layout, sampled, shape)
    assert bool((sent >= 0).all())
    trees = trade([sent], shape).trees
    assert trees.parents[0].tolist() == [0, *range(nodes - 1)] and (trees.sampled == LARGEST_TOKEN).all()
    assert (trees.tokens[0, 1:] == LARGEST_TOKEN).all() and (trees.probs[0, 1:] == 1).all()


def test_a_digest_tells_states_apart() -> None:
    """By any value, by its place, and by the list that it is in; digests of the steps before are part of it."""
    parts = [[3, 1, 4], [1, -1], [], [5]]
    others = [[3, 1, 5], [1, -1], [], [5]], [[1, 3, 4], [1, -1], [], [5]], [[3, 1, 4, 1], [-1], [], [5]]
    digests = [message.state_digest(7, *parts), message.state_digest(8, *parts)]
    digests += [message.state_digest(7, *other) for other in (*others, [*parts, []])]
    assert len({*digests}) == len(digests) and all(0 <= digest < 2**63 for digest in digests)
    assert message.state_digest(7, *parts) == digests[0]


def test_a_digest_takes_arrays() -> None:
    """A source of the user's may have its tree in one."""
    assert message.state_digest(7, [3, 1], np.array([4, 1]), (5,)) == message.state_digest(7, [3, 1], [4, 1], [5])


@pytest.mark.parametrize(
    ("at", "value"),
    [(message.COUNT, count) for count in (-1, 0, 6, 10**12)]
    + [
        (message.HEADER + node, parent << message.PARENT_SHIFT)
        for node, parent in ((0, 1), (1, 1), (2, 2), (2, 2**12), (2, -1))
    ],
)
def test_a_message_without_a_tree_is_refused(at: int, value: int) -> None:
    """A message of another version, or broken on its way, has to be refused: compiled code would leave its arrays."""
    shape = MessageShape(5, 1)
    sampled = Sampled(torch.arange(3), torch.zeros(3, 1, dtype=torch.int64))
    sent = message.pack(Header(7, Stop.NONE, 0), layout_of(0, 2, [[8, 9]]), sampled, shape)
    messages = torch.stack([sent] * 3).numpy()
    assert read_of(messages, shape, 4).trees.counts.tolist() == [3] * 3
    messages[1, at] = value
    with pytest.raises(RuntimeError, match="the message of rank 1 at step 4 is no tree of 1 to 5 nodes"):
        message.unpack(messages, shape.room(3), 4, ROUNDING)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    ("w", "n", "g"), [(15, 5, 15), (10, 5, 10), (7, 5, 7), (5, 4, 2), (20, 7, 20), (0, 5, 10), (15, 2, 0)]
)
def test_payload_is_small_and_fixed(w: int, n: int, g: int, ranks: int) -> None:
    """A step waits for its collective: 8 bytes x (8 + B tokens of a rank) are promised, and the logits."""
    config = lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g)
    budget = step_tokens(config, ranks)
    for k in (0, 1, 16):
        assert MessageShape(budget, k).size == message.HEADER + budget * (1 + k)
    assert message.HEADER == 8
    full = layout_of(w, n, [])
    for layout, size in ((full, full.num_nodes), (layout_of(0, n, []), 1)):
        sent = message.pack(
            Header(7, Stop.NONE, 0), layout, sampled_of(random.Random(0), layout, 1)[0], MessageShape(max(size, 9), 1)
        )
        assert len(sent) == MessageShape(max(size, 9), 1).size


@pytest.mark.parametrize(
    ("digests", "odd", "rest"),
    [
        ([1, 2], "1", "0"),
        ([1, 2, 2], "0", "1, 2"),
        ([5, 5, 9, 5], "2", "0, 1, 3"),
        ([3, 4, 3, 4], "1, 3", "0, 2"),
        ([1, 2, 3], "1, 2", "0"),
    ],
)
def test_a_digest_that_differs_names_ranks_and_step(digests: list[int], odd: str, rest: str) -> None:
    """Someone must find the rank, so the message has to name it, also where that rank is 0."""
    shape = MessageShape(6, 0)
    messages = [torch.tensor([digest, *[0] * (shape.size - 1)]) for digest in digests]
    with pytest.raises(RuntimeError, match=f"rank {odd} differs from rank {rest} at step 17"):
        trade(messages, shape, step=17)


def test_the_newest_token_s_successor_is_what_rank_0_sampled() -> None:
    """In a plain step nothing else of the messages is read; another rank's first node may be its own draft token."""
    shape = MessageShape(4, 0)
    messages = np.zeros((3, shape.size), np.int64)
    for rank, token in enumerate((77, 88, 99)):
        messages[rank, message.HEADER] = token << message.SAMPLED_SHIFT | 5 << message.DRAFT_SHIFT | 3
    assert message.sampled_at_c(messages) == 77


def test_drift_is_told_before_other_logits() -> None:
    """A rank whose text differs computes other logits too: not its weights are to blame."""
    shape = MessageShape(1, 0)
    messages = torch.zeros(2, shape.size, dtype=torch.int64)
    messages[1, message.DIGEST] = 5
    messages[1, message.BEST] = best_of({3: 9.0})[0]
    with pytest.raises(RuntimeError, match="rank 1 differs from rank 0 at step 3: their tokens"):
        trade([*messages], shape, step=3)


def test_a_vocabulary_too_large_to_pack_is_refused() -> None:
    """A token of more bits would change the one beside it."""
    message.check_vocabulary(INVALID_TOKEN)  # the largest id says that a node has none
    with pytest.raises(ValueError, match="2097152 tokens"):
        message.check_vocabulary(INVALID_TOKEN + 1)


def best_of(logits: dict[int, float], vocabulary: int = 12) -> list[int]:
    """The best of these logits, the others being far below, as a rank packs them."""
    scores = torch.full((1, vocabulary), -50.0)
    for token, logit in logits.items():
        scores[0, token] = logit
    return message.best_logits(scores).tolist()


def check_best(*by_rank: list[int], rounding: float = ROUNDING) -> None:
    message.check_best(np.array(by_rank), 4, rounding)


USUAL = {1: 8.0, 5: 7.0, 2: 6.0, 7: 5.0, 9: 4.9}  # rounding may change a logit by 8e-3
OTHER = {
    "one logit": {1: 8.0, 5: 7.0, 2: 6.0, 7: 5.02},
    "the best one": {1: 8.1, 5: 7.0, 2: 6.0, 7: 5.0},
    "two of them change places": {1: 7.0, 5: 8.0, 2: 6.0, 7: 5.0},
    "another token": {3: 8.0, 5: 7.0, 2: 6.0, 7: 5.0},
    "a token more": {1: 8.0, 5: 7.0, 2: 6.0, 7: 5.0, 8: 5.5},
    "a token less": {1: 8.0, 5: 7.0, 7: 5.0},
    "all other tokens": {3: 8.0, 4: 7.0, 6: 6.0, 8: 5.0},
    "NaN": {1: math.nan, 5: 7.0, 2: 6.0, 7: 5.0},
    "-inf": {1: 8.0, 5: 7.0, 2: 6.0, 7: -math.inf},
    "inf": {1: math.inf, 5: 7.0, 2: 6.0, 7: 5.0},
}


def test_logits_within_rounding_are_the_same() -> None:
    """Ranks of different processors round differently: a job that ends for it can't be used there."""
    check_best(best_of(USUAL))
    check_best(best_of(USUAL), best_of({1: 8.007, 5: 6.995, 2: 6.003, 7: 4.993}), best_of(USUAL))
    check_best(best_of({**USUAL, 5: 7.998}), best_of({1: 7.997, 5: 8.0, 2: 6.0, 7: 5.0}))  # a near-tie at the top
    for name in ("NaN", "-inf", "inf"):
        check_best(*[best_of(OTHER[name])] * 3)
    impossible = int(np.float32(-np.inf).view(np.uint32))
    some, others = (
        [*best_of(USUAL)[:1], *(token << 32 | impossible for token in left)] for left in ([2, 3, 4], [8, 6, 5])
    )
    check_best(some, others)  # of processors or heads that leave one token
    # A token that is just below the others' fourth is no difference, whichever it is.
    check_best(best_of({1: 8.0, 5: 7.0, 2: 6.0, 7: 5.0, 9: 4.999}), best_of({1: 8.0, 5: 7.0, 2: 6.0, 7: 4.999, 9: 5.0}))
    tiny = {token: logit / 1e4 for token, logit in USUAL.items()}
    check_best(best_of(tiny), best_of({**tiny, 1: tiny[1] + ROUNDING / 2}))  # of logits below 1, a share of 1


@pytest.mark.parametrize("name", OTHER)
def test_other_logits_name_the_rank(name: str) -> None:
    """One wrong weight gives a wrong text on all ranks, which no digest shows: the rank must be named, by majority."""
    odd, usual = best_of(OTHER[name]), best_of(USUAL)
    for ranks, bad, rest in ((2, 1, "0"), (3, 0, "1, 2"), (3, 1, "0, 2"), (4, 3, "0, 1, 2")):
        by_rank = [usual] * ranks
        by_rank[bad] = odd
        with pytest.raises(RuntimeError, match=f"the model of rank {bad} computes other logits than .* rank {rest} at"):
            check_best(*by_rank)
    with pytest.raises(RuntimeError, match=r"rank 1, 2 computes .* rank 0, 3, 4 at step 4: they differ by"):
        check_best(usual, odd, odd, usual, best_of({**USUAL, 1: 8.004}))


def test_ranks_on_both_sides_of_another_are_the_same() -> None:
    """Rounding is no equality: a may be like b and b like c, but not a like c. An error could not say who is wrong."""
    a, b, c = (best_of({**USUAL, 1: 8.0 + shift}) for shift in (-0.006, 0.0, 0.006))
    for by_rank in ((a, b, c), (b, a, c), (a, c, b)):
        check_best(*by_rank)
    with pytest.raises(RuntimeError, match="rank 1 computes other logits than that of rank 0 at"):
        check_best(a, c)
    with pytest.raises(RuntimeError, match="rank 2 computes other logits than that of rank 0, 1, 3 at"):
        check_best(a, b, best_of({**USUAL, 1: 8.02}), c)


def test_a_vocabulary_of_fewer_tokens_than_are_compared() -> None:
    """The best logits have a fixed size, whatever the vocabulary."""
    for vocabulary in (1, 2, 3, 4):
        scores = torch.arange(float(vocabulary))[None]
        packed = message.best_logits(scores)
        assert packed.shape == (message.NUM_BEST,)
        check_best(packed.tolist(), packed.tolist())
        with pytest.raises(RuntimeError, match="computes other logits"):
            check_best(packed.tolist(), message.best_logits(scores + 1).tolist())


def test_the_best_logits_are_those_of_the_newest_token() -> None:
    """All ranks compute it and nothing else alike; any other row would tell of drafts that only one rank has."""
    scores = torch.randn(5, 9)
    assert message.best_logits(scores).tolist() == pack_top_logits(scores[:1], message.NUM_BEST)[0].tolist()


@pytest.mark.parametrize("num_logits", [0, 16])
def test_ranks_agree_on_a_plain_step(num_logits: int) -> None:
    """`c` alone, without top-k logits, in a message of the usual size; any rank may ask to stop, rank 0 says how."""
    layout, shape = layout_of(0, 2, []), MessageShape(5, num_logits)
    headers = [Header(7, Stop.CRITERIA, 4), Header(7, Stop.NONE, 5), Header(7, Stop.INTERRUPTED, 6)]
    no_logits = torch.zeros(1, 0, dtype=torch.int64)
    best = torch.tensor(best_of(USUAL))
    sent = [
        message.pack(header, layout, Sampled(torch.tensor([40 + rank]), no_logits, best), shape)
        for rank, header in enumerate(headers)
    ]
    gathered = trade(sent, shape)
    assert gathered.trees.sampled[:, 0].tolist() == [40, 41, 42] and gathered.trees.counts.tolist() == [1, 1, 1]
    assert (gathered.stop, gathered.length) == (Stop.CRITERIA | Stop.INTERRUPTED, 4)


def test_a_rank_that_failed_is_not_blamed_for_its_logits() -> None:
    """It has none, and says so in its header: the others must end in order."""
    layout, shape = layout_of(0, 2, []), MessageShape(1, 0)
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    good = Sampled(torch.tensor([3]), nothing, torch.tensor(best_of(USUAL)))
    sent = [
        message.pack(Header(7, Stop.NONE, 2), layout, good, shape),
        message.pack(Header(7, Stop.FAILED, 2), layout, Sampled(torch.tensor([0]), nothing), shape),
    ]
    assert trade(sent, shape).stop == Stop.FAILED
