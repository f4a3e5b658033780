"""Times a step's attention: transformers' sdpa with a mask against flash, alternated; a table and a JSON line.

python scripts/attention_speed.py --prefix 2048 8192 --rows 61 --heads 32 8 --dim 64 --threads 1
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

from lp.attention.flash import flash_attention_forward
from lp.draft.layout import ancestors


def main() -> None:
    """Parse, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prefix", type=int, nargs="+", default=[256, 2048, 8192], help="cached rows")
    parser.add_argument("--rows", type=int, default=61, help="of the step")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="query and KV heads")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"CPU, {options.threads} thread(s), {options.dtype}, heads {options.heads}, {options.rows} rows, medians")
    print("| cached rows | sdpa, ms | flash, ms | ratio |\n|---|---|---|---|")
    figures = []
    for prefix in options.prefix:
        sdpa_s, flash_s = _times(prefix, options)
        figures.append({"prefix": prefix, "sdpa_s": sdpa_s, "flash_s": flash_s, "ratio": sdpa_s / flash_s})
        print(f"| {prefix} | {sdpa_s * 1e3:.2f} | {flash_s * 1e3:.2f} | {sdpa_s / flash_s:.2f} |")
    print(json.dumps({"settings": vars(options), "figures": figures}))


def _times(prefix: int, options: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of both, a call of each in turn."""
    dtype, rows, (heads, kv_heads) = getattr(torch, options.dtype), options.rows, options.heads
    module = nn.Module()
    module.num_key_value_groups = heads // kv_heads
    q = torch.randn(1, rows, heads, options.dim, dtype=dtype).transpose(1, 2)
    buffers = [torch.randn(1, kv_heads, prefix + rows + 300, options.dim, dtype=dtype) for _ in range(2)]
    k, v = (buffer[:, :, : prefix + rows] for buffer in buffers)
    rng = random.Random(0)
    visible = torch.from_numpy(ancestors([-1, *(rng.randrange(slot) for slot in range(1, rows))]))
    own = torch.zeros(rows, rows, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None]
    full = nn.functional.pad(own, (prefix, 0))
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: sdpa_attention_forward(module, q, k, v, full)[0],
        lambda: flash_attention_forward(module, q, k, v, own)[0],
    ]
    spent: list[list[float]] = [[], []]
    with torch.inference_mode():
        assert torch.allclose(calls[0](), calls[1](), atol=1e-5 if dtype is torch.float32 else 0.05)
        for _ in range(options.rounds):
            for call, seconds in zip(calls, spent, strict=True):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
    return statistics.median(spent[0]), statistics.median(spent[1])


if __name__ == "__main__":
    main()
