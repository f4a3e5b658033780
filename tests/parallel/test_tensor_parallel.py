"""Tensor parallelism with ranks that are threads: the tokens of one process, from a part of its weights each.

That the same holds among processes is in `test_replicas.py`.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf

import lp
from lp.budget.step_times import StepTimes
from lp.engine.batch_step import BatchStep
from lp.engine.generation import Generation
from lp.models.sharded_layers import head_of
from lp.models.tensor_parallel import divide, plan_of
from lp.parallel.context import ParallelContext, check_tp
from lp.parallel.replica import Replica
from tests.conftest import some_of
from tests.support.thread_ranks import LockstepReplica, run_lockstep
from tests.support.tiny_models import drawn_text, plain_greedy, tiny_model

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "mixtral", "qwen3_moe"]
OTHERS = ["gemma3", "olmo2", "gpt_neox", "qwen2_moe", "mistral_sliding"]
SHAPE = lp.LookaheadConfig(window_size=3, ngram_size=3, guess_set_size=4)
IDS = drawn_text(random.Random(1), 20)
NEW = 20
SAMPLED = {
    "T=0.8": lp.SamplingParams(temperature=0.8, seed=5),
    "top-k": lp.SamplingParams(temperature=0.8, top_k=7, seed=5),
    "top-k above a part": lp.SamplingParams(temperature=1.2, top_k=40, seed=5),
    "top-p": lp.SamplingParams(temperature=0.8, top_p=0.8, seed=5),
    "repetition penalty": lp.SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=5),
}


def on_ranks(
    model: Any, world: int, tp: int, use: Callable[[Any, ParallelContext], Any], plan: dict[str, str] | None = None
) -> list[Any]:
    """What `use(part of the model, context)` gives on every rank."""

    def body(context: ParallelContext) -> Any:
        return use(divide(copy.deepcopy(model), context.replica, plan), context)

    return run_lockstep(world, body, tp=tp)


def generated(
    model: Any, world: int, tp: int, config: Any = SHAPE, sampling: lp.SamplingParams | None = None, **kwargs: Any
) -> list[lp.GenerationOutput]:
    """What lookahead decoding gives on every rank of replicas of `tp` ranks."""

    def use(part: Any, context: ParallelContext) -> lp.GenerationOutput:
        step_times = kwargs.get("step_times")
        decoder = lp.LookaheadDecoder(part, config, context, step_times=step_times)
        return decoder.generate(IDS, NEW, sampling)

    return on_ranks(model, world, tp, use)


@pytest.mark.parametrize(("arch", "world", "tp"), some_of([*product(ARCHITECTURES + OTHERS, (2, 4), (2,))], 14))
def test_tokens_of_every_architecture(arch: str, world: int, tp: int) -> None:
    """A weight that is cut at the wrong place gives other tokens."""
    model = tiny_model(arch)
    expected = plain_greedy(model, IDS, NEW)

    def use(part: Any, context: ParallelContext) -> list[list[int]]:
        whole = sum(each.numel() for each in model.parameters())
        assert sum(each.numel() for each in part.parameters()) < 0.75 * whole
        decoders = [lp.AutoregressiveDecoder(part, context), lp.PlainDecoder(part, context)]
        decoders.append(lp.LookaheadDecoder(part, SHAPE, context))
        assert decoders[-1].runner.fused == (arch != "gpt_neox"), "merged projections are given up"
        return [decoder.generate(IDS, NEW).tokens for decoder in decoders]

    assert on_ranks(model, world, tp, use) == [[expected] * 3] * world


@pytest.mark.parametrize("world, tp", [(2, 2), (4, 2)])
def test_a_batch(world: int, tp: int) -> None:
    """Samplers of texts that share steps, and a prompt beside them, each over a divided vocabulary."""
    model = tiny_model("llama", seed=2)
    prompts = [IDS, IDS[::-1], IDS[:3]]
    samplings = [None, *list(SAMPLED.values())[:2]]
    expected = [
        lp.AutoregressiveDecoder(model).generate(ids, NEW, sampling, sequence=index).tokens
        for index, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]

    def use(part: Any, context: ParallelContext) -> list[list[int]]:
        outputs = lp.LookaheadDecoder(part, SHAPE, context).generate_batch(prompts, NEW, samplings)
        return [output.tokens for output in outputs]

    assert on_ranks(model, world, tp, use) == [expected] * world


@pytest.mark.parametrize("world, tp", [(4, 4), (6, 2)])
@pytest.mark.parametrize("arch", ["llama", "phi3", "gemma2", "qwen3_moe"])
def test_other_worlds(arch: str, world: int, tp: int) -> None:
    """Four ranks have fewer KV heads than ranks; six have parts of unequal size."""
    model = tiny_model(arch)
    expected = plain_greedy(model, IDS, NEW)
    assert {tuple(output.tokens) for output in generated(model, world, tp)} == {tuple(expected)}


@pytest.mark.parametrize("kv_sync", lp.KVSync)
@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED.keys())
def test_sampled_tokens(sampling: lp.SamplingParams, kv_sync: lp.KVSync) -> None:
    """The noise of a token must be that of its number in the whole vocabulary, and a warper must see all of it."""
    model = tiny_model("qwen3", sharpness=2.0)
    expected = lp.AutoregressiveDecoder(model).generate(IDS, NEW, sampling).tokens
    config = lp.LookaheadConfig(window_size=3, ngram_size=3, guess_set_size=4, ablation=lp.Ablation(kv_sync=kv_sync))
    for world, tp in ((2, 2), (4, 2)):
        outputs = generated(model, world, tp, config, sampling)
        assert {tuple(output.tokens) for output in outputs} == {tuple(expected)}


def test_rejection_sampling() -> None:
    """Each rank's own draws must not be each tp rank's own: the text is that of the same replicas without tp."""
    model = tiny_model("llama", sharpness=2.0)
    sampling = lp.SamplingParams(temperature=0.9, seed=3, verifier=lp.Verifier.REJECTION)
    for replicas in (1, 2):
        expected = generated(model, replicas, 1, sampling=sampling)[0].tokens
        outputs = generated(model, 2 * replicas, 2, sampling=sampling)
        assert {tuple(output.tokens) for output in outputs} == {tuple(expected)}


def test_adaptive_budget_and_tied_embeddings() -> None:
    """Step times are one rank's, for the ranks of all replicas."""
    model = tiny_model("llama", tie_word_embeddings=True)
    expected = plain_greedy(model, IDS, NEW)
    times = StepTimes((1, 8, 32), (1.0, 1.1, 1.5), 1.0)
    for world in (2, 4):
        outputs = generated(model, world, 2, lp.LookaheadConfig(), step_times=times)
        assert {tuple(output.tokens) for output in outputs} == {tuple(expected)}


def test_a_seed_of_none_is_one_for_all() -> None:
    """Ranks of a replica that draw different seeds sample different texts."""
    model = tiny_model("llama", sharpness=2.0)

    def use(part: Any, context: ParallelContext) -> list[list[int]]:
        sampling = lp.SamplingParams(temperature=1.0)
        kinds = (lp.AutoregressiveDecoder, lp.PlainDecoder, lp.LookaheadDecoder)
        return [kind(part, context=context).generate(IDS, 8, sampling).tokens for kind in kinds[:2]]

    found = on_ranks(model, 4, 2, use)
    assert found == [found[0]] * 4


def test_collectives_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums a layer, one for the embeddings, one gather of the vocabulary's, and one among replicas."""
    model = tiny_model("llama", num_hidden_layers=3)
    counts: dict[int, list[str]] = {}
    steps: list[list[str]] = []

    def counted(kind: str, of: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            counts.setdefault(self.rank, []).append(kind)
            return of(self, *args)

        return call

    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(LockstepReplica, name, counted(name, getattr(LockstepReplica, name)))
    run = BatchStep.run

    def watched(self: BatchStep, *args: Any) -> Any:
        counts[self.context.replica.rank] = []
        stops = run(self, *args)
        steps.append([*counts[self.context.replica.rank]])
        return stops

    monkeypatch.setattr(BatchStep, "run", watched)
    for sampling in (None, SAMPLED["T=0.8"]):
        generated(model, 2, 2, sampling=sampling)
    assert {(each.count("all_reduce"), each.count("all_gather")) for each in steps} == {(7, 1)}


def test_errors_name_value_limit_and_remedy() -> None:
    """What cannot be divided is refused before anything runs."""
    with pytest.raises(lp.UserError, match=r"tp is 3, but 4 ranks .* one of 1, 2, 4"):
        check_tp(3, 4)
    with pytest.raises(lp.UserError, match="tp is 0; it must be an integer >= 1"):
        check_tp(0, 4)
    with pytest.raises(lp.UserError, match=r"tp is 2, but 1 ranks"):
        ParallelContext.from_env(tp=2)
    with pytest.raises(lp.UserError, match=r"tp is 3, but the model has 4 attention heads and 2 KV heads.* 1, 2, 4"):
        divide(tiny_model("llama"), Replica(0, 3))
    with pytest.raises(lp.UserError, match=r"tp is 4, but the model has 3 tokens; give parallel\.tp at most 3"):
        divide(tiny_model("llama", vocab_size=3), Replica(0, 4))
    with pytest.raises(lp.UserError, match=r"GPT2LMHeadModel has no plan .*layers\.\*\.self_attn"):
        divide(tiny_model("gpt2"), Replica(0, 2))
    with pytest.raises(lp.UserError, match="has 'diagonal', which is no known style"):
        divide(tiny_model("llama"), Replica(0, 2), {"layers.*.mlp.up_proj": "diagonal"})
    part = divide(tiny_model("llama"), Replica(0, 2))
    with pytest.raises(lp.UserError, match=r"divided among 2 ranks, but the context has replicas of 1; .*context="):
        lp.PlainDecoder(part)


def test_a_plan_of_the_user() -> None:
    """A model without a plan, or with another one, is divided as the user says."""
    model = tiny_model("llama")
    plan = {name: style for name, style in model.config.base_model_tp_plan.items() if "mlp" in name}
    plan |= dict.fromkeys(["layers.*.self_attn.q_proj"], "replicated")
    expected = plain_greedy(model, IDS, NEW)

    def use(part: Any, context: ParallelContext) -> list[int]:
        assert part.model.layers[0].self_attn.q_proj.out_features == 32
        return lp.PlainDecoder(part, context).generate(IDS, NEW).tokens

    assert on_ranks(model, 2, 2, use, plan) == [expected] * 2
    assert plan_of(model, plan).keys() == {f"model.{pattern}" for pattern in plan}


@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_attention_sinks_go_with_their_heads(attention: str) -> None:
    """A rank that kept those of all heads could not run, or would give its heads those of others."""
    model = tiny_model("gpt_oss")
    for layer in model.model.layers:
        layer.self_attn.sinks.data = 3 * torch.randn(4, generator=torch.Generator().manual_seed(0)).double()
    plan = {f"layers.*.self_attn.{each}_proj": "colwise" for each in "qkv"} | {"layers.*.self_attn.o_proj": "rowwise"}
    expected = plain_greedy(model, IDS, NEW)

    def use(part: Any, context: ParallelContext) -> list[int]:
        return lp.LookaheadDecoder(part, SHAPE, context, attention).generate(IDS, NEW).tokens

    assert on_ranks(model, 2, 2, use, plan) == [expected] * 2


def test_another_replica_that_differs_is_named_by_both_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rank 1` alone would be one of two."""
    model = tiny_model("llama")

    def use(part: Any, context: ParallelContext) -> None:
        if context.rank >= 2:
            with torch.no_grad():
                part.model.norm.weight.mul_(1.5)
        lp.LookaheadDecoder(part, SHAPE, context)

    with pytest.raises(
        lp.UserError, match=r"checksum of rank \d \(lp 1, tp (\d)\) differs from rank \d \(lp 0, tp \1\)"
    ):
        on_ranks(model, 4, 2, use)
    header = Generation._header

    def strayed(self: Generation, *args: Any) -> Any:
        found = header(self, *args)
        other = len(self.stats) == 2 and self.context.steps.rank == 1
        return found._replace(digest=found.digest ^ 1) if other else found

    monkeypatch.setattr(Generation, "_header", strayed)
    with pytest.raises(RuntimeError, match=r"rank \d \(lp 1, tp (\d)\) differs from rank \d \(lp 0, tp \1\) at step 2"):
        generated(model, 4, 2)


def test_ranks_of_a_replica_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compare digests in the vocabulary's exchange."""
    header = Generation._header

    def strayed(self: Generation, *args: Any) -> Any:
        found = header(self, *args)
        other = len(self.stats) == 2 and self.context.replica.rank == 1
        return found._replace(digest=found.digest ^ 1) if other else found

    monkeypatch.setattr(Generation, "_header", strayed)
    with pytest.raises(RuntimeError, match=r"rank \d \(lp 0, tp \d\), tp 1 differs from tp 0 at step 2"):
        generated(tiny_model("llama"), 2, 2)


class Fails(tf.LogitsProcessor):
    """A processor that fails on one rank alone."""

    per_branch = True

    def __init__(self, fails: bool) -> None:
        self.case = SimpleNamespace(fails=fails, calls=0)  # whose name alone ranks compare

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.case.calls += 1
        if self.case.fails and self.case.calls > 4:
            raise ArithmeticError("a processor of one rank")
        return scores


@pytest.mark.parametrize("where", ["callback", "processor", "criterion", "signal"])
@pytest.mark.parametrize("world, victim", [(2, 0), (2, 1), (4, 1), (4, 2)])
def test_what_stops_one_rank_stops_all(where: str, world: int, victim: int) -> None:
    """The other ranks of its replica and those of other replicas learn of it by two different collectives."""
    model = tiny_model("llama")

    def use(part: Any, context: ParallelContext) -> str:
        here = context.rank == victim

        def on_tokens(tokens: list[int], step: int) -> None:
            if here and step == 2 and where == "callback":
                raise ArithmeticError("a callback of one rank")
            if here and step == 2 and where == "signal":
                signals[context.rank].received = 2

        kwargs: dict[str, Any] = {"on_tokens": on_tokens}
        if where == "processor":
            kwargs["logits_processor"] = [Fails(here)]
        if where == "criterion" and context.is_main:
            kwargs["stopping_criteria"] = [StopAfter(len(IDS) + 5)]
        elif where == "criterion":
            kwargs["stopping_criteria"] = [StopAfter(10**6)]
        decoder = lp.LookaheadDecoder(part, SHAPE, context)
        finished = decoder._generate

        def seen(request: Any) -> Any:
            signals[context.rank] = request.signals
            return finished(request)

        decoder._generate = seen  # type: ignore[method-assign]
        try:
            output = decoder.generate(IDS, 60, **kwargs)
            return f"{output.finish_reason} {len(output.tokens)}"
        except ArithmeticError:
            return "failed"
        except lp.Interrupted:
            return "interrupted"

    signals: dict[int, Any] = {}
    found = on_ranks(model, world, 2, use)
    if where == "criterion":
        assert found == ["criteria 5"] * world
    else:
        own = "interrupted" if where == "signal" else "failed"
        assert found == [own if rank == victim else "interrupted" for rank in range(world)]


@pytest.mark.parametrize("world, tp", [(2, 1), (4, 2)])
def test_ranks_that_are_threads_report_the_rank_that_failed(world: int, tp: int) -> None:
    """Another rank is stopped by it first, which says nothing of the cause."""
    model = tiny_model("llama")

    def use(part: Any, context: ParallelContext) -> None:
        decoder = lp.LookaheadDecoder(part, SHAPE, context)
        try:
            decoder.generate(IDS, 60, logits_processor=[Fails(context.rank == world - 1)])
        except ArithmeticError:
            time.sleep(0.2)
            raise

    with pytest.raises(ArithmeticError, match="a processor of one rank"):
        on_ranks(model, world, tp, use)


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_fails_in_the_prefill_leaves_its_replica_alone(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums of the next step would meet those of the prompt on the others."""
    model = tiny_model("llama")
    armed, failed, later = [False], [False], [0]
    all_reduce = LockstepReplica.all_reduce

    def failing(self: LockstepReplica, tensor: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is victim[0]:
            later[0] += failed[0]
            if armed[0] and not failed[0]:
                failed[0] = True
                raise ArithmeticError("out of memory on one rank")
        return all_reduce(self, tensor)

    monkeypatch.setattr(LockstepReplica, "all_reduce", failing)
    victim: list[Any] = [None]

    def use(part: Any, context: ParallelContext) -> None:
        decoder = lp.LookaheadDecoder(part, SHAPE, context)
        if context.rank == world - 1:
            victim[0], armed[0] = threading.current_thread(), True
        decoder.generate(IDS, NEW)

    with pytest.raises(ArithmeticError, match="out of memory on one rank"):
        on_ranks(model, world, 2, use)
    assert failed[0] and not later[0]


def test_plain_decoding_ends_where_the_first_rank_of_a_replica_says() -> None:
    """A criterion that looks at the clock ends one rank first, and the others would wait for it."""
    model = tiny_model("llama")

    def use(part: Any, context: ParallelContext) -> list[tuple[int, str]]:
        found = []
        for kind in (lp.AutoregressiveDecoder, lp.PlainDecoder):
            criteria = [StopAfter(len(IDS) + (5 if context.is_main else 7))]
            output = kind(part, context=context).generate(IDS, NEW, stopping_criteria=criteria)
            found.append((len(output.tokens), output.finish_reason))
        return found

    assert on_ranks(model, 2, 2, use) == [[(5, "criteria")] * 2] * 2


class StopAfter(tf.StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([ids.shape[1] >= self.length])


def test_a_divided_model_called_as_a_module_gives_all_logits() -> None:
    """transformers' own code sees a model like any other."""
    model = tiny_model("llama")
    ids = torch.tensor([IDS])
    expected = model(ids).logits

    def use(part: Any, context: ParallelContext) -> bool:
        assert head_of(part) is not None and part.lm_head.linear.weight.shape[0] < 61
        return torch.allclose(part(ids).logits, expected)

    assert on_ranks(model, 2, 2, use) == [True, True]
