"""Attention backends against plain attention in float64, on drawn steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import lp
from lp.attention import StepMasks
from lp.attention.flash import BLOCK, SHORT, masked, merge, step_attention
from lp.attention.hf import flash_attention_forward
from lp.attention.masks import block_mask
from lp.config import Attention
from lp.models.runner import ModelRunner
from tests.layouts import drawn_layout
from tests.tiny_models import drawn_text, tiny_config, tiny_model

HEADS = [(4, 4), (4, 2), (6, 1)]  # query heads, KV heads
DIMS = [64, 80, 96, 128]
PREFIXES = [0, 1, 17, 512, 8192]
# Largest error, in units of the dtype's eps, over the largest value. An output is a mean of values under weights that
# add up to 1. Sums are in float32 at least: where weights and the result are rounded to half precision, that is a
# quarter of an eps each at most; elsewhere the scores, of some units, carry an eps each into the weights.
TOLERANCE = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 0.5, torch.float16: 0.5}


def _oracle(
    q_1HTD: torch.Tensor, k_1GND: torch.Tensor, v_1GND: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax of the scores of what is seen, in float64, a head at a time: (1, H, T, D)."""
    q, k, v = (states[0].double() for states in (q_1HTD, k_1GND, v_1GND))
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    seen[:, k.shape[1] - len(visible) :] = visible
    outputs = []
    for head in range(len(q)):
        kv = head * len(k) // len(q)
        scores = (q[head] @ k[kv].T * scale).masked_fill(~seen, -torch.inf)
        outputs.append(scores.softmax(-1) @ v[kv])
    return torch.stack(outputs)[None]


def _drawn(
    rng: random.Random, heads: tuple[int, int], dim: int, prefix: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as a model lays them out, the last two as views of larger buffers, and what is seen."""
    torch.manual_seed(rng.randrange(2**31))
    visible = torch.from_numpy(drawn_layout(rng).visible())
    rows = len(visible)
    q = torch.randn(1, rows, heads[0], dim).transpose(1, 2)
    k, v = (torch.randn(1, heads[1], prefix + rows + 9, dim)[:, :, : prefix + rows] for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype), visible


def _own_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None]


def _check(said: torch.Tensor, truth: torch.Tensor, values: torch.Tensor) -> None:
    assert said.shape == truth.shape and said.dtype == values.dtype
    error = float((said.double() - truth).abs().max() / values.double().abs().max())
    assert error <= TOLERANCE[values.dtype] * torch.finfo(values.dtype).eps


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_flash(prefix: int, dtype: torch.dtype) -> None:
    """Both halves, their merge and the shares of keys among query heads; short prefixes go another way."""
    rng = random.Random(prefix)
    for heads in HEADS:
        for dim in DIMS:
            q, k, v, visible = _drawn(rng, heads, dim, prefix, dtype)
            scale = rng.choice([dim**-0.5, 1 / dim])
            said = step_attention(q, k, v, _own_mask(visible, dtype), scale)
            _check(said, _oracle(q, k, v, visible, scale), v)


def test_flash_of_a_prompt() -> None:
    """Blocks of rows must see all rows before them, their own up to each, and no fewer at the ragged end."""
    rng = random.Random(0)
    for prefix in (0, 17, SHORT + 3):
        for rows in (BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5):
            torch.manual_seed(rows)
            q, (k, v) = torch.randn(1, 4, rows, 64), torch.randn(2, 1, 2, prefix + rows, 64)
            visible = torch.from_numpy(np.tri(rows, dtype=bool))
            visible[rng.randrange(1, rows), 0] = False
            said = step_attention(q, k, v, _own_mask(visible, q.dtype))
            _check(said, _oracle(q, k, v, visible, 64**-0.5), v)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_flash_in_whole_buffers(prefix: int) -> None:
    """Where the length is data, rows behind the step must stay unseen whatever they hold."""
    rng = random.Random(prefix)
    for heads in HEADS:
        for dim in DIMS:
            q, k, v, visible = _drawn(rng, heads, dim, prefix, torch.float32)
            beyond = [torch.cat([states, torch.full_like(states[:, :, :7], 1e4)], 2) for states in (k, v)]
            places = prefix + torch.arange(len(visible))
            said = step_attention(q, *beyond, _own_mask(visible, q.dtype), dim**-0.5, places)
            _check(said, _oracle(q, k, v, visible, dim**-0.5), v)


def test_plain_half_and_merge() -> None:
    """What a GPU uses for the step's own rows, and the merge, on any split of the keys."""
    rng = random.Random(0)
    for heads in HEADS:
        for dim in DIMS:
            q, k, v, visible = _drawn(rng, heads, dim, 0, torch.float32)
            truth = _oracle(q, k, v, visible, 0.1)
            whole = _own_mask(visible, q.dtype)
            _check(masked(q, k, v, whole, 0.1)[0], truth, v)
            split = rng.randint(1, max(len(visible) - 1, 1))  # some rows see nothing of the right part
            halves = [
                masked(q, k[:, :, part], v[:, :, part], whole[..., part], 0.1)
                for part in (slice(split), slice(split, None) if split < len(visible) else slice(split))
            ]
            _check(merge(*halves[0], *halves[1]), truth, v)
            _check(merge(*halves[1], *halves[0]), truth, v)


@pytest.mark.parametrize("backend", [Attention.SDPA, Attention.EAGER, Attention.FLASH, Attention.FLEX])
def test_masks_show_what_the_step_sees(backend: Attention) -> None:
    """One row off, a mask would hide the text's last token or show a rejected one."""
    config = tiny_config("llama")
    masks = StepMasks(config, torch.float32, torch.device("cpu"), backend)
    for seed in range(30):
        rng = random.Random(seed)
        visible = torch.from_numpy(drawn_layout(rng).visible())
        rows, length = len(visible), rng.choice([0, 1, 17])
        positions = length + visible.sum(1) - 1
        for places, total in ((None, length + rows), (length + torch.arange(rows), length + rows + 5)):
            mask = masks.build(visible, positions, length if places is None else total, places)
            if backend is Attention.FLASH:
                assert isinstance(mask, torch.Tensor) and torch.equal(mask[0, 0] == 0, visible)
                continue
            truth = torch.zeros(rows, total, dtype=torch.bool)
            truth[:, :length] = True
            truth[:, length : length + rows] = visible
            if backend is Attention.FLEX:
                at = torch.arange(total)
                shown = mask.mask_mod(0, 0, torch.arange(rows)[:, None], at[None])  # type: ignore[union-attr]
            else:
                shown = mask[0, 0] == 0  # type: ignore[index]
            assert torch.equal(shown, truth)


def test_flex_is_plain_attention_under_its_mask() -> None:
    """FlexAttention runs here as it is written; on a GPU compiled, which tests/gpu holds against the same truth."""
    from torch.nn.attention.flex_attention import flex_attention

    rng = random.Random(1)
    for prefix in (0, 17, 512):
        q, k, v, visible = _drawn(rng, (4, 2), 64, prefix, torch.float32)
        seen = torch.cat([torch.ones(len(visible), prefix, dtype=torch.bool), visible], 1)
        said = flex_attention(q, k, v, block_mask=block_mask(seen), enable_gqa=True, scale=0.1)
        _check(said, _oracle(q, k, v, visible, 0.1), v)


def test_full_masks_go_to_sdpa() -> None:
    """Plain decoding and `generate` meet the same function with masks over all keys, or none."""
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True  # type: ignore[assignment]
    q, k, v = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 8, 64), torch.randn(1, 2, 8, 64)
    for mask in (None, torch.rand(1, 1, 3, 8) > 0.3):
        said = flash_attention_forward(module, q, k, v, mask, scaling=0.2, dropout=0.0)[0]
        assert torch.equal(said, sdpa_attention_forward(module, q, k, v, mask, scaling=0.2, dropout=0.0)[0])


@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "mistral_sliding", "gemma3"])
def test_backends_give_the_same_logits(arch: str) -> None:
    """Through a whole model, past the length at which flash splits the keys, and through prefill in chunks."""
    text = drawn_text(random.Random(5), SHORT + 40)
    visible = np.array(drawn_layout(random.Random(4)).visible())
    positions = [len(text) + int(row.sum()) - 1 for row in visible]
    logits = []
    for backend in (Attention.SDPA, Attention.FLASH, Attention.EAGER):
        runner = ModelRunner(tiny_model(arch, max_position_embeddings=1024), backend)
        assert runner.attention is backend
        with torch.inference_mode():
            cache = runner.new_cache(len(text) + len(visible))
            runner.prefill(text, cache, 200)
            logits.append(runner.forward(text[: len(positions)], positions, visible, cache, range(len(visible))))
    errors = [float((other - logits[0]).abs().max()) for other in logits[1:]]
    assert errors[0] < 1e-12 and errors[1] < 1e-5  # eager takes its softmax in float32


def test_auto_takes_flash_where_it_can() -> None:
    """Loaded with eager, a model stays so: its user may have reasons; what flash would get wrong runs with sdpa."""
    assert ModelRunner(tiny_model("llama")).attention is Attention.FLASH
    assert ModelRunner(tiny_model("llama", attention="eager")).attention is Attention.EAGER
    for arch in ("falcon", "gemma4", "deepseek_v3"):
        assert ModelRunner(tiny_model(arch)).attention is Attention.SDPA
    twice = tiny_model("llama")
    assert [ModelRunner(twice).attention, ModelRunner(twice).attention] == [Attention.FLASH] * 2
    with pytest.raises(ValueError, match="on a CPU"):
        lp.LookaheadDecoder(tiny_model("llama"), attention="flex")
    with pytest.raises(ValueError, match="choose attention=sdpa"):
        lp.LookaheadDecoder(tiny_model("falcon"), attention="flash")


def test_the_plain_half_takes_large_scores() -> None:
    """Keys of some models are so large that products of halves overflow before they are scaled."""
    for dtype in (torch.float16, torch.bfloat16):
        q = torch.full((1, 2, 3, 128), 24.0, dtype=dtype)
        v = torch.randn(1, 2, 3, 128).to(dtype)
        visible = torch.ones(3, 3).tril().bool()
        _check(masked(q, q, v, _own_mask(visible, dtype), None)[0], _oracle(q, q, v, visible, 128**-0.5), v)
