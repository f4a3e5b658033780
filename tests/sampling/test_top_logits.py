"""The top-k logits of a step come out of a message as they went in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lp.sampling.top_logits import TopLogits, pack_top_logits, unpack_top_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_unpacked_is_what_topk_says(dtype: torch.dtype) -> None:
    """A token with the logit of the one beside it misleads every draft source, and no output shows it."""
    scores = torch.randn(46, 500, generator=torch.Generator().manual_seed(1)).to(dtype)
    best = scores.float().topk(16)
    top = unpack_top_logits(pack_top_logits(scores, 16).numpy())
    assert (top.tokens.dtype, top.logits.dtype) == (np.int32, np.float32)
    assert top.tokens.tolist() == best.indices.tolist()
    assert top.logits.tolist() == best.values.tolist()


def test_logits_that_are_no_numbers() -> None:
    """A NaN would poison the sums of a draft source; a masked token's -inf must stay one."""
    top = unpack_top_logits(
        pack_top_logits(torch.tensor([[math.nan, 1.0, -math.inf], [-2.0, math.inf, 0.0]]), 3).numpy()
    )
    assert top.logits.tolist() == [[-math.inf, 1.0, -math.inf], [math.inf, 0.0, -2.0]]
    assert top.tokens.tolist() == [[0, 1, 2], [1, 2, 0]]


@pytest.mark.parametrize(("n", "vocabulary", "k", "width"), [(3, 5, 9, 5), (3, 5, 0, 0), (0, 5, 2, 2)])
def test_sizes(n: int, vocabulary: int, k: int, width: int) -> None:
    """A vocabulary smaller than K, a source that reads no logits, and a step without sampled nodes."""
    top = unpack_top_logits(pack_top_logits(torch.zeros(n, vocabulary), k).numpy())
    assert top.tokens.shape == top.logits.shape == (n, width)
    assert [array.size for array in TopLogits.empty()] == [0, 0]
