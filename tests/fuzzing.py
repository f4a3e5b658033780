"""Drawn cases of decoding, held against transformers' own `generate`.

A case is data: JSON of it is all that is needed to run it again.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import transformers as tf
from transformers import LogitsProcessor, PreTrainedModel

import lp
from lp.attention.flash import SHORT
from lp.models.loader import context_limit
from lp.models.support import check_supported
from lp.models.tensor_parallel import STYLES, divide
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.captured import captured_runner
from tests.pools import drawn_step_times, drawn_switches
from tests.processors import Alternating, Noise, SumCriterion
from tests.tiny_models import (
    MATRIX,
    VOCABULARY,
    drawn_text,
    letters,
    logits_differ,
    plain_greedy,
    tiny_config,
    tiny_model,
)

# Whose sizes may be drawn: nothing in their configs goes layer by layer.
RESIZED = [
    "llama", "mistral", "mistral_sliding", "qwen2", "qwen2_sliding", "qwen3", "phi3", "gemma", "granite", "gpt_neox",
    "stablelm", "olmo2", "starcoder2", "phi3_sliding",
]  # fmt: skip
STOPPABLE = 8  # fewest tokens of a vocabulary that has strings to stop at
FAR = [*RESIZED, *["llama", "qwen2"] * 6]  # of long cases: more of those whose biases make rows look near
LONG, LONG_EVERY = 2 * SHORT, 4  # tokens of the longest prompts; cases for a long one, on one rank and on several
PEERS: dict[str, Any] = {
    "prompt_lookup": lp.PromptLookupConfig,
    "paper": lp.PaperConfig,
    "recycling": lp.RecyclingConfig,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a prompt and what is asked for; the defaults are the simplest there is.

    Attributes:
        arch, model_seed, sharpness, recency, overrides: of `tiny_model`.
        backend: the attention.
        method: "lookahead" or one of PEERS, with their default settings.
        config: fields of LookaheadConfig.
        ids, new: the prompt, and the most tokens to add.
        ranks: threads in lockstep.
        tp: of these, ranks that hold a model between them.
        sampling: fields of SamplingParams.
        processors: names of PROCESSORS.
        eos, stop_strings: as `generate` takes them.
        criterion: end where the sum of all ids is a multiple of it; 0 for never.
        prefill_chunk: rows.
        calls: of the same decoder, one after the other.
        step_times: seed of the step times of an adaptive budget.
        captured: steps have a few fixed shapes.
        logits: those of every token are compared too, which shows what changes no token; on one rank.
        company: other texts, drawn, that share steps with this one; then steps are not captured.
    """

    arch: str = "llama"
    model_seed: int = 0
    sharpness: float = 3.0
    recency: float = 0.0
    overrides: dict[str, Any] = field(default_factory=dict)
    backend: str = "auto"
    method: str = "lookahead"
    config: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=lambda: [1])
    new: int = 1
    ranks: int = 1
    tp: int = 1
    sampling: dict[str, Any] | None = None
    processors: list[str] = field(default_factory=list)
    eos: list[int] = field(default_factory=list)
    stop_strings: list[str] = field(default_factory=list)
    criterion: int = 0
    prefill_chunk: int = 512
    calls: int = 1
    step_times: int = 0
    captured: bool = False
    logits: bool = False
    company: int = 0

    @classmethod
    def drawn(cls, seed: str, ranks: int, long: bool = False, archs: Sequence[str] | None = None) -> Case:
        """What a seed stands for; a long case has few new tokens behind about as many or twice as many as SHORT.

        Args:
            archs: to draw from; None: any that is supported.
        """
        rng = random.Random(seed)
        arch = rng.choice(archs or (FAR if long else RESIZED if rng.random() < 0.6 else _supported()))
        overrides = _drawn_sizes(rng, arch)
        vocabulary = overrides["vocab_size"]
        fewest = rng.choice([1, 1, 1, 40])
        eos = [rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 3]))] if vocabulary > 2 else []
        strings = ["".join(rng.choices("abc", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 2))]
        sampled = rng.random() < (0.8 if long else 0.4)
        method = rng.choice(["lookahead"] * 9 + [*PEERS])
        length, new, chunks = rng.randint(fewest, max(fewest, 60)), rng.randint(1, 60), [1, 7, 64, 512]
        if long:  # or the text grows past SHORT while it is generated
            overrides |= {"max_position_embeddings": 2 * LONG} | ({"attention_bias": True} if arch == "llama" else {})
            eos, length = [], rng.choice([rng.randint(SHORT - 20, SHORT), rng.randint(SHORT, LONG)])
            new, chunks = rng.randint(8, 24), [64, 512]
        return cls(
            arch=arch,
            model_seed=rng.randrange(1000),
            sharpness=rng.choice([3.0, 6.0, 6.0] if long else [0.0, 1.0, 2.0, 3.0, 3.0, 3.0, 6.0]),
            recency=rng.choice([0.0, 2.0, 2.0]) if long else 0.0,
            overrides=overrides,
            backend=rng.choice(["auto"] * (8 if long else 1) + ["sdpa", "eager"]) if arch in RESIZED else "auto",
            method=method,
            config=_drawn_config(rng, method),
            ids=drawn_text(rng, length, vocabulary),
            new=new,
            ranks=ranks,
            sampling=_drawn_sampling(rng) if sampled else None,
            processors=rng.sample([*PROCESSORS], rng.choice([0, 0, 0, 1, 2])),
            eos=eos,
            stop_strings=strings if vocabulary >= STOPPABLE and rng.random() < 0.2 else [],
            criterion=rng.choice([0, 0, 0, 0, 0, 0, 37]),
            prefill_chunk=rng.choice(chunks),
            calls=rng.choice([1, 1, 1, 2]),
            step_times=rng.randrange(1000),
            captured=rng.random() < (0.1 if long else 0.3),
            logits=ranks == 1 and rng.random() < (0.8 if long else 0.5),
            tp=_drawn_tp(rng, arch, ranks, overrides),
            company=rng.choice([0, 0, 0, 1, 2, 5]),
        )

    def json(self) -> str:
        """What differs from the defaults."""
        return json.dumps({key: value for key, value in asdict(self).items() if value != asdict(Case())[key]})


@cache
def _supported() -> list[str]:
    names = []
    for arch in MATRIX:
        try:
            check_supported(tiny_config(arch))
        except ValueError:
            continue
        names.append(arch)
    return names


def _drawn_sizes(rng: random.Random, arch: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {"vocab_size": rng.choice([2, 5, 17, 61, 61, 61, 300])}
    if hasattr(tiny_config(arch), "vocab_size_per_layer_input"):
        sizes["vocab_size_per_layer_input"] = sizes["vocab_size"]
    if arch not in RESIZED:
        return sizes
    sizes |= {"num_hidden_layers": rng.randint(1, 3), "num_key_value_heads": rng.choice([1, 2, 4])}
    if "sliding" in arch or arch == "starcoder2":
        sizes |= {"sliding_window": rng.randint(4, 40)}
    return sizes | ({"max_position_embeddings": 64} if rng.random() < 0.2 else {})


def _drawn_tp(rng: random.Random, arch: str, ranks: int, overrides: dict[str, Any]) -> int:
    """Ranks that hold a model between them: 1 where there is no plan of how."""
    config = tiny_config(arch, **overrides)
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan or not {*plan.values()} <= STYLES.keys() or not getattr(config, "num_attention_heads", 0):
        return 1
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", 4), config.vocab_size
    fitting = [size for size in (2, 4) if ranks % size == 0 and heads[0] % size == 0 and heads[2] >= size]
    fitting = [size for size in fitting if heads[1] % size == 0 or size % heads[1] == 0]
    return rng.choice([1, *fitting])


def _drawn_config(rng: random.Random, method: str) -> dict[str, Any]:
    sync = {"kv_sync": rng.choice(["recompute", "broadcast"])}
    if method != "lookahead":
        return sync
    shape = {"window_size": rng.randint(0, 12), "ngram_size": rng.randint(2, 6), "guess_set_size": rng.randint(0, 12)}
    policy = {
        "draft_depth": rng.choice([None, 1, 9, 48]),
        "warmup_steps": rng.choice([0, 0, 0, 3]),
        "pool_scope": rng.choice(["request", "session"]),
        "window_noise": rng.random() < 0.8,
    }
    return shape | policy | drawn_switches(rng) | sync


def _drawn_sampling(rng: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {"seed": rng.randrange(1 << 40), "temperature": rng.choice([0.3, 0.8, 1.0, 2.0])}
    warpers = {"top_k": 5, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.2}
    return drawn | {name: value for name, value in warpers.items() if rng.random() < 0.25}


def _some_eos(case: Case) -> list[int]:
    return case.eos or [0]


PROCESSORS: dict[str, Callable[[Case], LogitsProcessor]] = {
    "repetition": lambda case: tf.RepetitionPenaltyLogitsProcessor(1.3),
    "no_repeat": lambda case: tf.NoRepeatNGramLogitsProcessor(3),
    "bad_words": lambda case: tf.NoBadWordsLogitsProcessor([[1], [0, 0]]),
    "bias": lambda case: tf.SequenceBiasLogitsProcessor([[[1], -2.0], [[0, 1], 4.0]]),
    "min_length": lambda case: tf.MinLengthLogitsProcessor(30, _some_eos(case)),
    "min_new": lambda case: tf.MinNewTokensLengthLogitsProcessor(len(case.ids), 8, _some_eos(case)),
    "forced_eos": lambda case: tf.ForcedEOSTokenLogitsProcessor(len(case.ids) + case.new, _some_eos(case)),
    "at_begin": lambda case: tf.SuppressTokensAtBeginLogitsProcessor([0, 1], len(case.ids) + 2),
    "suppress": lambda case: tf.SuppressTokensLogitsProcessor([0]),
    "decay": lambda case: tf.ExponentialDecayLengthPenalty((4, 1.1), _some_eos(case), len(case.ids)),
    "own": lambda case: Alternating(),
}


def drawn(seed: int, number: int, share: float, archs: Sequence[str] | None = None) -> Case:
    """Case `number` of a seed; this share of the numbers, evenly spread, has several ranks, and some are long.

    Args:
        archs: to draw from, in cases that are not long; None: any that is supported.
    """
    before = int(number * share)
    several = int((number + 1) * share) > before
    long = not archs and (before if several else number - before) % LONG_EVERY == 1
    return Case.drawn(f"{seed}-{number}", 2 + number % 7 if several else 1, long, archs)


def past_failures() -> list[Case]:
    """Cases that failed once, shrunk; one line of JSON each in fuzz_corpus.jsonl."""
    lines = Path(__file__).with_name("fuzz_corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [Case(**json.loads(line)) for line in lines]


def run(case: Case) -> str | None:
    """What is wrong with a case, None if nothing is."""
    try:
        return _compare(case)
    except lp.Interrupted as error:  # no Exception
        if error.signal:
            raise
        return f"Interrupted: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _model(case: Case) -> PreTrainedModel:
    """Its logits come in float32, as `generate` rounds them before processors, which may cut near-ties either way."""
    model = tiny_model(case.arch, case.model_seed, sharpness=case.sharpness, recency=case.recency, **case.overrides)

    def rounded(module: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits.float()
        return output

    model.register_forward_hook(rounded)
    return model


def _asked(case: Case) -> dict[str, Any]:
    """Arguments that `generate` and the decoders have in common."""
    asked: dict[str, Any] = {"eos_token_id": case.eos or None}
    if case.stop_strings:
        asked |= {"stop_strings": case.stop_strings, "tokenizer": letters(case.overrides.get("vocab_size", VOCABULARY))}
    if case.criterion:
        asked["stopping_criteria"] = tf.StoppingCriteriaList([SumCriterion(case.criterion)])
    return asked


def _plain(case: Case, sampling: lp.SamplingParams | None) -> list[int]:
    """transformers' own tokens, of a model that has seen no other text."""
    model = _model(case)
    processors = [PROCESSORS[name](case) for name in case.processors]
    if sampling is not None:
        assert sampling.seed is not None
        processors += [*sampling.processors(), Noise(sampling.seed)]
    room = min(case.new, (context_limit(model) or 1 << 30) - len(case.ids))
    return plain_greedy(model, case.ids, room, logits_processor=tf.LogitsProcessorList(processors), **_asked(case))


def _compare(case: Case) -> str | None:
    sampling = lp.SamplingParams(**case.sampling) if case.sampling else None
    models = [_model(case) for _ in range(case.ranks)]
    asked = _asked(case) | {"prefill_chunk": case.prefill_chunk, "output_logits": case.logits}

    def generate(decoder: lp.LookaheadDecoder | lp.AutoregressiveDecoder) -> tuple[lp.GenerationOutput, list[int]]:
        streamed: list[int] = []
        processors = [PROCESSORS[name](case) for name in case.processors]
        told = (lambda tokens, step: streamed.extend(tokens)) if decoder.context.is_main else None
        call = asked | {"logits_processor": processors, "on_tokens": told}
        if case.company and isinstance(decoder, lp.LookaheadDecoder):
            return _in_company(case, decoder, sampling, call), streamed
        return decoder.generate(case.ids, case.new, sampling, **call), streamed

    def body(context: ParallelContext) -> list[tuple[lp.GenerationOutput, list[int]]]:
        model = models[context.rank]
        if case.tp > 1:
            model = divide(copy.deepcopy(model), context.replica)
        if case.method == "lookahead":
            config, step_times = lp.LookaheadConfig(**case.config), drawn_step_times(random.Random(case.step_times))
            decoder = lp.LookaheadDecoder(model, config, context, case.backend, step_times=step_times)
        else:
            kind = PEERS[case.method]
            decoder = lp.LookaheadDecoder(model, kind(**case.config), context, case.backend)
        if case.captured and not case.company and decoder.runner.boundary is None:
            captured_runner(decoder, probe=True)
        return [generate(decoder) for _ in range(case.calls)]

    plain = _plain(case, sampling)
    oracle, _ = generate(lp.AutoregressiveDecoder(models[0]))
    if oracle.tokens != plain:
        return _differ("plain decoding", oracle.tokens, "generate", plain)
    by_rank = run_lockstep(case.ranks, body, case.tp)
    for rank, outputs in enumerate(by_rank):
        for call, (output, streamed) in enumerate(outputs):
            who = f"rank {rank} of {case.ranks}, tp {case.tp}, call {call}"
            if output.tokens != plain:
                return _differ(who, output.tokens, "generate", plain)
            if output.finish_reason != oracle.finish_reason:
                return f"{who} ended by {output.finish_reason}, plain decoding by {oracle.finish_reason}"
            if rank == 0 and streamed != plain:
                return _differ(who, streamed, "streamed", plain)
            if logits_differ(output, oracle):
                return f"{who} has other logits than plain decoding"
            if [s.accepted for s in output.step_stats] != [s.accepted for s in by_rank[0][call][0].step_stats]:
                return f"{who} accepted other tokens than rank 0 in some step"
    return None


def _in_company(
    case: Case, decoder: lp.LookaheadDecoder, sampling: lp.SamplingParams | None, call: dict[str, Any]
) -> lp.GenerationOutput:
    """The text among others, which come and go at drawn steps; the same on every rank."""
    rng = random.Random(f"company-{case.step_times}")
    slots = (case.company + 1) * (2 * len(case.ids) + 200 + decoder.most_step_tokens)
    engine = lp.Engine(decoder, rng.randint(1, 6), slots, rng.choice([1, 16, 128]))
    arrivals = sorted((rng.choice([0, 0, rng.randint(1, 20)]), index) for index in range(case.company))
    own = rng.randint(0, 10)
    handle, others = None, list[lp.Handle]()
    for step in itertools.count():
        while arrivals and arrivals[0][0] <= step:
            arrivals.pop(0)
            begin = case.ids[: rng.choice([0, len(case.ids)])]
            ids = [*begin, *drawn_text(rng, rng.randint(1, 30), case.overrides["vocab_size"])]
            ids = ids[: (context_limit(decoder.model) or len(ids) + 1) - 1]
            seeded = lp.SamplingParams(temperature=0.7, seed=rng.randrange(9)) if rng.random() < 0.4 else None
            others.append(engine.submit(ids, rng.randint(1, 30), seeded, eos_token_id=()))
        if step == own:
            handle = engine.submit(case.ids, case.new, sampling, **call)
        if others and rng.random() < 0.05:
            engine.cancel(rng.choice(others))
        left = engine.step()
        engine.pool.check()
        if handle and handle.done and not left:
            for other in others:
                other.result()
            return handle.result()
    raise AssertionError


def _differ(name: str, tokens: list[int], other: str, expected: list[int]) -> str:
    at = next((i for i, pair in enumerate(itertools.zip_longest(tokens, expected)) if pair[0] != pair[1]), None)
    return f"{name} differs from {other} at new token {at}: {tokens} against {expected}"
