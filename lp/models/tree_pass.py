"""What one sequence has in a forward pass: a tree of tokens behind its prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lp.draft.layout import ancestors
from lp.models.kv_cache import StaticKVCache


class TreePass(NamedTuple):
    """What one sequence has in a pass.

    Attributes:
        tokens, positions: (T,).
        parents: (T,), of each token the last one before it that it sees; -1 for none.
        cache: holds the prefix.
        logits_indices: indices of the sequence's tokens whose logits are computed; may be empty.
        chain: each token sees all before it, and all are committed.
        rotary_offset: what positions are turned by, less `positions`: not 0 behind images of some models.
        adapter: the LoRA adapter that the sequence goes through; None: those that are active on the model.
    """

    tokens: Sequence[int] | np.ndarray
    positions: Sequence[int] | np.ndarray
    parents: Sequence[int] | np.ndarray
    cache: StaticKVCache
    logits_indices: Sequence[int]
    chain: bool = False
    rotary_offset: int = 0
    adapter: str | None = None

    def padded(self, count: int) -> TreePass:
        """This pass with so many tokens more, which nothing sees and nothing is sampled at."""
        if count <= 0:
            return self
        fields = (self.tokens, self.tokens[0]), (self.positions, self.positions[0]), (self.parents, -1)
        tokens, positions, parents = (np.pad(field, (0, count), constant_values=value) for field, value in fields)
        return self._replace(tokens=tokens, positions=positions, parents=parents)

    def visible(self) -> np.ndarray:
        """Bool (T, T), which tokens of the pass each one sees."""
        return ancestors(self.parents)
