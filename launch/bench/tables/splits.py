"""The fastest split of 8 GPUs into replicas (lp x tp), for GPUs nobody has run: by arithmetic, no measurement.

    python scripts/tables.py splits
    python scripts/tables.py splits --gpu h100 --memory-gb 80 --start 4.44 --doubling 0.41    # S of greedy text

Step times are those of scaling_projection, of a part of the model. A sum over a replica is a ring of NCCL's on NVLink,
by the figures of conf/scaling.yaml; or one step in which each rank reads all others (torch's symmetric memory), whose
5 us are assumed. S = start + doubling x log2(tokens a step), of docs/scaling.md; host time of a step is the one
measured there, or a shorter one that is assumed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from omegaconf import OmegaConf

from ...app import CONF
from ..arithmetic import GPUS
from ..ceilings import Work
from ..gpu_projection import LogLaw
from ..shapes import SHAPES, shape_config, sketch
from ..splits import Machine, Shape, Split, Sum
from ..summary import markdown

HOSTS = {"measured": (1.77e-3, 0.045e-3), "0.2 ms": (0.2e-3, 0.0)}  # seconds a step, and for each further replica
ONE_STEP = Sum(base_s=5e-6, hop_s=0.0, bytes_per_s=450e9, ring=False)
HEADS = (
    *("model", "sums", "host", "fastest lp x tp", "tokens a replica", "S", "step ms", "sums ms", "tokens/s"),
    *("TP alone", "LP alone", "over the better"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", choices=[*GPUS], default="h200")
    parser.add_argument("--memory-gb", type=float, default=141.0, help="of each GPU")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--shapes", default="llama2_7b,codellama_34b,llama2_70b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--start", type=float, default=1.18, help="S of one token, by the law")
    parser.add_argument("--doubling", type=float, default=0.27, help="S that twice the tokens add")
    parser.add_argument("--prefix", type=int, default=1024, help="cached tokens")


def run(args: argparse.Namespace) -> None:
    nvlink = OmegaConf.load(CONF / "scaling.yaml").links.nvlink
    ring = Sum(base_s=1e-6 * nvlink.base_us, hop_s=1e-6 * nvlink.hop_us, bytes_per_s=1e9 * nvlink.gb_s, ring=True)
    law = LogLaw(start=args.start, doubling=args.doubling)
    rows, figures = [], []
    for name in args.shapes.split(","):
        config = shape_config(name)
        shape = Shape(
            work=Work.of(sketch(config, "bfloat16")), layers=config.num_hidden_layers, hidden=config.hidden_size
        )
        for kind, sums in (("ring", ring), ("one step", ONE_STEP)):
            for host, host_s in HOSTS.items():
                memory = 1e9 * args.memory_gb
                machine = Machine(gpu=GPUS[args.gpu], memory_bytes=memory, sums=sums, host_s=host_s)
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
