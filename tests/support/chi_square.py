"""The chi-square test of sampled texts over all texts there can be, each with its exact probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

LEAST_EXPECTED = 5  # of a cell of its own


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The chance that true samples differ from what is expected by as much as these counts, or more.

    Args:
        counts, expected: float64 (cells,), samples that each cell has, and should have on average.
    """
    assert len(counts) > 1, "one cell can tell nothing: draw more"
    statistic = ((counts - expected) ** 2 / expected).sum()
    half_freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


def p_of_texts(texts: Sequence[Sequence[int]], probabilities: torch.Tensor, vocabulary: int) -> float:
    """p of the test that texts of one length have the model's distribution; 0 if one came out that has no chance.

    Args:
        texts: tokens of every sampled text.
        probabilities: float64 (V ** tokens,), the chance of every text there can be, by `joint`.
        vocabulary: V, the number of tokens.
    """
    numbers = torch.zeros(len(texts), dtype=torch.int64)
    for column in torch.tensor(texts).unbind(1):
        numbers = numbers * vocabulary + column
    counts = torch.bincount(numbers, minlength=len(probabilities)).double()
    expected = probabilities * len(texts)
    if bool(counts[expected == 0].any()):
        return 0.0
    return p_value(lumped(counts, expected), lumped(expected, expected))


def joint(model: PreTrainedModel, prompt: list[int], tokens: int, processors: Sequence[Any]) -> torch.Tensor:
    """Exact probabilities of the first tokens, by enumeration: (V ** tokens,)."""
    ids, probabilities = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    every = torch.arange(model.config.vocab_size)
    for _ in range(tokens):
        with torch.inference_mode():
            scores = model(ids).logits[:, -1]
        for processor in processors:
            scores = processor(ids, scores)
        probabilities = (probabilities[:, None] * scores.softmax(-1)).flatten()
        ids = torch.cat([ids.repeat_interleave(len(every), 0), every.repeat(len(ids))[:, None]], dim=1)
    return probabilities


def lumped(values: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Cells with too little expected for the chi-square approximation in groups; those with nothing left out."""
    rare = ((expected > 0) & (expected < LEAST_EXPECTED)).nonzero().flatten()
    cells = values[expected >= LEAST_EXPECTED]
    groups = (expected[rare].cumsum(0) / (2 * LEAST_EXPECTED)).floor().long()  # but the last large enough
    if not len(rare):
        return cells
    last = groups == groups[-1]
    if groups[-1] > 0 and expected[rare][last].sum() < LEAST_EXPECTED:
        groups[last] -= 1
    sums = torch.zeros(int(groups[-1]) + 1, dtype=values.dtype).index_add_(0, groups, values[rare])
    return torch.cat([cells, sums])
