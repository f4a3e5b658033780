"""Captured steps against float64, against steps that are not captured, and against plain decoding."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import lp
from lp.config import Attention
from lp.models.runner import ModelRunner
from tests.gpu.parity import DTYPES, PREFIXES, TOLERANCE, VOCABULARY, layouts, model_of, text

pytest.importorskip("lp.models.graph", reason="this version captures no steps")
from lp.config import Capture

pytestmark = pytest.mark.gpu
BACKENDS = [attention for attention in Attention if attention is not Attention.AUTO]
CONFIG = lp.LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=6)


@torch.inference_mode()
def _logits(model: PreTrainedModel, attention: Attention, capture: Capture) -> list[torch.Tensor]:
    """Of every layout behind every prefix, in an order of their own, so that no step follows one of its size."""
    runner = ModelRunner(model, attention, probe=False, capture=capture)
    cache = runner.new_cache(max(PREFIXES) + max(map(len, layouts().values())))
    runner.prefill(text(max(PREFIXES)), cache, 512)
    cases = [(prefix, layout) for prefix in PREFIXES for layout in layouts().values()]
    random.Random(0).shuffle(cases)
    found = []
    for prefix, layout in cases:
        cache.length = prefix
        positions = [prefix + at - layout.positions[0] for at in layout.positions]
        tokens = [token % VOCABULARY for token in layout.tokens]
        found.append(runner.forward(tokens, positions, np.array(layout.visible()), cache, layout.reads).clone())
    return found


def _error(said: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    assert [rows.shape for rows in said] == [rows.shape for rows in true]
    errors = [(a.double() - b).norm(dim=1) / b.norm(dim=1) for a, b in zip(said, true, strict=True)]
    return float(torch.cat(errors).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("attention", BACKENDS)
def test_a_captured_step_is_as_near_float64_as_one_that_is_not(
    attention: Attention, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    """A graph replays what it was captured with: a length, a mask or a token of another step would be in its logits."""
    model = model_of("GQA", 64, dtype, layers=2)
    record_property("part", f"captured {attention}")
    record_property("dtype", str(dtype).removeprefix("torch."))
    true = _logits(copy.deepcopy(model).double(), Attention.EAGER, Capture.OFF)
    try:
        captured, plain = (_error(_logits(model, attention, mode), true) for mode in (Capture.AUTO, Capture.OFF))
    except ValueError as refusal:
        pytest.skip(str(refusal))
    tolerance = 2 * plain + TOLERANCE[dtype]  # rows are padded, so that kernels of another size may run
    record_property("error", captured)
    record_property("tolerance", tolerance)
    assert captured <= tolerance


@pytest.mark.parametrize("attention", BACKENDS)
def test_captured_text_is_that_of_plain_decoding(
    attention: Attention, record_property: Callable[[str, object], None]
) -> None:
    """Token for token, over several texts of one decoder: what a graph kept of one must not reach the next."""
    model = model_of("GQA", 64, torch.float32, layers=2)
    record_property("part", f"captured text {attention}")
    try:
        decoder = lp.LookaheadDecoder(model, CONFIG, attention=attention, capture=Capture.AUTO)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    for length in (40, 3, 90):
        prompt = text(length)
        plain = lp.AutoregressiveDecoder(model).generate(prompt, 48)
        assert decoder.generate(prompt, 48).tokens == plain.tokens
