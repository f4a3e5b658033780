"""Attention backends against plain attention in float64, on drawn steps."""

from __future__ import annotations

import functools
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import lp
from lp.attention import flash_cuda
from lp.attention.base import StepView
from lp.attention.flash import BLOCK, SHORT, flash_attention_forward, step_attention
from lp.attention.flex import block_mask
from lp.attention.masks import StepMasks
from lp.attention.merging import masked_attention, merge, with_sinks
from lp.attention.registry import backend_named
from lp.models.runner import ModelRunner
from tests.support.layouts import drawn_layout, visible_of
from tests.support.tiny_models import drawn_text, plain_greedy, tiny_config, tiny_model

HEADS = [(4, 4), (4, 2), (6, 1)]  # query heads, KV heads
DIMS = [64, 80, 96, 128]
PREFIXES = [0, 1, 17, 512, 8192]
# Largest error, in units of the dtype's eps, over the largest value. An output is a mean of values under weights that
# add up to 1. Sums are in float32 at least: where weights and the result are rounded to half precision, that is a
# quarter of an eps each at most; elsewhere the scores, of some units, carry an eps each into the weights.
TOLERANCE = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 0.5, torch.float16: 0.5}


def _reference(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GND: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax of the scores of what is seen, in float64, a head at a time: (1, H, T, D). A sink is one score more."""
    q, k, v = (states[0].double() for states in (q_1HTD, k_1GND, v_1GND))
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    seen[:, k.shape[1] - len(visible) :] = visible
    outputs = []
    for head in range(len(q)):
        kv = head * len(k) // len(q)
        scores = (q[head] @ k[kv].T * scale).masked_fill(~seen, -torch.inf)
        sink = scores.new_full((len(scores), 1), -torch.inf if sinks_H is None else float(sinks_H[head]))
        outputs.append(torch.cat([scores, sink], 1).softmax(-1)[:, :-1] @ v[kv])
    return torch.stack(outputs)[None]


def _drawn(
    rng: random.Random, heads: tuple[int, int], dim: int, prefix: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as a model lays them out, the last two as views of larger buffers, and what is seen."""
    torch.manual_seed(rng.randrange(2**31))
    visible = torch.from_numpy(visible_of(drawn_layout(rng)))
    num_tokens = len(visible)
    q = torch.randn(1, num_tokens, heads[0], dim).transpose(1, 2)
    k, v = (torch.randn(1, heads[1], prefix + num_tokens + 9, dim)[:, :, : prefix + num_tokens] for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype), visible


def _own_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None]


def _check(output: torch.Tensor, expected: torch.Tensor, values: torch.Tensor, roundings: int = 1) -> None:
    """Compare with the reference; halves may be rounded more than once on the way."""
    assert output.shape == expected.shape and output.dtype == values.dtype
    error = float((output.double() - expected).abs().max() / values.double().abs().max())
    assert error <= roundings * TOLERANCE[values.dtype] * torch.finfo(values.dtype).eps


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_flash(prefix: int, dtype: torch.dtype) -> None:
    """Both halves, their merge and the shares of keys among query heads; short prefixes go another way."""
    rng = random.Random(prefix)
    for heads in HEADS:
        for dim in DIMS:
            q, k, v, visible = _drawn(rng, heads, dim, prefix, dtype)
            scale = rng.choice([dim**-0.5, 1 / dim])
            output = step_attention(q, k, v, _own_mask(visible, dtype), scale)
            _check(output, _reference(q, k, v, visible, scale), v)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_flash_with_sinks(prefix: int, dtype: torch.dtype) -> None:
    """gpt_oss: one score more in each head's softmax, in every way that a step is computed on a CPU; large ones too."""
    rng = random.Random(prefix)
    for heads in HEADS:
        q, k, v, visible = _drawn(rng, heads, 64, prefix, dtype)
        for sinks in (torch.randn(heads[0]), torch.full((heads[0],), 60.0), torch.full((heads[0],), -60.0)):
            expected = _reference(q, k, v, visible, 0.2, sinks.to(dtype))
            output = step_attention(q, k, v, _own_mask(visible, dtype), 0.2, sinks_H=sinks.to(dtype))
            _check(output, expected, v, roundings=2)
            beyond = [torch.cat([states, torch.full_like(states[:, :, :7], 1e4)], 2) for states in (k, v)]
            slots = prefix + torch.arange(len(visible))
            output = step_attention(q, *beyond, _own_mask(visible, dtype), 0.2, slots, sinks_H=sinks.to(dtype))
            _check(output, expected, v, roundings=2)


@pytest.mark.parametrize("kind", ["a prompt without a mask", "a mask over all keys", "a bool mask", "one token"])
def test_sinks_where_a_mask_is_not_a_steps_own(kind: str) -> None:
    """Passes of a sliding window and prompts, which go to sdpa without sinks; sdpa would leave them out in silence."""
    torch.manual_seed(3)
    num_tokens, prefix = (1, 40) if kind == "one token" else (150, 0 if "without" in kind else 40)
    q, k, v = (torch.randn(1, heads, n, 64) for heads, n in ((4, num_tokens), *[(2, prefix + num_tokens)] * 2))
    sinks = torch.randn(4)
    visible = torch.ones(num_tokens, num_tokens).tril().bool()
    mask = torch.nn.functional.pad(_own_mask(visible, q.dtype), (prefix, 0))
    given = {"a mask over all keys": mask, "a bool mask": mask == 0}.get(kind)
    output = flash_attention_forward(nn.Module(), q, k, v, given, 0.2, s_aux=sinks)[0].transpose(1, 2)
    _check(output, _reference(q, k, v, visible, 0.2, sinks), v)


def test_texts_with_sinks() -> None:
    """Alone, and several in one step, whose keys come in parts; large sinks, so that each counts."""
    model = tiny_model("gpt_oss")
    for module in model.modules():
        if isinstance(sinks := module._parameters.get("sinks"), nn.Parameter):
            sinks.data.normal_(2, 1)
    prompts = [drawn_text(random.Random(seed), 5 + 9 * seed) for seed in range(3)]
    expected = [plain_greedy(model, prompt, 30) for prompt in prompts]
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4))
    assert decoder.attention == "flash"
    assert [decoder.generate(prompt, 30).tokens for prompt in prompts] == expected
    assert [output.tokens for output in decoder.generate_batch(prompts, 30)] == expected


def test_flash_of_a_prompt() -> None:
    """Blocks of tokens must see all tokens before them, their own up to each, and no fewer at the ragged end."""
    rng = random.Random(0)
    for prefix in (0, 17, SHORT + 3):
        for num_tokens in (BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5):
            torch.manual_seed(num_tokens)
            q, (k, v) = torch.randn(1, 4, num_tokens, 64), torch.randn(2, 1, 2, prefix + num_tokens, 64)
            visible = torch.from_numpy(np.tri(num_tokens, dtype=bool))
            visible[rng.randrange(1, num_tokens), 0] = False
            output = step_attention(q, k, v, _own_mask(visible, q.dtype))
            _check(output, _reference(q, k, v, visible, 64**-0.5), v)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_flash_over_all_cache_slots(prefix: int) -> None:
    """Where the length is data, slots behind the step must stay unseen whatever they hold."""
    rng = random.Random(prefix)
    for heads in HEADS:
        for dim in DIMS:
            q, k, v, visible = _drawn(rng, heads, dim, prefix, torch.float32)
            beyond = [torch.cat([states, torch.full_like(states[:, :, :7], 1e4)], 2) for states in (k, v)]
            slot_mapping = prefix + torch.arange(len(visible))
            output = step_attention(q, *beyond, _own_mask(visible, q.dtype), dim**-0.5, slot_mapping)
            _check(output, _reference(q, k, v, visible, dim**-0.5), v)


def test_masked_attention_and_merge() -> None:
    """What a GPU uses for the step's own keys, and the merge, on any split of the keys."""
    rng = random.Random(0)
    for heads in HEADS:
        for dim in DIMS:
            q, k, v, visible = _drawn(rng, heads, dim, 0, torch.float32)
            expected = _reference(q, k, v, visible, 0.1)
            whole = _own_mask(visible, q.dtype)
            _check(masked_attention(q, k, v, whole, 0.1)[0], expected, v)
            sinks = torch.randn(heads[0])
            with_own = masked_attention(q, k, v, whole, 0.1, sinks)
            _check(with_own[0], _reference(q, k, v, visible, 0.1, sinks), v)
            torch.testing.assert_close(with_sinks(*masked_attention(q, k, v, whole, 0.1), sinks), with_own)
            split = rng.randint(1, max(len(visible) - 1, 1))  # some tokens see nothing of the right part
            halves = [
                masked_attention(q, k[:, :, part], v[:, :, part], whole[..., part], 0.1)
                for part in (slice(split), slice(split, None) if split < len(visible) else slice(split))
            ]
            _check(merge(*halves[0], *halves[1]), expected, v)
            _check(merge(*halves[1], *halves[0]), expected, v)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flash", "flex"])
def test_masks_show_what_the_step_sees(backend: str) -> None:
    """One token off, a mask would hide the text's last token or show a rejected one."""
    config = tiny_config("llama")
    masks = StepMasks(config, torch.float32, torch.device("cpu"), backend_named(backend))
    for seed in range(30):
        rng = random.Random(seed)
        visible = torch.from_numpy(visible_of(drawn_layout(rng)))
        num_tokens = len(visible)
        if num_tokens == 1:  # some backends take no mask for it
            continue
        length = rng.choice([0, 1, 17])
        slots = length + torch.arange(num_tokens)
        positions = length + visible.sum(1) - 1
        for slot_mapping, total in ((None, length + num_tokens), (slots, length + num_tokens + 5)):
            shown_length = length if slot_mapping is None else total
            mask = masks.build(StepView(visible, positions, shown_length, slot_mapping, None, torch.float32))
            if backend == "flash":
                assert isinstance(mask, torch.Tensor) and torch.equal(mask[0, 0] == 0, visible)
                continue
            expected = torch.zeros(num_tokens, total, dtype=torch.bool)
            expected[:, :length] = True
            expected[:, length : length + num_tokens] = visible
            if backend == "flex":
                keys = torch.arange(total)
                shown = mask.mask_mod(0, 0, torch.arange(num_tokens)[:, None], keys[None])  # type: ignore[union-attr]
            else:
                shown = mask[0, 0] == 0  # type: ignore[index]
            assert torch.equal(shown, expected)


def test_flex_is_plain_attention_under_its_mask() -> None:
    """FlexAttention runs here as it is written; on a GPU compiled, which tests/gpu holds against the same expected."""
    from torch.nn.attention.flex_attention import flex_attention

    rng = random.Random(1)
    for prefix in (0, 17, 512):
        q, k, v, visible = _drawn(rng, (4, 2), 64, prefix, torch.float32)
        seen = torch.cat([torch.ones(len(visible), prefix, dtype=torch.bool), visible], 1)
        output = flex_attention(q, k, v, block_mask=block_mask(seen), enable_gqa=True, scale=0.1)
        _check(output, _reference(q, k, v, visible, 0.1), v)


def test_full_masks_go_to_sdpa() -> None:
    """Plain decoding and `generate` meet the same function with masks over all keys, or none."""
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True  # type: ignore[assignment]
    q, k, v = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 8, 64), torch.randn(1, 2, 8, 64)
    for mask in (None, torch.rand(1, 1, 3, 8) > 0.3):
        output = flash_attention_forward(module, q, k, v, mask, scaling=0.2, dropout=0.0)[0]
        assert torch.equal(output, sdpa_attention_forward(module, q, k, v, mask, scaling=0.2, dropout=0.0)[0])


@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "mistral_sliding", "gemma3"])
def test_backends_give_the_same_logits(arch: str) -> None:
    """Through a whole model, past the length at which flash splits the keys, and through prefill in chunks."""
    text = drawn_text(random.Random(5), SHORT + 40)
    visible = visible_of(drawn_layout(random.Random(4)))
    positions = [len(text) + int(row.sum()) - 1 for row in visible]
    logits = []
    for backend in ("sdpa", "flash", "eager"):
        runner = ModelRunner(tiny_model(arch, max_position_embeddings=1024), backend)
        assert runner.attention == backend
        with torch.inference_mode():
            cache = runner.new_cache(len(text) + len(visible))
            runner.prefill(text, cache, 200)
            logits.append(runner.forward(text[: len(positions)], positions, visible, cache, range(len(visible))))
    errors = [float((other - logits[0]).abs().max()) for other in logits[1:]]
    assert errors[0] < 1e-12 and errors[1] < 1e-5  # eager takes its softmax in float32


def test_auto_takes_flash_where_it_can() -> None:
    """Loaded with eager, a model stays so: its user may have reasons; what flash would get wrong runs with sdpa."""
    assert ModelRunner(tiny_model("llama")).attention == "flash"
    assert ModelRunner(tiny_model("llama", attention="eager")).attention == "eager"
    assert ModelRunner(tiny_model("gpt_oss")).attention == "flash"  # transformers has only eager for sinks
    assert ModelRunner(tiny_model("falcon")).attention == "sdpa"  # cannot change its attention
    twice = tiny_model("llama")
    assert [ModelRunner(twice).attention, ModelRunner(twice).attention] == ["flash"] * 2
    with pytest.raises(ValueError, match="on a CPU"):
        lp.LookaheadDecoder(tiny_model("llama"), attention="flex")
    with pytest.raises(ValueError, match="choose attention=sdpa"):
        lp.LookaheadDecoder(tiny_model("falcon"), attention="flash")


def test_a_compiled_step_has_its_kernel_compiled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of a kernel reads its results, which a graph that is compiled as a whole can't."""
    trials = []

    def plain(*given: Any) -> torch.Tensor:
        q, k, v, mask, scale, slots, sinks_H = given
        if slots is not None:
            trials.append(1)  # only a trial has slots here
            end = int(slots[-1]) + 1
            k, v = k[:, :, :end], v[:, :, :end]
        mask = torch.nn.functional.pad(mask, (k.shape[2] - mask.shape[3], 0))
        return masked_attention(q, k, v, mask, scale, sinks_H)[0]

    monkeypatch.setattr(flash_cuda, "KERNELS", {"plain": plain})
    monkeypatch.setattr(flash_cuda, "_first_fit", functools.cache(flash_cuda._first_fit.__wrapped__))
    q, k, v, visible = _drawn(random.Random(0), (4, 2), 24, 17, torch.float32)
    step = torch.compile(flash_cuda.step_attention_on_cuda, backend="eager", fullgraph=True)
    with torch.inference_mode():
        for _ in range(2):
            output = step(q, k, v, _own_mask(visible, q.dtype), 0.1, None)
            _check(output, _reference(q, k, v, visible, 0.1), v)
    assert len(trials) == len(flash_cuda.TRIAL_LENGTHS) * len(flash_cuda.TRIAL_TOKENS)


@pytest.mark.parametrize(("arch", "reason"), [("deepseek_v2", "cannot run"), ("deepseek_v3", "cannot run")])
def test_auto_says_why_it_does_not_take_flash(arch: str, reason: str) -> None:
    """A slower backend that is taken without a word is found out by nobody."""
    with pytest.warns(UserWarning, match=rf"attention is sdpa: .* with flash attention {reason} a tree"):
        assert ModelRunner(tiny_model(arch)).attention == "sdpa"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelRunner(tiny_model(arch), "sdpa")
        ModelRunner(tiny_model("llama"))


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flash"])
def test_logits_of_the_last_tokens_alone(backend: str) -> None:
    """What a step with catch-up tokens asks for: Gemma 4 drops other tokens before the mask if they have a number."""
    runner = ModelRunner(tiny_model("gemma4"), backend)
    visible = np.tri(6, dtype=bool)
    found = []
    for wanted in (range(6), range(4, 6)):
        cache = runner.new_cache(20)
        runner.prefill(range(10), cache, 10)
        found.append(runner.forward(range(10, 16), range(10, 16), visible, cache, wanted).clone()[-2:])
    torch.testing.assert_close(*found)


def test_masked_attention_takes_large_scores() -> None:
    """Keys of some models are so large that products of halves overflow before they are scaled."""
    for dtype in (torch.float16, torch.bfloat16):
        q = torch.full((1, 2, 3, 128), 24.0, dtype=dtype)
        v = torch.randn(1, 2, 3, 128).to(dtype)
        visible = torch.ones(3, 3).tril().bool()
        output = masked_attention(q, q, v, _own_mask(visible, dtype), None)[0]
        _check(output, _reference(q, q, v, visible, 128**-0.5), v)
