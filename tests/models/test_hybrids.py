"""Models with recurrent layers: the text of transformers' `generate`, whatever the tree, the ranks and the prompt."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

import lp
from lp.engine.journal import Journal
from lp.models.hybrid_cache import HybridCache
from lp.models.recurrent_layers import limits_prompt
from lp.models.releases import cache_in, cache_keyword
from lp.models.support import check_supported
from lp.models.tensor_parallel import divide
from lp.parallel.context import ParallelContext
from lp.parallel.replica import Replica
from tests.support.captured import captured_runner
from tests.support.switches import lookahead_config
from tests.support.thread_ranks import run_lockstep
from tests.support.tiny_models import MATRIX, drawn_text, plain_greedy, tiny_model

HYBRIDS = [
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "zamba2",
    "falcon_h1",
    "falcon_h1_norm",
    "mamba2",
    "lfm2",
    "lfm2_moe",
]
pytestmark = pytest.mark.skipif(not set(HYBRIDS) <= set(MATRIX), reason="this release of transformers lacks some")
BFLOAT16 = 0.1  # of the largest number of a state: what steps and a prefill round otherwise
SAMPLING = lp.SamplingParams(temperature=0.8, top_p=0.95, seed=3)


def drawn_config(rng: random.Random, ranks: int) -> lp.LookaheadConfig:
    """Any shape, or one that adapts; of several ranks, with either way to complete their caches."""
    options: dict[str, object] = {"kv_sync": rng.choice(["recompute", "broadcast"])} if ranks > 1 else {}
    if rng.random() < 0.3:
        return lookahead_config(**options)
    shape = {"window_size": rng.randint(0, 10), "ngram_size": rng.randint(2, 6), "guess_set_size": rng.randint(1, 10)}
    return lookahead_config(**shape, **options)


def drawn_case(arch: str, number: int) -> tuple[list[int], int, int, lp.LookaheadConfig, dict[str, int]]:
    """A prompt of 1 to 300 tokens, ranks, new tokens, a config, and how the prompt is cut."""
    rng = random.Random(f"{arch}-{number}")
    ids = drawn_text(rng, rng.choice([1, 2, rng.randint(3, 60), rng.randint(60, 300)]))
    ranks = [1, 1, 2, 3][number % 4]
    chunk = rng.choice([1, 3, 16, 64, 512])
    return ids, ranks, rng.randint(20, 40), drawn_config(rng, ranks), {"prefill_chunk": chunk}


@pytest.mark.subset(5)
@pytest.mark.parametrize("arch", HYBRIDS)
def test_text_is_that_of_generate(arch: str, cases: Callable[[int, int], range]) -> None:
    """A state that saw a token of another branch, twice or never; a prompt cut in chunks; a rank that lacks tokens."""
    for number in cases(2, 40):
        ids, ranks, new, config, options = drawn_case(arch, number)
        models = [tiny_model(arch, seed=number) for _ in range(ranks)]
        plain = plain_greedy(tiny_model(arch, seed=number), ids, new)

        oracle = lp.AutoregressiveDecoder(models[0])
        assert oracle.generate(ids, new).tokens == plain, f"case {number}: plain decoding"
        expected = plain, oracle.generate(ids, new, SAMPLING).tokens
        for rank, texts in enumerate(run_lockstep(ranks, partial(texts_of_rank, models, config, ids, new, options))):
            assert texts == expected, f"case {number}, rank {rank} of {ranks}"


def texts_of_rank(
    models: list[PreTrainedModel],
    config: lp.LookaheadConfig,
    ids: list[int],
    new: int,
    options: dict[str, int],
    context: ParallelContext,
) -> tuple[list[int], list[int]]:
    """A greedy text and a sampled one."""
    decoder = lp.LookaheadDecoder(models[context.rank], config, context)
    greedy = decoder.generate(ids, new, **options)
    return greedy.tokens, decoder.generate(ids, new, SAMPLING, **options).tokens


@pytest.mark.subset(4)
@pytest.mark.parametrize("arch", HYBRIDS)
def test_captured_steps_give_the_same_text(arch: str, cases: Callable[[int, int], range]) -> None:
    """Padding that reaches a state; a commit that the next captured step would have to do."""
    for number in cases(1, 20):
        ids, _, new, config, options = drawn_case(arch, 4 * number)
        model = tiny_model(arch, seed=number)
        decoder = lp.LookaheadDecoder(model, config)
        captured_runner(decoder, probe=True)
        for _ in range(2):  # the second text is generated in the cache of the first
            tokens = decoder.generate(ids, new, **options).tokens
            assert tokens == plain_greedy(tiny_model(arch, seed=number), ids, new), f"case {number}"


@pytest.mark.parametrize("arch", ["qwen3_5", "mamba2", "lfm2"])
def test_a_prompt_of_one_token_begins_with_no_state(arch: str) -> None:
    """Its first step has no prefill before it that would overwrite the state of the text before, in the same cache."""
    model = tiny_model(arch)
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=3, ngram_size=3, guess_set_size=3))
    captured_runner(decoder)
    for ids in ([3, 1, 4, 1, 5], [9]):
        assert decoder.generate(ids, 20).tokens == plain_greedy(model, ids, 20)


@pytest.mark.parametrize("arch", HYBRIDS)
def test_the_users_model_stays_as_it_was(arch: str) -> None:
    """A forward replaced on the model itself, or on its class, would be felt by everyone who uses it."""
    model = tiny_model(arch)
    before = [(name, type(module), dict(vars(module))) for name, module in model.named_modules()]
    forwards = {type(module): type(module).forward for module in model.modules()}
    lp.LookaheadDecoder(model).generate([1, 2, 3], 10)
    for (name, kind, attributes), (after, module) in zip(before, model.named_modules(), strict=True):
        kept = {key: value for key, value in vars(module).items() if not key.startswith("_lp_")}
        assert (name, kind) == (after, type(module)) and attributes.keys() == kept.keys()
    assert all(kind.forward is forward for kind, forward in forwards.items())


@pytest.mark.parametrize("arch", HYBRIDS)
def test_a_commit_runs_no_layer_again(arch: str) -> None:
    """Every token of a step passes the model once, and no other token does behind the prompt."""
    model = tiny_model(arch)
    passed: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: passed.append(args[0].shape[1]))
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=5, ngram_size=3, guess_set_size=5))
    passed.clear()
    ids = drawn_text(random.Random(arch), 20)
    output = decoder.generate(ids, 30)
    prompt = len(ids) - 1
    assert passed == [prompt, *(step.num_tokens for step in output.step_stats)]
    assert output.compression > 1  # or no draft token was committed


@pytest.mark.parametrize("arch", ["qwen3_5", "mamba2"])
def test_as_custom_generate(arch: str) -> None:
    """`generate` makes a cache of its own for such a model, and hands it over under a name of its own."""
    model = tiny_model(arch)
    options = {"window_size": 4, "ngram_size": 3, "guess_set_size": 4}
    assert plain_greedy(model, [3, 1, 4], 20, custom_generate=lp.generate, **options) == plain_greedy(
        model, [3, 1, 4], 20
    )
    if arch == "mamba2":
        cache = {cache_keyword(model): cache_in(model(torch.tensor([[3, 1]]), use_cache=True))}
        with pytest.raises(ValueError, match=f"{cache_keyword(model)} holds the state of a text"):
            lp.generate(model, torch.tensor([[3, 1, 4]]), **cache)


def test_a_layer_of_another_class_is_refused() -> None:
    """A subclass may compute anything; to run transformers' formulas in its place would be wrong text."""
    model = tiny_model("qwen3_next")
    layer = model.model.layers[0].linear_attn
    layer.__class__ = type("Mine", (type(layer),), {})
    with pytest.raises(ValueError, match=r"recurrent layers \(0\) of a class that is not transformers' own"):
        lp.LookaheadDecoder(model)


@pytest.mark.parametrize(
    ("arch", "reason"), [("mamba", "Mamba-1"), ("jamba", "Mamba-1"), ("minimax", "can't run over a tree")]
)
def test_other_recurrent_models_are_refused_by_name(arch: str, reason: str) -> None:
    """A state that this package cannot carry over a tree must not be taken for one that it can."""
    config = transformers.AutoConfig.for_model(arch)
    with pytest.raises(ValueError, match=rf"'{arch}'.*{reason}"):
        check_supported(config)


def test_bytes_of_states_and_stash() -> None:
    """What docs/design/models.md states, counted: a state a head, its last inputs, and a stash a step token."""
    model = tiny_model("qwen3_next")
    runner = lp.LookaheadDecoder(model).runner
    (shape,) = runner.recurrent.values()
    cache = runner.new_cache(64)
    assert isinstance(cache, HybridCache)
    heads, rows, columns, keys, channels, taps = 4, 6, 10, 2, 2 * 12 + 40, 4
    state = 4 * heads * rows * columns + 8 * channels * taps  # float32, and float64 of this model
    token = 4 * (keys * rows + heads * columns + heads) + 8 * channels
    assert shape.nbytes(0) == state == cache.recurrent.nbytes()
    for _ in range(2):
        runner.forward([1] * 16, range(16), np.tri(16, dtype=bool), cache, [0], capture=False)
        assert shape.nbytes(16) == state + 16 * token == cache.recurrent.nbytes()
    for count in range(1, 17):  # sizes up to 16, 8, 4, 2 and 1 share a stash each
        runner.forward([1] * count, range(count), np.tri(count, dtype=bool), cache, [0], capture=False)
    assert cache.recurrent.nbytes() == state + 31 * token


@pytest.mark.subset(1)
@pytest.mark.parametrize("arch", ["nemotron_h", "zamba2", "mamba2"])
def test_limits_of_time_steps_hold_in_the_prompt_alone(arch: str) -> None:
    """Transformers computes the prompt's last token with the others, and we as the root of the first step."""
    limits = {"time_step_limit": (0.6, 0.7)} if arch == "mamba2" else {"time_step_min": 0.7}
    model = tiny_model(arch, seed=1, **limits)
    assert limits_prompt(model)
    config = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4)
    for length in (1, 2, 3, 18):
        ids = drawn_text(random.Random(length), length)
        plain = plain_greedy(model, ids, 25)
        assert lp.AutoregressiveDecoder(model).generate(ids, 25).tokens == plain
        decoder = lp.LookaheadDecoder(model, config)
        for chunk in (1, 2, 3, 8):
            assert decoder.generate(ids, 25, prefill_chunk=chunk).tokens == plain, f"{length} tokens by {chunk}"
        captured_runner(decoder)
        for _ in range(2):  # the second text in the cache of the first
            assert decoder.generate(ids, 25).tokens == plain, f"{length} tokens, captured"


def test_a_journal_does_not_make_new_tokens_a_part_of_the_prompt(tmp_path: Path) -> None:
    """They would be computed within the limits of the time steps, and the text would go on otherwise."""
    model = tiny_model("mamba2", seed=1, time_step_limit=(0.6, 0.7))
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4))
    ids = drawn_text(random.Random(1), 18)
    plain = plain_greedy(model, ids, 40)

    def stops(tokens: list[int], step: int) -> None:
        if step >= 8:
            raise RuntimeError("the machine fails")

    with pytest.raises(RuntimeError, match="the machine fails"):
        Journal(tmp_path / "journal", decoder.context).generate(decoder, ids, 40, on_tokens=stops)
    output = Journal(tmp_path / "journal", decoder.context).generate(decoder, ids, 40)
    assert (output.tokens, output.resumed) == (plain, 0)


@pytest.mark.parametrize("arch", ["qwen3_next", "qwen3_5", "olmo_hybrid", "granitemoehybrid", "lfm2_moe"])
def test_replicas_that_span_ranks(arch: str) -> None:
    """Attention and MLPs are divided as the plan says; every rank holds recurrent layers, and their states, whole."""
    ids = drawn_text(random.Random(arch), 30)
    whole = tiny_model(arch, seed=1)
    expected = plain_greedy(whole, ids, 25), lp.AutoregressiveDecoder(whole).generate(ids, 25, SAMPLING).tokens
    for ranks in (2, 4):
        config = lookahead_config(
            window_size=5, ngram_size=3, guess_set_size=5, kv_sync=["recompute", "broadcast"][ranks // 4]
        )

        def body(context: ParallelContext, config: lp.LookaheadConfig = config) -> tuple[list[int], list[int]]:
            part = divide(copy.deepcopy(whole), context.replica)
            decoder = lp.LookaheadDecoder(part, config, context)
            return decoder.generate(ids, 25).tokens, decoder.generate(ids, 25, SAMPLING).tokens

        assert run_lockstep(ranks, body, 2) == [expected] * ranks


def test_a_plan_that_divides_a_recurrent_layer_is_refused() -> None:
    """Half of its projection is not the projection of half of its heads."""
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.linear_attn.in_proj_qkv": "colwise"}
    with pytest.raises(ValueError, match=r"layers\.0\.linear_attn\.in_proj_qkv is in a recurrent layer"):
        divide(tiny_model("qwen3_5"), Replica(0, 2), plan)


def test_models_without_a_plan_are_refused_by_name() -> None:
    """Rather than held whole by every rank, at twice the memory that was asked for."""
    for arch, reason in (
        ("bamba", "BambaForCausalLM has no plan"),
        ("nemotron_h", "experts.up_proj, a weight of experts"),
    ):
        with pytest.raises(ValueError, match=reason):
            divide(tiny_model(arch), Replica(0, 2))


def test_an_offloaded_layer_is_refused() -> None:
    """A step reads its weights where they are: on torch's meta device there are none."""
    model = tiny_model("qwen3_5")
    model.model.layers[0].linear_attn.conv1d.to("meta")
    with pytest.raises(ValueError, match="recurrent layers whose weights are offloaded"):
        lp.LookaheadDecoder(model)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("arch", ["qwen3_5", "mamba2", "lfm2"])
def test_a_text_behind_one_that_failed(arch: str, captured: bool) -> None:
    """A state, or a stash, that the text before left half advanced."""
    model = tiny_model(arch)
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4))
    if captured:
        captured_runner(decoder)
    embedding = model.get_input_embeddings()
    passes = 0

    def fails(module: Any, args: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 6:
            raise RuntimeError("no such token")

    layer = model.get_decoder().layers[1]
    for ids in ([3, 1, 4, 1, 5], [9], [2, 6]):
        plain = plain_greedy(model, ids, 20)
        passes = 0
        for module in (embedding, layer):  # before the first layer, and behind it
            hook = module.register_forward_pre_hook(fails)
            with pytest.raises(RuntimeError, match="no such token"):
                decoder.generate(ids, 20)
            hook.remove()
            assert decoder.generate(ids, 20).tokens == plain
            passes = 0


@pytest.mark.parametrize("arch", ["qwen3_5", "mamba2", "lfm2"])
def test_a_text_within_another(arch: str) -> None:
    """It takes no captured cache that the outer one uses, and neither sees the other's states."""
    model = tiny_model(arch)
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4))
    captured_runner(decoder)
    inner: list[list[int]] = []

    def another(tokens: list[int], step: int) -> None:
        inner.append(decoder.generate([2, 7, 1], 10).tokens)

    assert decoder.generate([3, 1, 4], 20, on_tokens=another).tokens == plain_greedy(model, [3, 1, 4], 20)
    assert len(inner) > 2 and {*map(tuple, inner)} == {tuple(plain_greedy(model, [2, 7, 1], 10))}


@pytest.mark.subset(4)
@pytest.mark.parametrize("arch", HYBRIDS)
def test_texts_of_an_engine(arch: str) -> None:
    """A state of another text; one of a text that has ended, in cache slots or for a prompt that begins like it."""
    model = tiny_model(arch, seed=2)
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4))
    rng = random.Random(arch)
    first = drawn_text(rng, 40)
    prompts = [first, [5], drawn_text(rng, 2), first[:30], [*first, 7]]
    engine = lp.Engine(decoder, max_sequences=2, prefill_chunk=8)
    handles = [engine.submit(ids, 15, sampling) for ids in prompts for sampling in (None, SAMPLING)]
    engine.run()
    alone = lp.AutoregressiveDecoder(model)
    expected = [alone.generate(ids, 15, sampling).tokens for ids in prompts for sampling in (None, SAMPLING)]
    assert [handle.result().tokens for handle in handles] == expected
    assert not any(handle.reused for handle in handles)


@pytest.mark.subset(4)
@pytest.mark.parametrize("arch", HYBRIDS)
def test_a_model_in_bfloat16(arch: str) -> None:
    """A dtype that meets another in a product; states that are rounded at every commit."""
    model = tiny_model(arch, dtype=torch.bfloat16)
    decoder = lp.LookaheadDecoder(
        model, lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4), attention="eager"
    )
    ids = drawn_text(random.Random(arch), 40)
    assert len(decoder.generate(ids, 20, eos_token_id=()).tokens) == 20
    cache = decoder.runner.new_cache(128)
    assert isinstance(cache, HybridCache)
    with torch.inference_mode():
        decoder.runner.prefill(ids[:20], cache, 512)
        for position in range(20, 40, 2):  # two tokens a step
            decoder.runner.forward(
                ids[position : position + 2], [position, position + 1], np.tri(2, dtype=bool), cache, [0]
            )
            cache.commit([0, 1])
        fresh = decoder.runner.new_cache(128)
        decoder.runner.prefill(ids, fresh, 512)
    for index, layer in cache.recurrent.layers.items():
        theirs = fresh.recurrent.layers[index]
        assert layer.state_HRD.dtype == torch.float32 and layer.last_CK.dtype == torch.bfloat16
        for mine, other in ((layer.state_HRD, theirs.state_HRD), (layer.last_CK, theirs.last_CK)):
            torch.testing.assert_close(
                mine, other, atol=BFLOAT16 * float(other.abs().max()) if other.numel() else 0, rtol=0
            )
