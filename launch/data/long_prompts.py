"""Lengthen prompts, to measure decoding in long contexts: other prompts of the task go in front."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle


def lengthened(ids: list[int], others: Sequence[list[int]], num_tokens: int, bos: int | None) -> list[int]:
    """Lengthen a prompt to exactly `num_tokens` tokens by texts in front of it; a longer prompt stays as it is.

    Args:
        ids: the prompt's token ids, (L,).
        others: token ids of other texts to put in front: the first of them directly before the prompt, the next before
            that one, and so on, over again when all are used. At least one must not be empty. The outermost is cut at
            its beginning.
        num_tokens: tokens of the result.
        bos: the tokenizer's BOS id, which stays in front if the prompt begins with it; None where it has none.
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
