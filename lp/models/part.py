"""The part of a weight that a rank holds, where ranks divide a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Part(NamedTuple):
    """The part of a weight that a rank holds: some ranges of one dimension, joined in their order.

    Attributes:
        dimension: index of the dimension that is divided.
        ranges: pairs of the first index and the index after the last one, such as ((0, 512), (1024, 1536)) for half of
            each of two projections that are stored in one weight.
    """

    dimension: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, weight: Any) -> torch.Tensor:
        """Cut this part out of a whole weight.

        Args:
            weight: a tensor; or a slice object from safetensors' `get_slice`, so that only this part is read from the
                file.
        """
        before = (slice(None),) * self.dimension
        pieces = [weight[(*before, slice(*each))] for each in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dimension)

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape that this part has, given the shape of the whole weight.

        Args:
            shape: shape of the whole weight.
        """
        length = sum(last - first for first, last in self.ranges)
        return (*shape[: self.dimension], length, *shape[self.dimension + 1 :])
