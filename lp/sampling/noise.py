"""Counter-based Gumbel noise: a function of (seed, sequence, position, token), without a generator's state.

The random bits come from integer operations, so they are equal on every device, on every rank and for every node. The
argmax of logits plus this noise is a sample of their softmax (the Gumbel-max trick). V: vocabulary.
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
    """Hash a seed and a sequence's index into the key that the keys of the sequence's positions are made from.

    Args:
        seed: the generation's seed.
        sequence: index of the sequence in a batch.

    Returns:
        The key, an unsigned 64-bit integer.
    """
    return _keyed(_keyed(0, seed), sequence)


def gumbel(seed: int, sequence: int, position: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise for every token of the vocabulary at one position of a sequence.

    Args:
        seed: the generation's seed.
        sequence: index of the sequence in a batch.
        position: absolute position of the token that is sampled with this noise.
        vocabulary: V, size of the vocabulary.
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
    """64 random bits for every token of the vocabulary at each of n positions.

    Args:
        keys_n: int64 (n,), a key for each position, made by `position_key`.
        vocabulary: V, size of the vocabulary.

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
    """Hash seed, sequence and position into the key, an int64, that all noise at this position is made from.

    Args:
        seed: the generation's seed.
        sequence: index of the sequence in a batch.
        position: absolute position of the token that is sampled with this noise.
    """
    return _signed(_keyed(sequence_key(seed, sequence), position))


@torch.library.custom_op("lp::fill_noise", mutates_args=("noise_SV",))
def fill_noise(noise_SV: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> None:
    """Compute the Gumbel noise of n positions into rows of a buffer; on CUDA with one kernel, if Triton is installed.

    Args:
        noise_SV: float32 or float64 (S, V), contiguous: S rows with noise for each token of the vocabulary; changed in
            place. Its last row is scratch space.
        rows: int64 (n,), the row to write for each position, all different; -1 skips the position.
        keys: int64 (n,), a key for each position, made by `position_key`.
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
    """Compute the Gumbel noise of n positions into rows of a buffer in plain torch, if there is no kernel for it.

    Args:
        noise_SV: float32 or float64 (S, V): S rows with noise for each token of the vocabulary; changed in place.
        rows: int64 (n,), the row to write for each position.
        keys: int64 (n,), a key for each position, made by `position_key`.
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
    """Ring buffer of the Gumbel noise at the positions that a sequence's steps sample, so that it is computed once.

    Several sequences can share one buffer (S, V), so that one captured step (recorded as a CUDA graph) serves them all.
    S is the number of their rows plus two spare rows.

    Args:
        seed, sequence: choose the noise, see `gumbel`.
        vocabulary: V, size of the vocabulary.
        capacity: C, number of positions whose noise is kept; at least as many as one step samples.
        device: where the noise is kept.
        dtype: dtype of the noise.

    Attributes:
        first_row: index of the first of this sequence's C rows in the buffer.
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
        """The buffer (S, V): a row of zeros, `capacity` rows for each sequence that shares it, and a spare row."""
        if self._noise_SV is None:
            self.use(self.buffer(1), 0)
        assert self._noise_SV is not None
        return self._noise_SV

    @property
    def shape(self) -> tuple[int, int, torch.dtype]:
        """(capacity, vocabulary, dtype) of the cache; sequences whose caches have equal shapes can share a buffer."""
        return self.capacity, self.vocabulary, self.dtype

    def buffer(self, texts: int) -> torch.Tensor:
        """Make a buffer of zeros for the noise of several sequences, of shape (texts * capacity + 2, vocabulary).

        Args:
            texts: number of sequences that the buffer has room for; the caches of all must have this cache's `shape`.
        """
        return torch.zeros(texts * self.capacity + 2, self.vocabulary, device=self.device, dtype=self.dtype)

    def use(self, noise_SV: torch.Tensor, place: int) -> None:
        """Keep the noise in a given buffer from now on, such as the one that a captured step (a CUDA graph) reads.

        Args:
            noise_SV: a buffer made by `buffer`.
            place: index of this sequence among the sequences that share the buffer, from 0.
        """
        first_row = 1 + place * self.capacity
        if noise_SV is not self._noise_SV or first_row != self.first_row:
            self._noise_SV, self.first_row = noise_SV, first_row
            self._positions = [-1] * self.capacity

    def rows(self, positions: Sequence[int]) -> list[int]:
        """Indices of the buffer's rows for these absolute positions; noise that is missing there is computed first."""
        self.fill([self], [positions])
        return self.rows_of(positions)

    def rows_of(self, positions: Sequence[int]) -> list[int]:
        """Indices of the buffer's rows for these absolute positions, whether or not their noise is there yet."""
        return [self.first_row + position % self.capacity for position in positions]

    def missing(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """List (row, key), for `fill_noise`, for each of these absolute positions whose noise is not in the buffer.

        A caller that writes these rows then calls `filled`.
        """
        lacking = sorted({position for position in positions if self._positions[position % self.capacity] != position})
        keys = [position_key(self.seed, self.sequence, position) for position in lacking]
        return [*zip(self.rows_of(lacking), keys, strict=True)]

    def filled(self, positions: Sequence[int]) -> None:
        """Record that the buffer now holds the noise of these absolute positions."""
        for position in positions:
            self._positions[position % self.capacity] = position

    @staticmethod
    def fill(caches: Sequence[NoiseCache], positions: Sequence[Sequence[int]]) -> None:
        """Compute the noise that several sequences still lack, with one call of `fill_noise` for each buffer.

        Args:
            caches: the cache of each sequence; caches may share a buffer.
            positions: absolute positions whose noise is needed, a list for each sequence.
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
