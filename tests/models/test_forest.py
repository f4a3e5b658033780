"""A forward pass over the tokens of several sequences, and the pool of cache slots that their caches lie in."""

import itertools
import random

import pytest
import torch

from lp.draft.layout import ancestors
from lp.models.forest_cache import Stretch, pool_slots
from lp.models.kv_cache import StaticKVCache
from lp.models.kv_pool import KVPool, Run, Runs, slot_bytes
from lp.models.runner import ModelRunner
from lp.models.tree_pass import TreePass
from tests.support.tiny_models import CLOSE, MATRIX, tiny_model


def _runner(arch: str, attention: str = "auto") -> ModelRunner:
    return ModelRunner(tiny_model(arch, seed=1), attention)


def _prefilled(runner: ModelRunner, cache: StaticKVCache, text: list[int]) -> StaticKVCache:
    runner.prefill(text, cache, 512)
    return cache


def _drawn_tree(rng: random.Random, cache: StaticKVCache, vocabulary: int) -> TreePass:
    size = rng.randint(1, 12)
    parents = [-1, *(rng.randrange(node) for node in range(1, size))]
    positions = [cache.length + int(row.sum()) - 1 for row in ancestors(parents)]
    tokens = [rng.randrange(vocabulary) for _ in range(size)]
    return TreePass(tokens, positions, parents, cache, sorted(rng.sample(range(size), rng.randint(0, size))))


@pytest.mark.subset(60)
@pytest.mark.parametrize("arch", MATRIX)
@pytest.mark.parametrize("attention", ["flash", "sdpa", "eager"])
def test_a_forest_is_its_trees(arch: str, attention: str) -> None:
    """A sequence that sees another's tokens, or has its KV or logits swapped with another's; in a pool, or not."""
    try:
        runner = _runner(arch, attention)
    except ValueError as error:
        pytest.skip(str(error))
    if not runner.takes_forests:
        pytest.skip("its sequences are computed one after another")
    rng = random.Random(f"{arch}-{attention}")
    vocabulary = runner.model.config.get_text_config().vocab_size
    texts = [[rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 7, 40]))] for _ in range(3)]
    pool = KVPool(runner.known_kinds, 200, runner.cache_without_buffers)
    with torch.inference_mode():
        caches = []
        for allocate in (runner.new_cache if attention == "sdpa" else pool.allocate, runner.new_cache):
            empty = [allocate(len(text) + 12) for text in texts]
            caches.append([_prefilled(runner, cache, text) for cache, text in zip(empty, texts, strict=True) if cache])
        stretches = [Stretch(index, index + 1, cache) for index, cache in enumerate(caches[0])]
        assert (pool_slots(stretches, runner.device) is None) == (attention == "sdpa")
        trees = [_drawn_tree(rng, cache, vocabulary) for cache in caches[0]]
        together = runner.forward_trees(trees).each()
        for tree, logits, cache in zip(trees, together, caches[1], strict=True):
            indices = tree.logits_indices or [0]
            alone = runner.forward(tree.tokens, tree.positions, tree.visible(), cache, indices)
            assert len(logits) == len(tree.logits_indices)
            torch.testing.assert_close(logits, alone[: len(logits)], rtol=CLOSE, atol=CLOSE)
            for own, other in zip(tree.cache.buffers, cache.buffers, strict=True):
                used = tree.cache.length + len(tree.tokens)
                torch.testing.assert_close(own[:, :, :used], other[:, :, :used], rtol=CLOSE, atol=CLOSE)


def test_slots_are_neither_lost_nor_shared() -> None:
    """A run that is handed out twice, or a cache that loses its tokens when caches are moved together."""
    rng = random.Random(7)
    runner = _runner("llama")
    pool = KVPool(runner.known_kinds, 200, runner.cache_without_buffers)
    caches: dict[StaticKVCache, list[int]] = {}
    moved = refused = 0
    with torch.inference_mode():
        for _ in range(300):
            if caches and rng.random() < 0.45:
                cache = rng.choice([*caches])
                assert cache.length == len(caches.pop(cache))
                pool.give_back(cache)
            slots = rng.randint(1, 60)
            free, largest = pool.free, max((run.size for run in pool._runs._free), default=0)
            cache = pool.allocate(slots)
            pool.check()
            assert (cache is None) == (slots > free)
            refused += cache is None
            if cache is not None:
                moved += slots > largest
                caches[cache] = [rng.randrange(20) for _ in range(rng.randint(0, slots))]
                _prefilled(runner, cache, caches[cache])
            for cache, text in caches.items():
                if not text:
                    continue
                fresh = _prefilled(runner, runner.new_cache(len(text)), text)
                for own, other in zip(cache.buffers, fresh.buffers, strict=True):
                    torch.testing.assert_close(own[:, :, : len(text)], other[:, :, : len(text)])
    assert moved and refused


def test_free_slots_side_by_side_are_one_run() -> None:
    """Runs that stay apart would have every larger sequence wait, or move the others for nothing."""
    for order in itertools.permutations(range(3)):
        runs = Runs(10)
        taken = [runs.take(size) for size in (3, 4, 3)]
        assert taken == [Run(0, 3), Run(3, 4), Run(7, 3)] and runs.take(1) is None
        for index in order:
            run = taken[index]
            assert run is not None
            runs.give_back(run)
        assert runs.take(10) == Run(0, 10), order


def test_the_last_free_slots_are_had_though_they_lie_apart() -> None:
    """A sequence that just fits must not wait; and a cache given back is no longer of the pool."""
    runner = _runner("llama")
    pool = KVPool(runner.known_kinds, 10, runner.cache_without_buffers)
    first, middle, last = (pool.allocate(size) for size in (3, 4, 3))
    assert first is not None and middle is not None and last is not None
    pool.give_back(first)
    pool.give_back(last)
    assert pool.allocate(7) is None
    assert pool.allocate(6) is not None and pool.free == 0
    assert middle in pool and first not in pool


def test_bytes_of_a_slot() -> None:
    """Admission counts with them: too few, and the device is full in the middle of a batch."""
    runner = _runner("llama")
    pool = KVPool(runner.known_kinds, 10, runner.cache_without_buffers)
    assert 10 * slot_bytes(runner.known_kinds) == sum(states.nbytes for states in pool._buffers.values())


def test_what_is_moved_together_leaves_no_nan() -> None:
    """Attention that reads all slots with a mask: a NaN where a text lay before would fail every later one."""
    runner = _runner("llama")
    pool = KVPool(runner.known_kinds, 40, runner.cache_without_buffers, zeroed=True)
    with torch.inference_mode():
        first, second = pool.allocate(10), pool.allocate(20)
        assert first and second
        _prefilled(runner, second, [1, 2, 3])
        for states in second.buffers:
            states[:, :, 3:] = torch.nan  # a step whose tokens were not accepted
        kept = [states[:, :, :3].clone() for states in second.buffers]
        pool.give_back(first)
        assert pool.allocate(15) and second.first_slot == 0, "they are not moved together"
        for states, before in zip(second.buffers, kept, strict=True):
            torch.testing.assert_close(states[:, :, :3], before, rtol=0, atol=0)
        for states in pool.whole().buffers:
            assert not states.isnan().any()
            assert not states[:, :, 3:].any()
