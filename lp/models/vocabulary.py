"""How many tokens a model embeds, whatever part of the embeddings this rank holds."""

from __future__ import annotations

from typing import Any


def embedded_tokens(model: Any) -> int:
    """How many token ids a model has an embedding for; larger ids, and this number itself, cannot be its input."""
    embedding = model.get_input_embeddings()
    return getattr(embedding, "num_embeddings", None) or int(embedding.weight.shape[0])
