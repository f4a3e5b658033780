"""The preallocated cache on its own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from lp.models.kv_cache import CacheTooLarge, StatesKind, StaticKVCache


def test_capacity_has_the_names_of_every_release() -> None:
    """transformers 5.0 calls it get_max_cache_shape, abstract: a layer without it cannot be constructed there."""
    layer = StaticKVCache(1, 7).layers[0]
    assert layer.get_max_cache_shape() == layer.get_max_length() == 7


def test_layers_may_lie_on_several_devices() -> None:
    """With a device_map, layers are spread over GPUs: an index on the first one's device fails on the others'."""
    cache, states = StaticKVCache(2, 8), torch.arange(4.0).view(1, 1, 4, 1)
    for layer, device in zip(cache.layers, ("meta", "cpu"), strict=True):
        layer.update(states.to(device), states.to(device))
    cache.commit([0, 2, 3])
    assert cache.layers[1].keys[0, 0, : cache.length, 0].tolist() == [0, 2, 3]


def test_tokens_are_committed_in_the_given_order(cases: Callable[[int, int], range]) -> None:
    """Full attention takes keys in any order, so that a wrong one shows in no text but a sliding window's."""
    for case in cases(30, 300):
        rng = random.Random(case)
        cache, committed = StaticKVCache(2, 64), list[float]()
        for step in range(4):
            count = rng.randint(1, 12)
            numbers = 100.0 * step + torch.arange(count)
            for index, layer in enumerate(cache.layers):  # no number twice, in keys, values and layers
                keys = (numbers + index * 1000).view(1, 1, count, 1).expand(1, 3, count, 2)
                layer.update(keys, -keys)
            token_indices = rng.sample(range(count), rng.randint(0, count))
            token_indices = token_indices if rng.random() < 0.3 else sorted(token_indices)
            cache.commit(token_indices)
            committed += numbers[token_indices].tolist()
        assert cache.length == len(committed)
        for index, layer in enumerate(cache.layers):
            expected = (torch.tensor(committed) + index * 1000).view(1, 1, -1, 1).expand(1, 3, -1, 2)
            assert torch.equal(layer.keys[:, :, : cache.length], expected), f"case {case}"
            assert torch.equal(layer.values[:, :, : cache.length], -expected), f"case {case}"


def test_a_device_that_is_full_is_told_what_a_slot_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would fit is said by it; keys and values of several layers, in kinds of their own."""
    known: dict[StatesKind, int] = {}
    first = StaticKVCache(2, 8, known=known)
    for layer in first.layers:
        layer.update(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 6, dtype=torch.float64))
    assert first.claimed and sum(known.values()) == 4

    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("full")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CacheTooLarge) as caught:
        StaticKVCache(2, 100, known=known).allocate()
    assert caught.value.slot_bytes == 2 * 3 * 4 * 4 + 2 * 3 * 6 * 8
    assert caught.value.nbytes == 100 * caught.value.slot_bytes
