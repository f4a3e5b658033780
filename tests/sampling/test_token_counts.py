"""Counts of a sequence's tokens: what is added step by step equals a count of everything, as `Counter` makes it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lp.sampling.token_counts import GENERATED, MOST_IN_PROMPT, PROMPT, TokenCounts

VOCABULARY = 7
PADDING = [5, 5]
PROMPT_TOKENS = [0, 3, 3, 6, 0, 0]
TEXT = [*PROMPT_TOKENS, 3, 1, 0, 1, 1, 6, 2, 3, 3, 4]
MOST = 3


def _expected(num_tokens: int) -> list[int]:
    first = len(PROMPT_TOKENS)
    prompt, generated = Counter([*PADDING, *TEXT[: min(first, num_tokens)]]), Counter(TEXT[first:num_tokens])
    return [min(prompt[token], MOST_IN_PROMPT) * PROMPT + generated[token] * GENERATED for token in range(VOCABULARY)]


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("lengths", [[6, 7, 9, 12, 15], [6, 9, 13, 16], [4, 6, 8], [7, 7, 8], [16]])
def test_what_is_added_equals_a_count_of_everything(lengths: list[int], place: int) -> None:
    """The caller has room for `MOST` additions; after a step of more, everything is counted at once."""
    counts = TokenCounts(VOCABULARY, len(PROMPT_TOKENS), PADDING, torch.device("cpu"))
    counts.use(counts.buffer(3), place)
    before = 0
    for num_tokens in lengths:
        added = counts.uncounted(TEXT, num_tokens, MOST)
        assert len(added) == (num_tokens - before if before and num_tokens - before <= MOST else 0)
        for index, amount in added:
            counts.counts_QV.view(-1)[index] += amount
        counts.counted(num_tokens)
        before = num_tokens
        assert counts.counts_QV[place].tolist() == _expected(num_tokens)
    others = [row for row in range(3) if row != place]
    assert not counts.counts_QV[others].any(), "other sequences have those rows"


def test_another_row_is_counted_anew() -> None:
    """A sequence that moves to another row, or to another buffer, finds zeros there."""
    counts = TokenCounts(VOCABULARY, len(PROMPT_TOKENS), PADDING, torch.device("cpu"))
    buffer = counts.buffer(2)
    for shared, place in ((buffer, 0), (buffer, 1), (counts.buffer(2), 1)):
        counts.use(shared, place)
        assert not counts.uncounted(TEXT, 9, MOST)
        assert shared[place].tolist() == _expected(9)


def test_a_prompt_that_repeats_one_token_does_not_overflow() -> None:
    """A penalty asks only whether a prompt has a token, so its times are limited where all are counted at once."""
    counts = TokenCounts(VOCABULARY, 5000, [], torch.device("cpu"))
    text = [2] * 5000
    assert counts.uncounted(text, 4990, MOST) == []
    assert counts.counts_QV[0, 2] == MOST_IN_PROMPT * PROMPT
    added = counts.uncounted(text, 5000, 10)
    assert added == counts.uncounted(text, 5000, 10) == [(2, PROMPT)] * 10, "what is not recorded is listed again"
    assert (MOST_IN_PROMPT + 10) * PROMPT < 2**31


def test_a_token_that_the_vocabulary_lacks_is_not_counted() -> None:
    """Image placeholders may lie beyond the logits' last column."""
    counts = TokenCounts(VOCABULARY, 1, [], torch.device("cpu"))
    assert not counts.uncounted([1, VOCABULARY + 2], 2, MOST)
    assert counts.counts_QV[0].tolist() == [0, PROMPT, 0, 0, 0, 0, 0]
    assert counts.uncounted([1, VOCABULARY + 2, VOCABULARY, 4], 4, MOST) == [(4, GENERATED)]
