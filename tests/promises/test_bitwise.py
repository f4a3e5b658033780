"""exact="bitwise": logits of lookahead are those of plain decoding, bit for bit."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lp
from lp.attention.base import Window
from lp.attention.by_position import attention_by_position
from lp.attention.key_places import DEPTH, TAIL, key_places
from lp.draft.layout import ancestors
from lp.errors import RankLost, UserError
from lp.models import bitwise, equal_widths, experts_by_row
from lp.models.runner import ModelRunner
from lp.models.tree_pass import TreePass
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.by_position_cases import LENGTHS, drawn, drawn_tree, view_of
from tests.support.tiny_models import drawn_text, tiny_model

CONFIGS = (
    lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6),
    lp.LookaheadConfig(window_size=7, ngram_size=5, guess_set_size=7),
    lp.LookaheadConfig(),
)
SAMPLED = lp.SamplingParams(temperature=0.8, seed=5)
ARCHITECTURES = ("llama", "qwen3", "gemma3", "mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3")
NEW = 24


@pytest.mark.parametrize("window", [None, Window(20), Window(300), Window(20, chunked=True), Window(300, chunked=True)])
def test_it_is_softmax_attention(window: Window | None) -> None:
    """A key too many or too few, at a tile's border or in a tail, is far above rounding; held against float64."""
    for seed, length in enumerate(LENGTHS):
        parents, positions = drawn_tree(random.Random(seed), length)
        view = view_of(parents, positions, length, window)
        q, k, v = drawn(1, 4, len(parents), 8, seed=seed), *(drawn(2, 1, 2, length + len(parents), 8, seed=-seed))
        out = attention_by_position(q, k, v, key_places(view), 0.3)[0].transpose(0, 1)
        wide = attention_by_position(q.double(), k.double(), v.double(), key_places(view), 0.3)[0].transpose(0, 1)
        keys, values = (each[0].double().repeat_interleave(2, 0) for each in (k, v))
        scores = (q[0].double() @ keys.mT * 0.3).masked_fill(~view.visible_TN(), -math.inf)
        expected = scores.softmax(-1) @ values
        assert (out - expected).abs().max() < 1e-5 and (wide - expected).abs().max() < 1e-13


def in_a_pass(
    width: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parents: list[int], positions: list[int], length: int
) -> torch.Tensor:
    """The results (T, H, E) of these tokens in a pass of so many, the others being padding."""
    count = len(parents)
    padding = width - count
    q, k, v = (torch.cat([each, drawn(1, each.shape[1], padding, each.shape[3], seed=9)], 2) for each in (q, k, v))
    view = view_of([*parents, *[-1] * padding], [*positions, *positions[:1] * padding], length)
    return attention_by_position(q, k, v, key_places(view), 0.25)[0, :count]


def test_a_token_has_the_same_bits_in_any_company() -> None:
    """In a tree, in a plain step and in a prompt's chunk, wherever its ancestors lie."""
    for seed, length in enumerate(LENGTHS):
        rng = random.Random(seed)
        parents, positions = drawn_tree(rng, length)
        size = len(parents)
        visible = ancestors(parents)
        q, k, v = drawn(1, 4, size, 16, seed=seed), *(drawn(2, 1, 2, length + size, 16, seed=-seed))
        together = in_a_pass(40, q, k, v, parents, positions, length)
        for node in rng.sample(range(size), min(4, size)):
            path = [at for at in range(size) if visible[node, at]]
            kept = [*range(length), *(length + at for at in path)]  # as if the ancestors were cached
            for behind in (1, len(path)):  # a plain step, and a chunk of the whole path
                rows = path[-behind:]
                own = [*range(-1, behind - 1)], [positions[at] for at in rows], len(kept) - behind
                width = rng.choice([width for width in (1, 2, 3, *equal_widths.WIDTHS) if width >= behind])
                alone = in_a_pass(width, q[:, :, rows], k[:, :, kept], v[:, :, kept], *own)
                assert torch.equal(alone[-1], together[node]), (length, node, behind, width)


def test_what_is_not_seen_may_be_no_number() -> None:
    """A rejected node whose KV is NaN must not reach its neighbours."""
    view = view_of([-1, 0, 0], [100, 101, 101], 100)
    q, k, v = drawn(1, 2, 3, 8), *drawn(2, 1, 2, 103, 8)
    expected = attention_by_position(q, k, v, key_places(view), 1.0)
    k[:, :, 101], v[:, :, 101] = math.nan, math.inf
    found = attention_by_position(q, k, v, key_places(view), 1.0)
    assert torch.equal(found[0, [0, 2]], expected[0, [0, 2]])


def logits_of(decoder: lp.PlainDecoder | lp.LookaheadDecoder, ids: list[int], **how: Any) -> lp.GenerationOutput:
    return decoder.generate(ids, NEW, eos_token_id=(), output_logits=True, **how)


@pytest.mark.subset(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_are_plain_decodings(arch: str, dtype: torch.dtype) -> None:
    """With any shape of step, sampled or not; the usual mode differs in some, so that this test can fail."""
    model = tiny_model(arch, dtype=dtype, sharpness=2.0)
    plain = lp.PlainDecoder(model, exact="bitwise")
    usual_differs = False
    for seed, config in enumerate(CONFIGS):
        ids = drawn_text(random.Random(seed), 40 + 30 * seed)
        sampling = SAMPLED if seed else None
        expected = logits_of(plain, ids, sampling=sampling)
        times = lp.StepTimes.constant(0.01, 64) if config.adaptive else None
        found = logits_of(lp.LookaheadDecoder(model, config, step_times=times, exact="bitwise"), ids, sampling=sampling)
        assert found.tokens == expected.tokens and found.steps < expected.steps
        assert found.logits is not None and expected.logits is not None
        assert torch.equal(found.logits, expected.logits)
        assert (found.exact, found.attention) == ("bitwise", "by_position")
        usual = logits_of(lp.LookaheadDecoder(model, config, step_times=times), ids, sampling=sampling)
        assert usual.exact == "tokens" and usual.logits is not None
        usual_differs |= not torch.equal(usual.logits, expected.logits)
    assert usual_differs


@pytest.mark.subset(2)
@pytest.mark.parametrize(("ranks", "arch"), [(2, "llama"), (3, "llama"), (2, "mixtral"), (2, "deepseek_v3")])
def test_ranks_that_share_steps(ranks: int, arch: str) -> None:
    """They compare the bits of each `c`: any difference ends the run."""
    model = tiny_model(arch, dtype=torch.bfloat16, sharpness=2.0)
    ids = drawn_text(random.Random(ranks), 50)
    expected = lp.PlainDecoder(model, exact="bitwise").generate(ids, NEW, SAMPLED, eos_token_id=()).tokens

    def body(context: ParallelContext) -> list[int]:
        decoder = lp.LookaheadDecoder(model, CONFIGS[1], context, exact="bitwise")
        assert decoder.generate(ids, NEW, SAMPLED, eos_token_id=()).exact == "bitwise"
        return decoder.generate(ids, NEW, SAMPLED, eos_token_id=()).tokens

    assert run_lockstep(ranks, body) == [expected] * ranks


@pytest.mark.subset(3)
@pytest.mark.parametrize(
    ("arch", "dtype", "drafts"),
    [
        ("llama", torch.float32, False),
        ("llama", torch.float32, True),
        ("llama", torch.bfloat16, True),
        ("qwen3_moe", torch.float32, True),
        ("qwen2_moe", torch.bfloat16, True),
        ("deepseek_v2", torch.bfloat16, True),
    ],
)
def test_texts_beside_others_and_behind_reused_prefixes(arch: str, dtype: torch.dtype, drafts: bool) -> None:
    """A second turn, whose prefix holds the first answer, has the KV that decoding wrote and not that of a prompt."""
    model = tiny_model(arch, dtype=dtype, sharpness=2.0, num_key_value_heads=4)
    plain = lp.PlainDecoder(model, exact="bitwise")
    decoder = lp.LookaheadDecoder(model, CONFIGS[1], exact="bitwise") if drafts else plain
    rng = random.Random(3)
    texts = [drawn_text(rng, 30 + 90 * index) for index in range(4)]
    with lp.Engine(decoder, max_sequences=3) as engine:
        for _ in range(2):
            handles = [engine.submit(ids, NEW, SAMPLED, eos_token_id=(), output_logits=True) for ids in texts]
            engine.run()
            for ids, handle in zip(texts, handles, strict=True):
                found, expected = handle.result(), logits_of(plain, ids, sampling=SAMPLED)
                assert found.logits is not None and expected.logits is not None
                assert found.tokens == expected.tokens and torch.equal(found.logits, expected.logits)
            texts = [[*ids, *handle.result().tokens, 3, 1] for ids, handle in zip(texts, handles, strict=True)]
        assert handles[0].result().reused > len(texts[0]) // 2


def test_a_step_goes_no_deeper_than_tails_reach() -> None:
    """A longer path would have keys below A(p) that are not cached yet."""
    model = tiny_model("llama", sharpness=2.0)
    ids = drawn_text(random.Random(1), 20)
    expected = lp.PlainDecoder(model, exact="bitwise").generate(ids, 100, eos_token_id=())
    decoder = lp.LookaheadDecoder(model, CONFIGS[0], exact="bitwise")
    found = decoder.generate(ids, 100, eos_token_id=(), prediction=expected.tokens)
    accepted = [step.accepted for step in found.step_stats]
    assert found.tokens == expected.tokens and max(accepted) <= DEPTH and TAIL > DEPTH
    config = lp.LookaheadConfig(window_size=0, ngram_size=50, guess_set_size=1)
    found = lp.LookaheadDecoder(model, config, exact="bitwise").generate(
        ids, 100, eos_token_id=(), prediction=expected.tokens
    )
    assert found.tokens == expected.tokens and max(step.accepted for step in found.step_stats) <= DEPTH


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_lacks_tokens_goes_as_deep(ranks: int) -> None:
    """The tokens that a rank lacks come first in its step, in order: their keys lie where cached ones would."""
    model = tiny_model("llama", sharpness=2.0)
    config = lp.LookaheadConfig(window_size=2, ngram_size=50, guess_set_size=2)
    for length in (1, 20, 61, 96):
        ids = drawn_text(random.Random(length), length)
        expected = lp.PlainDecoder(model, exact="bitwise").generate(ids, 150, eos_token_id=()).tokens

        def body(context: ParallelContext) -> lp.GenerationOutput:
            decoder = lp.LookaheadDecoder(model, config, context, exact="bitwise")
            return decoder.generate(ids, 150, eos_token_id=(), prediction=expected)  # noqa: B023  (run at once)

        for found in run_lockstep(ranks, body):
            accepted = [step.accepted for step in found.step_stats]
            assert found.tokens == expected and max(accepted) == DEPTH
            assert any(a == b == DEPTH for a, b in itertools.pairwise(accepted)), accepted


def test_its_attention_has_the_limit_in_the_usual_mode_too() -> None:
    """Accepted drafts of a deeper step were tokens of another text: its keys lie elsewhere than at their positions."""
    model = tiny_model("llama", sharpness=2.0)
    ids = drawn_text(random.Random(1), 60)
    expected = lp.AutoregressiveDecoder(model).generate(ids, 150, eos_token_id=()).tokens
    config = lp.LookaheadConfig(window_size=3, ngram_size=60, guess_set_size=2)
    decoder = lp.LookaheadDecoder(model, config, attention="by_position")
    found = decoder.generate(ids, 150, eos_token_id=(), prediction=expected)
    assert found.tokens == expected and max(step.accepted for step in found.step_stats) <= DEPTH
    with pytest.raises(AssertionError, match="too deep"):
        key_places(view_of([-1, 0, 1, 1], [0, 120, 121, 121], 0))


def test_kv_of_another_number_of_threads_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode's widths hold for the threads that they were found with, and so does KV."""
    ids = drawn_text(random.Random(1), 40)
    with lp.Engine(lp.LookaheadDecoder(tiny_model("llama"), CONFIGS[0], exact="bitwise")) as engine:
        reused = []
        for threads in (1, 1, 2, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            handle = engine.submit(ids, 4, eos_token_id=())
            engine.run()
            reused.append(handle.result().reused > 0)
    assert reused == [False, True, False, True]


def test_a_model_that_is_cast_afterwards() -> None:
    """The first pass of other weights finds out what its KV is like, and is padded too."""
    model = tiny_model("llama", dtype=torch.float32)
    decoder = lp.PlainDecoder(model, exact="bitwise")
    model.to(torch.bfloat16)
    expected = logits_of(decoder, [1, 2, 3])
    with lp.Engine(decoder, max_sequences=2) as engine:
        handle = engine.submit([1, 2, 3], NEW, eos_token_id=(), output_logits=True)
        engine.run()
    found = handle.result()
    assert found.logits is not None and expected.logits is not None and torch.equal(found.logits, expected.logits)


def test_ranks_in_different_modes_are_refused() -> None:
    """One would take the other's rounding for a fault."""
    model = tiny_model("llama")

    def body(context: ParallelContext) -> None:
        exact = "bitwise" if context.rank else "tokens"
        with pytest.raises(ValueError, match="exact"):
            lp.LookaheadDecoder(model, CONFIGS[0], context, exact=exact).generate([1, 2, 3], 4)

    run_lockstep(2, body)


def test_ranks_with_other_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's share of a tensor decides how its ends are rounded: ranks would part at some later step."""
    model = tiny_model("llama")
    own = threading.local()
    monkeypatch.setattr(torch, "get_num_threads", lambda: getattr(own, "threads", 1))

    def body(context: ParallelContext) -> None:
        decoder = lp.LookaheadDecoder(model, CONFIGS[0], context, exact="bitwise")
        own.threads = 1 + context.rank
        with pytest.raises(ValueError, match="threads"):
            decoder.generate([1, 2, 3], 4)

    run_lockstep(2, body)


def test_transformers_generate_takes_the_mode() -> None:
    """The two ways through transformers give the tokens and logits of plain decoding in the mode."""
    model = tiny_model("llama", dtype=torch.bfloat16, sharpness=2.0)
    ids = drawn_text(random.Random(4), 50)
    expected = logits_of(lp.PlainDecoder(model, exact="bitwise"), ids)
    assert expected.threads == torch.get_num_threads() and expected.logits is not None
    how: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    how |= {"return_dict_in_generate": True, "output_logits": True, "attention_mask": torch.ones(1, len(ids))}
    prompt = torch.tensor([ids])
    outputs = [model.generate(prompt, custom_generate=lp.generate, exact="bitwise", **how)]
    lp.accelerate(model, exact="bitwise")
    outputs.append(model.generate(prompt, **how))
    lp.restore(model)
    for output in outputs:
        assert output.sequences[0, len(ids) :].tolist() == expected.tokens
        assert torch.equal(torch.cat(output.logits), expected.logits.float())
    with pytest.raises(ValueError, match="caps its attention scores"):
        lp.accelerate(tiny_model("gemma2"), exact="bitwise")


def test_widths_with_other_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: products of 24 and 128 rows add up in another order. A pass of 20 tokens is padded to 32."""
    forward = ModelRunner.forward

    def other_kernels(self: ModelRunner, tokens: Any, *args: Any, **how: Any) -> torch.Tensor:
        logits = forward(self, tokens, *args, **how)
        return logits + 1e-6 if len(tokens) in (24, 128) else logits

    monkeypatch.setattr(ModelRunner, "forward", other_kernels)
    runner = lp.PlainDecoder(tiny_model("llama"), exact="bitwise").runner
    assert runner.widths == tuple(width for width in equal_widths.WIDTHS if width not in (24, 128))
    assert (runner.padded(20), runner.padded(97), runner.most_padding) == (32, 192, 95)


def test_an_adaptive_step_keeps_within_the_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU few widths agree, and passes of 200 tokens may not: the default decoder was refused there."""
    monkeypatch.setattr(equal_widths, "WIDTHS", (8, 64))
    model = tiny_model("llama", dtype=torch.bfloat16, sharpness=2.0)
    decoder = lp.LookaheadDecoder(model, exact="bitwise")
    assert decoder.config.adaptive and decoder.span == 64
    ids = drawn_text(random.Random(6), 90)
    found, expected = logits_of(decoder, ids), logits_of(lp.PlainDecoder(model, exact="bitwise"), ids)
    assert found.logits is not None and expected.logits is not None
    assert found.tokens == expected.tokens and torch.equal(found.logits, expected.logits)
    with pytest.raises(ValueError, match="passes have up to 64 tokens here, and a step of this config has 120"):
        lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=16), exact="bitwise")


def test_fewer_widths_than_when_the_decoder_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other threads fewer may agree: a step that no pass has room for ended a text without a word."""
    decoder = lp.LookaheadDecoder(tiny_model("llama"), lp.LookaheadConfig(window_size=16), exact="bitwise")
    monkeypatch.setattr(bitwise, "equal_widths", lambda runner: (8, 64))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with pytest.raises(ValueError, match="passes have up to 64 tokens here, and a step of this config has 120"):
        decoder.generate([1, 2, 3], 4)


@pytest.mark.parametrize("arch", ["mixtral", "deepseek_v3"])
def test_experts_that_are_not_padded_are_found(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: transformers' own loop, in which an expert has as many rows as come to it. DeepSeek's first layer has
    no experts, so that another one must be asked.
    """

    def own_loop(self: Any, *inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = type(self).forward.__wrapped__(self, *inputs)
        return found

    monkeypatch.setattr(experts_by_row, "experts_by_row", own_loop)
    with pytest.raises(ValueError, match="gives a token other bits beside other tokens"):
        lp.PlainDecoder(tiny_model(arch, dtype=torch.float32), exact="bitwise")


def test_rows_that_fill_no_vectors_are_left_out() -> None:
    """Qwen2-MoE's shared expert has a gate of one number a token. Of 8 tokens sigmoid takes one number at a time, and
    4 in a hundred are rounded otherwise than in a vector: too few to be found by asking.
    """
    assert lp.PlainDecoder(tiny_model("qwen2_moe"), exact="bitwise").runner.widths == (64, 128, 192, 256)


def test_a_model_whose_rows_depend_on_company_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a token's logits depend on the token beside it. The usual mode would notice nothing that small."""
    forward = ModelRunner.forward

    def mixing(self: ModelRunner, tokens: Any, *args: Any, **how: Any) -> torch.Tensor:
        logits = forward(self, tokens, *args, **how)
        return logits + 1e-7 * logits.roll(1, 0)

    model = tiny_model("llama")
    monkeypatch.setattr(equal_widths.ModelRunner, "forward", mixing)
    with pytest.raises(ValueError, match=r"other bits beside other tokens, with 1 threads; try one thread"):
        lp.PlainDecoder(model, exact="bitwise")


def with_own_experts() -> Any:
    """A model one of whose layers has experts in a list, as code from before transformers' registry does."""
    model: Any = tiny_model("mixtral")
    model.model.layers[1].mlp.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
    return model


@pytest.mark.parametrize(
    ("make", "how", "said"),
    [
        (lambda: tiny_model(), {"exact": "bits"}, "exact is 'bits'; it must be one of auto, tokens, bitwise"),
        (lambda: tiny_model(), {"attention": "sdpa"}, "attention is 'sdpa', which adds up in another order"),
        (lambda: tiny_model(), {"capture": "compile"}, "capture is 'compile', whose kernels round otherwise"),
        (lambda: tiny_model(), {"capture": "graph"}, "CUDA graphs need a GPU; choose capture=off"),
        (
            lambda: with_own_experts(),
            {},
            r"layers\.1\.mlp\.experts, a ModuleList, computes experts by code of its own, as many rows as come to it",
        ),
        (lambda: tiny_model("gemma2"), {}, "caps its attention scores, .*; choose exact=tokens, and attention=auto"),
        (lambda: tiny_model("gpt_oss"), {}, "has no sdpa attention in transformers; choose exact=tokens"),
        (lambda: tiny_model("llama_dynamic"), {}, "rotary frequencies that change"),
        (
            lambda: tiny_model(),
            {"config": lp.LookaheadConfig(window_size=80, ngram_size=5, guess_set_size=80)},
            r"passes have up to 256 tokens here, and a step of this config has \d+; lower W, N or G",
        ),
    ],
)
def test_what_the_mode_cannot_be_had_with_is_named(make: Callable[[], Any], how: dict[str, Any], said: str) -> None:
    """Dropped in silence, the promise would be kept by luck."""
    with pytest.raises(ValueError, match=said):
        lp.LookaheadDecoder(make(), **{"exact": "bitwise"} | how)


def test_widths_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other threads, or an adapter, other widths may agree."""
    asked: list[int] = []
    model = tiny_model("llama")

    def noting(runner: ModelRunner) -> tuple[int, ...]:
        asked.append(torch.get_num_threads())
        return (8, 64) if len(asked) == 1 else (16, 64)

    monkeypatch.setattr("lp.models.bitwise.equal_widths", noting)
    decoder = lp.PlainDecoder(model, exact="bitwise")
    assert lp.LookaheadDecoder(model, CONFIGS[0], exact="bitwise").runner is decoder.runner
    decoder.generate([1, 2, 3], 4, eos_token_id=())
    assert asked == [1] and decoder.runner.widths == (8, 64)
    torch.set_num_threads(2)
    try:
        decoder.generate([1, 2, 3], 4, eos_token_id=())
        assert asked == [1, 2] and decoder.runner.widths == (16, 64)
    finally:
        torch.set_num_threads(1)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2, requires_grad=False)
    decoder.generate([1, 2, 3], 4, eos_token_id=())
    assert asked == [1, 2, 1]


def test_a_lost_rank_is_no_fault_of_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking all layers instead would wait for it once more, as long as a rank is waited for."""
    asked: list[Any] = []

    def lost(*args: Any) -> Any:
        asked.append(args)
        raise RankLost("rank 1 has ended")

    monkeypatch.setattr(equal_widths, "_agreeing", lost)
    with pytest.raises(RankLost):
        lp.PlainDecoder(tiny_model("llama"), exact="bitwise")
    assert len(asked) == 1


def test_after_a_refusal_the_next_text_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights whose rows depend on company: a second text would run with widths of those before."""
    model = tiny_model("mixtral", dtype=torch.float32)
    decoder = lp.PlainDecoder(model, exact="bitwise")

    def refusing(runner: ModelRunner) -> tuple[int, ...]:
        raise UserError("other bits")

    monkeypatch.setattr("lp.models.bitwise.equal_widths", refusing)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2, requires_grad=False)
    for _ in range(2):
        with pytest.raises(ValueError, match="other bits"):
            decoder.generate([1, 2, 3], 4)


def test_passes_are_cut_where_they_are_too_long() -> None:
    """Many texts together have more tokens than the widest pass."""
    model = tiny_model("llama")
    runner = lp.PlainDecoder(model, exact="bitwise").runner
    rng = random.Random(2)
    with torch.inference_mode():
        trees = []
        for _ in range(5):
            cache = runner.cache_without_buffers(200 + runner.most_padding)
            tokens = [rng.randrange(16) for _ in range(90)]
            trees.append(TreePass(tokens, range(90), range(-1, 89), cache, [0, 89], chain=True))
        together = runner.forward_trees(trees).each()
        for tree, logits in zip(trees, together, strict=True):
            own = tree._replace(cache=runner.cache_without_buffers(200 + runner.most_padding))
            assert torch.equal(runner.forward_trees([own]).each()[0], logits)
