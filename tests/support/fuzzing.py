"""Drawn cases of decoding, held against transformers' own `generate`."""

from __future__ import annotations

import copy
import itertools
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

import lp
from lp.draft.pool.corpus_file import delta_path
from lp.draft.pool.history_file import HistoryFile
from lp.draft.pool.model_ngrams import write_file
from lp.models.loader import context_limit
from lp.models.tensor_parallel import divide
from lp.parallel.context import ParallelContext
from tests.support.adapted import NAMES, add_adapters
from tests.support.captured import captured_runner
from tests.support.corpora import corpus_of, delta_of
from tests.support.drawn_cases import PEERS, PROCESSORS, Case
from tests.support.image_models import IMAGE, VIDEO, image_model, image_prompt, video_prompt
from tests.support.pools import drawn_step_times
from tests.support.processors import Noise, SumCriterion
from tests.support.quantised import quantise_in_place
from tests.support.rounded_kv import OwnCache
from tests.support.simulated_cuda import run_on_gpus, simulated_cuda, why_not
from tests.support.switches import lookahead_config
from tests.support.thread_ranks import run_lockstep
from tests.support.tiny_models import VOCABULARY, drawn_text, letters, logits_differ, plain_greedy, tiny_model
from tests.support.toy_grammar import ToyGrammar, ToyMask

CHOSEN = NAMES[1]  # the adapter of a case's text
Outputs = list[tuple[lp.GenerationOutput, list[int]]]  # of every call, and what it streamed


@dataclass
class Turn:
    """A call of a case, and the text that it is to give.

    Attributes:
        case: the case with the prompt of this turn.
        plain: tokens that transformers' own `generate` gives; in the mode `exact="bitwise"` the oracle's tokens.
        oracle: what lp's plain decoding gives: the finish reason, and the logits where they are compared.
    """

    case: Case
    plain: list[int]
    oracle: lp.GenerationOutput


def past_failures() -> list[Case]:
    """Cases that failed once, shrunk; one line of JSON each in fuzz_corpus.jsonl."""
    lines = Path(__file__).parents[1].joinpath("fuzz_corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [Case(**json.loads(line)) for line in lines]


def run(case: Case) -> str | None:
    """Run a case; what is wrong with it in words, None if nothing is."""
    try:
        return _compare(case)
    except lp.Interrupted as error:  # no Exception
        if error.signal:
            raise
        return f"Interrupted: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _model(case: Case) -> PreTrainedModel:
    """The case's model; its logits are rounded to float32, as `generate` does before processors, or ties would part."""
    dtype = getattr(torch, case.bitwise or "float64")
    sizes: dict[str, Any] = {"sharpness": case.sharpness, "recency": case.recency, **case.overrides}
    if case.images or case.video:
        model = image_model(case.arch, case.model_seed)
    else:
        model = tiny_model(case.arch, case.model_seed, dtype, **sizes)
    if case.adapters:
        add_adapters(model, case.adapters)
    if case.quantised:
        quantise_in_place(model, case.quantised)

    def rounded(module: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits.float()
        return output

    model.register_forward_hook(rounded)
    return model


def _vocabulary(case: Case) -> int:
    return int(case.overrides.get("vocab_size", VOCABULARY))


def _images(case: Case) -> dict[str, Any]:
    """What a processor gives besides the tokens of the case's prompt; empty without images."""
    if not (case.images or case.video):
        return {}
    whole = _processed(case)
    ids = torch.tensor([case.ids])
    kinds = (ids == IMAGE).long() + (2 * (ids == VIDEO).long() if case.video else 0)
    types = {name: kinds for name in whole if name.endswith("token_type_ids")}
    return {name: value for name, value in whole.items() if name not in ("input_ids", "attention_mask")} | types


def _processed(case: Case) -> dict[str, Any]:
    """What a processor gives for the case's images and video, with words between them that are not the case's."""
    return (video_prompt if case.video else image_prompt)(case.arch, case.model_seed, case.images)


def _holds_images(case: Case) -> bool:
    """Whether the prompt has a place for all that the images are; not where one was made shorter."""
    if not (case.images or case.video):
        return True
    whole = _processed(case)["input_ids"]
    places = (IMAGE, VIDEO) if case.video else (IMAGE,)
    return all(case.ids.count(place) == int((whole == place).sum()) for place in places) and case.ids[-1] not in places


def _sampling(case: Case) -> lp.SamplingParams | None:
    return lp.SamplingParams(**case.sampling) if case.sampling else None


def _asked(case: Case) -> dict[str, Any]:
    """Arguments that `generate` and the decoders have in common."""
    asked: dict[str, Any] = {"eos_token_id": case.eos or None}
    if case.stop_strings:
        asked |= {"stop_strings": case.stop_strings, "tokenizer": letters(_vocabulary(case))}
    if case.criterion:
        asked["stopping_criteria"] = tf.StoppingCriteriaList([SumCriterion(case.criterion)])
    return asked


def _plain(model: PreTrainedModel, case: Case) -> list[int]:
    """The tokens of transformers' own `generate`, by a copy of the model that has seen no other text."""
    model = copy.deepcopy(model)
    if case.adapters:
        model.enable_adapters()
        model.set_adapter(CHOSEN)
    processors = [PROCESSORS[name](case, "cpu") for name in case.processors]
    if case.grammar:
        processors.append(ToyMask(ToyGrammar(case.grammar, _vocabulary(case)), len(case.ids)))
    if sampling := _sampling(case):
        assert sampling.seed is not None
        processors += [*sampling.processors(), Noise(sampling.seed, case.sequence)]
    room = min(case.new, (context_limit(model) or 1 << 30) - len(case.ids))
    asked = _asked(case) | _images(case)
    if case.kv_dtype:
        asked["past_key_values"] = OwnCache(case.kv_dtype, model.config)
    return plain_greedy(model, case.ids, room, logits_processor=tf.LogitsProcessorList(processors), **asked)


def _call(case: Case, device: str, prediction: Sequence[int] = ()) -> dict[str, Any]:
    """Arguments of a decoder's `generate` besides prompt, length and sampling."""
    call = _asked(case) | {
        "logits_processor": [PROCESSORS[name](case, device) for name in case.processors],
        "prefill_chunk": case.prefill_chunk,
        "output_logits": case.logits,
        "sequence": case.sequence,
        "prediction": prediction,
        **_images(case),
        "adapter": CHOSEN if case.adapters else None,
    }
    return call | ({"grammar": ToyGrammar(case.grammar, _vocabulary(case))} if case.grammar else {})


def _predicted(case: Case, plain: Sequence[int]) -> list[int]:
    """The prediction that the case gives: its text with some tokens changed; empty for none."""
    if case.prediction < 0:
        return []
    rng = random.Random(f"prediction-{case.step_times}")
    return [rng.randrange(_vocabulary(case)) if rng.random() * 100 < case.prediction else token for token in plain]


def _turns(case: Case, model: PreTrainedModel) -> list[Turn]:
    """The calls of a chat: the prompt of each is the text that the calls before it are to give, and some more."""
    turns: list[Turn] = []
    rng = random.Random(f"turns-{case.step_times}")
    own = copy.deepcopy(model)
    if case.adapters:
        own.enable_adapters()
        own.set_adapter(CHOSEN)
    kv_dtype = case.kv_dtype or "auto"
    decoder: Any = lp.AutoregressiveDecoder(own, kv_dtype=kv_dtype)
    if case.bitwise:
        decoder = lp.PlainDecoder(own, exact="bitwise", kv_dtype=kv_dtype)
    while len(turns) < case.turns:
        oracle = decoder.generate(case.ids, case.new, _sampling(case), **_call(case, "cpu") | {"adapter": None})
        plain = oracle.tokens if case.bitwise else _plain(model, case)
        turns.append(Turn(case, plain, oracle))
        ids = [*case.ids, *plain, *drawn_text(rng, rng.randint(1, 9), _vocabulary(case))]
        if len(ids) >= (context_limit(model) or 1 << 30):
            break
        case = replace(case, ids=ids)
    return turns


@dataclass
class Rank:
    """One rank of a case, which makes all its calls, with a decoder or with an engine.

    Attributes:
        case: the case that all ranks run.
        model: the rank's own copy of the model, on its device.
        turns: the calls, in order, with what each is to give.
        gpus: whether devices are simulated GPUs.
        memory: the pool's corpora and history, as fields of its config.
    """

    case: Case
    model: PreTrainedModel
    turns: list[Turn]
    gpus: bool = False
    memory: Mapping[str, Any] = field(default_factory=dict)
    engine: lp.Engine | None = field(default=None, init=False)

    def run(self, context: ParallelContext) -> Outputs:
        """Make every call, one after the other, on the rank of this context; what each gave."""
        decoder = self.decoder(context)
        return [self._generate(decoder, turn) for turn in self.turns for _ in range(self.case.calls)]

    def decoder(self, context: ParallelContext) -> lp.LookaheadDecoder:
        """The decoder of the method and settings that the case asks for."""
        case, model = self.case, self.model
        if case.tp > 1:
            model = divide(model, context.replica)
        settings: dict[str, Any] = {"capture": case.gpu} if self.gpus else {}
        if case.method == "lookahead":
            config = lookahead_config(**case.config, **self.memory)
            settings["step_times"] = drawn_step_times(random.Random(case.step_times))
        else:
            config = PEERS[case.method](**case.config)
        settings |= {"exact": "bitwise" if case.bitwise else "auto", "kv_dtype": case.kv_dtype or "auto"}
        decoder = lp.LookaheadDecoder(model, config, context, case.backend, **settings)
        if case.captured and not case.company and decoder.runner.boundary is None:
            captured_runner(decoder, probe=True)
        return decoder

    def _generate(self, decoder: lp.LookaheadDecoder, turn: Turn) -> tuple[lp.GenerationOutput, list[int]]:
        case = turn.case
        streamed: list[int] = []
        call = _call(case, "cuda" if self.gpus else "cpu", _predicted(case, turn.plain))
        if decoder.context.is_main:
            call["on_tokens"] = lambda tokens, step: streamed.extend(tokens)
        rng = random.Random(f"corpora-{case.corpora}-{len(case.ids)}")
        if decoder.corpora and rng.random() < 0.5:
            call["corpora"] = rng.sample(decoder.corpora, rng.randint(0, len(decoder.corpora)))
        if case.company:
            self.engine = self.engine or self._made(decoder)
            output = _in_company(turn, self.engine, call)
        else:
            output = decoder.generate(case.ids, case.new, _sampling(case), **call)
        if output.logits is not None:
            output.logits = output.logits.cpu()  # here, within the simulation
        return output, streamed

    def _made(self, decoder: lp.LookaheadDecoder) -> lp.Engine:
        rng = random.Random(f"engine-{self.case.step_times}")
        longest = max(len(turn.case.ids) for turn in self.turns)
        slots = (self.case.company + 1) * (2 * longest + 200 + decoder.most_step_tokens)
        return lp.Engine(decoder, rng.randint(1, 6), slots, rng.choice([1, 16, 128]))


def _memory(case: Case, turns: Sequence[Turn], folder: str) -> dict[str, Any]:
    """Write the case's corpora and history into a folder, and give the pool's settings for them.

    They have the texts with some tokens changed, and others.
    """
    rng = random.Random(f"corpora-{case.corpora}")
    vocabulary, paths = _vocabulary(case), []
    for index in range(rng.randint(1, 4) if case.corpora else 0):
        place = Path(folder, str(index))
        corpus = corpus_of(_alike(rng, turns, vocabulary), vocabulary)
        write_file(corpus, place)
        paths.append(str(place))
        own = random.Random(f"delta-{case.corpora}-{index}")
        if own.random() < 0.5:  # files that are there and others have changed, and some were deleted
            texts = _alike(own, turns, vocabulary)
            names = own.sample(range(2 * len(texts)), len(texts))
            changed = {f"{name}.py": own.choice([text, text, []]) for name, text in zip(names, texts, strict=True)}
            write_file(delta_of(corpus, changed, vocabulary), delta_path(place))
    if not case.history:
        return {"corpora": paths}
    history = HistoryFile(path := str(Path(folder, "history")), vocabulary, rng.choice([40, 1000]))
    for text in filter(None, _alike(random.Random(f"history-{case.history}"), turns, vocabulary)):
        history.append(text)
    history.close()
    return {"corpora": paths, "history": path}


def _alike(rng: random.Random, turns: Sequence[Turn], vocabulary: int) -> list[list[int]]:
    """Texts: drawn ones, and those of the case with some tokens changed."""
    texts = [drawn_text(rng, rng.randint(0, 60), vocabulary) for _ in range(rng.randint(0, 6))]
    for turn in turns:
        changed = rng.choice([0.0, 0.1, 0.5])
        whole = [*turn.case.ids, *turn.plain]
        texts.append([rng.randrange(vocabulary) if rng.random() < changed else token for token in whole])
    return texts


def _compare(case: Case) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        return _compared(case, folder)


def _compared(case: Case, folder: str) -> str | None:
    if not _holds_images(case):
        return None
    model = _model(case)
    turns = _turns(case, model)
    for turn in turns:
        if turn.oracle.tokens != turn.plain:
            return _differ("plain decoding", turn.oracle.tokens, "generate", turn.plain)
    memory = _memory(case, turns, folder)
    if case.server >= 0:
        from tests.support.fuzzed_server import served_tokens  # here: its packages are of an extra

        asked = served_tokens(
            [(turn.case, turn.plain) for turn in turns], model, Rank(case, model, turns, memory=memory).decoder
        )
        return _first(
            _differ(f"request {number}", tokens, "generate", expected)
            for number, (tokens, expected) in enumerate(asked)
            if tokens != expected
        )
    by_rank = _by_rank(case, model, turns, memory)
    calls = [turn for turn in turns for _ in range(case.calls)]
    return _first(
        _fault(f"rank {rank} of {case.ranks}, tp {case.tp}, call {call}", rank, turn, by_rank[rank][call], accepted)
        for rank in range(case.ranks)
        for call, turn in enumerate(calls)
        for accepted in [[step.accepted for step in by_rank[0][call][0].step_stats]]
    )


def _by_rank(case: Case, model: PreTrainedModel, turns: list[Turn], memory: Mapping[str, Any]) -> list[Outputs]:
    if not case.gpu or why_not():
        ranks = [Rank(case, copy.deepcopy(model), turns, memory=memory) for _ in range(case.ranks)]
        return run_lockstep(case.ranks, lambda context: ranks[context.rank].run(context), case.tp)
    with simulated_cuda():
        ranks = [Rank(case, copy.deepcopy(model).to(f"cuda:{rank}"), turns, True, memory) for rank in range(case.ranks)]
        if case.ranks == 1:
            return [ranks[0].run(ParallelContext())]
        return run_on_gpus(case.ranks, lambda context, own: ranks[context.rank].run(context))


def _fault(
    who: str, rank: int, turn: Turn, result: tuple[lp.GenerationOutput, list[int]], accepted: list[int]
) -> str | None:
    """What is wrong with what one rank gave for a call, in words; None if nothing is.

    Args:
        who: names rank and call in the message.
        rank: number of the rank; rank 0 streams too.
        turn: the call, with what it is to give.
        result: what the rank gave, and what it streamed.
        accepted: number of tokens that each of rank 0's steps accepted, which every rank must have alike.
    """
    output, streamed = result
    if output.tokens != turn.plain:
        return _differ(who, output.tokens, "generate", turn.plain)
    if output.finish_reason != turn.oracle.finish_reason:
        return f"{who} ended by {output.finish_reason}, plain decoding by {turn.oracle.finish_reason}"
    if rank == 0 and streamed != turn.plain:
        return _differ(who, streamed, "streamed", turn.plain)
    if logits_differ(output, turn.oracle):
        return f"{who} has other logits than plain decoding"
    if turn.case.bitwise and not _same_bits(output, turn.oracle):
        return f"{who} has logits of other bits than plain decoding"
    if [step.accepted for step in output.step_stats] != accepted:
        return f"{who} accepted other tokens than rank 0 in some step"
    return None


def _same_bits(output: lp.GenerationOutput, oracle: lp.GenerationOutput) -> bool:
    """Whether two texts' logits are equal, NaN and infinite ones included; of ranks, none are kept."""
    if output.logits is None or oracle.logits is None:
        return output.exact == "bitwise"
    return output.exact == "bitwise" and torch.equal(output.logits.nan_to_num(), oracle.logits.nan_to_num())


def _first(faults: Any) -> str | None:
    return next((fault for fault in faults if fault), None)


def _in_company(turn: Turn, engine: lp.Engine, call: dict[str, Any]) -> lp.GenerationOutput:
    """The text among others, which come and go at drawn steps; the same on every rank.

    Some of the others are a shorter form of the same text, and must have its tokens.
    """
    case, decoder = turn.case, engine.decoder
    rng = random.Random(f"company-{case.step_times}")
    arrivals = sorted((rng.choice([0, 0, rng.randint(1, 20)]), index) for index in range(case.company))
    own = rng.randint(0, 10)
    handle, others, shorter = None, list[lp.Handle](), list[lp.Handle]()
    for step in itertools.count():
        while arrivals and arrivals[0][0] <= step:
            arrivals.pop(0)
            if rng.random() < 0.3 and "forced_eos" not in case.processors:
                less = {name: value for name, value in call.items() if name not in ("on_tokens", "output_logits")}
                less["logits_processor"] = _call(case, str(decoder.model.device.type))["logits_processor"]
                shorter.append(engine.submit(case.ids, rng.randint(1, case.new), _sampling(case), **less))
                continue
            begin = case.ids[: rng.choice([0, len(case.ids)])]
            ids = [*begin, *drawn_text(rng, rng.randint(1, 30), _vocabulary(case))]
            ids = ids[: (context_limit(decoder.model) or len(ids) + 1) - 1]
            seeded = lp.SamplingParams(temperature=0.7, seed=rng.randrange(9)) if rng.random() < 0.4 else None
            adapter = rng.choice([None, *NAMES]) if case.adapters else None
            others.append(engine.submit(ids, rng.randint(1, 30), seeded, eos_token_id=(), adapter=adapter))
        if step == own:
            handle = engine.submit(case.ids, case.new, _sampling(case), **call)
        if others and rng.random() < 0.05:
            engine.cancel(rng.choice(others))
        left = engine.step()
        engine.pool.check()
        if handle and handle.done and not left:
            break
    for other in others:
        other.result()
    for other in shorter:
        tokens = other.result().tokens
        if tokens != turn.plain[: len(tokens)] or not tokens:
            raise AssertionError(_differ("a shorter form of the text beside it", tokens, "generate", turn.plain))
    assert handle is not None
    return handle.result()


def _differ(name: str, tokens: list[int], other: str, expected: list[int]) -> str:
    at = next((i for i, pair in enumerate(itertools.zip_longest(tokens, expected)) if pair[0] != pair[1]), None)
    return f"{name} differs from {other} at new token {at}: {tokens} against {expected}"
