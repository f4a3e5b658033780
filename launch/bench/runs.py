"""A benchmark's session: loaded model, methods that are all called alike, record file, and the content of a record."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import lp
from lp.checks import check_int
from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput
from lp.errors import UserError
from lp.models.loader import Loaded
from lp.parallel.agreement import exchange

from ..config.builders import ORACLE, PLAIN
from ..config.sampling import seeded
from ..config.schema import BenchmarkConfig
from ..data.long_prompts import lengthened
from ..data.prompts import Prompt
from ..running.jobs import folder_of_run
from ..running.session import Session, checked, on_main, open_model
from ..text.detokenizer import decoded
from .alternation import Measured
from .baselines import BASELINES
from .compare import Difference, differences
from .machine import machine_now
from .methods import (
    bare_name,
    baseline_options,
    check_divisible,
    check_kv_dtype,
    check_pass_at_1,
    check_sessions,
    methods_of,
    missing_methods,
    own_names,
    shares_steps,
)
from .origin import hardware, origin, versions
from .pass_at_1 import judge
from .quality import assess, check_rouge
from .record_settings import settings_of
from .records import Record, digest, slug

Once = Callable[[list[int], int], GenerationOutput]


@dataclass(frozen=True, kw_only=True)
class Bench(Session[BenchmarkConfig]):
    """A loaded model with the methods that a benchmark measures; each is called alike, whichever ranks run it.

    It also takes the arguments of its base class `Session`.

    Args:
        runs: functions that decode a prompt once, by method; arguments are the prompt's token ids and the most new
            tokens. Every rank calls each function, also for methods that run on rank 0 alone.
        path: the record file.
        settings: settings of the measurement, which every record repeats.
        origin: command and commit of this run, which every record repeats.
    """

    runs: Mapping[str, Once]
    path: Path
    settings: dict[str, Any]
    origin: dict[str, str | None] = field(default_factory=dict)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; prompt_tokens=N in the config puts other prompts before it until it has N tokens.

        Args:
            prompt: one of `prompts`.
        """
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
        """Gather every rank's tokens per step, step times and peak memory in one method's run; every rank calls this.

        Args:
            method: name of the method.
            result: the method's result on this rank.

        Returns:
            A dict for each rank that ran the method: "num_tokens", "forward_ms", "exchange_ms" and "host_ms" are means
            per decode step, "peak_bytes" is the peak memory.
        """
        steps = result.output.step_stats
        names = ("num_tokens", "forward_s", "exchange_s", "host_s")
        # Nanoseconds and billionths of a token, as the collective carries integers.
        means = [round(1e9 * fmean(getattr(step, name) for step in steps)) if steps else 0 for name in names]
        means.append(result.peak_bytes)
        by_rank = exchange(self.context.ranks, "comparing the step times of ranks", means).tolist()
        units = {"num_tokens": 1e9, "forward_ms": 1e6, "exchange_ms": 1e6, "host_ms": 1e6, "peak_bytes": 1}
        return [
            {name: mean / unit for mean, (name, unit) in zip(of_rank, units.items(), strict=True)}
            for of_rank in (by_rank if shares_steps(method) else by_rank[: self.context.replica.size])
        ]

    def compared(self, prompt: Prompt, measured: Mapping[str, Measured]) -> list[Difference] | None:
        """Compare all methods' tokens on one prompt with plain decoding's; every rank calls this.

        Under tensor parallelism all ranks compute the comparison. Otherwise rank 0 does, and the others wait.

        Args:
            prompt: the prompt.
            measured: the methods' results on it.

        Returns:
            One difference for each method whose tokens differ. None with rejection sampling, without plain decoding
            among the methods, and on ranks that only waited.
        """
        if measured.keys().isdisjoint((PLAIN, ORACLE)) or self.in_distribution:
            return None

        def compare() -> list[Difference]:
            ids = self.encode(prompt)
            outputs = {name: result.output for name, result in measured.items()}
            plain = self.oracle_tokens(ids, self.config.max_new_tokens, outputs)
            new = {name: output.tokens for name, output in outputs.items()}
            return differences(self.loaded.model, ids, new, plain, self.sampling, self.config.model.kv_dtype)

        return compare() if self.context.replica.size > 1 else on_main(self.context, compare)

    def records(
        self,
        index: int,
        prompt: Prompt,
        measured: Mapping[str, Measured],
        shares: Mapping[str, list[dict[str, float]]],
        found: list[Difference] | None,
    ) -> list[Record]:
        """Make the records of one prompt, one for each method.

        Args:
            index: the prompt's index in the task.
            prompt: the prompt.
            measured: the methods' results on the prompt.
            shares: figures of each rank that `Bench.shares` returned, by method.
            found: differences from plain decoding that `Bench.compared` returned; None where nothing was compared.
        """
        ids = self.encode(prompt)
        by_method = {difference.method: difference for difference in found or []}
        head = {"task": self.config.task.name, "index": index, "task_id": prompt.task_id}
        head |= {"prompt_digest": digest(prompt.text), "prompt_tokens": len(ids)}
        records = []
        for name, result in measured.items():
            record = {**head, "method": name, **_figures(result), "split": shares[name]}
            record["peak_bytes"] = max(int(share["peak_bytes"]) for share in shares[name])
            record["captured"] = captured(self.decoders.get(name))
            record["machine"] = machine_now(self.context.device, self.context.world_size)
            record["text"] = decoded(self.loaded.tokenizer, result.output.tokens, after=ids)
            record["equal"] = None if found is None else name not in by_method
            record["difference"] = asdict(by_method[name]) if name in by_method else None
            if self.config.quality:
                tokens = result.output.tokens
                record["quality"] = assess(
                    self.loaded.model, ids, tokens, record["text"], prompt.reference, by_method.get(name)
                )
            if self.config.pass_at_1:
                assert self.config.task.check
                record["check"] = asdict(judge(self.config.task.check, prompt, record["text"]))
            record |= {"settings": self.settings, "hardware": hardware(self.context), "versions": versions()}
            records.append(record | {"origin": self.origin})
        return records


def captured(decoder: Decoder | None) -> str | None:
    """How a decoder captures its decode steps, as in "graph" (CUDA graphs); None if it captures none, as baselines do.

    Args:
        decoder: the decoder; None where this rank has none.
    """
    runner = getattr(decoder, "runner", None)
    return str(runner.captured.mode) if runner is not None and runner.captured else None


class ModelCache:
    """Keeps a loaded model from one job of a sweep to the next, so that jobs with equal model settings load it once."""

    def __init__(self) -> None:
        self._settings: Any = None
        self._opened: tuple[lp.ParallelContext, Loaded] | None = None

    def open(self, config: BenchmarkConfig) -> tuple[lp.ParallelContext, Loaded]:
        """This rank's context and the loaded model: those of the last job if its settings are equal, else new ones.

        Args:
            config: this job's config, of which the settings of the model and of the ranks are compared.

        Raises:
            ValueError: the model cannot be loaded, or a value of the config is wrong; the message names the remedy.
        """
        settings = (asdict(config.model), asdict(config.parallel))
        if self._opened is None or settings != self._settings:
            self._opened = None  # before the next one takes its memory
            self._opened = open_model(config)
            self._settings = settings
        return self._opened


def open_bench(config: BenchmarkConfig, models: ModelCache) -> Bench:
    """Check a benchmark's config as far as possible without the model, then load the model and build its methods.

    Args:
        config: this job's config.
        models: keeps the model from job to job.

    Raises:
        ValueError: the model cannot be loaded, or a value of the config is wrong; the message names the remedy.
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
    check_kv_dtype(config, methods)
    context, loaded = models.open(config)
    asked = config.parallel.backend
    if context.world_size > 1 and asked not in ("auto", context.backend):  # an earlier job of a sweep chose
        raise UserError(
            f"parallel.backend is {asked!r}, but the ranks have met with {context.backend!r}, which all jobs of a "
            "sweep share; start a run for each backend"
        )
    sampling = seeded(sampling, context)
    parameters = loaded.model.num_parameters()
    settings = settings_of(config, methods, sampling, context.world_size, parameters, context)
    decoders: dict[str, Decoder] = {}
    for name in methods:
        own_context = context if shares_steps(name) else context.replica_alone()
        options = baseline_options(config)
        builder = builders.get(bare_name(name)) or partial(BASELINES[name].build, options=options)
        build = partial(builder, loaded.model, own_context)
        if decoder := build() if shares_steps(name) or context.replica.size > 1 else on_main(context, build):
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
        """Decode on rank 0 while the others wait: for methods that have no use for several ranks."""
        return on_main(bench.context, partial(together, ids, tokens)) or GenerationOutput([], "", [])

    # Replicas that span ranks decode all at once, each for itself, where they share no steps.
    return together if shares_steps(name) or bench.context.replica.size > 1 else alone


def folder_of(config: BenchmarkConfig) -> Path:
    """The folder of the record files: the one that the key `out` names, else the run's own.

    In a sweep, the run's own folder is the one that all its jobs share.

    Args:
        config: this job's config.
    """
    return Path(config.out) if config.out else folder_of_run()


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
