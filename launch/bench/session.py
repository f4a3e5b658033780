"""What a benchmark runs on: its methods behind one call, the file of its records, and what a record holds."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch

import lp
from lp.checks import check_int
from lp.engine.decoder import Decoder
from lp.engine.interrupts import Terminated
from lp.engine.output import GenerationOutput
from lp.errors import UserError
from lp.models.loader import Loaded
from lp.parallel.agreement import exchange

from ..builders import ALONE, METHODS, ORACLE, PLAIN, decoder_names, draft_configs, guess_set_sizes, has_pool
from ..detokenizer import decoded
from ..schema import BenchmarkConfig, PoolSchema
from ..session import Session, checked, open_model, seeded
from ..sweep import folder_of_run
from .baselines import BASELINES, BaselineOptions
from .compare import Measured, differences
from .long_prompts import lengthened
from .machine import machine_now
from .origin import origin
from .pass_at_1 import check_limits, check_prompts, judge
from .prompts import Prompt
from .quality import assess, check_rouge
from .records import Record, digest, slug

T = TypeVar("T")
Once = Callable[[list[int], int], GenerationOutput]
VERSIONS = ("torch", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, kw_only=True)
class Bench(Session[BenchmarkConfig]):
    """A session whose methods are called alike, whichever ranks run them.

    Args:
        runs: by method, continues a prompt by this many tokens; every rank calls it.
        path: of the records.
        settings: tells these records from those of other settings.
        origin: of the records: command and commit.
    """

    runs: Mapping[str, Once]
    path: Path
    settings: dict[str, Any]
    origin: dict[str, str | None] = field(default_factory=dict)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens; with `prompt_tokens`, behind those of the prompts before it up to that length."""
        ids = super().encode(prompt)
        if self.config.prompt_tokens is None:
            return ids
        tokenizer = self.loaded.tokenizer
        here = self.prompts.index(prompt)
        before = [*self.prompts[:here][::-1], *self.prompts[here:][::-1]]
        texts = [f"{each.text}\n\n" for each in before]
        others = [list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts]
        return lengthened(ids, others, self.config.prompt_tokens, tokenizer.bos_token_id)

    def shares(self, method: str, result: Measured) -> list[dict[str, float]]:
        """Mean tokens and milliseconds of a step on every rank that ran the method, and its most memory in bytes."""
        steps = result.output.step_stats
        names = ("num_tokens", "forward_s", "exchange_s", "host_s")
        # Nanoseconds and billionths of a token, as the collective carries integers.
        means = [round(1e9 * fmean(getattr(step, name) for step in steps)) if steps else 0 for name in names]
        means.append(result.peak_bytes)
        by_rank = exchange(self.context.ranks, "comparing the step times of ranks", means).tolist()
        units = {"num_tokens": 1e9, "forward_ms": 1e6, "exchange_ms": 1e6, "host_ms": 1e6, "peak_bytes": 1}
        return [
            {name: mean / unit for mean, (name, unit) in zip(of_rank, units.items(), strict=True)}
            for of_rank in (by_rank if _together(method) else by_rank[: self.context.replica.size])
        ]

    def records(
        self, index: int, prompt: Prompt, measured: Mapping[str, Measured], shares: Mapping[str, list[dict[str, float]]]
    ) -> list[Record]:
        """The records of one prompt, one a method."""
        ids = self.encode(prompt)
        new = {name: result.output.tokens for name, result in measured.items()}
        compared = not new.keys().isdisjoint((PLAIN, ORACLE)) and not self.in_distribution
        found = []
        if compared:
            outputs = {name: result.output for name, result in measured.items()}
            plain = self.oracle_tokens(ids, self.config.max_new_tokens, outputs)
            found = differences(self.loaded.model, ids, new, plain, self.sampling)
        by_method = {difference.method: difference for difference in found}
        head = {"task": self.config.task.name, "index": index, "task_id": prompt.task_id}
        head |= {"prompt_digest": digest(prompt.text), "prompt_tokens": len(ids)}
        records = []
        for name, result in measured.items():
            record = {**head, "method": name, **_figures(result), "split": shares[name]}
            record["peak_bytes"] = max(int(share["peak_bytes"]) for share in shares[name])
            record["captured"] = captured(self.decoders.get(name))
            record["machine"] = machine_now(self.context.device, self.context.world_size)
            record["text"] = decoded(self.loaded.tokenizer, result.output.tokens, behind=ids)
            record["equal"] = name not in by_method if compared else None
            record["difference"] = asdict(by_method[name]) if name in by_method else None
            if self.config.quality:
                tokens = result.output.tokens
                record["quality"] = assess(
                    self.loaded.model, ids, tokens, record["text"], prompt.reference, by_method.get(name)
                )
            if self.config.pass_at_1:
                assert self.config.task.check
                record["check"] = asdict(judge(self.config.task.check, prompt, record["text"]))
            records.append(record | {"settings": self.settings, "hardware": hardware(self), "versions": versions()})
            records[-1]["origin"] = self.origin
        return records


def captured(decoder: Decoder | None) -> str | None:
    """How a decoder of ours captures its steps; None for one that does not."""
    runner = getattr(decoder, "runner", None)
    return str(runner.captured.mode) if runner is not None and runner.captured else None


def on_main(context: lp.ParallelContext, work: Callable[[], T]) -> T | None:
    """The result of `work` on rank 0, which alone does it; the other ranks wait, and get None.

    Raises:
        Exception: it failed, on every rank: others would go on with this job, and rank 0 with the next one of a sweep.
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


class ModelCache:
    """The model of one job, for the next job of a sweep if its settings are the same."""

    def __init__(self) -> None:
        self._settings: Any = None
        self._opened: tuple[lp.ParallelContext, Loaded] | None = None

    def open(self, config: BenchmarkConfig) -> tuple[lp.ParallelContext, Loaded]:
        """This rank's context and the model on its device.

        Raises:
            ValueError: a user error, with its remedy.
        """
        settings = (asdict(config.model), asdict(config.parallel))
        if self._opened is None or settings != self._settings:
            self._opened = None  # before the next one takes its memory
            self._opened = open_model(config)
            self._settings = settings
        return self._opened


def open_bench(config: BenchmarkConfig, models: ModelCache) -> Bench:
    """Check everything that can be checked without the model, then load it.

    Args:
        config: of this job.
        models: holds the model of the last one.

    Raises:
        ValueError: a user error, with its remedy.
    """
    methods = methods_of(config)
    check_divisible(config, methods)
    for name, lacking in missing_methods(config, methods).items():
        raise UserError(f"method {name} {lacking}")
    prompts, sampling, builders = checked(config, own_names(methods))
    if config.pass_at_1:
        check_pass_at_1(config, prompts)
    if config.quality:
        check_rouge(prompt.reference for prompt in prompts)
    if config.prompt_tokens is not None:
        check_int("prompt_tokens", config.prompt_tokens, 1, float("inf"), "try 2048, or null for prompts as they are")
        if config.task.chat:
            raise UserError(
                f"prompt_tokens is {config.prompt_tokens} with task {config.task.name}, whose questions are put into a "
                "chat template; take a task of texts to continue, such as humaneval, or task.chat=false"
            )
    check_sessions(config, methods)
    context, loaded = models.open(config)
    sampling = seeded(sampling, context)
    settings = settings_of(config, methods, sampling, context.world_size, loaded.model.num_parameters())
    decoders: dict[str, Decoder] = {}
    for name in methods:
        own_context = context if _together(name) else context.replica_alone()
        options = baseline_options(config)
        builder = builders.get(_bare(name)) or partial(BASELINES[name].build, options=options)
        build = partial(builder, loaded.model, own_context)
        if decoder := build() if _together(name) or context.replica.size > 1 else on_main(context, build):
            decoders[name] = decoder
    bench = Bench(
        config=config,
        context=context,
        loaded=loaded,
        decoders=decoders,
        sampling=sampling,
        prompts=prompts,
        runs={},
        path=folder_of(config) / f"{slug(config.task.name)}-{digest(settings)}.jsonl",
        settings=settings,
        origin=origin(),
    )
    return replace(bench, runs={name: _once(bench, name) for name in methods})


def _once(bench: Bench, name: str) -> Once:
    def together(ids: list[int], tokens: int) -> GenerationOutput:
        return bench.run(bench.decoders[name], ids, tokens)

    def alone(ids: list[int], tokens: int) -> GenerationOutput:
        """On rank 0; the others wait."""
        return on_main(bench.context, partial(together, ids, tokens)) or GenerationOutput([], "", [])

    # Replicas that span ranks decode all at once, each for itself, where they share no steps.
    return together if _together(name) or bench.context.replica.size > 1 else alone


def _bare(name: str) -> str:
    return name.removesuffix(ALONE)


def own_names(methods: Iterable[str]) -> list[str]:
    """The decoders of ours among the methods."""
    return [_bare(name) for name in methods if _bare(name) in decoder_names()]


def _together(name: str) -> bool:
    """Whether all ranks share its steps."""
    if name.endswith(ALONE) or name in (PLAIN, ORACLE):
        return False
    return BASELINES[name].all_ranks if name in BASELINES else True


def baseline_options(config: BenchmarkConfig) -> BaselineOptions:
    """What the config has of them."""
    return BaselineOptions(draft=config.draft, gguf=config.gguf, greedy=config.sampling.name == "greedy")


def missing_methods(config: BenchmarkConfig, methods: Iterable[str]) -> dict[str, str]:
    """What baselines among the methods lack here: a package, GPUs, an option; each with its remedy."""
    options = baseline_options(config)
    found = {name: BASELINES[name].missing(options) for name in methods if name in BASELINES}
    return {name: lacking for name, lacking in found.items() if lacking}


def check_divisible(config: BenchmarkConfig, methods: list[str]) -> None:
    """Refuse what needs the whole model on one rank where ranks hold parts of it.

    Raises:
        ValueError: names it.
    """
    if config.parallel.tp == 1:
        return
    whole = [name for name in methods if name in BASELINES]
    if whole or config.quality:
        what = f"method {whole[0]!r}" if whole else "quality=true"
        raise UserError(
            f"{what} needs the whole model on a rank, and parallel.tp is {config.parallel.tp}; leave it out"
        )


def check_sessions(config: BenchmarkConfig, methods: Iterable[str]) -> None:
    """Refuse a pool that has a text before its method is measured on it.

    Raises:
        ValueError: names the setting.
    """
    own = draft_configs(config, map(_bare, methods))
    keeping = [
        name
        for name in methods
        if isinstance(each := own.get(_bare(name)), lp.LookaheadConfig) and each.pool_scope is lp.PoolScope.SESSION
    ]
    if config.repeats > 1 and keeping:
        raise UserError(
            f"repeats is {config.repeats} with pool.scope=session, whose pool has the text from the first one on; "
            "take repeats=1, or pool.scope=request"
        )
    if config.pool.file is not None and len(keeping) > 1:
        raise UserError(
            f"pool.file is {config.pool.file!r} for {' and '.join(keeping)}, each of which would begin with what the "
            "other wrote; name one of them in methods, or take pool.file=null"
        )


def check_pass_at_1(config: BenchmarkConfig, prompts: list[Prompt]) -> None:
    """Refuse prompts whose texts cannot be judged, and machines that cannot run a program within limits.

    Raises:
        ValueError: names what is missing.
    """
    task = config.task
    given = config.prompt is not None or config.prompt_file is not None
    where = "the prompt that was given" if given else str(task.path or task.hub)
    check_prompts(task.check, task.name, where, prompts)
    if task.check != "number" and not check_limits():
        print("no Landlock here: programs that the model writes may write where you may", file=sys.stderr)


def methods_of(config: BenchmarkConfig) -> list[str]:
    """The methods of the config, or the decoder with plain decoding and prompt lookup beside it.

    Raises:
        ValueError: one that does not exist, or twice the same.
    """
    methods = config.methods or list(dict.fromkeys([config.decoder.name, *METHODS[1:]]))
    known = [*decoder_names(), *BASELINES]
    for name in methods:
        if _bare(name) not in known or (name.endswith(ALONE) and _bare(name) in BASELINES):
            names = ", ".join(known)
            raise UserError(f"methods has {name!r}; it must be one of {names}; {ALONE} behind ours runs it on one rank")
    if len(set(methods)) < len(methods):
        raise UserError(f"methods is {methods}, with one of them twice; name each once")
    return methods


def settings_of(
    config: BenchmarkConfig, methods: list[str], sampling: lp.SamplingParams | None, ranks: int, parameters: int
) -> dict[str, Any]:
    """All that a figure depends on beside prompt and machine.

    G is the one that was used; by method where these have their own defaults.
    """
    model = config.model
    decoder: dict[str, Any] = {"name": config.decoder.name}
    for chosen in draft_configs(config, [config.decoder.name]).values():
        decoder |= asdict(chosen)
    decoder.pop("ablation", None)  # which no key sets
    sizes = guess_set_sizes(config, map(_bare, methods))
    guess_set_size: dict[str, int] | int | None = sizes
    if len({*sizes.values()}) < 2:
        guess_set_size = next(iter(sizes.values()), config.G)
    settings: dict[str, Any] = {
        "model": model.name,
        "parameters": parameters,
        "dtype": model.dtype,
        "attention": config.attention.name,
        "capture": config.attention.capture,
    }
    settings |= {"task": config.task.name, "chat": config.task.chat, "W": config.W, "N": config.N, "G": guess_set_size}
    settings |= {"decoder": decoder, "methods": methods, "draft": config.draft, "ranks": ranks}
    settings |= {"sampling": asdict(sampling) if sampling else None, "max_new_tokens": config.max_new_tokens}
    settings |= {"stop_strings": config.stop_strings, "repeats": config.repeats, "quality": config.quality}
    settings |= {"prompt_tokens": config.prompt_tokens} if config.prompt_tokens else {}
    settings |= {"gguf": config.gguf} if config.gguf else {}
    settings |= {"pass_at_1": True} if config.pass_at_1 else {}
    settings |= {"tp": config.parallel.tp} if config.parallel.tp > 1 else {}
    pool = asdict(config.pool)
    named = {f"pool_{name}": value for name, value in pool.items()}.items() <= decoder.items()
    if pool != asdict(PoolSchema()) and not named and has_pool(map(_bare, methods)):
        settings |= {"pool": pool}
    return settings | {"threads": torch.get_num_threads()}


def folder_of(config: BenchmarkConfig) -> Path:
    """The folder of the records: `out`, or this run's folder, which the jobs of a sweep share."""
    return Path(config.out) if config.out else folder_of_run()


def hardware(bench: Bench) -> str:
    """The machine of rank 0 in words."""
    if bench.context.device.type == "cuda":
        return f"{bench.context.world_size} x {torch.cuda.get_device_name(bench.context.device)}"
    return f"{os.cpu_count()} {platform.machine().replace('_', '-')} cores"


def versions() -> dict[str, str]:
    """Versions of the packages that figures depend on."""
    return {"lp": lp.__version__, "python": platform.python_version()} | {name: version(name) for name in VERSIONS}


def _figures(result: Measured) -> dict[str, Any]:
    output = result.output
    accepted = Counter(step.accepted for step in output.step_stats)
    figures: dict[str, Any] = {"tokens": len(output.tokens), "steps": output.steps, "S": output.compression}
    figures |= {"accepted": {str(length): accepted[length] for length in sorted(accepted)}}
    figures |= {"tokens_a_step": output.mean_tokens, "finish_reason": output.finish_reason}
    figures |= {"attention": output.attention}
    figures |= {"prefill_s": output.prefill_s, "decode_s": result.decode_s, "rounds_s": [*result.rounds_s]}
    figures["tokens_per_s"] = len(output.tokens) / result.decode_s
    return figures | {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
