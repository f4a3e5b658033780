"""The profile measures what its report names: work counted, attention left out, the right rank's tokens."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lp
from launch.bench.baselines.hf_generate import HFGenerateDecoder
from launch.bench.ceilings import WARM_UP, CeilingCalls, Ceilings, Work, alternated
from launch.bench.one_rank import Build, record, replayed
from launch.bench.passes import sampled_of
from launch.bench.step_profile import Plan, largest_step, profile, step_budget
from launch.data.shapes import build_shape, shape_config
from launch.profile import speeds
from lp.attention import flash
from lp.attention.ablation import WithoutAttention
from lp.budget.policy import FixedBudget
from lp.budget.step_times import StepTimes
from lp.draft.pool.ngram_pool import NGramPool
from lp.draft.share import Share, step_tokens
from lp.draft.source import ShareInput
from lp.draft.tree import DraftTree
from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput
from lp.models.releases import cache_in, cache_keyword
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.switches import lookahead_config
from tests.support.tiny_models import plain_greedy, tiny_model

CPU = torch.device("cpu")
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
CONFIG = lp.LookaheadConfig(window_size=6, ngram_size=4, guess_set_size=6)


def _build(model: object) -> Build:
    return lambda context: lp.LookaheadDecoder(model, CONFIG, context)  # type: ignore[arg-type]


def _decode(decoder: Decoder) -> GenerationOutput:
    return decoder.generate(IDS, 12, eos_token_id=())


def test_the_work_counted_is_the_work_done() -> None:
    """torch's own counter of floating-point operations is the oracle, GQA and an untied head included."""
    num_tokens = 5
    prefix = 11
    for name in ("codellama_34b", "qwen2_5_coder_7b"):
        model = build_shape(shape_config(name, layers=2, divide=4), "float32", CPU)
        model.set_attn_implementation("eager")
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            past = cache_in(model(torch.arange(prefix)[None]))
            before = counter.get_total_flops()
            model(torch.arange(num_tokens)[None], **{cache_keyword(model): past})
        done = counter.get_total_flops() - before
        assert Work.of(model).flop(num_tokens, prefix) == pytest.approx(done, rel=1e-3)
        keys = past.layers[0].keys
        assert Work.of(model).kv_token_bytes == 2 * 2 * keys.nbytes // keys.shape[2]
        bytes_of_all = sum(p.nbytes for p in model.parameters())
        assert Work.of(model).weight_bytes == bytes_of_all - model.get_input_embeddings().weight.nbytes


def test_the_floor_is_the_dearer_of_bytes_and_products() -> None:
    """Few tokens wait for weights, many for arithmetic."""
    work = Work(weight_bytes=1000, kv_token_bytes=10, token_flop=90, head_flop=10, key_flop=1)
    ceilings = Ceilings(bytes_per_s=100.0, flop_per_s=100.0)
    assert work.floor_s(1, 9, ceilings) == (1000 + 10 * 10) / 100
    assert work.floor_s(100, 0, ceilings) == 100 * (90 + 10 + 100) / 100


def test_calls_are_alternated_and_medians_taken() -> None:
    """Measured one after the other, drift of the machine would look like a difference."""
    order: list[str] = []
    calls = {name: partial(order.append, name) for name in "abc"}
    times = alternated(calls, 3, CPU)
    assert set(times) == set("abc") and all(took > 0 for took in times.values())
    assert len(order) == 3 * (WARM_UP + 3)
    assert {order[3 * turn] for turn in range(3)} == set("abc")  # each round begins with another one


def test_ceilings_are_those_of_a_copy_and_a_product() -> None:
    calls = CeilingCalls(CPU, torch.float32)
    for call in calls.calls().values():
        call()
    assert torch.equal(calls.target, calls.source)
    torch.testing.assert_close(calls.product, calls.left @ calls.right)
    found = calls.read({"copy": 2.0, "product": 4.0})
    assert found.bytes_per_s == calls.source.nbytes
    assert found.flop_per_s == 2 * len(calls.left) ** 3 / 4


def test_attention_is_left_out_and_comes_back() -> None:
    """An ablation that left the model as it is would say that attention costs nothing."""
    model, ids = tiny_model("qwen2"), torch.tensor([IDS])
    before = model(ids).logits
    without = WithoutAttention(model)
    for _ in range(2):
        with without:
            assert not torch.allclose(model(ids).logits, before, atol=1e-3)
    assert without.called
    assert torch.equal(model(ids).logits, before)


def test_a_profile_times_a_pass_without_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's share is the difference of two passes: were it in both, it would cost nothing."""
    model = tiny_model(dtype=torch.float32)
    computed: list[str] = []
    honest = flash.step_attention

    def step_attention(*args: Any) -> torch.Tensor:
        computed.append(running)
        return honest(*args)

    monkeypatch.setattr(flash, "step_attention", step_attention)
    running = ""

    def once(calls: dict[str, Any], rounds: int, device: torch.device) -> dict[str, float]:
        nonlocal running
        for running in calls:
            for _ in range(WARM_UP + 1):
                calls[running]()
        running = "after"
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr("launch.bench.step_profile.alternated", once)
    plan = Plan(prefix=len(IDS) - 1, sizes=(1, 4), max_new_tokens=6, rounds=2)
    profile(model, _build(model), _build(model), IDS, plan, ParallelContext())
    layers = model.config.num_hidden_layers
    assert computed.count("model") == (WARM_UP + 1) * layers and computed.count("bare") == 0


def test_an_old_attention_is_said_not_to_be_left_out() -> None:
    """Its share would be read as nothing."""

    class Old(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"_attn_implementation": "sdpa"})()

        def set_attn_implementation(self, name: str) -> None:
            self.config._attn_implementation = name

    without = WithoutAttention(Old())  # type: ignore[arg-type]
    with without:
        pass
    assert not without.called and without.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kv_sync", ["recompute", "broadcast"])
@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_alone_does_what_it_did_among_all(rank: int, kv_sync: str) -> None:
    """Another share of the tokens, or another text, would be profiled as that rank's."""
    model = tiny_model()
    config = lookahead_config(window_size=6, ngram_size=4, guess_set_size=6, kv_sync=kv_sync)

    def build(context: ParallelContext) -> lp.LookaheadDecoder:
        return lp.LookaheadDecoder(model, config, context)

    among = run_lockstep(3, lambda context: _decode(build(context)))[rank]
    again = replayed(build, _decode, rank, 3, record(build, _decode, 3))
    for _ in range(2):  # it is rewound
        alone = again()
        assert alone.tokens == among.tokens == plain_greedy(model, IDS, 12)
        assert [s.num_tokens for s in alone.step_stats] == [s.num_tokens for s in among.step_stats]


def test_a_replay_of_another_decode_fails() -> None:
    """Other steps, with the recorded messages, would be timed as that rank's."""
    build = _build(tiny_model())
    recorded = record(build, _decode, 3)

    def decode(decoder: lp.LookaheadDecoder) -> GenerationOutput:
        decoder.budget = lambda *_: FixedBudget(replace(CONFIG, window_size=3))  # type: ignore[method-assign]
        return _decode(decoder)

    with pytest.raises(RuntimeError, match="rank 1 differs from rank 0, 2 at step 0"):
        replayed(build, decode, 1, 3, recorded)()
    with pytest.raises(ValueError, match="the prompt of rank 1 differs"):
        replayed(build, lambda decoder: decoder.generate(IDS[1:], 12), 1, 3, recorded)()


def test_a_replay_can_be_interrupted() -> None:
    """The tape has nobody's Ctrl-C: it would be dropped, and the measurement go on."""
    build = _build(tiny_model())

    def interrupted(decoder: Decoder) -> GenerationOutput:
        return decoder.generate(IDS, 12, eos_token_id=(), on_tokens=lambda *_: signal.raise_signal(signal.SIGINT))

    again = replayed(build, interrupted, 1, 3, record(build, _decode, 3))
    with pytest.raises(KeyboardInterrupt):
        again()


def test_a_pool_of_other_texts_has_no_tape() -> None:
    """The second decode would guess with what the first one left; step times of one rank price the tokens of others."""
    session = lp.LookaheadConfig(adaptive=False, pool_scope=lp.PoolScope.SESSION)
    adaptive = lp.LookaheadConfig(adaptive=True)
    model = tiny_model()
    for config, remedy in ((session, r"take pool\.scope=request"), (adaptive, "give W, N or G")):
        with pytest.raises(ValueError, match=remedy):
            record(partial(lp.LookaheadDecoder, model, config, step_times=StepTimes.constant(0.01, 64)), _decode, 2)


def test_a_replay_of_other_nodes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have merged what was recorded: the rank would commit the KV of other tokens."""
    build = _build(tiny_model())
    recorded = record(build, _decode, 3)
    whole = NGramPool.propose_share

    def shorter(pool: NGramPool, text: Sequence[int], step: ShareInput) -> Share:
        share = whole(pool, text, step)
        tree = share.draft
        return Share(DraftTree(tree.tokens[:-1], tree.parents[:-1]), share.common)

    monkeypatch.setattr(NGramPool, "propose_share", shorter)
    with pytest.raises(RuntimeError, match="rank 1 lays out other nodes than in the recorded run"):
        replayed(build, _decode, 1, 3, recorded)()


@pytest.mark.parametrize("catch_up", [0, 3])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_largest_step_is_a_whole_budget(ranks: int, catch_up: int) -> None:
    """A step with fewer tokens, or without the rank's columns, would be timed in place of the rank's largest."""
    budget = step_budget(_build(tiny_model())(ParallelContext()), IDS, ranks)
    assert budget == step_tokens(CONFIG, ranks)
    columns = 0
    for rank in range(ranks):
        layout = largest_step(CONFIG, budget, ranks, rank, catch_up)
        assert layout.num_tokens == budget and len(layout.catch_up) == catch_up
        columns += layout.columns.num_columns
        sampled = sampled_of(layout, budget)
        assert [layout.step_tokens[index] for index in sampled] == [
            layout.tokens[node] for node in layout.sampled_nodes
        ]
        assert sampled_of(layout, 5) == [index for index in sampled if index < 5]
    assert columns == 6 or catch_up
    lookup = lp.LookaheadDecoder(tiny_model(), lp.PromptLookupConfig(num_tokens=4))
    assert step_budget(lookup, IDS, ranks) == 5  # its path cannot be divided


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (3, 2)])
def test_a_profile_adds_up(ranks: int, rank: int) -> None:
    """Shares that do not sum to the step, or tokens of another rank, would be reported."""
    model = tiny_model(dtype=torch.float32)
    plan = Plan(prefix=len(IDS) - 1, sizes=(4, 1), max_new_tokens=6, rounds=2, ranks=ranks, rank=rank)
    found = profile(model, _build(model), _build(model), IDS, plan, ParallelContext())
    assert [point.num_tokens for point in found.step_times] == [1, 4] and found.step_times[0].ratio == 1
    for point in found.step_times:
        assert point.seconds * point.bytes_per_s == pytest.approx(found.work.moved_bytes(point.num_tokens, plan.prefix))
        floor_s = found.work.floor_s(point.num_tokens, plan.prefix, found.ceilings)
        assert point.floor == pytest.approx(point.seconds / floor_s)
    step = found.step
    assert list(step.parts) == ["attention", "LM head", "other layers", "exchange", "host"]
    assert sum(step.parts.values()) == pytest.approx(step.seconds) and sum(step.shares.values()) == pytest.approx(1)
    assert min(step.parts[name] for name in ("LM head", "exchange", "host")) > 0
    assert (step.max_tokens < 6 * 3 + 6 * 3) == (ranks > 1)
    assert not step.real_exchange
    assert found.over_weights == pytest.approx(
        found.step_times[0].seconds / (found.work.weight_bytes / found.ceilings.bytes_per_s)
    )


def test_running_ranks_exchange_in_earnest() -> None:
    """Under torchrun each rank profiles its own share, and waits for the others."""
    model = tiny_model(dtype=torch.float32)

    def body(context: ParallelContext) -> tuple[bool, int]:
        plan = Plan(prefix=len(IDS) - 1, sizes=(1,), max_new_tokens=4, rounds=1, ranks=2, rank=context.rank)
        step = profile(model, _build(model), _build(model), IDS, plan, context).step
        return step.real_exchange, step.max_tokens

    (first, count_0), (second, count_1) = run_lockstep(2, body)
    assert first and second and abs(count_0 - count_1) <= 3


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position past the context says nothing of the model, and a cache that does not fit ends the process."""
    model = tiny_model()
    with pytest.raises(ValueError, match=r"prefix is 500, .* positions; the model's context is 512"):
        profile(model, _build(model), _build(model), IDS, Plan(prefix=500), ParallelContext())
    monkeypatch.setattr("lp.models.memory.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"too little memory on cpu: [0-9.]+ [KMG]iB needed, 1.0 KiB free"):
        profile(model, _build(model), _build(model), IDS, Plan(prefix=16), ParallelContext())


def test_speeds_are_of_the_same_text() -> None:
    """Speeds of different texts, or of different numbers of tokens, are no comparison."""
    model = tiny_model()
    theirs, ours = HFGenerateDecoder(model), lp.LookaheadDecoder(model, CONFIG)
    found = speeds({"theirs": lambda: _decode(theirs), "ours": lambda: _decode(ours)}, 1)
    assert found["theirs"].compression == 1 <= found["ours"].compression
    assert found["theirs"].tokens == found["ours"].tokens and found["ours"].tokens_per_s > 0
