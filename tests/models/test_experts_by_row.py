"""Experts that compute by row are transformers' own, to rounding, and no one else's model changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lp
from lp.models.experts_by_row import NAME, experts_of, pad_experts
from tests.support.tiny_models import MATRIX, tiny_model

# Gated; gated with biases, transposed and interleaved; not gated.
ARCHITECTURES = [arch for arch in ("mixtral", "deepseek_v3", "gpt_oss", "nemotron_h") if arch in MATRIX]


@pytest.mark.parametrize("widths", [(), (8, 64)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sums_are_transformers_own(arch: str, widths: tuple[int, ...]) -> None:
    """A weight that is transposed, a bias or a gate that is left out, or another token's row, is far above rounding."""
    experts: Any = experts_of(tiny_model(arch))[0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    states = torch.randn(40, 32, generator=generator, dtype=torch.float64)
    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(40)])
    index[:, 0][index[:, 0] == 3], index[:, 1][index[:, 1] == 3] = 0, 1  # the last expert has no token
    weights = torch.rand(40, 2, generator=generator, dtype=torch.float64)
    with torch.inference_mode():
        expected = experts(states, index, weights)
        pad_experts(experts, widths)
        found = experts(states, index, weights)
    assert (found - expected).abs().max() < 1e-11 * expected.abs().max()


def test_the_callers_model_keeps_its_own() -> None:
    """The mode's experts belong to its runner's view; the usual mode, and transformers, run as before."""
    model = tiny_model("mixtral", dtype=torch.float32)
    ids = torch.arange(9)[None]
    expected = model(ids).logits
    usual = lp.PlainDecoder(model).generate([1, 2, 3], 4, eos_token_id=(), output_logits=True).logits
    runner = lp.PlainDecoder(model, exact="bitwise").runner
    assert runner.model.config._experts_implementation == NAME
    assert model.config._experts_implementation == "eager"
    again = lp.PlainDecoder(model).generate([1, 2, 3], 4, eos_token_id=(), output_logits=True).logits
    assert torch.equal(model(ids).logits, expected)
    assert usual is not None and again is not None and torch.equal(usual, again)
