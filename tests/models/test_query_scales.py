"""Llama 4: layers without positions scale their queries by position, also where a step has several branches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import lp
from lp.draft.layout import ancestors
from lp.models.runner import ModelRunner
from tests.support.tiny_models import MATRIX, drawn_text, plain_greedy, tiny_model

pytestmark = pytest.mark.skipif("llama4" not in MATRIX, reason="this release of transformers has no Llama 4")
PARENTS = [-1, 0, 1, 2, 0, 4, 5, 6, 4]  # nodes at positions 14 to 17, twice: places of the second branch are 18 to 21


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash", "by_position"])
def test_logits_of_a_tree(backend: str) -> None:
    """Queries are scaled anew at position 15 and at 23, chunks begin at 12: places in the pass are beyond both."""
    model = tiny_model("llama4", attn_scale=5.0, floor_scale=8, attention_chunk_size=16)
    for parameter in model.parameters():
        parameter.data.mul_(3)  # so that attention is far from uniform
    runner = ModelRunner(model, backend, same_bits=backend == "by_position")
    visible = ancestors(PARENTS)
    prefix, nodes = drawn_text(random.Random(1), 14), drawn_text(random.Random(2), len(PARENTS))
    positions = [len(prefix) + int(row.sum()) - 1 for row in visible]
    cache = runner.new_cache(60)
    runner.prefill(prefix, cache, len(prefix))
    found = runner.forward(nodes, positions, visible, cache, range(len(nodes)))
    for node, seen in enumerate(visible):
        path = [*prefix, *(nodes[at] for at in np.flatnonzero(seen))]
        with torch.inference_mode():
            expected = model(torch.tensor([path])).logits[0, -1]
        torch.testing.assert_close(found[node], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tuning", [True, False])
def test_texts(tuning: bool) -> None:
    """Over several chunks, with and without the scaling, alone and together."""
    model = tiny_model("llama4", attn_scale=5.0, attn_temperature_tuning=tuning)
    prompts = [drawn_text(random.Random(seed), 3 + 11 * seed) for seed in range(3)]
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=5))
    expected = [plain_greedy(model, prompt, 40) for prompt in prompts]
    assert [decoder.generate(prompt, 40).tokens for prompt in prompts] == expected
    assert [output.tokens for output in decoder.generate_batch(prompts, 40)] == expected
