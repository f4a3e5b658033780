"""From a config to what a run needs: prompts, the model, and the decoders to compare."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import lp
from lp.checks import check_int, env_int
from lp.commands import install_command
from lp.compile_cache import why_not_compiled
from lp.compiled import COMPILED
from lp.engine.decoder import Decoder
from lp.engine.journal import Journal
from lp.engine.output import GenerationOutput
from lp.engine.request import OnTokens
from lp.errors import UserError
from lp.models.loader import Loaded, context_limit, load, vocabulary_size
from lp.optional import is_installed
from lp.parallel.agreement import shared_seed
from lp.sampling.generation_config import AUTO, NONE, Checkpoint
from lp.sampling.grammar import Grammar
from lp.waits import waiting

from .arguments import closest
from .bench.hub import load_hub
from .bench.prompts import Fields, Prompt, check_whole, load_builtin, load_jsonl, read_text
from .bench.shapes import SHAPES
from .builders import METHODS, ORACLE, Builders, decoder_builders
from .chat_tokens import chat_tokens
from .schema import Common, Config, Tasked, frozen
from .threads import settle_threads
from .weights_bar import tensors_counted

WARM_UP_TOKENS = 8  # enough to touch every code path once
C = TypeVar("C", bound=Tasked)


@dataclass(frozen=True, kw_only=True)
class Session(Generic[C]):
    """A loaded model with its decoders.

    Args:
        config: the config, as the user gave it.
        context: this rank among the others.
        loaded: model and tokenizer.
        decoders: by method; the first is the one that the user chose.
        sampling: the sampling of every run, its seed known; None is greedy.
        prompts: what to continue.
        journal: the file of the texts that are shown.
        grammar: grammar that every text follows; None for none.
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
        """The prompts that the model's context has room for, with their numbers; a line on stderr counts the others.

        Raises:
            ValueError: it has room for none.
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
        """The prompt's tokens, in the model's chat template where the task asks a question and the model has one."""
        tokenizer = self.loaded.tokenizer
        if self.config.task.chat and tokenizer.chat_template:
            return chat_tokens(tokenizer, [{"role": "user", "content": prompt.text}])
        return list(tokenizer(prompt.text, verbose=False)["input_ids"])  # too long a prompt has our error, no warning

    def run(self, decoder: Decoder, ids: list[int], tokens: int, on_tokens: OnTokens | None = None) -> GenerationOutput:
        """Continue a prompt by at most so many tokens, as the config says."""
        return decoder.generate(ids, tokens, self.sampling, on_tokens=on_tokens, **self._stops())

    def run_once(self, decoder: Decoder, ids: list[int], tokens: int, on_tokens: OnTokens) -> GenerationOutput:
        """Continue a prompt as `run` does; in a run that was started again, from where its journal ends."""
        if self.journal is None:
            return self.run(decoder, ids, tokens, on_tokens)
        return self.journal.generate(decoder, ids, tokens, self.sampling, on_tokens=on_tokens, **self._stops())

    def oracle_tokens(self, ids: list[int], tokens: int, outputs: Mapping[str, GenerationOutput]) -> list[int]:
        """What the oracle continues a prompt by: in its run among these outputs, or in one that nobody times."""
        if ORACLE in outputs:
            return outputs[ORACLE].tokens
        oracle: Decoder = lp.AutoregressiveDecoder(self.loaded.model, self.context.replica_alone())
        if self.config.exact == lp.Exact.BITWISE:  # which promises plain decoding's own bits, and not transformers'
            oracle = lp.PlainDecoder(self.loaded.model, self.context, exact=self.config.exact)
        oracle.follows = next(iter(self.decoders.values())).follows
        return self.run(oracle, ids, tokens).tokens

    @property
    def in_distribution(self) -> bool:
        """Whether texts are equal in distribution only: nothing follows from tokens that differ."""
        return self.sampling is not None and self.sampling.verifier is lp.Verifier.REJECTION

    def of_rank_0(self, value: Any) -> Any:
        """Rank 0's value on every rank, as JSON has it."""
        return json.loads(self.context.share_text(json.dumps(value)) or "null")

    def _stops(self) -> dict[str, Any]:
        stops = {"stop_strings": list(self.config.stop_strings), "tokenizer": self.loaded.tokenizer}
        return stops if self.grammar is None else stops | {"grammar": self.grammar}


def open_session(config: Config) -> Session[Config]:
    """Check everything that can be checked without the model, then load it.

    Raises:
        ValueError: a user error, with its remedy.
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
    """The text of a schema's file; None for none.

    Raises:
        ValueError: there is no such file, or it is no JSON.
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
    """The grammar of a JSON schema; None for none.

    Raises:
        ValueError: it has what is not taken.
    """
    if schema is None:
        return None
    return lp.GrammarCompiler(loaded.tokenizer, vocabulary_size(loaded.model)).json_schema(schema)


def checked(config: Tasked, names: Iterable[str]) -> tuple[list[Prompt], lp.SamplingParams | None, Builders]:
    """Prompts, sampling and the builders of these decoders, before any model is loaded.

    Raises:
        ValueError: a user error, with its remedy.
    """
    check(config)
    return read_prompts(config), sampling_of(config), decoder_builders(config, names)


def journal_path(config: Config, sampling: lp.SamplingParams | None) -> Path | None:
    """The user's; or, where torchrun may start the ranks again, one in the folder that torchrun.sh chose.

    Raises:
        ValueError: the user asks for one of texts that no restart can go on with.
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
    """Join the other ranks and load the model on this one's device.

    Raises:
        ValueError: a user error, with its remedy.
    """
    context = open_context(config)
    return context, load_model(config, context)


def open_context(config: Common) -> lp.ParallelContext:
    """Join the other ranks, and seed torch.

    Raises:
        ValueError: a device or backend that there is not.
    """
    if config.seed is not None:
        torch.manual_seed(config.seed)
    parallel, device = config.parallel, known_device(config.model.device)
    return lp.ParallelContext.from_env(
        parallel.backend, device, parallel.timeout_s, tp=parallel.tp, one_shot_sums=parallel.one_shot_sums
    )


def say_how_it_runs(context: lp.ParallelContext, loaded: Loaded) -> None:
    """Take the number of threads that is fastest now, where one rank has the machine; lines on stderr say so, and that
    functions are not compiled yet.
    """
    if context.world_size == 1 and (line := settle_threads(loaded.model)):
        print(line, file=sys.stderr)
    if context.is_main and not COMPILED:
        print(f"this run is slower than it could be: {why_not_compiled()}", file=sys.stderr)


def load_model(config: Common, context: lp.ParallelContext) -> Loaded:
    """The model and its tokenizer, on this rank's device.

    Raises:
        ValueError: a user error, with its remedy.
    """
    model = config.model
    if model.name in SHAPES:
        raise UserError(f"{model.name} is a shape without weights, for lp profile; model=hf takes a model")
    implementation = "sdpa" if config.attention.name == "sdpa" else None  # whatever its own config names
    with waiting(f"loading {model.name}") as wait, tensors_counted(wait):
        return load(model.name, model.dtype, context.device, implementation, model.trust_remote_code, context)


def seeded(
    sampling: lp.SamplingParams | None, context: lp.ParallelContext, before: int | None = None
) -> lp.SamplingParams | None:
    """Sampling with its seed known on every rank and for every run, or they could not be compared.

    Args:
        sampling: sampling as the user gave it.
        context: the ranks, of which rank 0 draws a seed if none was given.
        before: the seed of a run that goes on.
    """
    if sampling is None or sampling.greedy or sampling.seed is not None:
        return sampling
    drawn = shared_seed(context.ranks, "drawing the seed of a run")
    return replace(sampling, seed=drawn if before is None else before)


def sampled_by_checkpoint(
    sampling: lp.SamplingParams | None, checkpoint: Checkpoint, seed: int | None
) -> lp.SamplingParams | None:
    """The run's sampling; where it is not set and the checkpoint samples, the checkpoint's.

    Args:
        sampling: the run's sampling; None is greedy, the apps' default.
        checkpoint: what is followed of the model's.
        seed: the run's seed.
    """
    if sampling is not None or not checkpoint.samples:
        return sampling
    return lp.SamplingParams(**checkpoint.sampling, seed=seed)


def sampling_of(config: Common) -> lp.SamplingParams | None:
    """How tokens are sampled; None is greedy.

    Raises:
        ValueError: a value out of range.
    """
    name = config.sampling.name
    if name == "sample":
        return frozen(lp.SamplingParams, config.sampling, seed=config.seed)
    if name != "greedy":
        raise UserError(f"sampling.name is {name!r}; choose with sampling=<one of greedy, sample>")
    return None


def check(config: Tasked) -> None:
    """Refuse counts below one and a prompt given twice.

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
    """Refuse what no app can use.

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


def read_prompts(config: Tasked) -> list[Prompt]:
    """The prompt, the prompt file, or the first prompts of the task.

    Raises:
        ValueError: an empty prompt, or a file that is missing or malformed.
    """
    if config.prompt is not None:
        return [_not_empty(Prompt(task_id="prompt", text=config.prompt), "write one, as in prompt='import os'")]
    if config.prompt_file is not None:
        text = read_text(config.prompt_file, "prompt_file")
        return [_not_empty(Prompt(task_id=Path(config.prompt_file).name, text=text), "put a text into the prompt_file")]
    task = config.task
    if task.path is not None and not Path(task.path).is_file():
        remedy = "set LP_DATA to its folder, or give task.path=..."
        hub = f", or task.path=null to take {task.hub} from the hub" if task.hub is not None else ""
        raise UserError(f"task {task.name} has no file {task.path}; {remedy}{hub}")
    limit = config.limit if task.ids is None else None
    if task.path is not None:
        fields = Fields(prompt=task.prompt, reference=task.reference, task_id=task.id)
        prompts = load_jsonl(task.path, limit, fields)
    elif task.hub is not None:
        prompts = load_hub(task.hub, task.subset, task.split, task.prompt, task.reference, task.id, limit)
    else:
        prompts = load_builtin(limit)
    return prompts if task.ids is None else _by_id(prompts, task.ids)[: config.limit]


def _by_id(prompts: list[Prompt], ids: list[str]) -> list[Prompt]:
    if not ids:
        raise UserError("task.ids is [], which leaves no prompt; name at least one, or task.ids=null for all")
    by_id = {prompt.task_id: prompt for prompt in prompts}
    for task_id in ids:
        if task_id not in by_id:
            raise UserError(f"task.ids has {task_id!r}, which the task does not{closest(task_id, by_id)}")
    return [by_id[task_id] for task_id in ids]


def _not_empty(prompt: Prompt, remedy: str) -> Prompt:
    if not prompt.text:
        raise UserError(f"the prompt is empty; {remedy}")
    check_whole(prompt.text, "the prompt has half a character")
    return prompt


def known_device(device: str) -> str:
    """Refuse what torch would not take for a device.

    Raises:
        ValueError: names it.
    """
    if device == "auto":
        return device
    try:
        return str(torch.device(device))
    except RuntimeError:
        raise UserError(f"model.device is {device!r}; it must be auto, cpu, cuda or cuda:<number>") from None
