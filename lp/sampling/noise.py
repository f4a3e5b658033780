"""Counter-based Gumbel noise: a function of (seed, sequence, position, token), with no generator state.

Integer operations make the bits, so they are the same on every device, on every rank and for every node. The argmax of
logits plus this noise is a sample of their softmax (the Gumbel-max trick). V: vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from lp.optional import is_installed
from lp.to_device import to_device

logger = logging.getLogger(__name__)

CHUNK = 1 << 16  # numbers that a CPU makes at once: they stay in its second-level cache
NO_NOISE = 0  # the row of a buffer that has zeros
BELOW_1 = 1 - 2.0**-53  # the largest double below 1
_MASK = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64


def _signed(value: int) -> int:
    """The int64 with the bits of a 64-bit unsigned value."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64, which torch shifts arithmetically."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _keyed(key: int, part: int) -> int:
    """The key that follows from a key and one more number: a hash of both, 64 bits, unsigned."""
    return _mix((key + part * _GOLDEN + _GOLDEN) & _MASK)


def sequence_key(seed: int, sequence: int) -> int:
    """The key from which the keys of all positions of a sequence are made: a hash of both arguments, 64 bits, unsigned.

    Args:
        seed: the generation's seed.
        sequence: index of the sequence in a batch.
    """
    return _keyed(_keyed(0, seed), sequence)


def gumbel(seed: int, sequence: int, position: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise for every token at one position of a sequence.

    Args:
        seed: the generation's seed.
        sequence: index of the sequence in a batch.
        position: absolute position of the token that the noise chooses.
        vocabulary: V.
        device: where the noise is made.

    Returns:
        (V,) float64.
    """
    key = torch.tensor([position_key(seed, sequence, position)], device=device)
    return _gumbel_nV(key, vocabulary)[0]


def _gumbel_nV(keys_n: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise (n, V), float64, for the keys of n positions."""
    return _uniform(random_bits(keys_n, vocabulary)).log_().neg_().log_().neg_()


def random_bits(keys_n: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """64 random bits for every token at each of n positions.

    Args:
        keys_n: int64 (n,), the positions' keys, made by `position_key`.
        vocabulary: V.

    Returns:
        int64 (n, V).
    """
    tokens = torch.arange(1, vocabulary + 1, device=keys_n.device)
    bits = tokens * _signed(_GOLDEN) + keys_n[:, None]  # int64 wraps
    bits = (bits ^ _shift(bits, 30)).mul_(_signed(_MIX_1))
    bits = (bits ^ _shift(bits, 27)).mul_(_signed(_MIX_2))
    return bits ^ _shift(bits, 31)


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1) from the upper 53 bits: never 1, to which 53 ones would round, as its noise is infinite."""
    return ((_shift(bits, 11).double() + 0.5) * 2.0**-53).clamp(max=BELOW_1)


def position_key(seed: int, sequence: int, position: int) -> int:
    """The key that all noise of a position is made from: a hash of seed, sequence and position, as an int64.

    Args:
        seed: the generation's seed.
        sequence: index of the sequence in a batch.
        position: absolute position of the token that the noise chooses.
    """
    return _signed(_keyed(sequence_key(seed, sequence), position))


@torch.library.custom_op("lp::fill_noise", mutates_args=("noise_SV",))
def fill_noise(noise_SV: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> None:
    """Write the Gumbel noise of n positions into rows of a buffer; on CUDA by one kernel, where Triton is installed.

    Args:
        noise_SV: float32 or float64 (S, V), S rows of noise, contiguous; changed. Its last row holds nothing of use.
        rows: int64 (n,), different rows of the buffer; -1 where nothing is written.
        keys: int64 (n,), a position's key for each row, made by `position_key`.
    """
    if noise_SV.is_cuda and _kernel_works(noise_SV.device, noise_SV.dtype):
        from lp.sampling.noise_kernel import launch_fill_noise  # here: it needs Triton

        launch_fill_noise(noise_SV, rows, keys)
    elif noise_SV.is_cuda:  # how many there are is not known here, and a captured step can't ask
        fill_noise_rows(noise_SV, torch.where(rows < 0, len(noise_SV) - 1, rows), keys)
    else:
        wanted = rows >= 0
        fill_noise_rows(noise_SV, rows[wanted], keys[wanted])


def fill_noise_rows(noise_SV: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> None:
    """Write the Gumbel noise of n positions into rows of a buffer, in plain torch, where there is no kernel.

    Args:
        noise_SV: float32 or float64 (S, V); changed.
        rows: int64 (n,), rows of the buffer, all of which are written.
        keys: int64 (n,), a position's key for each row, made by `position_key`.
    """
    vocabulary = noise_SV.shape[1]
    at_once = max(1, CHUNK // vocabulary) if noise_SV.device.type == "cpu" else max(len(keys), 1)
    for own_rows, own_keys in zip(rows.split(at_once), keys.split(at_once), strict=True):
        noise_SV.index_copy_(0, own_rows, _gumbel_nV(own_keys, vocabulary).to(noise_SV.dtype))


@functools.cache
def _kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernel gives torch's noise on this device; tried once, since its compiler may be missing."""
    if not is_installed("triton"):
        return False
    noise, expected = torch.zeros(2, 4, 1000, device=device, dtype=dtype)
    rows = to_device([2, -1, 0, 3], device)
    keys = to_device([position_key(7, 0, position) for position in range(4)], device)
    try:
        from lp.sampling.noise_kernel import launch_fill_noise

        launch_fill_noise(noise, rows, keys)
    except Exception as failure:
        logger.warning("noise is made without a kernel of its own: %s: %s", type(failure).__name__, failure)
        return False
    wanted = to_device([0, 2, 3], device)
    fill_noise_rows(expected, rows[wanted], keys[wanted])
    if torch.allclose(noise, expected, rtol=1e-6, atol=1e-6):
        return True
    logger.warning("noise is made without a kernel of its own: it gives other numbers on %s", device)
    return False


class NoiseCache:
    """Gumbel noise of the positions that a sequence's steps sample, computed once each: a ring buffer by position.

    Several sequences can have their rows in one buffer (S, V), S being the rows of all of them and two spare ones, so
    that one captured step serves them all.

    Args:
        seed, sequence, vocabulary, device: see `gumbel`.
        capacity: C, positions held, at least as many as a step spans.
        dtype: dtype of the noise.

    Attributes:
        first_row: the first of this sequence's C rows in the buffer.
    """

    def __init__(
        self, seed: int, sequence: int, vocabulary: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.seed = seed
        self.sequence = sequence
        self.capacity = capacity
        self.vocabulary = vocabulary
        self.device = device
        self.dtype = dtype
        self.first_row = 1
        self._noise_SV: torch.Tensor | None = None
        self._positions = [-1] * capacity

    @property
    def noise_SV(self) -> torch.Tensor:
        """The buffer (S, V): a row of zeros, C rows for each of its sequences, and a row that is never read."""
        if self._noise_SV is None:
            self.use(self.buffer(1), 0)
        assert self._noise_SV is not None
        return self._noise_SV

    @property
    def shape(self) -> tuple[int, int, torch.dtype]:
        """C, V and dtype; sequences whose caches have equal ones can share a buffer."""
        return self.capacity, self.vocabulary, self.dtype

    def buffer(self, texts: int) -> torch.Tensor:
        """A new buffer of zeros for the noise of several sequences: (S, V) with S = texts * C + 2.

        Args:
            texts: how many sequences it has room for, all with this cache's `shape`.
        """
        return torch.zeros(texts * self.capacity + 2, self.vocabulary, device=self.device, dtype=self.dtype)

    def use(self, noise_SV: torch.Tensor, place: int) -> None:
        """Keep the noise in this buffer from now on, since a captured step reads the buffer that it was captured with.

        Args:
            noise_SV: a buffer that `buffer` made.
            place: index of this sequence among those of the buffer, from 0.
        """
        first_row = 1 + place * self.capacity
        if noise_SV is not self._noise_SV or first_row != self.first_row:
            self._noise_SV, self.first_row = noise_SV, first_row
            self._positions = [-1] * self.capacity

    def rows(self, positions: Sequence[int]) -> list[int]:
        """Rows of the buffer with the noise of these absolute positions; missing noise is computed first."""
        self.fill([self], [positions])
        return self.rows_of(positions)

    def rows_of(self, positions: Sequence[int]) -> list[int]:
        """Rows of the buffer that belong to these absolute positions, whether or not they have their noise already."""
        return [self.first_row + position % self.capacity for position in positions]

    def missing(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """(row, key) for each of these positions whose noise is not in the buffer, as `fill_noise` takes them.

        A caller that fills the rows says so by `filled`.
        """
        lacking = sorted({position for position in positions if self._positions[position % self.capacity] != position})
        keys = [position_key(self.seed, self.sequence, position) for position in lacking]
        return [*zip(self.rows_of(lacking), keys, strict=True)]

    def filled(self, positions: Sequence[int]) -> None:
        """Note that the buffer now has the noise of these absolute positions."""
        for position in positions:
            self._positions[position % self.capacity] = position

    @staticmethod
    def fill(caches: Sequence[NoiseCache], positions: Sequence[Sequence[int]]) -> None:
        """Compute the noise that the buffers of several sequences lack, by one `fill_noise` for each buffer.

        Args:
            caches: a cache for each sequence.
            positions: absolute positions whose noise is needed, by sequence.
        """
        pairs: dict[int, list[tuple[int, int]]] = {}
        for cache, own in zip(caches, positions, strict=True):
            pairs.setdefault(id(cache.noise_SV), []).extend(cache.missing(own))
        for cache in caches:
            if wanted := pairs.pop(id(cache.noise_SV), []):
                rows, keys = zip(*wanted, strict=True)
                fill_noise(cache.noise_SV, to_device(rows, cache.device), to_device(keys, cache.device))
        for cache, own in zip(caches, positions, strict=True):
            cache.filled(own)
