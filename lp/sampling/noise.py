"""Counter-based Gumbel noise: a function of (seed, sequence, position, token), with no generator state.

Integer operations make the bits, so they are the same on every device, on every rank and for every node. The argmax of
logits plus this noise is a sample of their softmax (the Gumbel-max trick). V: vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

import torch

from lp.optional import is_installed
from lp.to_device import to_device

logger = logging.getLogger(__name__)

CHUNK = 1 << 16  # numbers that a CPU makes at once: they stay in its second-level cache
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
    return _mix((key + part * _GOLDEN + _GOLDEN) & _MASK)


def sequence_key(seed: int, sequence: int) -> int:
    """The key that the noise of a sequence's positions starts from: 64 bits, unsigned."""
    return _keyed(_keyed(0, seed), sequence)


def gumbel(seed: int, sequence: int, position: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise of one absolute position.

    Args:
        seed: the generation's seed.
        sequence: index of the sequence in a batch.
        position: where the token to be chosen is.
        vocabulary: V.

    Returns:
        (V,) float64.
    """
    key = _keyed(sequence_key(seed, sequence), position)
    return _gumbel_nV([key], vocabulary, torch.device(device))[0]


def _gumbel_nV(position_keys: Sequence[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise (n, V), float64, for the keys of n positions."""
    return _uniform(random_bits(position_keys, vocabulary, device)).log_().neg_().log_().neg_()


def random_bits(position_keys: Sequence[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """64 random bits of every token of n positions, each with its key: (n, V) int64."""
    keys_n1 = torch.tensor([[_signed(key)] for key in position_keys], device=device)
    bits = torch.arange(1, vocabulary + 1, device=device) * _signed(_GOLDEN) + keys_n1  # int64 wraps
    bits = (bits ^ _shift(bits, 30)).mul_(_signed(_MIX_1))
    bits = (bits ^ _shift(bits, 27)).mul_(_signed(_MIX_2))
    return bits ^ _shift(bits, 31)


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1) from the upper 53 bits: never 1, to which 53 ones would round, as its noise is infinite."""
    return ((_shift(bits, 11).double() + 0.5) * 2.0**-53).clamp(max=BELOW_1)


@torch.library.custom_op("lp::gumbel_rows", mutates_args=("noise_CV",))
def gumbel_rows(noise_CV: torch.Tensor, key: int, first_position: int, count: int) -> None:
    """Fill the rows of a range of positions with their noise; that of a position is row position % C.

    On CUDA it is one kernel, where Triton is installed: the arguments are numbers, so nothing is copied to the device.

    Args:
        noise_CV: float32 or float64, contiguous.
        key: `sequence_key`, as an int64.
        first_position, count: of the range; count is at most C.
    """
    if noise_CV.is_cuda and _kernel_works(noise_CV.device, noise_CV.dtype):
        from lp.sampling.noise_kernel import launch_gumbel_rows  # here: it needs Triton

        launch_gumbel_rows(noise_CV, key, first_position, count)
        return
    fill_gumbel_rows(noise_CV, key, first_position, count)


def fill_gumbel_rows(noise_CV: torch.Tensor, key: int, first_position: int, count: int) -> None:
    """`gumbel_rows` in torch."""
    capacity, vocabulary = noise_CV.shape
    at_once = max(1, CHUNK // vocabulary) if noise_CV.device.type == "cpu" else count
    end = first_position + count
    start = first_position
    while start < end:
        row = start % capacity
        positions = range(start, min(start + at_once, end, start + capacity - row))
        keys = [_keyed(key & _MASK, position) for position in positions]
        noise_CV[row : row + len(positions)] = _gumbel_nV(keys, vocabulary, noise_CV.device)
        start = positions.stop


@functools.cache
def _kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernel gives torch's noise on this device; tried once, since its compiler may be missing."""
    if not is_installed("triton"):
        return False
    rows, expected = torch.zeros(2, 4, 1000, device=device, dtype=dtype)
    try:
        from lp.sampling.noise_kernel import launch_gumbel_rows

        launch_gumbel_rows(rows, 7, 2, 4)
    except Exception as failure:
        logger.warning("noise is made without a kernel of its own: %s: %s", type(failure).__name__, failure)
        return False
    fill_gumbel_rows(expected, 7, 2, 4)
    if torch.allclose(rows, expected, rtol=1e-6, atol=1e-6):
        return True
    logger.warning("noise is made without a kernel of its own: it gives other numbers on %s", device)
    return False


class NoiseCache:
    """The noise of the positions that a step may need, computed once each: a ring buffer by position.

    Args:
        seed, sequence, vocabulary, device: as in `gumbel`.
        capacity: C, positions held, at least as many as a step spans.
        dtype: the dtype of the noise that is given out.

    Attributes:
        noise_SV: the ring buffer, then a row of zeros for what is sampled without noise: S = C + 1.
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
        self.noise_SV: torch.Tensor | None = None
        self._positions = [-1] * capacity

    @property
    def no_noise(self) -> int:
        """The row of zeros."""
        return self.capacity

    @property
    def shape(self) -> tuple[int, int, torch.dtype]:
        """S, V and the dtype of the buffer."""
        return self.capacity + 1, self.vocabulary, self.dtype

    def buffer(self) -> torch.Tensor:
        """A new ring buffer, of zeros."""
        return torch.zeros(*self.shape[:2], device=self.device, dtype=self.dtype)

    def use(self, noise_SV: torch.Tensor) -> None:
        """Compute into this buffer from now on: a captured step reads the one that it was captured with."""
        if noise_SV is not self.noise_SV:
            self.noise_SV = noise_SV
            self._positions = [-1] * self.capacity

    def rows(self, positions: Sequence[int]) -> list[int]:
        """The rows of the buffer that hold the noise of these positions."""
        missing = self._missing(positions)
        for first, count in _ranges(missing):
            assert self.noise_SV is not None
            key = _signed(sequence_key(self.seed, self.sequence))
            gumbel_rows(self.noise_SV[: self.capacity], key, first, count)
        self._note(missing)
        return [position % self.capacity for position in positions]

    def _missing(self, positions: Sequence[int]) -> list[int]:
        """Which of them the buffer does not hold, ascending."""
        if self.noise_SV is None:
            self.use(self.buffer())
        return sorted({position for position in positions if self._positions[position % self.capacity] != position})

    def _note(self, positions: Sequence[int]) -> None:
        for position in positions:
            self._positions[position % self.capacity] = position

    @staticmethod
    def fill(caches: Sequence[NoiseCache], positions: Sequence[Sequence[int]]) -> None:
        """Compute what the buffers of several sequences lack of these positions, on a CPU all at once.

        Args:
            caches: one for each sequence, for the same vocabulary.
            positions: those that each sequence's step needs.
        """
        if caches[0].device.type != "cpu":  # where a kernel makes what one of them lacks
            return
        missing = [cache._missing(own) for cache, own in zip(caches, positions, strict=True)]
        wanted = [(cache, position) for cache, own in zip(caches, missing, strict=True) for position in own]
        at_once = max(1, CHUNK // caches[0].vocabulary)
        for start in range(0, len(wanted), at_once):
            part = wanted[start : start + at_once]
            keys = [_keyed(sequence_key(cache.seed, cache.sequence), position) for cache, position in part]
            for (cache, position), noise in zip(
                part, _gumbel_nV(keys, caches[0].vocabulary, caches[0].device), strict=True
            ):
                assert cache.noise_SV is not None
                cache.noise_SV[position % cache.capacity] = noise
        for cache, own in zip(caches, missing, strict=True):
            cache._note(own)

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """The noise of these positions: (len(positions), V)."""
        rows = to_device(self.rows(positions), self.device)
        assert self.noise_SV is not None
        return self.noise_SV.index_select(0, rows)


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The runs of ascending numbers, each as its first one and its length."""
    first = 0
    for index, number in enumerate(numbers, 1):
        if index == len(numbers) or numbers[index] != number + 1:
            yield numbers[first], index - first
            first = index
