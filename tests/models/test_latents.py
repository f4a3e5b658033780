"""Layers that cache latents: each sequence's are expanded by themselves, in the mode by products of one size."""

from __future__ import annotations

import random

import pytest
import torch

import lp
from lp.models.latents import BLOCK
from lp.models.releases import EXPAND_LATENTS
from tests.support.tiny_models import drawn_text, tiny_model

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
EQUAL_HEADS = {"v_head_dim": 16}  # flash attention takes keys and values of one size


@pytest.mark.parametrize("arch", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_texts_beside_others(arch: str, attention: str) -> None:
    """Attention that takes each sequence's keys alone had none: a layer had made keys of the pass's latents only."""
    model = tiny_model(arch, **EQUAL_HEADS)
    rng = random.Random(2)
    texts = [drawn_text(rng, 20 + 30 * index) for index in range(3)]
    decoder = lp.LookaheadDecoder(model, CONFIG, attention=attention)
    with lp.Engine(decoder, max_sequences=3) as engine:
        handles = [engine.submit(ids, 16, eos_token_id=()) for ids in texts]
        engine.run()
        found = [handle.result().tokens for handle in handles]
    oracle = lp.AutoregressiveDecoder(model)
    assert found == [oracle.generate(ids, 16, eos_token_id=()).tokens for ids in texts]


def test_products_have_one_size_in_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of as many rows as there are cached tokens is of a width that nobody has asked the model about."""
    model = tiny_model("deepseek_v3", dtype=torch.float32)
    layer = type(model.model.layers[0].self_attn)
    if not hasattr(layer, EXPAND_LATENTS):
        pytest.skip("this release of transformers caches keys and values")
    expand = getattr(layer, EXPAND_LATENTS)
    sizes = []

    def noting(self: torch.nn.Module, *latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(latents[0].shape[2])
        expanded: tuple[torch.Tensor, torch.Tensor] = expand(self, *latents)
        return expanded

    monkeypatch.setattr(layer, EXPAND_LATENTS, noting)
    decoder = lp.PlainDecoder(model, exact="bitwise")
    assert BLOCK in decoder.runner.widths
    sizes.clear()
    decoder.generate(drawn_text(random.Random(1), 150), 8, eos_token_id=())
    assert {*sizes} == {BLOCK}
