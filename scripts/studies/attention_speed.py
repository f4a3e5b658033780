"""Time of a step's attention, transformers' sdpa with a mask against flash, alternated.

python scripts/tables.py attention_speed --prefix 2048 8192 --num-tokens 61 --heads 32 8 --dim 64 --threads 1
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lp.attention.flash import flash_attention_forward
from lp.draft.layout import ancestors

from .harness import Method, Result, Row, Study, Table, grouped, option, ratios, seconds_of, spread, values

Calls = dict[str, Callable[[], torch.Tensor]]


@dataclass(kw_only=True)
class AttentionSpeed(Study):
    """Times two implementations of attention behind caches of several lengths."""

    prefix: list[int] = option([256, 2048, 8192], "cached tokens")
    num_tokens: int = option(61, "step tokens")
    heads: list[int] = option([32, 8], "query and KV heads")
    dim: int = option(64)
    dtype: str = option("float32")
    threads: int = option(1)
    rounds: int = option(15)
    SHARED = ("num_tokens", "heads", "dim", "dtype", "threads")

    def rows(self) -> Iterable[Row]:
        return [Row({"prefix": prefix}) for prefix in self.prefix]

    def methods(self) -> Mapping[str, Method]:
        torch.set_num_threads(self.threads)
        calls = lru_cache(maxsize=1)(self.calls)

        def method(name: str) -> Method:
            def call(row: Row) -> Result:
                prepared = calls(row.key["prefix"])[name]
                with torch.inference_mode():
                    return {"seconds": seconds_of(prepared)}

            return call

        return {name: method(name) for name in ("sdpa", "flash")}

    def calls(self, prefix: int) -> Calls:
        """Calls of both implementations on one drawn tree behind a cache; made only where their outputs agree."""
        dtype = getattr(torch, self.dtype)
        heads, kv_heads = self.heads
        num_tokens = self.num_tokens
        module: Any = nn.Module()
        module.num_key_value_groups = heads // kv_heads
        q = torch.randn(1, num_tokens, heads, self.dim, dtype=dtype).transpose(1, 2)
        buffers = [torch.randn(1, kv_heads, prefix + num_tokens + 300, self.dim, dtype=dtype) for _ in range(2)]
        k, v = (buffer[:, :, : prefix + num_tokens] for buffer in buffers)
        rng = random.Random(0)
        visible = torch.from_numpy(ancestors([-1, *(rng.randrange(node) for node in range(1, num_tokens))]))
        tree = torch.zeros(num_tokens, num_tokens, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        tree = tree[None, None]
        whole = nn.functional.pad(tree, (prefix, 0))
        calls: Calls = {
            "sdpa": lambda: sdpa_attention_forward(module, q, k, v, whole)[0],
            "flash": lambda: flash_attention_forward(module, q, k, v, tree)[0],
        }
        with torch.inference_mode():
            tolerance = 1e-5 if dtype is torch.float32 else 0.05
            assert torch.allclose(calls["sdpa"](), calls["flash"](), atol=tolerance)
        return calls

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines = []
        for prefix, of in grouped(results, "prefix").items():
            sdpa_s, flash_s = (values(grouped(of, "method")[name]) for name in ("sdpa", "flash"))
            times = (spread([1e3 * each for each in times_s], 2) for times_s in (sdpa_s, flash_s))
            lines.append((str(prefix), *times, spread(ratios(sdpa_s, flash_s), 2)))
        yield Table(("cached tokens", "sdpa, ms", "flash, ms", "ratio"), lines)
