"""One sequence's part of a forward pass: a tree of tokens that continue its cached prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lp.draft.layout import ancestors
from lp.models.kv_cache import StaticKVCache


class TreePass(NamedTuple):
    """One sequence's part of a forward pass: the tokens to compute, and which of them each one sees.

    Every token also sees the whole cached prefix.

    Attributes:
        tokens, positions: (T,), token ids, and their positions in the sequence.
        parents: (T,), index of each token's parent, the nearest earlier token that it sees; -1: it has no parent. A
            token sees its parent and all that the parent sees.
        cache: holds the prefix, and gets the KV of these tokens.
        logits_indices: indices of the tokens whose logits are computed; may be empty.
        chain: whether each token sees all tokens before it, and all will be committed, as in a prompt.
        rotary_offset: added to `positions` for the rotary embedding; not 0 after images, in some models.
        adapter: name of the LoRA adapter that the sequence goes through; None: the adapters that are active on the
            model.
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
        """Make a copy with `count` more tokens at the end, which no other token sees and which get no logits."""
        if count <= 0:
            return self
        fields = (self.tokens, self.tokens[0]), (self.positions, self.positions[0]), (self.parents, -1)
        tokens, positions, parents = (np.pad(field, (0, count), constant_values=value) for field, value in fields)
        return self._replace(tokens=tokens, positions=positions, parents=parents)

    def visible(self) -> np.ndarray:
        """Which tokens of the pass see which, bool (T, T); [i, j]: token i sees token j."""
        return ancestors(self.parents)
