"""Counter-based Gumbel noise: a function of (seed, sequence, position, token), with no generator state.

Integer operations make the bits, so they are the same on every device, on every rank and for every node. The argmax of
logits plus this noise is a sample of their softmax (the Gumbel-max trick). V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
        capacity: positions held, at least as many as a step spans.
        dtype: of the noise handed out.
    """

    def __init__(
        self, seed: int, sequence: int, vocabulary: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.seed = seed
        self.sequence = sequence
        self._noise_CV = torch.empty(capacity, vocabulary, device=device, dtype=dtype)  # C: capacity
        self._positions = [-1] * capacity

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """Noise of these positions: (len(positions), V)."""
        capacity, vocabulary = self._noise_CV.shape
        for position in positions:
            index = position % capacity
            if self._positions[index] != position:
                noise_V = gumbel(self.seed, self.sequence, position, vocabulary, self._noise_CV.device)
                self._noise_CV[index] = noise_V.to(self._noise_CV.dtype)
                self._positions[index] = position
        indices = [position % capacity for position in positions]
        return self._noise_CV[torch.tensor(indices, dtype=torch.long, device=self._noise_CV.device)]
