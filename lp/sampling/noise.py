"""Counter-based Gumbel noise: a function of (seed, sequence, position, token), with no generator state.

Integer operations make the bits, so they are the same on every device, on every rank and for every node. The argmax of
logits plus this noise is a sample of their softmax (the Gumbel-max trick). V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lp.to_device import to_device

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
    """What the noise of a sequence's positions begins with: 64 bits, unsigned."""
    return _keyed(_keyed(0, seed), sequence)


def gumbel(seed: int, sequence: int, position: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise of one absolute position.

    Args:
        seed: of the generation.
        sequence: index of the sequence in a batch.
        position: of the token to be chosen.
        vocabulary: V.

    Returns:
        (V,) float64.
    """
    key = _keyed(sequence_key(seed, sequence), position)
    bits = torch.arange(1, vocabulary + 1, device=device) * _signed(_GOLDEN) + _signed(key)  # int64 wraps
    bits = (bits ^ _shift(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shift(bits, 27)) * _signed(_MIX_2)
    bits = bits ^ _shift(bits, 31)
    return -torch.log(-torch.log(_uniform(bits)))


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """In (0, 1), of the upper 53 bits; where all are set the half rounds up to 1, whose noise would be infinite."""
    return ((_shift(bits, 11).double() + 0.5) * 2.0**-53).clamp(max=BELOW_1)


class NoiseCache:
    """The noise of the positions that a step may need, computed once each: a ring buffer by position.

    Args:
        seed, sequence, vocabulary, device: as in `gumbel`.
        capacity: C, positions held, at least as many as a step spans.
        dtype: of the noise handed out.

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
        if self.noise_SV is None:
            self.use(self.buffer())
        assert self.noise_SV is not None
        for position in positions:
            row = position % self.capacity
            if self._positions[row] != position:
                noise_V = gumbel(self.seed, self.sequence, position, self.vocabulary, self.device)
                self.noise_SV[row] = noise_V.to(self.dtype)
                self._positions[row] = position
        return [position % self.capacity for position in positions]

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """The noise of these positions: (len(positions), V)."""
        rows = to_device(self.rows(positions), self.device)
        assert self.noise_SV is not None
        return self.noise_SV.index_select(0, rows)
