"""ModelRunner: one forward pass over the rows of a step.

T: rows of the step, L: cached rows, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.attention import StepMasks, resolve
from lp.cache import StaticKVCache
from lp.config import Attention
from lp.models.loader import check_supported
from lp.models.probe import check_tree_mask


class ModelRunner:
    """Runs tree-shaped steps of one model against a preallocated cache.

    Args:
        model: any HF causal LM that honours a 4-D mask; its attention implementation is set if `attention`
            names another one.
        attention: backend.
        probe: ask the model itself whether it honours the mask, the first time it is used.

    Raises:
        ValueError: an architecture or attention that takes no tree mask.
    """

    def __init__(self, model: PreTrainedModel, attention: Attention = Attention.AUTO, probe: bool = True) -> None:
        check_supported(model.config)
        self.model, self.attention = model, resolve(model, attention)
        self.device = model.get_input_embeddings().weight.device
        self.config = model.config.get_text_config()
        self.masks = StepMasks(self.config, model.dtype, self.device)
        if probe:
            check_tree_mask(self)

    def new_cache(self, capacity: int) -> StaticKVCache:
        """An empty cache of `capacity` rows."""
        return StaticKVCache(self.config.num_hidden_layers, capacity)

    def prefill(self, tokens: Sequence[int], cache: StaticKVCache, chunk: int) -> None:
        """Cache the KV of these tokens, `chunk` rows at a time, so that no mask is larger than chunk x prompt."""
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            rows = np.tri(len(part), dtype=bool)
            self.forward(part, range(start, start + len(part)), rows, cache, reads=[len(part) - 1])
            cache.commit(range(len(part)))

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        visible: np.ndarray,
        cache: StaticKVCache,
        reads: Sequence[int],
    ) -> torch.Tensor:
        """Logits of the rows that are read; the rows' KV is written behind the prefix, uncommitted.

        Args:
            tokens, positions: (T,).
            visible: (T, T) bool, which rows of the step each one sees besides the whole prefix.
            cache: holds the prefix.
            reads: rows to read; only these go through the LM head.

        Returns:
            (len(reads), V).
        """
        at = torch.tensor(positions, device=self.device)
        mask = self.masks.build(torch.from_numpy(visible).to(self.device), at, cache.length)
        output = self.model(
            input_ids=torch.tensor(tokens, device=self.device)[None],
            position_ids=at[None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(reads, dtype=torch.long, device=self.device),
        )
        return output.logits[0]
