"""Prompts of a given length: other prompts of the task in front of each, as the files before one in a repository."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle


def lengthened(ids: list[int], others: Sequence[list[int]], num_tokens: int, bos: int | None) -> list[int]:
    """A prompt of `num_tokens` tokens that ends with this one.

    Args:
        ids: the prompt's token ids, (L,); returned as they are if L is `num_tokens` or more.
        others: token ids of other texts, put in front in turn, the nearest first, and again from the start; at least
            one that is not empty. The first of the texts in front is cut at its beginning.
        num_tokens: how many tokens the result has.
        bos: begins the result if it begins the prompt; None for none.
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
