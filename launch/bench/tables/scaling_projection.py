"""R GPUs over one, for a GPU nobody has run: step times by arithmetic, S and host time of the demo model here.

    python scripts/tables.py scaling_projection results.jsonl --data data --sets humaneval,gsm8k --figure figure.png
    python scripts/tables.py scaling_projection results.jsonl --gpu a100 --shape llama2_13b    # of the same runs

S comes from R ranks with B tokens each, run as threads. Host time and message size come from the same ranks run one at
a time on the first prompts (--timed), with a model that computes nothing: the slowest rank's. The time of the gather
is that of the links in conf/scaling.yaml. Beside them S of the paper's method, on one rank with as many tokens. Each
line of the file is one of these runs at one temperature; what it has is not run again. --page puts the tables into
docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from omegaconf import OmegaConf

import lp
from lp.errors import UserError
from lp.models.loader import Loaded
from lp.parallel.thread_ranks import run_lockstep

from ...app import CONF
from ...builders import PLAIN
from ..arithmetic import GPUS, StepTime
from ..ceilings import Work
from ..gpu_projection import GpuLine, LogLaw
from ..plots import projection_plot
from ..projection import Link, Projection
from ..shapes import SHAPES, shape_config, sketch
from ..summary import markdown
from ._common import add_model_arguments, append_result, by_commas, load_model, progress, read_results, sampling_at
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


def measure(loaded: Loaded, sets: dict[str, list[list[int]]], setting: Result) -> Result:
    """S of one run over all sets; of ours, the host's part of the first prompts too."""
    temperature, new, timed = setting["temperature"], setting["max_new_tokens"], setting["timed"]
    prompts = [ids for of_set in zip_longest(*sets.values()) for ids in of_set if ids]  # the first of every set first
    decodes = [
        partial(_decode, ids=ids, new=new, temperature=temperature, index=index) for index, ids in enumerate(prompts)
    ]
    host_s: list[float] = []
    payload_bytes = 0
    if setting["method"] == LP:
        ranks, budget = setting["ranks"], setting["budget"]
        config = fixed_config(min(setting["window"] * (ranks - 1), budget // 2), ranks, budget)
        outputs = run_lockstep(ranks, partial(decode_all, loaded, config, prompts, new, temperature))[0]
        for decode in decodes[:timed]:
            decoder = lp.LookaheadDecoder(loaded.model, config, capture="off")
            decoder.merges_late = True  # as on a GPU, beside which it takes no time
            projection = Projection(decoder=decoder, decode=decode, ranks=ranks)
            host_s.append(projection.slowest_host_s(projection.host_runs(setting["rounds"])))
            payload_bytes = projection.recorded.payload_bytes
    else:
        outputs = [decode(_alone(loaded, setting)) for decode in decodes]
        host_s = [median(step.host_s for step in output.step_stats) for output in outputs[:timed]]
    tokens = sum(len(output.tokens) for output in outputs)
    steps = sum(output.steps for output in outputs)
    return {"tokens": tokens, "steps": steps, "host_s": fmean(host_s), "payload_bytes": payload_bytes}


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
    left = [setting for setting in asked if _result(setting, args.results) is None]
    if left:
        loaded = load_model(args)
        sets = read_sets(args, loaded)
    for setting in progress(left, "settings"):
        append_result(args.results, setting | measure(loaded, sets, setting) | {"torch": torch.__version__})
    results = [result for setting in asked if (result := _result(setting, args.results))]
    config = shape_config(args.shape)
    work, layers = Work.of(sketch(config, "bfloat16")), config.num_hidden_layers
    step_time = partial(StepTime.of, GPUS[args.gpu], work, layers, prefix=args.prefix)
    links = {name: Link(**values) for name, values in OmegaConf.load(CONF / "scaling.yaml").links.items()}
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


def _result(setting: Result, path: Path) -> Result | None:
    return next((result for result in read_results(path) if setting.items() <= result.items()), None)
