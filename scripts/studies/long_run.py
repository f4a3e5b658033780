"""One generation of many tokens from a tiny random model: S, step time and memory by thousand tokens.

    python scripts/tables.py long_run                          # 20,000 sampled tokens; docs/experiments/reliability.md
    python scripts/tables.py long_run --tokens 5000 --greedy

The model is small, so that the figures are those of the loop: what grows with the text is the cache and the attention
to it. Needs a clone: the model is one of tests/tiny_models.py.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch

import lp
from launch.bench.summary import markdown

from .parts.endurance import endure

MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--greedy", action="store_true")


def run(args: argparse.Namespace) -> None:
    from tests.tiny_models import tiny_model  # of the clone alone

    torch.set_num_threads(1)
    model = tiny_model(dtype=torch.float32, max_position_embeddings=args.tokens + 1)  # the prompt is one token
    sampling = None if args.greedy else lp.SamplingParams(temperature=0.8, seed=1)
    decoder = lp.LookaheadDecoder(model)
    decoder.generate([1], 64, sampling)
    output, stretches = endure(decoder, [1], args.tokens + 1000, sampling=sampling)
    lines = []
    tokens = 0
    for part in stretches:
        tokens += part.tokens
        resident = "-" if part.resident_bytes is None else f"{part.resident_bytes / MIB:.0f}"
        times = (f"{part.step_ms:.2f}", f"{part.host_ms:.2f}")
        lines.append((str(tokens), str(part.steps), f"{part.compression:.2f}", *times, resident))
    print(markdown(("tokens", "steps", "S", "ms a step", "of it host", "resident MiB"), lines))
    cache_mib = output.cache_bytes / MIB
    print(f"ended by {output.finish_reason} after {len(output.tokens)} tokens; cache {cache_mib:.1f} MiB")
    print(json.dumps({"finish_reason": output.finish_reason, "stretches": [asdict(part) for part in stretches]}))
