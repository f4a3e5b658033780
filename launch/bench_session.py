"""What a benchmark runs on: the methods behind one call, where their rows go, and what a row says."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch

import lp
from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput
from lp.engine.signals import Terminated
from lp.errors import UserError
from lp.models.loader import Loaded
from lp.parallel.agreement import exchange

from .bench.baselines import BASELINES, BaselineOptions
from .bench.compare import Difference, Measured, differences
from .bench.prompts import Prompt
from .bench.quality import assess
from .bench.records import Row, digest, slug
from .builders import METHODS, PLAIN, choices
from .schema import BenchmarkConfig
from .session import Session, checked, open_model, seeded
from .sweep import folder_of_run

T = TypeVar("T")
Once = Callable[[list[int], int], GenerationOutput]
ALONE = "@1"  # behind a method's name: on rank 0 alone
VERSIONS = ("torch", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, kw_only=True)
class Bench(Session[BenchmarkConfig]):
    """A session whose methods are called alike, whichever ranks run them.

    Args:
        runs: by method, continues a prompt by so many tokens; every rank calls it.
        path: of the rows.
        settings: what tells these rows from those of other settings.
    """

    runs: Mapping[str, Once]
    path: Path
    settings: dict[str, Any]

    def shares(self, method: str, output: GenerationOutput) -> list[dict[str, float]]:
        """Mean rows and milliseconds of a step on every rank that ran the method."""
        steps = output.step_stats
        names = ("num_tokens", "forward_s", "exchange_s", "host_s")
        # Nanoseconds and billionths of a row, as the collective carries integers.
        means = [round(1e9 * fmean(getattr(step, name) for step in steps)) if steps else 0 for name in names]
        everyone = exchange(self.context, "comparing what ranks took", means).tolist()
        ranks = everyone if _together(method) else everyone[:1]
        return [
            {"rows": rows / 1e9, "forward_ms": forward / 1e6, "exchange_ms": exchange / 1e6, "host_ms": host / 1e6}
            for rows, forward, exchange, host in ranks
        ]

    def rows(
        self, index: int, prompt: Prompt, measured: Mapping[str, Measured], shares: Mapping[str, list[dict[str, float]]]
    ) -> list[Row]:
        """What is written of one prompt, a row a method."""
        ids = self.encode(prompt)
        new = {name: result.output.tokens for name, result in measured.items()}
        compared = PLAIN in new and not self._in_distribution
        parted = differences(self.loaded.model, ids, new, PLAIN, self.sampling) if compared else []
        by_method = {difference.method: difference for difference in parted}
        head = {"task": self.config.task.name, "index": index, "task_id": prompt.task_id}
        head |= {"prompt_digest": digest(prompt.text), "prompt_tokens": len(ids)}
        rows = []
        for name, result in measured.items():
            row = {**head, "method": name, **_figures(result), "split": shares[name]}
            row["text"] = self.loaded.tokenizer.decode(result.output.tokens, skip_special_tokens=True)
            row["equal"] = name not in by_method if compared else None
            row["difference"] = asdict(by_method[name]) if name in by_method else None
            if self.config.quality:
                row["quality"] = self._quality(prompt, ids, result.output, row["text"], by_method.get(name))
            rows.append(row | {"settings": self.settings, "hardware": hardware(self), "versions": versions()})
        return rows

    def _quality(
        self, prompt: Prompt, ids: list[int], output: GenerationOutput, text: str, parted: Difference | None
    ) -> dict[str, Any]:
        return assess(self.loaded.model, ids, output.tokens, text, prompt.reference, parted)

    @property
    def _in_distribution(self) -> bool:
        return self.sampling is not None and self.sampling.verifier is lp.Verifier.REJECTION


def on_main(context: lp.ParallelContext, work: Callable[[], T]) -> T | None:
    """What it gives on rank 0, which alone does it; the others wait, and get None.

    Raises:
        Exception: it failed, on every rank: others would go on with this job, and rank 0 with the next one of a sweep.
        KeyboardInterrupt: rank 0 was interrupted.
    """
    made, failure = None, None
    if context.is_main:
        try:
            made = work()
        except (Exception, KeyboardInterrupt) as error:
            failure = error
    said = context.share_text(f"{isinstance(failure, KeyboardInterrupt):d}{failure}" if failure else None)
    if failure:
        raise failure
    if said is not None:
        raise Terminated if said[0] == "1" else UserError(said[1:])
    return made


class KeptModel:
    """The model of one job, for the next one of a sweep that asks for the same."""

    def __init__(self) -> None:
        self._asked: Any = None
        self._opened: tuple[lp.ParallelContext, Loaded] | None = None

    def open(self, config: BenchmarkConfig) -> tuple[lp.ParallelContext, Loaded]:
        """This rank's place and the model there.

        Raises:
            ValueError: a user error, with its remedy.
        """
        asked = (asdict(config.model), asdict(config.parallel))
        if self._opened is None or asked != self._asked:
            self._opened = None  # before the next one takes its memory
            self._opened, self._asked = open_model(config), asked
        return self._opened


def open_bench(config: BenchmarkConfig, kept: KeptModel) -> Bench:
    """Check everything that can be checked without the model, then load it.

    Args:
        config: of this job.
        kept: holds the model of the last one.

    Raises:
        ValueError: a user error, with its remedy.
    """
    methods = methods_of(config)
    prompts, sampling, builders = checked(config, [_bare(name) for name in methods if _bare(name) in choices()])
    if config.repeats > 1 and getattr(config.decoder, "pool_scope", None) == lp.PoolScope.SESSION:
        raise UserError(
            f"repeats is {config.repeats} with pool.scope=session, whose pool has the text from the first one on; "
            "take repeats=1, or pool.scope=request"
        )
    context, loaded = kept.open(config)
    sampling = seeded(sampling, context)
    settings = settings_of(config, methods, sampling, context.world_size, loaded.model.num_parameters())
    decoders: dict[str, Decoder] = {}
    for name in methods:
        where = context if _together(name) else lp.ParallelContext(device=context.device)
        options = BaselineOptions(draft=config.draft)
        maker = builders.get(_bare(name)) or partial(BASELINES[name].build, options=options)
        build = partial(maker, loaded.model, where)
        if made := build() if _together(name) else on_main(context, build):
            decoders[name] = made
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
    )
    return replace(bench, runs={name: _once(bench, name) for name in methods})


def _once(bench: Bench, name: str) -> Once:
    def together(ids: list[int], tokens: int) -> GenerationOutput:
        return bench.run(bench.decoders[name], ids, tokens)

    def alone(ids: list[int], tokens: int) -> GenerationOutput:
        """On rank 0; the others wait."""
        return on_main(bench.context, partial(together, ids, tokens)) or GenerationOutput([], "", [])

    return together if _together(name) else alone


def _bare(name: str) -> str:
    return name.removesuffix(ALONE)


def _together(name: str) -> bool:
    """Whether all ranks share its steps."""
    if name.endswith(ALONE) or name == PLAIN:
        return False
    return BASELINES[name].together if name in BASELINES else True


def methods_of(config: BenchmarkConfig) -> list[str]:
    """The methods asked for, or the decoder with plain decoding and prompt lookup beside it.

    Raises:
        ValueError: one that does not exist, or twice the same.
    """
    methods = config.methods or list(dict.fromkeys([config.decoder.name, *METHODS[1:]]))
    known = [*choices(), *BASELINES]
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
    """What a figure depends on beside prompt and machine."""
    model, decoder = config.model, {key: value for key, value in vars(config.decoder).items()}
    chosen: dict[str, Any] = {
        "model": model.name,
        "parameters": parameters,
        "dtype": model.dtype,
        "attention": config.attention.name,
        "capture": config.attention.capture,
    }
    chosen |= {"task": config.task.name, "chat": config.task.chat, "W": config.W, "N": config.N, "G": config.G}
    chosen |= {"decoder": decoder, "methods": methods, "draft": config.draft, "ranks": ranks}
    chosen |= {"sampling": asdict(sampling) if sampling else None, "max_new_tokens": config.max_new_tokens}
    chosen |= {"stop_strings": config.stop_strings, "repeats": config.repeats, "quality": config.quality}
    return chosen | {"threads": torch.get_num_threads()}


def folder_of(config: BenchmarkConfig) -> Path:
    """Where rows go: `out`, or this run's folder, which the jobs of a sweep share."""
    return Path(config.out) if config.out else folder_of_run()


def hardware(bench: Bench) -> str:
    """The machine of rank 0 in words."""
    if bench.context.device.type == "cuda":
        return f"{bench.context.world_size} x {torch.cuda.get_device_name(bench.context.device)}"
    return f"{os.cpu_count()} {platform.machine().replace('_', '-')} cores"


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    return {"lp": version("lp-runtime"), "python": platform.python_version()} | {
        name: version(name) for name in VERSIONS
    }


def _figures(result: Measured) -> dict[str, Any]:
    output = result.output
    accepted = Counter(step.accepted for step in output.step_stats)
    figures: dict[str, Any] = {"tokens": len(output.tokens), "steps": output.steps, "S": output.compression}
    figures |= {"accepted": {str(length): accepted[length] for length in sorted(accepted)}}
    figures |= {"rows_a_step": output.mean_tokens, "finish_reason": output.finish_reason}
    figures |= {"prefill_s": output.prefill_s, "decode_s": result.decode_s}
    figures["tokens_per_s"] = len(output.tokens) / result.decode_s
    return figures | {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
