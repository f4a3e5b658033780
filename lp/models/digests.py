"""Digests of a model, by which ranks check that they hold the same model before anything runs."""

from __future__ import annotations

import re
from pprint import pformat

import torch
from transformers import PreTrainedModel

from lp.digest import chain_digest, text_digest
from lp.errors import UserError

CPU_PIECE, PIECE = 1 << 15, 1 << 22  # words at a time, with their weights: in the processor's cache; on a GPU
SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # neighbouring multiples of it share few bits


def model_digests(model: PreTrainedModel) -> dict[str, int]:
    """Digests by which ranks compare a model: its config, its weights' names and shapes, and the bytes of its weights.

    Returns:
        One integer for each digest, under a name for error messages, such as "model config".
    """
    weights = _weights(model)
    names = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in weights)
    return {
        "model config": text_digest(without_addresses(pformat(model.config.to_dict()))),
        "weights' names and shapes": text_digest(names),
        "weights' checksum": weights_checksum(model),
    }


def weights_checksum(model: PreTrainedModel) -> int:
    """A digest of the bytes of all weights of a model, to tell whether two models have the same weights.

    Raises:
        ValueError: weights are offloaded, and so not in memory.
    """
    return chain_digest(0, [_checksum(part) for _, tensor in _weights(model) for part in _plain(tensor)])


def _weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return sorted(model.state_dict().items())


def without_addresses(printed: str) -> str:
    """Remove memory addresses, such as " at 0x7f12", from a printed config, since they differ between processes."""
    return re.sub(" at 0x[0-9a-f]+", "", printed)


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the bytes of one: several for a quantised one, which takes no view."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _plain(getattr(tensor, name))]


def _checksum(tensor: torch.Tensor) -> int:
    """Sum of the bytes as integers of up to 32 bits, modulo 2^63.

    Each is multiplied by an odd number that depends on its place, so that no single value can change unseen. Several
    that change, or are swapped, go unseen one time in billions.
    """
    if tensor.is_meta:
        raise UserError("weights are not in memory, but offloaded, and can't be compared; load the model whole")
    if not tensor.numel():
        return 0
    word = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    count = max((CPU_PIECE if tensor.device.type == "cpu" else PIECE) // rows.shape[1], 1)
    start = 0
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in rows.split(count):
        words = part.contiguous().view(-1).view(word)  # a layer's weights may lie column by column
        factors = SPREAD * torch.arange(start, start + len(words), device=tensor.device)
        total += (words * (factors ^ (factors >> 32) | 1)).sum()
        start += len(words)
    return int(total) % (1 << 63)
