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

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import lp
from launch.bench.ceilings import Work
from launch.bench.projection import Link, Projection
from launch.bench.summary import markdown
from launch.config.builders import PLAIN
from launch.config.schema import known_links
from launch.data.shapes import SHAPES, shape_config, sketch
from lp.errors import UserError
from lp.models.loader import Loaded
from lp.parallel.thread_ranks import run_lockstep

from ._common import add_model_arguments, append_result, by_commas, load_model, progress, read_results, sampling_at
from .parts.arithmetic import GPUS, StepTime
from .parts.gpu_projection import GpuLine, LogLaw
from .parts.projection_plot import projection_plot
from .shares_compression import BUILTIN, add_set_arguments, decode_all, fixed_config, read_sets

Result = dict[str, Any]
PAPER, LP = "paper", "lookahead"
PAPER_N = 5  # the paper's best for 7B
BEGIN, END = "<!-- scaling_projection -->", "<!-- end of scaling_projection -->"
NODE_GPUS = 8  # joined by the first link; more are joined by the second
LINKS = ("nvlink", "infiniband")
HEADS = (
    *("GPUs", "tokens a step", "S", "GPU ms", "host ms", "gather ms", "tokens/s", "over 1 GPU", "efficiency"),
    *("over its best 1 GPU", "over plain", "largest part of a step", "limited by"),
)


def measure_steps(loaded: Loaded, sets: dict[str, list[list[int]]], setting: Result) -> Result:
    """Tokens and steps of one run over all sets, which are its S."""
    temperature, new = setting["temperature"], setting["max_new_tokens"]
    prompts = _in_turn(sets)
    if setting["method"] == LP:
        ranks = setting["ranks"]
        outputs = run_lockstep(ranks, partial(decode_all, loaded, _config(setting), prompts, new, temperature))[0]
    else:
        decoder = _alone(loaded, setting)
        outputs = [_decode(decoder, ids, new, temperature, index) for index, ids in enumerate(prompts)]
    return {
        "tokens": sum(len(output.tokens) for output in outputs),
        "steps": sum(output.steps for output in outputs),
    }


def measure_hosts(loaded: Loaded, sets: dict[str, list[list[int]]], settings: Sequence[Result]) -> list[Result]:
    """Host time of a step and the size of a message, of each setting, on the first prompts."""
    hosts = [
        [_Host.of(loaded, setting, ids, index) for index, ids in enumerate(_in_turn(sets)[: setting["timed"]])]
        for setting in settings
    ]
    for _ in progress(range(max(setting["rounds"] for setting in settings)), "rounds of host times"):
        for of_prompts in hosts:
            for host in of_prompts:
                host.time()
    return [
        {"host_s": fmean(host.seconds for host in of_prompts), "payload_bytes": of_prompts[0].payload_bytes}
        for of_prompts in hosts
    ]


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


def _in_turn(sets: dict[str, list[list[int]]]) -> list[list[int]]:
    """The prompts: the first of every set first."""
    return [ids for of_set in zip_longest(*sets.values()) for ids in of_set if ids]


def _config(setting: Result) -> lp.LookaheadConfig:
    """Ours, of R ranks with B tokens each."""
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
    """A line of the file, on GPUs with these step times."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="JSONL to write, or to go on with")
    parser.add_argument("--figure", type=Path, help="PNG to draw")
    parser.add_argument("--page", type=Path, help="Markdown whose part between two comments the tables replace")
    parser.add_argument("--gpu", choices=[*GPUS], default="h200")
    parser.add_argument("--shape", choices=[*SHAPES], default="llama2_7b", metavar="NAME", help="of conf's models")
    parser.add_argument("--prefix", type=int, default=1024, help="cached tokens")
    parser.add_argument("--ranks", type=by_commas(int), default=[1, 2, 4, 8, 16, 32, 64], help="by commas")
    parser.add_argument("--budget", type=int, default=64, help="B, step tokens of every rank")
    parser.add_argument(
        "--alone", type=by_commas(int), default=[32, 128, 192], help="B that one GPU is tried with besides"
    )
    parser.add_argument(
        "--paper", type=by_commas(int), default=[64, 128, 256, 512], help="step tokens of the paper's method"
    )
    parser.add_argument(
        "--window", type=int, default=4, help="columns for each rank but the first, with N = 2; half of B at most"
    )
    add_set_arguments(parser, limit=4, temperatures=[0.0, 0.8])
    parser.add_argument("--timed", type=int, default=1, help="prompts whose host time is measured")
    parser.add_argument("--rounds", type=int, default=3, help="of host times; the least counts")
    add_model_arguments(parser)


def settings(args: argparse.Namespace) -> list[Result]:
    """Every run, the cheap ones first."""
    runs = [(PLAIN, 1, 1), *((PAPER, 1, budget) for budget in args.paper)]
    runs += sorted({*((LP, 1, budget) for budget in args.alone), *((LP, ranks, args.budget) for ranks in args.ranks)})
    shared = {"model": args.model, "dtype": args.dtype, "threads": args.threads, "window": args.window}
    shared |= {"sets": args.sets if args.data else [BUILTIN], "limit": args.limit, "timed": args.timed}
    shared |= {"rounds": args.rounds, "max_new_tokens": args.max_new_tokens}
    return [
        {"method": method, "ranks": ranks, "budget": budget, "temperature": temperature} | shared
        for method, ranks, budget in runs
        for temperature in args.temperatures
    ]


def run(args: argparse.Namespace) -> None:
    if 1 not in args.ranks:
        raise UserError(f"--ranks is {args.ranks}; it needs 1, which the others are compared with")
    asked = settings(args)
    uncounted = [setting for setting in asked if "steps" not in _result(setting, args.results)]
    untimed = [setting for setting in asked if "host_s" not in _result(setting, args.results)]
    if uncounted or untimed:
        loaded = load_model(args)
        sets = read_sets(args, loaded)
    for setting in progress(uncounted, "settings"):
        append_result(args.results, setting | measure_steps(loaded, sets, setting) | {"torch": torch.__version__})
    if untimed:
        for setting, host in zip(untimed, measure_hosts(loaded, sets, untimed), strict=True):
            append_result(args.results, setting | host)
    results = [_result(setting, args.results) for setting in asked]
    config = shape_config(args.shape)
    work, layers = Work.of(sketch(config, "bfloat16")), config.num_hidden_layers
    step_time = partial(StepTime.of, GPUS[args.gpu], work, layers, prefix=args.prefix)
    links = {name: Link(**vars(link)) for name, link in known_links().items()}
    source = f"By arithmetic: {GPUS[args.gpu].name}, {args.shape} in bfloat16, {args.prefix} cached tokens. S and host "
    source += f"time: {args.model} model on a CPU, N=2, W={args.window} (GPUs - 1), at most half of B. "
    source += f"{LINKS[0]} up to {NODE_GPUS} GPUs, then {LINKS[1]}."
    text = source + "\n"
    series: dict[str, list[GpuLine]] = {}
    for temperature in args.temperatures:
        by_method: dict[str, list[GpuLine]] = {PLAIN: [], PAPER: [], LP: []}
        for result in results:
            if result["temperature"] == temperature:
                by_method[result["method"]].append(project(result, step_time, links))
        (plain,), paper, ours = by_method.values()
        alone = sorted((line for line in ours if line.ranks == 1), key=lambda line: line.budget)
        lines = [line for line in ours if line.budget == args.budget]
        best = max(alone, key=lambda line: line.tokens_per_s)
        text += f"\nT = {temperature:g}, B = {args.budget}\n\n{markdown(HEADS, cells(lines, plain, best))}\n"
        speeds = ", ".join(f"{line.tokens_per_s:.0f} with B = {line.budget}" for line in alone)
        text += f"One GPU, tokens/s: plain decoding {plain.tokens_per_s:.0f}; {speeds}.\n"
        text += f"Law: {LogLaw.of(lines)}; the paper's method on one rank: {LogLaw.of(paper)}.\n"
        series |= {f"T = {temperature:g}": lines, f"T = {temperature:g}, paper": paper}
    print(text)
    if args.page:
        before, _, after = args.page.read_text(encoding="utf-8").partition(BEGIN)
        args.page.write_text(f"{before}{BEGIN}\n{text}{END}{after.partition(END)[2]}", encoding="utf-8")
    if args.figure:
        projection_plot(series, source, args.figure)
    figures = {name: [asdict(line) for line in lines] for name, lines in series.items()}
    print(json.dumps({"gpu": args.gpu, "shape": args.shape, "series": figures}))


def _result(setting: Result, path: Path) -> Result:
    """The setting with all that the file has of it."""
    found = setting
    for line in read_results(path):
        if setting.items() <= line.items():
            found = found | line
    return found
