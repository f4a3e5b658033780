"""One generation of many tokens from a tiny random model: S, step time and memory by thousand tokens.

    python scripts/long_run.py                          # 20,000 sampled tokens
    python scripts/long_run.py --tokens 5000 --greedy

The model is small, so that the figures are those of the loop: what grows with the text is the cache and the attention
to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lp
from launch.bench.endurance import endure
from tests.tiny_models import tiny_model

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--greedy", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model(dtype=torch.float32, max_position_embeddings=args.tokens + 1)  # the prompt is one token
    sampling = None if args.greedy else lp.SamplingParams(temperature=0.8, seed=1)
    decoder = lp.LookaheadDecoder(model)
    decoder.generate([1], 64, sampling)
    output, stretches = endure(decoder, [1], args.tokens + 1000, sampling=sampling)
    print("| tokens | steps | S | ms a step | of it host | resident MiB |\n|---|---|---|---|---|---|")
    tokens = 0
    for part in stretches:
        tokens += part.tokens
        held = "-" if part.resident_bytes is None else f"{part.resident_bytes / MIB:.0f}"
        times = f"{part.step_ms:.2f} | {part.host_ms:.2f}"
        print(f"| {tokens} | {part.steps} | {part.compression:.2f} | {times} | {held} |")
    print(
        f"ended by {output.finish_reason} after {len(output.tokens)} tokens; cache {output.cache_bytes / MIB:.1f} MiB"
    )
    print(json.dumps({"finish_reason": output.finish_reason, "stretches": [asdict(part) for part in stretches]}))


if __name__ == "__main__":
    main()
