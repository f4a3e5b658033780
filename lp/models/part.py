"""The part of a weight that a rank of a replica holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Part(NamedTuple):
    """The part of a weight that a rank holds: ranges of one dimension, one behind the other.

    Attributes:
        dimension: the dimension.
        ranges: [first, last) each.
    """

    dimension: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, weight: Any) -> torch.Tensor:
        """This part of a tensor, or of what safetensors' `get_slice` gives, which then reads no more than that."""
        before = (slice(None),) * self.dimension
        pieces = [weight[(*before, slice(*each))] for each in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dimension)

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes of this part of a tensor of this shape."""
        length = sum(last - first for first, last in self.ranges)
        return (*shape[: self.dimension], length, *shape[self.dimension + 1 :])
