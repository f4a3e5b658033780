"""Decoders as their callers use them: reuse, stops, callbacks, memory, bad input."""

from __future__ import annotations

import gc
import random
from typing import Any, cast

import pytest
import torch
from transformers import MaxTimeCriteria

import lp
from lp.engine.stopping import Stopping
from lp.models.runner import ModelRunner
from lp.parallel.message import Stop
from tests.conftest import LONG
from tests.support.tiny_models import CONTEXT, VOCABULARY, letters, plain_greedy, tiny_model

CONFIG = lp.LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=5)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
DECODERS = [
    lp.AutoregressiveDecoder,
    lp.PlainDecoder,
    lambda m: lp.LookaheadDecoder(m, CONFIG),
    lambda m: lp.LookaheadDecoder(m, lp.PromptLookupConfig()),
]


def test_a_decoder_is_reusable() -> None:
    """State that leaks between calls made another system wrong after the first: interleave prompts and settings."""
    decoder = lp.LookaheadDecoder(tiny_model(), CONFIG)
    rng = random.Random(0)
    calls = [([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 90))], rng.randint(1, 60)) for _ in range(5)]

    def once(ids: list[int], new: int) -> tuple[list[int], list[int]]:
        output = decoder.generate(ids, new)
        return output.tokens, [step.accepted for step in output.step_stats]

    first = [once(*call) for call in calls]
    for i in [4, 0, 0, 3, 2, 1, 4]:
        assert once(*calls[i]) == first[i]


@pytest.mark.parametrize("make", DECODERS)
def test_callback_gets_every_token_once(make: Any) -> None:
    """A streamed text that differs from the returned one cannot be trusted."""
    seen: list[tuple[list[int], int]] = []
    eos = plain_greedy(tiny_model(), PROMPT, 40)[25]
    output = make(tiny_model()).generate(PROMPT, 40, eos_token_id=[eos], on_tokens=lambda t, s: seen.append((t, s)))
    assert [t for tokens, _ in seen for t in tokens] == output.tokens
    assert [step for _, step in seen] == list(range(output.steps))
    assert output.tokens[-1] == eos and output.finish_reason == "eos"


@pytest.mark.parametrize("make", DECODERS)
def test_criteria_cut_inside_a_step(make: Any) -> None:
    """A step brings several tokens; a criterion met by the first must drop the rest."""
    plain = plain_greedy(tiny_model(), PROMPT, 60)
    token = plain[30]
    expected = plain[: 10 + plain[10:].index(token) + 1]

    def late_token(ids: torch.Tensor, scores: Any) -> bool:
        return int(ids[0, -1]) == token and ids.shape[1] > len(PROMPT) + 10

    output = make(tiny_model()).generate(PROMPT, 60, stopping_criteria=[late_token])
    assert (output.tokens, output.finish_reason) == (expected, "criteria")
    assert make(tiny_model()).generate(PROMPT, 60, stopping_criteria=[MaxTimeCriteria(0.0)]).finish_reason == "criteria"


def test_criteria_get_ids_on_the_models_device() -> None:
    """A criterion that holds tensors on the GPU, as those of `generate` may, fails on ids from elsewhere."""
    seen: list[torch.device] = []

    def criterion(ids: torch.Tensor, scores: Any) -> bool:
        seen.append(ids.device)
        return False

    stopping = Stopping.build(frozenset(), 9, None, PROMPT, None, None, [cast(Any, criterion)], torch.device("meta"))
    assert stopping.check([1, 2], 2)[1] == 2
    assert [device.type for device in seen] == ["meta", "meta"]


def test_criteria_cost_no_conversion_of_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 100,000 tokens of a prompt, every new token took a hundredth of a second for its stop strings."""
    converted: list[int] = []
    seen: list[torch.Tensor] = []
    tensor = torch.tensor

    def noted(values: Any, **kwargs: Any) -> torch.Tensor:
        converted.append(tensor(values, **kwargs).numel())
        return tensor(values, **kwargs)

    def criterion(ids: torch.Tensor, scores: Any) -> bool:
        assert ids.dtype == torch.int64
        seen.append(ids.clone())
        ids.zero_()  # its own affair
        return False

    monkeypatch.setattr("lp.engine.stopping.ROOM", 1)
    prompt, rng = [*range(100)], random.Random(1)
    stopping = Stopping.build(
        frozenset({7}), 999, None, prompt, None, None, [cast(Any, criterion)], torch.device("cpu")
    )
    monkeypatch.setattr(torch, "tensor", noted)
    tokens: list[int] = []
    while len(tokens) < 200:
        new = rng.randrange(1, 5)
        tokens += [10 + rng.randrange(50) for _ in range(new)]
        stopping.check(tokens, new)
    assert [ids.tolist() for ids in seen] == [[[*prompt, *tokens[:count]]] for count in range(1, len(tokens) + 1)]
    assert sum(converted) == len(prompt) + len(tokens)
    assert stopping.check([*tokens[:50], 8, 9], 2) == (Stop.NONE, 52), "of another text that begins alike"
    assert seen[-1].tolist() == [[*prompt, *tokens[:50], 8, 9]]


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("make", DECODERS)
def test_eos_as_the_first_token_ends_the_text(make: Any, new: int) -> None:
    """A check that begins at the second token would answer where the model says that nothing is to be added."""
    seen: list[int] = []
    first = plain_greedy(tiny_model(), PROMPT, 1)
    output = make(tiny_model()).generate(PROMPT, new, eos_token_id=first, on_tokens=lambda t, s: seen.extend(t))
    assert (output.tokens, output.finish_reason, output.steps, seen) == (first, "eos", 1, first)
    assert plain_greedy(tiny_model(), PROMPT, new, eos_token_id=first) == first


def test_a_failing_callback_is_the_callers_error() -> None:
    """Swallowed, it would hide a full disk; wrapped, it could not be caught by its type."""

    def on_tokens(tokens: list[int], step: int) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        lp.LookaheadDecoder(tiny_model(), CONFIG).generate(PROMPT, 9, on_tokens=on_tokens)


@pytest.mark.parametrize("steps", [500 if LONG else 150])
def test_memory_does_not_grow_with_steps(steps: int) -> None:
    """Re-concatenated caches and kept activations are what made long generations slow elsewhere."""
    model = tiny_model(max_position_embeddings=4096)
    config = lp.LookaheadConfig(
        window_size=3, ngram_size=3, guess_set_size=0, ablation=lp.Ablation(prompt_ngrams=False)
    )
    held: list[int] = []

    def tensor_bytes() -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def on_tokens(tokens: list[int], step: int) -> None:
        if step in (5, steps - 5):
            held.append(tensor_bytes())

    def long_enough(ids: torch.Tensor, scores: Any) -> bool:
        return ids.shape[1] - len(PROMPT) >= steps * 4  # a step brings at most N + 1 = 4 tokens here

    output = lp.LookaheadDecoder(model, config).generate(
        PROMPT, 4000, on_tokens=on_tokens, stopping_criteria=[long_enough]
    )
    assert output.steps >= steps and len(held) == 2
    assert held[1] == held[0]
    heads, head_dim, layers = 2, 8, 2
    assert output.cache_bytes == 2 * layers * heads * head_dim * 8 * (len(PROMPT) + 4000 + 3 * 2)


def test_the_cache_is_no_larger_than_the_context() -> None:
    """Asking for "as much as fits" with a huge number must not allocate that many rows."""
    huge = lp.LookaheadDecoder(tiny_model(), CONFIG).generate(PROMPT, 10**12)
    assert huge.finish_reason == "context" and len(PROMPT) + len(huge.tokens) == CONTEXT
    exact = lp.LookaheadDecoder(tiny_model(), CONFIG).generate(PROMPT, CONTEXT - len(PROMPT))
    assert huge.cache_bytes == exact.cache_bytes


def test_only_read_rows_go_through_the_head() -> None:
    """The LM head over every slot costs a fifth of a small model's step."""
    model, rows = tiny_model(), []
    shape = {"window_size": 6, "ngram_size": 5, "guess_set_size": 0}
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(**shape, ablation=lp.Ablation(prompt_logits=False)))
    model.lm_head.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[1]))
    decoder.generate(PROMPT, 60)
    # c and row 0 (6), column 0's middle rows (2), the last row (6): 14 of 24 slots; prefill reads one, or all.
    assert rows[0] == 1 and max(rows) == 14
    rows.clear()
    lp.LookaheadDecoder(model, lp.LookaheadConfig(**shape)).generate(PROMPT, 60)
    assert rows[0] == len(PROMPT) - 1 and max(rows[1:]) == 14


@pytest.mark.parametrize("value", [-1, 65537, 2.5, "7", True])
@pytest.mark.parametrize("name", ["window_size", "ngram_size", "guess_set_size"])
def test_bad_shapes_are_refused(name: str, value: Any) -> None:
    """The error names the value, the limit and the remedy."""
    with pytest.raises(ValueError, match=rf"{name}.*is {value!r}; it must be .*; try"):
        lp.LookaheadConfig(**{name: value})


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        ([], {}, "the prompt is empty"),
        (torch.zeros(1, 0, dtype=torch.long), {}, "the prompt is empty"),
        ([1] * CONTEXT, {}, f"{CONTEXT} tokens, the model's context {CONTEXT}"),
        ([1, VOCABULARY], {}, f"token id {VOCABULARY}.*0..{VOCABULARY - 1}"),
        ([1, -1], {}, "token id -1"),
        (torch.ones(3), {}, "token id 1.0"),
        ("abc", {}, "input_ids is 'abc'; give token ids"),
        (torch.ones(2, 3, dtype=torch.long), {}, "2 prompts"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (PROMPT, {"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
        (PROMPT, {"stop_strings": ["x"]}, "no tokenizer"),
        (PROMPT, {"stop_strings": "xyz"}, r"\['xyz'\] but no tokenizer"),
        (PROMPT, {"stop_strings": 5}, "stop_strings is 5; give a string"),
        (PROMPT, {"stop_strings": ["x", 5]}, "stop_strings has 5, which is no string"),
        (PROMPT, {"stop_strings": ""}, "stop_strings has an empty string"),
    ],
)
@pytest.mark.parametrize("make", DECODERS)
def test_bad_calls_are_refused(make: Any, ids: Any, kwargs: dict[str, Any], message: str) -> None:
    """Every decoder refuses the same calls in the same words."""
    with pytest.raises(ValueError, match=message):
        make(tiny_model()).generate(ids, **kwargs)


@pytest.mark.parametrize("make", DECODERS)
def test_a_string_is_one_stop_string(make: Any) -> None:
    """Taken as a list of its letters, it ends the text at the first of them, and `generate` ends it later."""
    model, tokenizer = tiny_model(), letters(VOCABULARY)
    stop = tokenizer.decode(plain_greedy(model, PROMPT, 20))[-6:]
    expected = plain_greedy(model, PROMPT, 40, stop_strings=stop, tokenizer=tokenizer)
    output = make(model).generate(PROMPT, 40, stop_strings=stop, tokenizer=tokenizer)
    assert (output.tokens, output.finish_reason) == (expected, "stop_string")
    assert len(expected) > 2


def test_an_unknown_kernel_is_refused_not_wrong() -> None:
    """A kernel that ignores the tree mask would give other tokens without a word."""
    model = tiny_model()
    model.config._attn_implementation = "sage_attention"
    with pytest.raises(ValueError, match=r"sage_attention.*no tree mask"):
        ModelRunner(model)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_a_model_loaded_with_flash_attention_runs_with_ours(implementation: str) -> None:
    """Its package takes no tree mask; ours is the same algorithm. The model itself stays as it was loaded."""
    model = tiny_model()
    expected = lp.AutoregressiveDecoder(model).generate(PROMPT, 12)
    model.config._attn_implementation = implementation  # the packages need a GPU
    output = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4)).generate(PROMPT, 12)
    assert (output.tokens, output.attention) == (expected.tokens, "flash")
    assert model.config._attn_implementation == implementation


def test_the_output_says_what_computed_attention() -> None:
    """`auto` may take another backend than its user thinks, which a figure would hide."""
    model = tiny_model()
    assert lp.AutoregressiveDecoder(model).generate(PROMPT, 2).attention == "transformers' sdpa"
    for attention in ("sdpa", "eager", "flash"):
        assert lp.LookaheadDecoder(model, attention=attention).generate(PROMPT, 2).attention == attention
