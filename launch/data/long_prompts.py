"""Lengthen prompts, to measure decoding in long contexts: other prompts of the task are put before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle


def lengthened(ids: list[int], others: Sequence[list[int]], num_tokens: int, bos: int | None) -> list[int]:
    """Lengthen a prompt to exactly `num_tokens` tokens by putting other texts before it.

    A prompt that has as many tokens already stays as it is.

    Args:
        ids: the prompt's token ids, (L,).
        others: token ids of the other texts. The first goes directly before the prompt, the next before that one, and
            so on, over again when all are used. At least one must not be empty. The outermost is cut at its beginning.
        num_tokens: number of tokens in the result.
        bos: the tokenizer's BOS id, which stays first if the prompt begins with it; None for a tokenizer without one.
    """
    if len(ids) >= num_tokens:
        return ids
    head = ids[:1] if bos is not None and ids[:1] == [bos] else []
    body = ids[len(head) :]
    missing = num_tokens - len(head)
    for other in cycle(others):
        if len(body) >= missing:
            break
        body = other + body
    return head + body[-missing:]
