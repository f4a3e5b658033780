"""Lookahead parallelism with ranks that are threads in lockstep: the same decode loop, no process group.

That R ranks give one rank's tokens, over drawn shapes; `test_gloo.py` has the same over real processes.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

import lp
from lp.budget.step_times import StepTimes
from lp.draft import registry
from lp.draft.registry import sources
from lp.draft.share import Share
from lp.draft.source import DraftSource, StepSamples, TokenPrice, WindowDrafts
from lp.draft.tree import DraftTree
from lp.engine.generation import Generation, StepPart
from lp.models.loader import DEMO_MODEL
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.conftest import some_of
from tests.support.layouts import drawn_tree
from tests.support.pools import drawn_step_times, drawn_switches
from tests.support.switches import lookahead_config
from tests.support.tiny_models import VOCABULARY, drawn_text, letters, plain_greedy, tiny_model

ARCHS = ["llama", "llama", "llama", "gemma3", "mistral_sliding", "gpt_neox"]


def on_ranks(
    ranks: int,
    model: PreTrainedModel,
    config: lp.LookaheadConfig,
    ids: list[int],
    new: int,
    by_rank: Callable[[int], dict[str, Any]] = lambda rank: {},
    step_times: StepTimes | None = None,
    **kwargs: Any,
) -> list[lp.GenerationOutput | BaseException]:
    """What `generate` gave on every rank: its output, or what it raised."""

    def body(context: ParallelContext) -> lp.GenerationOutput | BaseException:
        decoder = lp.LookaheadDecoder(model, config, context, step_times=step_times)
        try:
            return decoder.generate(ids, new, **kwargs, **by_rank(context.rank))
        except (
            ArithmeticError,
            ValueError,
            lp.Interrupted,
        ) as error:  # what these tests raise on purpose; others end the test
            return error

    return run_lockstep(ranks, body)


@pytest.fixture
def largest_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(step tokens, B) of every rank and step of the test's texts, in the order in which steps began."""
    begin_step = Generation.begin_step
    seen: list[tuple[int, int]] = []

    def counted(self: Generation) -> StepPart:
        part = begin_step(self)
        seen.append((part.layout.num_tokens, self.budget.step_tokens))
        return part

    monkeypatch.setattr(Generation, "begin_step", counted)
    return seen


def test_ranks_give_plain_greedy(cases: Callable[[int, int], range], largest_steps: list[tuple[int, int]]) -> None:
    """A wrong share, speaker, catch-up or broadcast changes a token, or what is accepted, on some rank of some case."""
    accepted = 0
    for case in cases(16, 200):
        rng = random.Random(f"lockstep-{case}")
        model = tiny_model(rng.choice(ARCHS), seed=rng.randrange(8))
        ids, new = drawn_text(rng, rng.randint(1, 60)), rng.randint(1, 48)
        plain = plain_greedy(model, ids, new)
        eos = rng.choice(plain) if rng.random() < 0.5 else None
        expected = plain[: plain.index(eos) + 1] if eos is not None else plain
        ranks = 1 + case % 8
        config = lookahead_config(
            window_size=rng.randint(0, 12),
            ngram_size=rng.randint(2, 6),
            guess_set_size=rng.randint(0, 10),
            draft_depth=rng.choice([None, None, 9]),
            kv_sync=rng.choice(list(lp.KVSync)),
            **drawn_switches(rng),
        )
        step_times = drawn_step_times(rng)
        largest_steps.clear()
        outputs = on_ranks(ranks, model, config, ids, new, step_times=step_times, eos_token_id=eos)
        for rank, output in enumerate(outputs):
            where = f"case {case}, rank {rank} of {ranks}: {config}, prompt {len(ids)}, new {new}, eos {eos}"
            assert isinstance(output, lp.GenerationOutput), where
            assert output.tokens == expected, where
            assert output.finish_reason == ("length" if eos is None else "eos"), where
            assert _alike(output) == _alike(outputs[0]), where
            accepted += sum(step.accepted for step in output.step_stats)
        bounds = {budget for _, budget in largest_steps}
        assert len(bounds) == 1 and max(tokens for tokens, _ in largest_steps) <= max(bounds), f"case {case}: {config}"
        least = config.window_size + config.ngram_size - 2 if config.window_size and not config.adaptive else 1
        assert min(bounds) >= least
    assert accepted > 100


def _alike(output: lp.GenerationOutput | BaseException) -> list[tuple[int, int, int, bool]]:
    """The part of every step's figures that all ranks must have alike; times may differ."""
    assert isinstance(output, lp.GenerationOutput)
    return [(step.accepted, step.num_draft, step.columns, step.idle) for step in output.step_stats]


def test_more_ranks_take_fewer_steps() -> None:
    """Bounds are a rank's: ranks that all drafted the same, or whose drafts did not count, would save nothing."""
    model = tiny_model()
    config = lp.LookaheadConfig(adaptive=True, window_size=4, ngram_size=3, guess_set_size=4, draft_depth=12)
    times = StepTimes.constant(0.01, 40)
    steps = {}
    for ranks in (1, 8):
        steps[ranks] = 0
        for seed in range(6):
            output = on_ranks(ranks, model, config, drawn_text(random.Random(seed), 40), 60, step_times=times)[0]
            assert isinstance(output, lp.GenerationOutput)
            steps[ranks] += output.steps
    assert steps[8] < 0.95 * steps[1], steps


def test_the_window_is_that_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that takes another one's sample guesses wrongly for ever after: the text stays exact, and slow."""
    learn = Generation._learn
    windows: dict[int, list[list[list[int]]]] = {}

    def noted(self: Any, *args: Any) -> None:
        learn(self, *args)
        windows.setdefault(self.context.rank, []).append([*self.window.levels])

    monkeypatch.setattr(Generation, "_learn", noted)
    config = lookahead_config(window_size=9, ngram_size=4, guess_set_size=4, warmup_steps=99)  # a token a step
    model, ids = tiny_model(), drawn_text(random.Random(13), 30)
    on_ranks(1, model, config, ids, 30)
    alone = windows.pop(0)
    for ranks in (2, 3, 5):
        on_ranks(ranks, model, config, ids, 30)
        assert [windows.pop(rank) for rank in range(ranks)] == [alone] * ranks, ranks


SOURCES: dict[str, Any] = {
    "lookahead": lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=5, draft_depth=6),
    "lookahead_adaptive": lp.LookaheadConfig(adaptive=True, window_size=4, guess_set_size=20),
    "lookahead_paper": lp.PaperConfig(window_size=4, ngram_size=3, guess_set_size=4),
    "prompt_lookup": lp.PromptLookupConfig(num_tokens=6),
    "jacobi": lp.JacobiConfig(num_tokens=6),
    "token_recycling": lp.RecyclingConfig(successors=4, nodes=12),
    "suffix": lp.SuffixConfig(max_tokens=8, max_spec_factor=2.0, tree=True),
    "test_repeat": None,  # the toy, which is imported for its test alone
}
STOPS = ["abc", "ba", "cc", "aab"]


@pytest.fixture
def toy() -> Iterator[ModuleType]:
    """A source that a user might register, which has no shares of its own; afterwards it never was."""
    yield importlib.import_module("tests.support.toy_source")
    del registry._entries["test_repeat"]
    del sys.modules["tests.support.toy_source"]


def test_every_source_is_decoded_on_ranks(toy: ModuleType) -> None:
    """A source that is registered and not here would never have been tried on ranks."""
    assert {entry.name for entry in sources()} <= {*SOURCES}


@pytest.mark.parametrize(("name", "kv_sync"), some_of([*product(SOURCES, lp.KVSync)], 8))
def test_sources_give_plain_decoding_on_any_ranks(
    name: str,
    kv_sync: lp.KVSync,
    toy: ModuleType,
    cases: Callable[[int, int], range],
    largest_steps: list[tuple[int, int]],
) -> None:
    """Greedy and coupled, with processors and stop strings: the tokens are those of plain decoding."""
    config = SOURCES[name] or toy.RepeatConfig(num_tokens=5)
    if name == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        pytest.skip("arctic-inference is not installed")
    if isinstance(config, lp.LookaheadConfig):
        config = replace(config, ablation=lp.Ablation(kv_sync=kv_sync))
    elif kv_sync is lp.KVSync.BROADCAST:
        pytest.skip("it has no such setting")
    accepted = 0
    for case in cases(6, 64):
        rng = random.Random(f"{name} {kv_sync} {case}")
        ranks = 1 + case % 8
        model = tiny_model(rng.choice(ARCHS), seed=rng.randrange(8))
        ids = drawn_text(rng, rng.randint(5, 40))
        coupled = lp.SamplingParams(temperature=0.6, top_p=0.95, seed=case)
        asked: dict[str, Any] = {"sampling": coupled if case % 2 else None}
        if case % 4 >= 2:
            asked["logits_processor"] = [RepetitionPenaltyLogitsProcessor(1.1), NoRepeatNGramLogitsProcessor(5)]
        if case % 3 == 2:
            asked |= {"stop_strings": rng.sample(STOPS, 2), "tokenizer": letters(VOCABULARY)}
        plain = lp.AutoregressiveDecoder(model).generate(ids, 24, **asked)
        outputs = on_ranks(ranks, model, config, ids, 24, step_times=drawn_step_times(rng), **asked)
        for rank, output in enumerate(outputs):
            where = f"case {case}, rank {rank} of {ranks}"
            assert isinstance(output, lp.GenerationOutput)
            assert (output.tokens, output.finish_reason) == (plain.tokens, plain.finish_reason), where
            assert _alike(output) == _alike(outputs[0]), where
            accepted += sum(step.accepted for step in output.step_stats)
    assert all(tokens <= budget for tokens, budget in largest_steps), "a rank took more than B"
    assert accepted, "nothing was ever accepted"


SHAPE = lp.LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=4)


def _corrupt(generation: Any, what: str) -> bool:
    """Change one token of a rank's state, if there is one of that kind."""
    if what == "last token":
        generation.text[-1] ^= 1
    elif what == "accepted token":  # not the last one, which the next layout starts from
        if generation.text[generation.num_digested :][1:] == []:
            return False
        generation.text[-2] ^= 1
    elif what == "window":
        generation.window.levels[1][2] ^= 1
    else:
        tree = DraftTree([VOCABULARY - 1], [-1])
        generation.propose_share = lambda *asked: Share(tree, tree)
    return True


@pytest.mark.parametrize("what", ["last token", "accepted token", "window", "candidates"])
@pytest.mark.parametrize(("ranks", "bad"), [(2, 0), (2, 1), (3, 0), (4, 2)])
def test_a_corrupted_token_stops_the_job(ranks: int, bad: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose state drifts must not go on: its read-offs would be taken for the text."""
    corrupted: list[int] = []
    learn, seen = Generation._learn, [0] * ranks

    def learn_and_corrupt(self: Any, *args: Any) -> None:
        learn(self, *args)
        step, rank = len(self.stats), self.context.rank
        seen[rank] = step + 1
        if rank == bad and step >= 2 and not corrupted and _corrupt(self, what):
            corrupted.append(step)

    monkeypatch.setattr(Generation, "_learn", learn_and_corrupt)
    ids = drawn_text(random.Random(4), 40)
    with pytest.raises(RuntimeError) as error:
        on_ranks(ranks, tiny_model(), SHAPE, ids, 60)
    others = ", ".join(str(rank) for rank in range(ranks) if rank != bad)
    odd, rest = (bad, others) if ranks > 2 else (1, 0)  # of two, nobody can tell which is right
    assert f"rank {odd} differs from rank {rest} at step {corrupted[0] + 1}" in str(error.value)
    assert max(seen) == corrupted[0] + 1, "a step was taken after the corruption"


@pytest.mark.parametrize("kv_sync", list(lp.KVSync))
def test_a_rank_may_draft_anything(kv_sync: lp.KVSync, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks go by what the others say that they computed: to guess it from their own state would be a wrong text."""
    propose = Generation._propose

    def anything(self: Any, slices: Any) -> Share:
        share = propose(self, slices)
        rank, step = self.context.rank, len(self.stats)
        if rank != step % 3:
            return share
        rng = random.Random(step)
        room = self.budget.step_tokens - self.catch_up_counts[rank] - slices[rank].num_nodes
        right = [*plain[len(self.tokens) :][: rng.randrange(4)], rng.randrange(VOCABULARY)][:room]
        path = DraftTree(right, range(-1, len(right) - 1))
        return replace(share, draft=rng.choice([path, drawn_tree(rng, room, VOCABULARY, first=0)]))

    monkeypatch.setattr(Generation, "_propose", anything)
    model, ids = tiny_model(), drawn_text(random.Random(11), 30)
    plain = plain_greedy(model, ids, 60)
    outputs = on_ranks(3, model, replace(SHAPE, ablation=lp.Ablation(kv_sync=kv_sync)), ids, 60)
    for output in outputs:
        assert isinstance(output, lp.GenerationOutput)
        assert output.tokens == plain and _alike(output) == _alike(outputs[0])


def _copies(ranks: int, **options: Any) -> list[PreTrainedModel]:
    """A copy of the model for every rank, as processes have."""
    return [tiny_model(**options) for _ in range(ranks)]


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(("ranks", "bad"), [(2, 0), (2, 1), (3, 0), (3, 2), (5, 3)])
def test_a_changed_weight_is_an_error_that_names_the_rank(ranks: int, bad: int, idle: bool) -> None:
    """Weights are compared when a decoder is made: what a user changes later gave a wrong text, alike on all ranks."""
    models, ids = _copies(ranks), drawn_text(random.Random(12), 30)
    config = lp.LookaheadConfig(adaptive=True) if idle else SHAPE
    sampling = lp.SamplingParams(temperature=2.0, seed=1) if idle else None  # at which texts begin with plain steps
    taken = [0] * ranks

    def body(context: ParallelContext) -> None:
        model = models[context.rank]
        decoder = lp.LookaheadDecoder(model, config, context, step_times=StepTimes.constant(0.01, 120))
        assert decoder.generate(ids, 10, sampling).tokens
        if context.rank == bad:
            with torch.no_grad():
                model.lm_head.weight[:, 3] += 0.01 * torch.arange(VOCABULARY)

        def on_tokens(tokens: list[int], step: int) -> None:
            taken[context.rank] += 1

        decoder.generate(ids, 10, sampling, on_tokens=on_tokens)

    with pytest.raises(RuntimeError) as error:
        run_lockstep(ranks, body)
    others = ", ".join(str(rank) for rank in range(ranks) if rank != bad)
    odd, rest = (bad, others) if ranks > 2 else (1, 0)  # of two, nobody can tell which is right
    assert f"the model of rank {odd} computes other logits than that of rank {rest} at step 0" in str(error.value)
    assert taken == [0] * ranks


def _tied(model: PreTrainedModel, gap: float) -> PreTrainedModel:
    """Every row's second-best logit is so much above its best, as another processor's rounding might have it."""

    def tie(module: Any, args: Any, output: Any) -> Any:
        best, at = output.logits.topk(2)
        output.logits = output.logits.scatter(-1, at[..., 1:], best[..., :1] + gap)
        return output

    model.register_forward_hook(tie)
    return model


@pytest.mark.parametrize(("bad", "kv_sync"), some_of([*product(range(3), lp.KVSync)], 3))
def test_a_near_tie_settles_alike_on_all_ranks(bad: int, kv_sync: lp.KVSync) -> None:
    """Ranks round differently: whichever token a near-tie gives, all of them must have the same."""
    accepted = 0
    for seed in range(4):
        models = [_tied(model, 1e-11 if rank == bad else -1e-11) for rank, model in enumerate(_copies(3, seed=seed))]
        ids = drawn_text(random.Random(seed), 40)
        plain = [lp.AutoregressiveDecoder(models[rank]).generate(ids, 40).tokens for rank in (bad, (bad + 1) % 3)]
        assert plain[0] != plain[1], "there was no tie"

        def body(context: ParallelContext, settings: Any = (models, ids)) -> lp.GenerationOutput:
            models, ids = settings
            config = lookahead_config(window_size=4, ngram_size=3, guess_set_size=8, draft_depth=8, kv_sync=kv_sync)
            return lp.LookaheadDecoder(models[context.rank], config, context).generate(ids, 40)

        outputs = run_lockstep(3, body)
        assert all(output.tokens == outputs[0].tokens for output in outputs)
        assert all(_alike(output) == _alike(outputs[0]) for output in outputs)
        text = torch.tensor([[*ids, *outputs[0].tokens]])
        with torch.inference_mode():
            logits = models[0](text).logits[0, len(ids) - 1 : -1]
        ranked = logits.argsort(-1, descending=True)[:, :2].tolist()
        assert all(token in best for token, best in zip(outputs[0].tokens, ranked, strict=True))
        accepted += sum(step.accepted for step in outputs[0].step_stats)
    assert accepted


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("when", ["first", "third", "last"])
def test_a_failing_callback_stops_every_rank(bad: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for one that has left hang until a timeout."""
    monkeypatch.setattr("lp.parallel.context.DEFAULT_TIMEOUT_S", 20)
    model, ids, new = tiny_model(), drawn_text(random.Random(5), 30), 24
    undisturbed = on_ranks(3, model, SHAPE, ids, new)[0]
    assert isinstance(undisturbed, lp.GenerationOutput)
    step = {"first": 0, "third": 2, "last": undisturbed.steps - 1}[when]
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def by_rank(rank: int) -> dict[str, Any]:
        def on_tokens(tokens: list[int], now: int) -> None:
            streamed[rank] += tokens
            if rank == bad and now == step:
                raise ZeroDivisionError("from the callback")

        return {"on_tokens": on_tokens}

    outputs = on_ranks(3, model, SHAPE, ids, new, by_rank)
    kept = streamed[bad]
    for rank, output in enumerate(outputs):
        if rank == bad:
            assert isinstance(output, ZeroDivisionError)
        else:
            if when != "last":
                assert isinstance(output, lp.Interrupted)
                output = output.output
            assert isinstance(output, lp.GenerationOutput)
            assert output.tokens == streamed[rank] == kept == undisturbed.tokens[: len(kept)]
            assert output.finish_reason == ("length" if when == "last" else "interrupted")
            assert output.steps == step + 1


class _OnCall:
    """A criterion that knows more than the tokens, as a clock does: it acts on its n-th call."""

    def __init__(self, call: int, action: Callable[[], bool]) -> None:
        self.call, self.action, self.calls = call, action, 0

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        self.calls += 1
        return self.calls == self.call and self.action()


def test_a_criterion_of_rank_0_stops_every_rank() -> None:
    """A time limit that one rank meets a step before another leaves them with different texts, or hanging."""
    model, ids = tiny_model(), drawn_text(random.Random(6), 30)

    def stops(rank: int) -> dict[str, Any]:
        call = {0: 9, 1: 4, 2: 10**6}[rank]
        return {"stopping_criteria": [_OnCall(call, lambda: True)]}

    plain = plain_greedy(model, ids, 40)
    for output in on_ranks(3, model, SHAPE, ids, 40, stops):
        assert isinstance(output, lp.GenerationOutput)
        assert (output.tokens, output.finish_reason) == (plain[:9], "criteria")
    # The other stops are rank 0's word too, as soon as there are criteria.
    eos = plain[20]
    never = {"stopping_criteria": [_OnCall(-1, bool)]}
    for output in on_ranks(3, model, SHAPE, ids, 40, eos_token_id=eos, **never):
        assert isinstance(output, lp.GenerationOutput)
        assert (output.tokens, output.finish_reason) == (plain[: plain.index(eos) + 1], "eos")


def test_a_failing_criterion_stops_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a failing callback, but where the text is checked."""
    monkeypatch.setattr("lp.parallel.context.DEFAULT_TIMEOUT_S", 20)
    model, ids = tiny_model(), drawn_text(random.Random(7), 30)
    outputs = on_ranks(2, model, SHAPE, ids, 40, lambda rank: {"stopping_criteria": [_OnCall(5, lambda: bool(1 // 0))]})
    assert isinstance(outputs[0], ZeroDivisionError)
    assert isinstance(outputs[1], lp.Interrupted)
    tokens = outputs[1].output.tokens
    assert len(tokens) >= 5 and tokens == plain_greedy(model, ids, 40)[: len(tokens)]


class _FailingSource(DraftSource):
    """Repeats the text's last tokens; fails at the third step."""

    steps = 0

    def __init__(self, what: str) -> None:
        self.what = what

    def propose(self, text: Sequence[int], budget: int, window: WindowDrafts, price: TokenPrice | None) -> DraftTree:
        tokens = list(text[-4:])[:budget]
        tree = DraftTree(tokens, range(-1, len(tokens) - 1))
        if self.steps < 2:
            return tree
        if self.what == "propose":
            raise ZeroDivisionError("from propose")
        others = {"a cycle": replace(tree, parents=[0] * len(tokens)), "lengths": replace(tree, parents=[-1])}
        return others.get(self.what, tree)

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        self.steps += 1
        if self.what == "observe" and self.steps > 2:
            raise ZeroDivisionError("from observe")


@pytest.mark.parametrize("what", ["propose", "observe", "a cycle", "lengths"])
@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1, 2)])
def test_a_failing_draft_source_stops_every_rank(
    what: str, bad: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's source may fail on one rank or on all: each of these raises what failed, the others are interrupted."""
    monkeypatch.setattr("lp.parallel.context.DEFAULT_TIMEOUT_S", 20)
    monkeypatch.setattr(
        lp.LookaheadDecoder,
        "source",
        lambda self, request: _FailingSource(what if self.context.rank in bad else "nothing"),
    )
    model, ids = tiny_model(), drawn_text(random.Random(9), 30)
    outputs = on_ranks(3, model, SHAPE, ids, 40)
    for rank, output in enumerate(outputs):
        if rank in bad:
            assert isinstance(output, ZeroDivisionError if what in ("propose", "observe") else ValueError)
        else:
            assert isinstance(output, lp.Interrupted)
            tokens = output.output.tokens
            assert output.output.steps == (3 if what == "observe" else 2)
            assert tokens == plain_greedy(model, ids, len(tokens))


@pytest.mark.parametrize("seed", range(4))  # some accept to the very end
def test_criteria_at_the_end_of_the_context(seed: int) -> None:
    """The step that tells the others of a stop must not run past the last learned position."""
    torch.manual_seed(seed)
    shape = GPT2Config(
        vocab_size=VOCABULARY, n_positions=48, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(shape).double().eval()
    model.generation_config = GenerationConfig(do_sample=False)
    ids = drawn_text(random.Random(8), 30)
    alone = lp.AutoregressiveDecoder(model).generate(ids, 100)
    for new, reason in ((100, "context"), (18, "length"), (17, "length")):
        for output in on_ranks(2, model, SHAPE, ids, new, stopping_criteria=[_OnCall(-1, bool)]):
            assert isinstance(output, lp.GenerationOutput)
            assert (output.tokens, output.finish_reason) == (alone.tokens[:new], reason)


DIFFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": ("prompt", {"ids": [1, 2, 4]}),
    "window_size": ("window_size", {"config": lp.LookaheadConfig(window_size=6)}),
    "ablation": ("ablation", {"config": lookahead_config(window_size=5, kv_sync="broadcast")}),
    "max_new_tokens": ("max_new_tokens", {"new": 9}),
    "eos_token_id": ("eos_token_id", {"eos_token_id": 3}),
    "sampling": ("sampling", {"sampling": lp.SamplingParams(temperature=0.7, seed=3)}),
    "an open seed": ("sampling", {"sampling": lp.SamplingParams(temperature=0.7)}),
    "criteria": ("stopping_criteria", {"stopping_criteria": [_OnCall(-1, bool)]}),
    "weights": ("weights' checksum", {"model": {"seed": 1}}),
    "dtype": ("weights' names and shapes", {"model": {"dtype": torch.float32}}),
    "stop strings": ("stop_strings", {"stop_strings": ["a"]}),
    "model config": ("model config", {"model": {"rms_norm_eps": 1e-4}}),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_rank_that_differs_is_named(what: str) -> None:
    """Ranks that were given different things would fail later, for a reason that names neither rank nor thing."""
    item, other = DIFFERENCES[what]
    usual: dict[str, Any] = {"ids": [1, 2, 3], "new": 8, "config": lp.LookaheadConfig(window_size=5)}
    usual |= {"model": {}, "tokenizer": AutoTokenizer.from_pretrained(DEMO_MODEL)}
    by_rank = [usual, usual | other, usual]
    models = [tiny_model(**given["model"]) for given in by_rank]  # here: the ranks would share one generator

    def body(context: ParallelContext) -> None:
        given = {key: value for key, value in by_rank[context.rank].items() if key != "model"}
        decoder = lp.LookaheadDecoder(models[context.rank], given.pop("config"), context)
        decoder.generate(given.pop("ids"), given.pop("new"), **given)

    with pytest.raises(ValueError, match=f"the {item} of rank 1 differs from rank 0's"):
        run_lockstep(3, body)


def test_prompt_lookup_on_ranks() -> None:
    """A method without a window is shared by the same loop, and its own settings are compared too."""
    model, ids = tiny_model(), drawn_text(random.Random(9), 50)
    plain = plain_greedy(model, ids, 40)

    def body(context: ParallelContext) -> list[int]:
        lookup = lp.PromptLookupConfig(num_tokens=7)
        return lp.LookaheadDecoder(model, lookup, context).generate(ids, 40).tokens

    assert run_lockstep(3, body) == [plain] * 3

    def differ(context: ParallelContext) -> None:
        lookup = lp.PromptLookupConfig(max_matching_ngram=2 + context.rank // 2)
        lp.LookaheadDecoder(model, lookup, context).generate(ids, 40)

    with pytest.raises(ValueError, match="the max_matching_ngram of rank 2 differs"):
        run_lockstep(3, differ)
