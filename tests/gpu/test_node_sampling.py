"""Sampling on a GPU against transformers' processors there: to the last bit, where torch divides otherwise."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from lp.sampling.node_sampling import CallRules, NodeSampling, ScoreRules
from lp.sampling.processors import BranchProcessors
from tests.gpu.parity import DEVICE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_those_of_the_processors(dtype: torch.dtype) -> None:
    """A sort, a softmax or a division of the device's own may leave other tokens out."""
    processors = [
        tf.TemperatureLogitsWarper(0.7),
        tf.TopKLogitsWarper(200),
        tf.TopPLogitsWarper(0.9),
        tf.MinPLogitsWarper(0.01),
    ]
    rules = ScoreRules.of(processors)
    assert rules is not None
    logits = 4 * torch.randn(8, 32000, generator=torch.Generator().manual_seed(1))
    logits = logits.to(DEVICE, dtype)
    numbers = torch.tensor([rules.numbers], dtype=torch.float64, device=DEVICE)
    found = NodeSampling(CallRules.of([rules], False), rules, numbers, None).scores(logits)
    expected = BranchProcessors(processors)(logits, [[]] * 8, [1])
    differing = (found.isinf() != expected.isinf()).sum()
    assert differing <= 8  # at the borders, a token of each
    both = found.isfinite() & expected.isfinite()
    torch.testing.assert_close(found[both], expected[both], rtol=2 * torch.finfo(torch.float32).eps, atol=0)
