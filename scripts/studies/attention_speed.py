"""Time of a step's attention, transformers' sdpa with a mask against flash, alternated: docs/experiments/step-time.md.

python scripts/tables.py attention_speed --prefix 2048 8192 --num-tokens 61 --heads 32 8 --dim 64 --threads 1
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from launch.bench.summary import markdown
from lp.attention.flash import flash_attention_forward
from lp.draft.layout import ancestors

from ._common import median_and_range


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefix", type=int, nargs="+", default=[256, 2048, 8192], help="cached tokens")
    parser.add_argument("--num-tokens", type=int, default=61, help="step tokens")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="query and KV heads")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    print(
        f"CPU, {args.threads} thread(s), {args.dtype}, heads {args.heads}, {args.num_tokens} step tokens, "
        f"medians of {args.rounds} calls (least to most)"
    )
    figures = []
    lines = []
    for prefix in args.prefix:
        sdpa_s, flash_s = _times(prefix, args)
        ratios = [sdpa / flash for sdpa, flash in zip(sdpa_s, flash_s, strict=True)]
        milliseconds = ([1e3 * each for each in times] for times in (sdpa_s, flash_s))
        figures.append({"prefix": prefix, "sdpa_s": sdpa_s, "flash_s": flash_s, "ratio": statistics.median(ratios)})
        cells = (median_and_range(each, 2) for each in (*milliseconds, ratios))
        lines.append((str(prefix), *cells))
    print(markdown(("cached tokens", "sdpa, ms", "flash, ms", "ratio"), lines))
    print(json.dumps({"settings": vars(args), "figures": figures}))


def _times(prefix: int, args: argparse.Namespace) -> list[list[float]]:
    """Seconds of both, a call of each in turn."""
    dtype = getattr(torch, args.dtype)
    heads, kv_heads = args.heads
    num_tokens = args.num_tokens
    module = nn.Module()
    module.num_key_value_groups = heads // kv_heads
    q = torch.randn(1, num_tokens, heads, args.dim, dtype=dtype).transpose(1, 2)
    buffers = [torch.randn(1, kv_heads, prefix + num_tokens + 300, args.dim, dtype=dtype) for _ in range(2)]
    k, v = (buffer[:, :, : prefix + num_tokens] for buffer in buffers)
    rng = random.Random(0)
    visible = torch.from_numpy(ancestors([-1, *(rng.randrange(node) for node in range(1, num_tokens))]))
    tree = torch.zeros(num_tokens, num_tokens, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None]
    whole = nn.functional.pad(tree, (prefix, 0))
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: sdpa_attention_forward(module, q, k, v, whole)[0],
        lambda: flash_attention_forward(module, q, k, v, tree)[0],
    ]
    seconds: list[list[float]] = [[], []]
    with torch.inference_mode():
        assert torch.allclose(calls[0](), calls[1](), atol=1e-5 if dtype is torch.float32 else 0.05)
        for _ in range(args.rounds):
            for call, times in zip(calls, seconds, strict=True):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
    return seconds
