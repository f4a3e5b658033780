"""A long text in one generation: right to the end, in memory that does not grow, and a clean stop at the context."""

from __future__ import annotations

import torch

import lp
from scripts.studies.long_run import endure
from tests.conftest import LONG
from tests.support.tiny_models import tiny_model

TOKENS = 20_000 if LONG else 1_500
SLACK = 64 << 20  # bytes, of allocators and of one step's mask; one that were kept for every step would be gigabytes
SAMPLING = lp.SamplingParams(temperature=0.8, seed=1)


def test_a_long_text_ends_cleanly_in_flat_memory() -> None:
    """A list or a mask that is kept for every step costs nothing in a test of forty tokens."""
    model = tiny_model(max_position_embeddings=TOKENS + 1)
    decoder = lp.LookaheadDecoder(model)
    decoder.generate([1], 64, SAMPLING)
    output, stretches = endure(decoder, [1], TOKENS + 1000, TOKENS // 10, sampling=SAMPLING)
    assert (len(output.tokens), output.finish_reason) == (TOKENS, "context")
    assert sum(part.tokens for part in stretches) == TOKENS and sum(part.steps for part in stretches) == output.steps
    assert all(part.step_ms > part.host_ms > 0 for part in stretches)
    held = [part.resident_bytes for part in stretches if part.resident_bytes is not None]
    if held:  # pages of the cache are the process's once they are written
        assert held[-1] - held[2] < output.cache_bytes + SLACK
    plain = lp.AutoregressiveDecoder(model).generate([1], TOKENS + 1000, SAMPLING)
    assert (output.tokens, output.finish_reason) == (plain.tokens, plain.finish_reason)


def test_stretches_hold_all_steps() -> None:
    """A step that ends two stretches at once, or the last one's end, must not be counted twice or dropped."""
    model = tiny_model(dtype=torch.float64)
    for stretch in (1, 3, 7, 40, 1000):
        output, stretches = endure(lp.LookaheadDecoder(model), [1, 2], 40, stretch)
        assert sum(part.tokens for part in stretches) == 40
        assert sum(part.steps for part in stretches) == output.steps
        assert all(part.tokens >= part.steps > 0 for part in stretches)
