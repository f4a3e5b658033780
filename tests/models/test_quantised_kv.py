"""Keys and values in one byte each: the rows that slots hold, and caches that move them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from lp.config import KVDtype
from lp.engine.rounded_cache import RoundedCache
from lp.models.kv_cache import CacheTooLarge, StatesKind, StaticKVCache
from lp.models.kv_pool import KVPool
from lp.models.quantised_kv import SCALE_BYTES, dequantised, quantised
from tests.support.rounded_kv import FP8, KINDS, rounded

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STEP = {"int8": 1 / 254, "fp8": 1 / 16}  # most that rounding changes, of the largest number, or of the number itself


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(states: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    kind = KVDtype(kv_dtype)
    return dequantised(quantised(states, kind), kind, states.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_what_is_read_is_what_one_byte_can_hold(kv_dtype: str, dtype: torch.dtype) -> None:
    """By numpy, and by the oracle's own code; of rows of all sizes, odd ones too."""
    for dim in (1, 7, 64, 128):
        states = (drawn(3, 5, dim, seed=dim) * 10.0 ** drawn(3, 5, 1, seed=-dim)).to(dtype)
        rows = quantised(states, KVDtype(kv_dtype))
        assert rows.dtype == torch.int8 and rows.shape == (3, 5, dim + SCALE_BYTES)
        assert torch.equal(read(states, kv_dtype), rounded(states, kv_dtype))
        oracle = RoundedCache(KVDtype(kv_dtype)).update(states[None], states[None] / 3, 0)
        assert torch.equal(read(states, kv_dtype), oracle[0][0])
        assert torch.equal(read(states[None] / 3, kv_dtype), oracle[1])
        size = states.abs().amax(-1, keepdim=True) if kv_dtype == "int8" else states.abs()
        smallest = states.abs().amax(-1, keepdim=True).double() / 448 / 512  # of fp8, half a step
        off = (read(states, kv_dtype).double() - states.double()).abs()
        assert (off <= STEP[kv_dtype] * size.double() + smallest + torch.finfo(dtype).eps * states.double().abs()).all()


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_every_number_is_kept(kv_dtype: str) -> None:
    """A row of numbers that a byte can hold is read as it was."""
    numbers = torch.arange(-127.0, 128.0) if kv_dtype == "int8" else torch.tensor([*-FP8, *FP8]).float()
    for scale in (1.0, 2.0**-30, 2.0**40):
        states = numbers[None] * scale
        assert torch.equal(read(states, kv_dtype), states)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_rows_at_the_ends(kv_dtype: str, dtype: torch.dtype) -> None:
    """Zeros stay zeros, the largest numbers finite; what is not finite shows in all of its row, and in no other."""
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    if dtype == torch.float64:
        tiny, largest = 1e-300, 1e38
    states = torch.tensor(
        [[0.0, 0.0, -0.0], [tiny, 0.0, -tiny], [largest / 2, 1.0, -largest / 4], [1.0, 2.0, 3.0]], dtype=dtype
    )
    kept = read(states, kv_dtype)
    assert kept.isfinite().all() and not kept[0].any()
    assert (kept[1] - states[1]).abs().max() <= tiny
    assert torch.allclose(kept[2], states[2], rtol=0.02, atol=largest / 100)
    for bad in (math.nan, math.inf, -math.inf):
        broken = states.clone()
        broken[2, 1] = bad
        kept = read(broken, kv_dtype)
        assert kept[2].isnan().all() and kept[[0, 1, 3]].isfinite().all()
    if dtype == torch.float64:  # beyond float32's range
        assert read(torch.tensor([[1e60, 1.0]], dtype=dtype), kv_dtype).isnan().all()


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_slots_are_moved_and_never_made_again(kv_dtype: str, cases: Callable[[int, int], range]) -> None:
    """Commits, another cache's prefix, what other ranks send, and a pool's moves leave the bytes of a row as they were:
    rounded again, a number may come out as another one.
    """
    kind = KVDtype(kv_dtype)
    for case in cases(10, 100):
        rng = random.Random(case)
        known: dict[StatesKind, int] = {}
        cache = StaticKVCache(2, 64, known=known, kv_dtype=kind)
        committed: list[torch.Tensor] = []
        for step in range(3):
            states = drawn(2, 2, 3, 8, 6, seed=100 * case + step)  # layers, keys and values, G, T, D
            for layer, (keys, values) in zip(cache.layers, states[:, :, None], strict=True):
                seen = layer.update(keys, values)
                assert torch.equal(seen[0][:, :, -8:], rounded(keys, kv_dtype)), "attention sees what is stored"
                assert torch.equal(seen[1][:, :, -8:], rounded(values, kv_dtype))
            chosen = sorted(rng.sample(range(8), rng.randint(1, 8)))
            cache.commit(chosen)
            committed.append(quantised(states[..., chosen, :], kind))
        expected = torch.cat(committed, 3).flatten(0, 1)
        (held,) = cache.first(cache.length)
        assert torch.equal(held, expected), f"case {case}"
        other = StaticKVCache(2, 64, known=known, kv_dtype=kind)
        other.allocate()
        other.begin_with([held[:, :, :3]], 3)
        cache.length = 0
        other.append(cache.pack(range(3, expected.shape[2])), expected.shape[2] - 3)
        assert torch.equal(other.first(other.length)[0], expected), f"case {case}"
        pool = KVPool(known, 40, lambda slots, known=known: StaticKVCache(2, slots, known=known, kv_dtype=kind))
        first, second = pool.allocate(4), pool.allocate(30)
        assert first is not None and second is not None
        second.begin_with([held], expected.shape[2])
        pool.give_back(first)
        assert pool.allocate(10) is not None  # beside it: the others are moved together
        assert second.first_slot == 0 and torch.equal(second.first(second.length)[0], expected)


def test_kernels_get_no_rows() -> None:
    """One that writes keys and values to slots by itself would write them to a tensor that nobody keeps."""
    for kv_dtype, held in (("auto", True), *((kind, False) for kind in KINDS)):
        cache = StaticKVCache(1, 8, kv_dtype=KVDtype(kv_dtype))
        cache.layers[0].update(drawn(1, 2, 3, 4), drawn(1, 2, 3, 4))
        assert (cache.whole(0) is not None) == held


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_bytes(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a number and four a row, in buffers, in pools and in what is said of a device that is full."""
    cache = StaticKVCache(2, 8, known=(known := {}), kv_dtype=KVDtype(kv_dtype))
    for layer in cache.layers:
        layer.update(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 6, dtype=torch.float64))
    slot = 2 * 3 * (4 + 4) + 2 * 3 * (6 + 4)
    (cache := StaticKVCache(2, 8, known=known, kv_dtype=KVDtype(kv_dtype))).allocate()
    assert cache.nbytes() == 8 * slot

    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("full")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CacheTooLarge) as caught:
        StaticKVCache(2, 100, known=known, kv_dtype=KVDtype(kv_dtype)).allocate()
    assert caught.value.slot_bytes == slot
    with pytest.raises(CacheTooLarge) as caught:
        KVPool(known, 100, lambda slots: StaticKVCache(2, slots))
    assert caught.value.slot_bytes == slot
    layer = StaticKVCache(2, 100, kv_dtype=KVDtype(kv_dtype)).layers[0]
    with pytest.raises(CacheTooLarge) as caught:
        layer.update(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 6))
    assert caught.value.slot_bytes == 2 * (3 * 8 + 3 * 10)
