"""What a model says behind every token of its vocabulary, for `lp.draft.pool.bigrams`.

V: vocabulary, K: logits of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.models.loader import vocabulary_size
from lp.models.vocabulary import embedded_tokens
from lp.sampling.top_logits import pack_top_logits

NUM_LOGITS = 16  # K
BATCH = 64  # texts of a pass


def measure_bigrams(
    model: PreTrainedModel, contexts: Sequence[Sequence[int]], num_logits: int = NUM_LOGITS, batch: int = BATCH
) -> np.ndarray:
    """The best logits behind every token, of its probabilities' mean over these contexts.

    Args:
        model: on its device.
        contexts: tokens to come before it, alike in nothing but that they may come before anything.
        num_logits: K.
        batch: texts of a pass.

    Returns:
        int64 (V, K), as `pack_top_logits` packs them.
    """
    device = model.get_input_embeddings().weight.device
    packed = []
    with torch.inference_mode():
        for tokens in torch.arange(vocabulary_size(model), device=device).split(batch):
            probabilities = torch.zeros((), device=device)
            for context in contexts:
                before = torch.tensor(list(context), dtype=torch.int64, device=device).expand(len(tokens), -1)
                ids = torch.cat([before, tokens[:, None].clamp(max=embedded_tokens(model) - 1)], 1)
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
                probabilities = probabilities + logits.float().softmax(-1)
            packed.append(pack_top_logits((probabilities / len(contexts)).log(), num_logits).cpu().numpy())
    return np.concatenate(packed)
