"""The preallocated cache on its own."""

from __future__ import annotations

import torch

from lp.models.kv_cache import StaticKVCache


def test_capacity_has_the_names_of_every_release() -> None:
    """transformers 5.0 calls it get_max_cache_shape, abstract: a layer without it cannot even be made there."""
    layer = StaticKVCache(1, 7).layers[0]
    assert layer.get_max_cache_shape() == layer.get_max_length() == 7


def test_layers_may_lie_on_several_devices() -> None:
    """With a device_map, layers are spread over GPUs: an index on the first one's device fails on the others'."""
    cache, rows = StaticKVCache(2, 8), torch.arange(4.0).view(1, 1, 4, 1)
    for layer, device in zip(cache.layers, ("meta", "cpu"), strict=True):
        layer.update(rows.to(device), rows.to(device))
    cache.commit([0, 2, 3])
    assert cache.layers[1].keys[0, 0, : cache.length, 0].tolist() == [0, 2, 3]
