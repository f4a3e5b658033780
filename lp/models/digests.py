"""Ranks must hold the same model: digests of it, to be compared before anything runs."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lp.digest import chain_digest, text_digest
from lp.errors import UserError


def model_digests(model: PreTrainedModel) -> dict[str, int]:
    """Digests of a model's config, of its weights' names and shapes, and of their bytes."""
    weights = sorted(model.state_dict().items())
    names = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in weights)
    return {
        "model config": text_digest(model.config.to_json_string(use_diff=False)),
        "weights' names and shapes": text_digest(names),
        "weights' checksum": chain_digest(0, [_checksum(part) for _, tensor in weights for part in _plain(tensor)]),
    }


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the bytes of one: several for a quantised one, which takes no view."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _plain(getattr(tensor, name))]


def _checksum(tensor: torch.Tensor) -> int:
    """Sum of the bytes as integers, each with a weight of its own so that swapped values show; modulo 2^64."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    if flat.is_meta:
        raise UserError("weights are not in memory, but offloaded, and ranks can't compare them; load the model whole")
    total = 0
    for part in words.split(1 << 24):  # int64 copies of a piece at a time
        weights = 2 * torch.arange(len(part), device=part.device) + 1
        total = (1_000_003 * total + int((part.long() * weights).sum())) % (1 << 62)
    return total
