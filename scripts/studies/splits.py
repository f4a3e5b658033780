"""The fastest split of 8 GPUs into replicas (lp x tp), for GPUs nobody has run: by arithmetic, no measurement.

    python scripts/tables.py splits docs/experiments/results/scaling-projection/runs.jsonl
    python scripts/tables.py splits RUNS --gpu h100 --memory-gb 80 --temperature 0   # of the same runs

Step times are those of scaling_projection, of a part of the model. A sum over a replica is a ring of NCCL's on NVLink,
by the figures of `known_links` in launch/config; or one step in which each rank reads all others (torch's symmetric
memory), whose 5 us are assumed. S and host time are lines fitted to the runs of scaling_projection: S over log2(tokens
a step), host time over the number of replicas. Beside that host time, a shorter one that is assumed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from launch.bench.ceilings import Work
from launch.bench.summary import markdown
from launch.config.schema import known_links
from launch.data.shapes import SHAPES, shape_config, sketch
from lp.errors import UserError

from ._common import read_results
from .parts.arithmetic import GPUS
from .parts.gpu_projection import LogLaw
from .parts.splits import Machine, Shape, Split, Sum

ASSUMED_HOST_S = 0.2e-3  # of a step
ONE_STEP = Sum(base_s=5e-6, hop_s=0.0, bytes_per_s=450e9, ring=False)
HEADS = (
    *("model", "sums", "host", "fastest lp x tp", "tokens a replica", "S", "step ms", "sums ms", "tokens/s"),
    *("TP alone", "LP alone", "over the better"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="JSONL of scaling_projection")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the runs")
    parser.add_argument("--gpu", choices=[*GPUS], default="h200")
    parser.add_argument("--memory-gb", type=float, default=141.0, help="of each GPU")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--shapes", default="llama2_7b,codellama_34b,llama2_70b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--prefix", type=int, default=1024, help="cached tokens")


def run(args: argparse.Namespace) -> None:
    nvlink = known_links()["nvlink"]
    ring = Sum(base_s=1e-6 * nvlink.base_us, hop_s=1e-6 * nvlink.hop_us, bytes_per_s=1e9 * nvlink.gb_s, ring=True)
    runs = [
        run
        for run in read_results(args.results)
        if run["method"] == "lookahead" and run["temperature"] == args.temperature
    ]
    compressions = [(run["ranks"] * run["budget"], run["tokens"] / run["steps"]) for run in runs if "steps" in run]
    shared = {run["budget"] for run in runs if run["ranks"] > 1}  # one rank was tried with others too
    times = [
        (run["ranks"], run["host_s"])
        for run in runs
        if "host_s" in run and run["ranks"] <= args.gpus and run["budget"] in shared
    ]
    if not compressions or len({ranks for ranks, _ in times}) < 2:
        raise UserError(
            f"{args.results} has no runs at T = {args.temperature:g} of 1 and more ranks, up to --gpus ({args.gpus}); "
            "make them with scripts/tables.py scaling_projection"
        )
    law = LogLaw.fitted(compressions)
    further_s, host_s = np.polyfit([ranks - 1 for ranks, _ in times], [seconds for _, seconds in times], 1).tolist()
    measured = f"{1e3 * host_s:.2f} ms + {1e6 * further_s:.0f} us a further replica"
    hosts = {measured: (host_s, further_s), f"{1e3 * ASSUMED_HOST_S:g} ms": (ASSUMED_HOST_S, 0.0)}
    rows, figures = [], []
    for name in args.shapes.split(","):
        config = shape_config(name)
        shape = Shape(
            work=Work.of(sketch(config, "bfloat16")), layers=config.num_hidden_layers, hidden=config.hidden_size
        )
        for kind, sums in (("ring", ring), ("one step", ONE_STEP)):
            for host, times_s in hosts.items():
                memory = 1e9 * args.memory_gb
                machine = Machine(gpu=GPUS[args.gpu], memory_bytes=memory, sums=sums, host_s=times_s)
                splits = [*machine.splits(shape, law, args.gpus, args.prefix)]
                rows.append(cells(name, kind, host, splits))
                figures += [{"shape": name, "sums": kind, "host": host} | asdict(split) for split in splits]
    print(f"By arithmetic: {args.gpus} x {GPUS[args.gpu].name}, bfloat16, {args.prefix} cached tokens, {law}.\n")
    print(markdown(HEADS, rows))
    print(json.dumps({"gpu": args.gpu, "gpus": args.gpus, "splits": figures}))


def cells(name: str, sums: str, host: str, splits: list[Split]) -> list[str]:
    """A row: the fastest split, beside the two that are one dimension alone."""
    best = max(splits, key=lambda split: split.tokens_per_s)
    pure = {True: None, False: None} | {split.tp == 1: split for split in splits if 1 in (split.lp, split.tp)}
    others = [split.tokens_per_s for split in pure.values() if split]
    row = [name, sums, host, f"{best.lp} x {best.tp}", str(best.budget), f"{best.compression:.2f}"]
    row += [f"{1e3 * best.step_s:.2f}", f"{1e3 * best.parts['sums']:.2f}", f"{best.tokens_per_s:.0f}"]
    row += [f"{split.tokens_per_s:.0f}" if split else "no room" for split in (pure[False], pure[True])]
    return [*row, f"{best.tokens_per_s / max(others):.2f} x"]
