"""Out-of-memory errors that say what to lower: for a KV cache that does not fit, and for a device that is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from lp.budget.policy import Budget
from lp.config import LookaheadConfig
from lp.draft.share import step_tokens
from lp.errors import UserError
from lp.models.kv_cache import CacheTooLarge
from lp.models.memory import format_bytes, free_bytes

# The share of the free bytes that a proposed cache may take; a step's own tensors need the rest. Set by hand.
USABLE = 0.9
REMEDY = (
    "lower max_new_tokens, prefill_chunk, or the tokens of a step (window_size, guess_set_size; max_sequences of an "
    "engine), or take a device with more memory"
)


def with_remedy(error: BaseException) -> BaseException:
    """Add to a device's out-of-memory error which settings to lower; any other error is returned unchanged."""
    if not isinstance(error, torch.OutOfMemoryError) or REMEDY in str(error):
        return error
    explained = torch.OutOfMemoryError(f"{error}; {REMEDY}")
    explained.__cause__ = error
    return explained


@contextmanager
def remedy_named() -> Iterator[None]:
    """A `with` block that adds to out-of-memory errors raised in it which settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if with_remedy(error) is error:
            raise
        raise with_remedy(error) from error  # in no variable: the traceback has this frame, and they would be a cycle


def too_large(
    error: CacheTooLarge,
    config: LookaheadConfig,
    budget: Budget,
    prompt_tokens: int,
    new_tokens: int,
    device: torch.device,
) -> ValueError:
    """Make the user's error for a KV cache that does not fit: needed and free memory, and settings that would fit.

    It proposes smaller W and G (the size of steps), or fewer new tokens.

    Args:
        error: the exception raised for the cache, which has the bytes that the cache needs.
        config, budget: shape and token budget of the steps.
        prompt_tokens, new_tokens: number of prompt tokens, and of tokens that were to be generated.
        device: device on which there is no room for the cache.
    """
    free = free_bytes(device)
    a_rank = " a rank" if budget.ranks > 1 else ""
    message = (
        f"the KV cache of {prompt_tokens} prompt and {new_tokens} new tokens and a step of "
        f"{_step_slots(budget)} tokens{a_rank} needs {format_bytes(error.nbytes)} on {device}"
    )
    remedies: list[str] = []
    if free is not None:
        message += f", where {format_bytes(free)} are free"
        remedies = _remedies(int(USABLE * free) // error.slot_bytes, config, budget, prompt_tokens, new_tokens)
    remedy = " or ".join(remedies) or "use a shorter prompt, or a device with more memory"
    return UserError(f"{message}; {remedy}")


def _remedies(
    cache_slots: int, config: LookaheadConfig, budget: Budget, prompt_tokens: int, new_tokens: int
) -> list[str]:
    """Smaller settings that fit in `cache_slots` slots, as phrases such as "W=8 G=52 would fit"; [] if none does."""
    remedies = []
    smaller = config
    while smaller.window_size + smaller.guess_set_size and (
        prompt_tokens + new_tokens + step_tokens(smaller, budget.ranks) > cache_slots
    ):
        smaller = replace(smaller, window_size=smaller.window_size // 2, guess_set_size=smaller.guess_set_size // 2)
    if prompt_tokens + new_tokens + step_tokens(smaller, budget.ranks) <= cache_slots:
        whose = ""
        if budget.ranks > 1:
            whose = " a rank" if config.adaptive else f" of all {budget.ranks} ranks"
        remedies.append(f"W={smaller.window_size} G={smaller.guess_set_size}{whose} would fit")
    fewer = cache_slots - prompt_tokens - _step_slots(budget)
    if fewer > 0:
        remedies.append(f"max_new_tokens={fewer} would fit")
    return remedies


def _step_slots(budget: Budget) -> int:
    """Cache slots of a rank's largest step."""
    return max(budget.step_tokens, budget.max_padded_tokens)
