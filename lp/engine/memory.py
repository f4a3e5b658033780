"""What to ask for instead, where a generation's KV cache does not fit the device."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from lp.config import LookaheadConfig
from lp.draft.layout import largest_layout
from lp.models.kv_cache import CacheTooLarge

USABLE = 0.9  # of the free bytes; the step's own tensors need some


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; None where nobody tells."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    names = getattr(os, "sysconf_names", {})
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def largest_step(config: LookaheadConfig) -> int:
    """Rows of the largest step."""
    return len(largest_layout(config))


def too_large(error: CacheTooLarge, config: LookaheadConfig, prompt: int, new: int, device: torch.device) -> ValueError:
    """The error for the user: needed and free bytes, and a smaller shape or length that fits.

    Args:
        error: of the cache.
        config: of the generation.
        prompt, new: its tokens, given and wanted.
        device: the cache's.
    """
    free = free_bytes(device)
    asked = f"the KV cache of {prompt} prompt and {new} new tokens and a step of {largest_step(config)} rows needs "
    needed = f"{error.nbytes:,} bytes on {device}, " + ("" if free is None else f"where {free:,} are free; ")
    remedies = [] if free is None else _fitting(int(USABLE * free) // error.row_bytes, config, prompt, new)
    return ValueError(asked + needed + (" or ".join(remedies) or "use a shorter prompt, or a device with more memory"))


def _fitting(rows: int, config: LookaheadConfig, prompt: int, new: int) -> list[str]:
    """Smaller settings whose rows, prefix and step together, are no more than these."""
    smaller, remedies = config, []
    while smaller.window_size + smaller.guess_set_size and prompt + new + largest_step(smaller) > rows:
        smaller = replace(smaller, window_size=smaller.window_size // 2, guess_set_size=smaller.guess_set_size // 2)
    if prompt + new + largest_step(smaller) <= rows:
        remedies.append(f"W={smaller.window_size} G={smaller.guess_set_size} would fit")
    if (fewer := rows - prompt - largest_step(config)) > 0:
        remedies.append(f"max_new_tokens={fewer} would fit")
    return remedies
