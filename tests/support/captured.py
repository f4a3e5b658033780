"""Captured steps without a compiler or a GPU: static buffers, padding, cache slots, the model's own kernels."""

from __future__ import annotations

import lp
from lp.models.runner import ModelRunner


def captured_runner(decoder: lp.LookaheadDecoder, probe: bool = False) -> ModelRunner:
    """Give a decoder a runner of its own, whose steps are captured."""
    runner = ModelRunner(decoder.model, decoder.runner.attention, kv_dtype=decoder.runner.kv_dtype)
    runner._capture_steps(lp.Capture.OFF, probe=probe)
    decoder.runner = runner
    return runner
