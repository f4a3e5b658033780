"""The message of a step: what the ranks pack is what each of them unpacks, and it is as small as promised."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from lp.config import LookaheadConfig
from lp.draft.layout import largest_layout
from lp.parallel import message
from lp.parallel.message import Header, MessageShape, Stop
from lp.parallel.sharding import ShardPlan
from lp.sampling.top_logits import unpack_top_logits
from tests.layouts import chains, drawn_layout, layout_of

LARGEST_TOKEN = 2**21 - 1


def trade(rows: list[torch.Tensor], shape: MessageShape, step: int = 0) -> tuple[torch.Tensor, int]:
    """What rank 0 gathers, and by how many collectives."""
    parts = [row.split(shape.size) for row in rows]
    calls = 0

    def all_gather(mine: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert torch.equal(mine, parts[0][calls - 1])
        return torch.stack([part[calls - 1] for part in parts])  # fails, as a collective would, where sizes differ

    return message.gather(rows[0], shape, all_gather, step), calls


def packed(
    plan: ShardPlan, tokens: dict[int, int], tops: dict[int, list[int]], shape: MessageShape, flags: list[Stop]
) -> list[torch.Tensor]:
    """The rows of all ranks; rank r keeps 10 + r tokens, of which rank 0's number counts."""
    rows = []
    for rank, mine in enumerate(plan.owned):
        owned = torch.tensor([tokens[node] for node in mine]).long()
        top_logits = torch.tensor([tops[node] for node in mine]).long().view(len(mine), shape.num_logits)
        rows.append(message.pack(Header(7, flags[rank], 10 + rank), owned, top_logits, plan, shape))
    return rows


def drawn_top(rng: random.Random) -> int:
    """A kept token and its logit, of either sign."""
    bits = int(np.float32(rng.choice([0.0, rng.gauss(0, 9), -np.inf])).view(np.uint32))
    return rng.choice([0, LARGEST_TOKEN, rng.randrange(10**5)]) << 32 | bits


def test_what_is_packed_is_read(cases: Callable[[int, int], range]) -> None:
    """A token read for the node beside its own is a wrong text on every rank alike, which no digest would show."""
    for seed in cases(200, 2000):
        rng = random.Random(seed)
        layout, ranks = drawn_layout(rng), 1 + seed % 5
        plan = ShardPlan.build(layout, ranks)
        # Too small a row must cost a collective, nothing else.
        shape = MessageShape(rng.choice([1, 3, 9, 300]), num_logits=rng.choice([0, 0, 1, 3, 16]))
        tokens = {node: rng.choice([0, LARGEST_TOKEN, rng.randrange(10**5)]) for node in layout.sampled_nodes}
        tops = {node: [drawn_top(rng) for _ in range(shape.num_logits)] for node in layout.sampled_nodes}
        flags = [rng.choice([Stop.NONE, Stop.NONE, Stop.INTERRUPTED, Stop.EOS, Stop.FAILED]) for _ in range(ranks)]
        rows = packed(plan, tokens, tops, shape, flags)
        gathered, calls = trade(rows, shape)
        assert len({len(row) for row in rows}) == 1 and calls == -(-len(rows[0]) // shape.size)
        sampled, top_logits, stop, length = message.unpack(gathered, plan, layout, shape)
        assert sampled == tokens
        assert list(sampled) == layout.sampled_nodes, "an order that depends on the ranks would reach the pool"
        sent = np.array([tops[node] for node in layout.sampled_nodes], np.int64)
        expected = unpack_top_logits(sent.reshape(len(layout.sampled_nodes), shape.num_logits))
        assert top_logits.tokens.tolist() == expected.tokens.tolist()
        assert top_logits.logits.tolist() == expected.logits.tolist()
        assert (stop, length) == (Stop(sum({int(flag) for flag in flags})), 10)


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
    rows = [torch.tensor([digest, 0, 0, 0, 0]) for digest in digests]
    with pytest.raises(RuntimeError, match=f"rank {odd} differs from rank {rest} at step 17"):
        trade(rows, MessageShape(6, 0), step=17)


def test_digests_are_compared_before_sizes_matter() -> None:
    """A rank whose draft tree differs needs another size; it must be an error, not a hang or a torn collective."""
    few, many = layout_of(0, 5, []), layout_of(0, 5, chains(15, 4))
    shape, rows = MessageShape(2, 2), []
    for digest, layout in ((1, few), (2, many)):
        plan = ShardPlan.build(layout, 2)
        owned = len(plan.owned[0])
        rows.append(
            message.pack(
                Header(digest, Stop.NONE, 0), torch.zeros(owned).long(), torch.zeros(owned, 2).long(), plan, shape
            )
        )
    assert len(rows[0]) != len(rows[1])
    with pytest.raises(RuntimeError, match="rank 1 differs from rank 0 at step 3"):
        trade(rows, shape, step=3)


def test_a_vocabulary_too_large_to_pack_is_refused() -> None:
    """A token of more bits would change the one beside it."""
    message.check_vocabulary(LARGEST_TOKEN)  # the largest id says that a row has none
    with pytest.raises(ValueError, match="2097152 tokens"):
        message.check_vocabulary(LARGEST_TOKEN + 1)


def shape_of(config: LookaheadConfig, ranks: int) -> MessageShape:
    """A rank's row, as the decode loop chooses it."""
    full = largest_layout(config)
    return MessageShape.of(ShardPlan.build(full, ranks), config.num_logits)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    ("w", "n", "g"), [(15, 5, 15), (10, 5, 10), (7, 5, 7), (5, 4, 2), (20, 7, 20), (0, 5, 10), (15, 2, 0)]
)
@pytest.mark.parametrize("depth", [None, 48])
def test_payload_is_small_and_fixed(w: int, n: int, g: int, ranks: int, depth: int | None) -> None:
    """A step waits for its collective; at most 8 bytes x (reads of the largest rank + fresh columns + 16) are promised.

    The size is the same in every step, so the bound is that of a full one, and with no column fresh. At the paper's
    depth, and with a window at any, even a step without candidates is within its own. The top_logits comes on top: K
    int64s of every read that there is room for.
    """
    config = LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g, draft_depth=depth, num_logits=0)
    size = shape_of(config, ranks).size
    full = ShardPlan.build(largest_layout(config), ranks)
    assert size <= full.max_owned + 16
    if ranks > 1 and g <= 15 and (w or depth is None):
        bare = ShardPlan.build(layout_of(w, n, []), ranks)
        assert size <= bare.max_owned + 16
    room = full.max_owned + message.SPARE_NODES
    for k in (1, 16):
        assert shape_of(replace(config, num_logits=k), ranks).size == message.HEADER + -(-room // 3) + room * k


def test_steps_rarely_need_a_second_collective(cases: Callable[[int, int], range]) -> None:
    """Candidates that share prefixes divide less evenly than a full step's; the row must have room for them."""
    larger = 0
    drawn = cases(300, 4000)
    for seed in drawn:
        rng = random.Random(seed)
        config = LookaheadConfig(
            window_size=rng.randint(0, 20), ngram_size=rng.randint(2, 7), guess_set_size=rng.randint(1, 20)
        )
        kinds, paths, nodes = rng.choice([1, 2, 4, 30]), list[list[int]](), set[tuple[int, ...]]()
        for _ in range(100):
            path = [1000 + min(int(rng.expovariate(0.7)), kinds) for _ in range(config.depth)]
            more = nodes | {tuple(path[: k + 1]) for k in range(len(path))}
            if len(more) <= config.draft_budget:
                paths, nodes = [*paths, path], more
        ranks = rng.randint(1, 8)
        plan = ShardPlan.build(layout_of(config.window_size, config.ngram_size, paths), ranks)
        shape = shape_of(config, ranks)
        larger += shape.holding(plan) != shape
    assert larger == 0


def test_a_single_rank_has_its_own_header() -> None:
    """Ctrl-C in a step that guesses nothing must not be lost for want of another rank."""
    header, token, shape = Header(7, Stop.INTERRUPTED, 5), torch.tensor([42]), MessageShape(3, 0)

    def all_gather(row: torch.Tensor) -> torch.Tensor:
        return row[None]

    one, packed = (message.gather_plain(header, token, shape, all_gather, 0, ranks) for ranks in (1, 2))
    assert one == packed == (42, Stop.INTERRUPTED, 5)


def test_ranks_agree_on_a_plain_step() -> None:
    """Any rank may ask to stop; of what is kept and which token came, rank 0's counts."""
    headers = [Header(7, Stop.CRITERIA, 4), Header(7, Stop.NONE, 5), Header(7, Stop.INTERRUPTED, 6)]
    rows, shape = list[torch.Tensor](), MessageShape(3, 0)

    def all_gather(row: torch.Tensor) -> torch.Tensor:
        rows.append(row)
        return torch.stack(rows) if len(rows) == 3 else row[None]

    for rank, header in enumerate(headers):
        gathered = message.gather_plain(header, torch.tensor([40 + rank]), shape, all_gather, 0, 3)
    assert gathered == (40, Stop.CRITERIA | Stop.INTERRUPTED, 4)
