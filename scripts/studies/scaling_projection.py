"""R GPUs over one, for a GPU nobody has run: step times by arithmetic, S and host time of the demo model here.

    python scripts/tables.py scaling_projection results.jsonl --data data --sets humaneval,gsm8k --figure figure.png
    python scripts/tables.py scaling_projection results.jsonl --gpu a100 --shape llama2_13b    # of the same runs

S comes from R ranks with B tokens each, run as threads. Host time and message size come from the same ranks run one at
a time on the first prompts (--timed), with a model that computes nothing: the slowest rank's. Each round measures every
R, so that a slow minute of the machine is not one R's. The time of the gather is that of `known_links` in
launch/config. Beside them S of the paper's method, on one rank with as many tokens. Each line of the file is S or
the host time of one of these runs at one temperature; what it has is not run again. --page puts the tables into
docs/experiments/scaling.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import lp
from launch.bench.ceilings import Work
from launch.bench.plots import COLOURS, figure, look
from launch.bench.projection import Link, Projection
from launch.config.builders import PLAIN
from launch.config.schema import known_links
from launch.data.shapes import SHAPES, shape_config, sketch
from lp.errors import UserError
from lp.models.loader import Loaded
from lp.parallel.thread_ranks import run_lockstep

from .harness import Method, Result, ResultFile, Row, Table, grouped, option, progress, sampling_at
from .parts.arithmetic import GPUS, StepTime
from .parts.gpu_projection import GpuLine, LogLaw
from .shares_compression import SetStudy, decode_all, fixed_config

PAPER, LP = "paper", "lookahead"
PAPER_N = 5  # the paper's best for 7B
KEY = ("method", "ranks", "budget", "temperature")
NODE_GPUS = 8  # joined by the first link; more are joined by the second
LINKS = ("nvlink", "infiniband")
HEADS = (
    *("GPUs", "tokens a step", "S", "GPU ms", "host ms", "gather ms", "tokens/s", "over 1 GPU", "efficiency"),
    *("over its best 1 GPU", "over plain", "largest part of a step", "limited by"),
)


@dataclass(kw_only=True)
class ScalingProjection(SetStudy):
    """Measures S and host time of each number of ranks here, and adds a GPU's step times by arithmetic."""

    results: Path = option(help="JSONL to write, or to go on with")
    gpu: str = option("h200", choices=[*GPUS])
    shape: str = option("llama2_7b", f"of {', '.join(SHAPES)}")
    prefix: int = option(1024, "cached tokens")
    ranks: list[int] = option([1, 2, 4, 8, 16, 32, 64])
    budget: int = option(64, "B, step tokens of every rank")
    alone: list[int] = option([32, 128, 192], "B that one GPU is tried with besides")
    paper: list[int] = option([64, 128, 256, 512], "step tokens of the paper's method")
    window: int = option(4, "columns for each rank but the first, with N = 2; half of B at most")
    limit: int = option(4, "first prompts of every set")
    temperatures: list[float] = option([0.0, 0.8], "0 is greedy")
    timed: int = option(1, "prompts whose host time is measured")
    rounds: int = option(3, "of host times; the least counts")
    SHARED = ("model", "dtype", "threads", "window", "limit", "timed", "rounds", "max_new_tokens")

    turns = 1  # S is counted once

    def shared(self) -> dict[str, Any]:
        return super().shared() | {"sets": self.set_names}

    def rows(self) -> Iterable[Row]:
        """Every run, the cheap ones first."""
        if 1 not in self.ranks:
            raise UserError(f"--ranks is {self.ranks}; it needs 1, which the others are compared with")
        runs = [(PLAIN, 1, 1), *((PAPER, 1, budget) for budget in self.paper)]
        runs += sorted({*((LP, 1, each) for each in self.alone), *((LP, each, self.budget) for each in self.ranks)})
        keys = [(*run, temperature) for run in runs for temperature in self.temperatures]
        return [Row(dict(zip(KEY, key, strict=True))) for key in keys]

    def methods(self) -> Mapping[str, Method]:
        return {"": self.counted}

    def counted(self, row: Row) -> Result:
        """Tokens and steps of one run over all sets, which are its S."""
        setting, prompts = row.key | self.shared(), [*enumerate(self.in_turn)]
        if setting["method"] == LP:
            decode = partial(decode_all, self, _config(setting), prompts, setting["temperature"])
            outputs = run_lockstep(setting["ranks"], decode)[0]
        else:
            decoder = _alone(self.loaded, setting)
            new, temperature = self.max_new_tokens, setting["temperature"]
            outputs = [_decode(decoder, ids, new, temperature, index) for index, ids in prompts]
        counts = {"tokens": sum(len(each.tokens) for each in outputs), "steps": sum(each.steps for each in outputs)}
        return counts | {"torch": torch.__version__}

    def measure(self) -> list[Result]:
        """S of every run, then the host times of those that have none."""
        super().measure()
        file = ResultFile(self.results, self.shared())
        found = file.by(KEY)
        keys = [(*row.key.values(),) for row in self.rows()]
        untimed = [key for key in keys if key in found and "host_s" not in found[key]]
        for key, host in zip(untimed, self.hosts([found[key] for key in untimed]), strict=True):
            file.add(dict(zip(KEY, key, strict=True)) | host)
        found = file.by(KEY)
        return [found[key] for key in keys]

    def hosts(self, settings: Sequence[Result]) -> list[Result]:
        """Host time of a step and the size of a message, of each setting, on the first prompts."""
        if not settings:
            return []
        timed = [*enumerate(self.in_turn[: self.timed])]
        hosts = [[_Host.of(self.loaded, each, ids, index) for index, ids in timed] for each in settings]
        for _ in progress(range(self.rounds), "rounds of host times"):
            for of_prompts in hosts:
                for host in of_prompts:
                    host.time()
        return [
            {"host_s": fmean(host.seconds for host in of_prompts), "payload_bytes": of_prompts[0].payload_bytes}
            for of_prompts in hosts
        ]

    @property
    def in_turn(self) -> list[list[int]]:
        """All prompts, the first of every set before any second one, so that the first few are of several sets."""
        return [ids for of_set in zip_longest(*self.prompt_ids.values()) for ids in of_set if ids]

    def heading(self) -> str:
        gpu = f"By arithmetic: {GPUS[self.gpu].name}, {self.shape} in bfloat16, {self.prefix} cached tokens."
        window = f"N=2, W={self.window} (GPUs - 1), at most half of B."
        links = f"{LINKS[0]} up to {NODE_GPUS} GPUs, then {LINKS[1]}."
        return f"{gpu} S and host time: {self.model} model on a CPU, {window} {links}"

    def series(self, results: list[Result]) -> dict[float, dict[str, list[GpuLine]]]:
        """The estimates by temperature and method, each a series over the number of GPUs."""
        config = shape_config(self.shape)
        work, layers = Work.of(sketch(config, "bfloat16")), config.num_hidden_layers
        step_time = partial(StepTime.of, GPUS[self.gpu], work, layers, prefix=self.prefix)
        links = {name: Link(**vars(link)) for name, link in known_links().items()}
        return {
            temperature: {
                method: [project(result, step_time, links) for result in found]
                for method, found in grouped(of, "method").items()
            }
            for temperature, of in grouped(results, "temperature").items()
        }

    def tables(self, results: list[Result]) -> Iterable[Table]:
        for temperature, lines in self.series(results).items():
            (plain,) = lines[PLAIN]
            alone = sorted((line for line in lines[LP] if line.ranks == 1), key=lambda line: line.budget)
            ours = [line for line in lines[LP] if line.budget == self.budget]
            best = max(alone, key=lambda line: line.tokens_per_s)
            speeds = ", ".join(f"{line.tokens_per_s:.0f} with B = {line.budget}" for line in alone)
            note = f"One GPU, tokens/s: plain decoding {plain.tokens_per_s:.0f}; {speeds}.\n"
            note += f"Law: {LogLaw.of(ours)}; the paper's method on one rank: {LogLaw.of(lines[PAPER])}."
            yield Table(HEADS, cells(ours, plain, best), f"T = {temperature:g}, B = {self.budget}", note)

    def draw(self, results: list[Result], path: Path) -> None:
        drawn: dict[str, list[GpuLine]] = {}
        for temperature, lines in self.series(results).items():
            drawn[f"T = {temperature:g}"] = [line for line in lines[LP] if line.budget == self.budget]
            drawn[f"T = {temperature:g}, paper"] = lines[PAPER]
        projection_plot(drawn, self.heading(), path)


@dataclass(kw_only=True, slots=True)
class _Host:
    """Host time of a step on one prompt; of ours, the slowest rank's."""

    decoder: Any
    decode: Callable[[Any], lp.GenerationOutput]
    projection: Projection | None  # of ours
    runs: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, loaded: Loaded, setting: Result, ids: list[int], index: int) -> _Host:
        decode = partial(
            _decode, ids=ids, new=setting["max_new_tokens"], temperature=setting["temperature"], index=index
        )
        if setting["method"] != LP:
            return cls(decoder=_alone(loaded, setting), decode=decode, projection=None)
        decoder = lp.LookaheadDecoder(loaded.model, _config(setting), capture="off")
        decoder.merges_late = True  # as on a GPU, beside which it takes no time
        return cls(
            decoder=decoder,
            decode=decode,
            projection=Projection(decoder=decoder, decode=decode, ranks=setting["ranks"]),
        )

    def time(self) -> None:
        self.runs += self.projection.host_runs(1) if self.projection else [self.decode(self.decoder)]

    @property
    def seconds(self) -> float:
        if self.projection:
            return self.projection.slowest_host_s(self.runs)
        return min(median(step.host_s for step in output.step_stats) for output in self.runs)

    @property
    def payload_bytes(self) -> int:
        return self.projection.recorded.payload_bytes if self.projection else 0


def _config(setting: Result) -> lp.LookaheadConfig:
    """The config of our decoder for a setting: R ranks with B tokens each."""
    ranks, budget = setting["ranks"], setting["budget"]
    return fixed_config(min(setting["window"] * (ranks - 1), budget // 2), ranks, budget)


def _alone(loaded: Loaded, setting: Result) -> Any:
    """A decoder of one rank: plain decoding, or the paper's with W = G and `budget` step tokens."""
    if setting["method"] == PLAIN:
        return lp.PlainDecoder(loaded.model)
    size = max(setting["budget"] // (2 * (PAPER_N - 1)), 1)
    config = lp.PaperConfig(window_size=size, ngram_size=PAPER_N, guess_set_size=size)
    return lp.LookaheadDecoder(loaded.model, config, capture="off")


def _decode(decoder: Any, ids: list[int], new: int, temperature: float, index: int) -> lp.GenerationOutput:
    output: lp.GenerationOutput = decoder.generate(ids, new, sampling_at(temperature), sequence=index)
    return output


def project(result: Result, step_time: Callable[[int], StepTime], links: dict[str, Link]) -> GpuLine:
    """Turn a measured line of the file into the estimate for GPUs with these step times."""
    link = links[LINKS[result["ranks"] > NODE_GPUS]]
    gather_s = link.all_gather_s(result["ranks"], result["payload_bytes"])
    return GpuLine(
        ranks=result["ranks"],
        budget=result["budget"],
        compression=result["tokens"] / result["steps"],
        parts=step_time(result["budget"]).parts | {"host": result["host_s"], "gather": gather_s},
    )


def cells(lines: Sequence[GpuLine], plain: GpuLine, best: GpuLine) -> list[list[str]]:
    """The table of one temperature: R ranks in order, the first of them alone."""
    found = []
    for line, fewer in zip(lines, [None, *lines], strict=False):
        host_s, gather_s = line.parts["host"], line.parts["gather"]
        ratio = line.tokens_per_s / lines[0].tokens_per_s
        row = [str(line.ranks), str(line.step_tokens), f"{line.compression:.2f}"]
        row += [f"{1e3 * seconds:.2f}" for seconds in (line.step_s - host_s - gather_s, host_s, gather_s)]
        row += [f"{line.tokens_per_s:.0f}", f"{ratio:.2f} x", f"{ratio / line.ranks:.1%}"]
        row += [f"{line.tokens_per_s / other.tokens_per_s:.2f} x" for other in (best, plain)]
        found.append([*row, line.largest, line.limit(fewer)])
    return found


def projection_plot(series: Mapping[str, Sequence[GpuLine]], caption: str, path: Path) -> Path:
    """S with its law, by series; of those with several GPUs the speed over one, and of the last the parts of a step."""
    scaled = {name: lines for name, lines in series.items() if len({line.ranks for line in lines}) > 1}
    with figure(path, caption, 6.4, 3) as (_, (upper, middle, lower)):
        for number, (name, lines) in enumerate(series.items()):
            law = LogLaw.of(lines)
            tokens = [line.step_tokens for line in lines]
            hollow = look(number, f"{name}: {law}") | {"markerfacecolor": "none"}
            upper.plot(tokens, [line.compression for line in lines], **hollow | {"linestyle": "none"})
            upper.plot(tokens, [law.compression(count) for count in tokens], color=hollow["color"])
            if name in scaled:
                ratios = [line.tokens_per_s / lines[0].tokens_per_s for line in lines]
                middle.plot([line.ranks for line in lines], ratios, **hollow | {"linestyle": "--", "label": name})
        last, lines = list((scaled or series).items())[-1]
        bottom = [0.0] * len(lines)
        for part, colour in zip(dict.fromkeys(part for line in lines for part in line.parts), COLOURS, strict=False):
            heights = [1e3 * line.parts.get(part, 0.0) for line in lines]
            bars: dict[str, Any] = {"color": colour, "label": part, "hatch": "////", "edgecolor": "white"}
            lower.bar([str(line.ranks) for line in lines], heights, 0.7, bottom, **bars)
            bottom = [start + height for start, height in zip(bottom, heights, strict=True)]
        step_tokens = {line.step_tokens for each in series.values() for line in each}
        for axes, numbers in ((upper, sorted(step_tokens)), (middle, [line.ranks for line in lines])):
            axes.set_xscale("log", base=2)
            axes.set_xticks(numbers, map(str, numbers))
            axes.set_ylim(0, None)
        upper.set(xlabel="tokens a step, of all ranks", ylabel="S", ylim=(0, 1.5 * upper.get_ylim()[1]))
        middle.set(xlabel="GPUs (by arithmetic)", ylabel="speed over 1 GPU (x)", ylim=(0, 1.1 * middle.get_ylim()[1]))
        lower.set(xlabel=f"GPUs (by arithmetic), {last}", ylabel="ms a step", ylim=(0, 1.3 * max(bottom)))
        upper.legend(loc="upper left")
        middle.legend()
        lower.legend(loc="upper left", ncols=4)
    return path
