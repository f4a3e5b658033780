"""Load what a run needs, as its config says: prompts, the model, and the decoders to run or to compare."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import lp
from lp.checks import check_int, env_int
from lp.commands import install_command
from lp.compile_cache import why_not_compiled
from lp.compiled import COMPILED
from lp.engine.decoder import Decoder
from lp.engine.interrupts import Terminated
from lp.engine.journal import Journal
from lp.engine.output import GenerationOutput
from lp.engine.request import OnTokens
from lp.errors import UserError
from lp.models.loader import Loaded, context_limit, load, vocabulary_size
from lp.models.prompt_images import EXACT
from lp.optional import is_installed
from lp.sampling.generation_config import AUTO, NONE
from lp.sampling.grammar import Grammar
from lp.waits import waiting

from ..config.builders import METHODS, ORACLE, Builders, decoder_builders
from ..config.sampling import sampled_by_checkpoint, sampling_of, seeded
from ..config.schema import Common, Config, Tasked
from ..config.task import read_prompts
from ..data.prompts import Prompt, read_text
from ..data.shapes import SHAPES
from ..text.chat_tokens import chat_tokens
from ..text.image_prompts import for_template
from .threads import settle_threads
from .weights_bar import tensors_counted

WARM_UP_TOKENS = 8  # enough to touch every code path once
C = TypeVar("C", bound=Tasked)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Session(Generic[C]):
    """A loaded model with its decoders and prompts: all that an app needs to generate texts.

    Args:
        config: the config, as the user gave it.
        context: this rank's context.
        loaded: model and tokenizer.
        decoders: decoders by method; the first is the one that the user chose.
        sampling: sampling of every text, with its seed; None is greedy.
        prompts: the prompts to continue.
        journal: file that keeps generated tokens, so that a restarted run continues after them; None: tokens are not
            kept.
        grammar: grammar that every text follows; None: texts follow no grammar.
    """

    config: C
    context: lp.ParallelContext
    loaded: Loaded
    decoders: Mapping[str, Decoder]
    sampling: lp.SamplingParams | None
    prompts: list[Prompt]
    journal: Journal | None = None
    grammar: Grammar | None = None

    def fitting(self) -> list[tuple[int, Prompt]]:
        """Prompts that are shorter than the model's context, as (index, prompt); a line on stderr counts the others.

        Raises:
            ValueError: none is short enough.
        """
        room = context_limit(self.loaded.model)
        count = len(self.prompts)
        fit = [(i, prompt) for i, prompt in enumerate(self.prompts) if room is None or len(self.encode(prompt)) < room]
        if not fit:
            raise UserError(f"none of {count} prompts is shorter than the model's context of {room}; give others")
        if self.context.is_main and len(fit) < count:
            left = f"{count - len(fit)} of {count} prompts left out"
            print(f"{left}: as long as the model's context of {room}", file=sys.stderr)
        return fit

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids, in the model's chat template if the task asks for one and the model has one."""
        tokenizer = self.loaded.tokenizer
        if self.config.task.chat and tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt.text}]
            if self.loaded.model.config.model_type in EXACT:
                messages = for_template(tokenizer, messages)
            return chat_tokens(tokenizer, messages)
        return list(tokenizer(prompt.text, verbose=False)["input_ids"])  # too long a prompt has our error, no warning

    def run(self, decoder: Decoder, ids: list[int], tokens: int, on_tokens: OnTokens | None = None) -> GenerationOutput:
        """Continue a prompt with one of the decoders, with the sampling, stop strings and grammar of the config.

        Args:
            decoder: generates the text.
            ids: token ids of the prompt.
            tokens: most tokens to generate.
            on_tokens: called with the new tokens after every decode step.
        """
        return decoder.generate(ids, tokens, self.sampling, on_tokens=on_tokens, **self._stops())

    def run_once(self, decoder: Decoder, ids: list[int], tokens: int, on_tokens: OnTokens) -> GenerationOutput:
        """Continue a prompt as `run` does, and keep its tokens in the journal.

        A run that is started again then continues after the kept tokens.

        Args:
            decoder: generates the text.
            ids: token ids of the prompt.
            tokens: most tokens to generate.
            on_tokens: called with the new tokens after every decode step.
        """
        if self.journal is None:
            return self.run(decoder, ids, tokens, on_tokens)
        return self.journal.generate(decoder, ids, tokens, self.sampling, on_tokens=on_tokens, **self._stops())

    def oracle_tokens(self, ids: list[int], tokens: int, outputs: Mapping[str, GenerationOutput]) -> list[int]:
        """Tokens with which transformers' own decoding continues a prompt, as the reference for a decoder's tokens.

        With exact=bitwise the reference is lp's plain decoding instead, whose logits lookahead then reproduces bit for
        bit.

        Args:
            ids: token ids of the prompt.
            tokens: most tokens to generate.
            outputs: outputs by method; if decoder=autoregressive is among them, its tokens are returned.
        """
        if ORACLE in outputs:
            return outputs[ORACLE].tokens
        given = self.loaded.model, self.context.replica_alone()
        exact, kv_dtype = self.config.exact, self.config.model.kv_dtype
        oracle: Decoder = lp.AutoregressiveDecoder(*given, kv_dtype)
        if exact == lp.Exact.BITWISE:  # which promises plain decoding's own bits, and not transformers'
            oracle = lp.PlainDecoder(*given, exact=exact, kv_dtype=kv_dtype)
        oracle.follows = next(iter(self.decoders.values())).follows
        return self.run(oracle, ids, tokens).tokens

    @property
    def in_distribution(self) -> bool:
        """Whether texts equal plain decoding's in distribution only, so that their tokens may differ.

        Rejection sampling has this effect.
        """
        return self.sampling is not None and self.sampling.verifier is lp.Verifier.REJECTION

    def of_rank_0(self, value: Any) -> Any:
        """Send rank 0's value to all ranks, as JSON, and return it; every rank must call this.

        Args:
            value: data that JSON can hold; only rank 0's value is used.
        """
        return json.loads(self.context.share_text(json.dumps(value)) or "null")

    def _stops(self) -> dict[str, Any]:
        stops = {"stop_strings": list(self.config.stop_strings), "tokenizer": self.loaded.tokenizer}
        return stops if self.grammar is None else stops | {"grammar": self.grammar}


def on_main(context: lp.ParallelContext, work: Callable[[], T]) -> T | None:
    """Do some work on rank 0 alone, while the other ranks wait; return its result there, and None on the others.

    Args:
        context: this rank's context; every rank must call this.
        work: function that rank 0 calls, for example to write a file.

    Raises:
        Exception: the work failed; raised on every rank, so that none continues with this job alone.
        KeyboardInterrupt: rank 0 was interrupted.
    """
    result: T | None = None
    failure: BaseException | None = None
    if context.is_main:
        try:
            result = work()
        except (Exception, KeyboardInterrupt) as error:
            failure = error
    message = context.share_text(f"{isinstance(failure, KeyboardInterrupt):d}{failure}" if failure else None)
    if failure:
        raise failure
    if message is not None:
        raise Terminated if message[0] == "1" else UserError(message[1:])
    return result


def open_session(config: Config) -> Session[Config]:
    """Load what a config asks for: check all that needs no model first, then load model, decoders, journal and grammar.

    Args:
        config: the run's config.

    Raises:
        ValueError: a value of the config is wrong, or the model cannot be loaded; the message names the remedy.
    """
    others = METHODS[config.decoder.name == "lookahead" :]  # measuring its step times takes seconds
    others = tuple(name for name in others if config.compare and name != config.decoder.name)
    prompts, sampling, builders = checked(config, [config.decoder.name, *others])
    schema = schema_text(config.json_schema)
    path, context = journal_path(config, sampling), open_context(config)
    journal = Journal(path, context, fixed_weights=True) if path else None
    loaded = load_model(config, context)
    say_how_it_runs(context, loaded)
    decoders = {name: build(loaded.model, context) for name, build in builders.items()}
    for decoder in decoders.values():
        decoder.follows = config.generation_config
    sampling = sampled_by_checkpoint(sampling, next(iter(decoders.values())).checkpoint(), config.seed)
    sampling = seeded(sampling, context, journal.seed if journal else None)
    return Session(
        config=config,
        context=context,
        loaded=loaded,
        decoders=decoders,
        sampling=sampling,
        prompts=prompts,
        journal=journal,
        grammar=grammar_of(schema, loaded),
    )


def schema_text(path: str | None) -> str | None:
    """The text of the user's file with a JSON schema; None if no file is given.

    Args:
        path: the file, or None.

    Raises:
        ValueError: there is no such file, it is no JSON, or llguidance is not installed.
    """
    if path is None:
        return None
    text = read_text(path, "json_schema")
    try:
        json.loads(text)
    except ValueError as error:
        raise UserError(f"json_schema {path} is no JSON ({error}); give a file with a JSON schema") from None
    if not is_installed("llguidance"):
        raise UserError(f"json_schema needs llguidance; install the extra: {install_command('grammar')}")
    return text


def grammar_of(schema: str | None, loaded: Loaded) -> Grammar | None:
    """The grammar of the user's JSON schema, for the loaded model; None without a schema.

    Raises:
        ValueError: the schema has a keyword that can't be enforced.
    """
    if schema is None:
        return None
    return lp.GrammarCompiler(loaded.tokenizer, vocabulary_size(loaded.model)).json_schema(schema)


def checked(config: Tasked, names: Iterable[str]) -> tuple[list[Prompt], lp.SamplingParams | None, Builders]:
    """Read a config's prompts and sampling, and make its decoders' builders, all checked before a model is loaded.

    Args:
        config: the run's config.
        names: names of the decoders.

    Returns:
        The prompts, the sampling (None is greedy), and the builders by decoder.

    Raises:
        ValueError: a value of the config is wrong, or a file is missing; the message names the remedy.
    """
    check(config)
    return read_prompts(config), sampling_of(config), decoder_builders(config, names)


def journal_path(config: Config, sampling: lp.SamplingParams | None) -> Path | None:
    """The journal, a file that keeps generated tokens for a restart: the user's, or under torchrun the run's own.

    Args:
        config: the run's config.
        sampling: the run's sampling; None is greedy.

    Returns:
        The path. None if the user names no journal, and torchrun either does not restart ranks or could not continue
        their texts.

    Raises:
        ValueError: the user names a journal, but a restart cannot continue such texts: rejection sampling, or a
            json_schema.
    """
    rejection = sampling is not None and sampling.verifier is lp.Verifier.REJECTION
    if config.journal:
        if rejection:
            raise UserError("journal is given with verifier 'rejection'; use sampling.verifier=coupled")
        if config.json_schema is not None:
            raise UserError("journal is given with json_schema, which begins with the text; leave one of them out")
        return Path(config.journal)
    folder = os.environ.get("LP_RUN_DIR")
    if not folder or not env_int("TORCHELASTIC_MAX_RESTARTS", 0):
        return None
    if rejection or config.json_schema is not None:
        why = "rejection sampling draws anew" if rejection else "a json_schema begins with the text"
        if env_int("RANK", 0) == 0:
            print(f"no journal: {why}, so a restart begins texts anew", file=sys.stderr)
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / "journal.jsonl"


def open_model(config: Common) -> tuple[lp.ParallelContext, Loaded]:
    """Join the other ranks, and load model and tokenizer on this rank's device.

    Raises:
        ValueError: a value of the config is wrong, or the model cannot be loaded; the message names the remedy.
    """
    context = open_context(config)
    return context, load_model(config, context)


def open_context(config: Common) -> lp.ParallelContext:
    """Join the other ranks, and seed torch with the config's seed.

    Raises:
        ValueError: there is no such device or backend.
    """
    if config.seed is not None:
        torch.manual_seed(config.seed)
    parallel, device = config.parallel, known_device(config.model.device)
    return lp.ParallelContext.from_env(
        parallel.backend, device, parallel.timeout_s, tp=parallel.tp, one_shot_sums=parallel.one_shot_sums
    )


def say_how_it_runs(context: lp.ParallelContext, loaded: Loaded) -> None:
    """Choose the number of CPU threads if there is one rank alone, and tell the user what makes this run slow.

    Lines on stderr name the number of threads, and say so if lp's numba functions are not compiled.
    """
    if context.world_size == 1 and (line := settle_threads(loaded.model)):
        print(line, file=sys.stderr)
    if context.is_main and not COMPILED:
        print(f"this run is slower than it could be: {why_not_compiled()}", file=sys.stderr)


def load_model(config: Common, context: lp.ParallelContext) -> Loaded:
    """Load model and tokenizer on this rank's device, and tell the user about the wait.

    Raises:
        ValueError: the model cannot be loaded, or has no weights; the message names the remedy.
    """
    model = config.model
    if model.name in SHAPES:
        raise UserError(f"{model.name} is a shape without weights, for lp profile; model=hf takes a model")
    implementation = "sdpa" if config.attention.name == "sdpa" else None  # whatever its own config names
    with waiting(f"loading {model.name}") as wait, tensors_counted(wait):
        return load(model.name, model.dtype, context.device, implementation, model.trust_remote_code, context)


def check(config: Tasked) -> None:
    """Refuse a config for prompts that can't be used: counts below 1, or a prompt given twice.

    Raises:
        ValueError: the key, the limit and the remedy.
    """
    check_common(config)
    check_int("repeats", config.repeats, 1, float("inf"), "measure at least once")
    if config.limit is not None:
        check_int("limit", config.limit, 1, float("inf"), "take at least one prompt, or limit=null for all")
    if config.prompt is not None and config.prompt_file is not None:
        raise UserError("prompt and prompt_file are both given; give one of them")


def check_common(config: Common) -> None:
    """Refuse values of keys that all apps have, such as max_new_tokens=0.

    Raises:
        ValueError: the key, the limit and the remedy.
    """
    check_int("max_new_tokens", config.max_new_tokens, 1, float("inf"), "ask for at least one token")
    if config.seed is not None:
        check_int("seed", config.seed, 0, 2**63 - 1, "or seed=null to draw one")
    follows = getattr(config, "generation_config", NONE)
    if follows not in (AUTO, NONE):
        raise UserError(f"generation_config is {follows!r}; it must be {AUTO} or {NONE}")
    if "" in config.stop_strings:
        raise UserError("stop_strings has an empty string, which every text ends with; leave it out")


def check_forgets(config: Common, run: str) -> None:
    """Refuse an n-gram pool that remembers earlier texts, where a run generates each text several times.

    Such a pool would draft each repetition from the first time, so that the figures would be too good.

    Args:
        config: the run's config.
        run: name of the run in the message, such as "lp tune".

    Raises:
        ValueError: names the key and the remedy.
    """
    remedies = {"pool.scope": (config.pool.scope != lp.PoolScope.REQUEST, "request")}
    remedies["pool.history"] = (config.pool.history is not None, "null")
    for key, (remembers, remedy) in remedies.items():
        if remembers:
            given = attrgetter(key)(config)
            raise UserError(
                f"{key} is {given!r}, which would have the texts of {run} from their first time on; take {key}={remedy}"
            )


def known_device(device: str) -> str:
    """Check that torch knows the config's device, and return its name as torch writes it; "auto" is returned as it is.

    Args:
        device: "auto", "cpu", "cuda" or "cuda:<number>".

    Raises:
        ValueError: names a device that torch does not know.
    """
    if device == "auto":
        return device
    try:
        return str(torch.device(device))
    except RuntimeError:
        raise UserError(f"model.device is {device!r}; it must be auto, cpu, cuda or cuda:<number>") from None
