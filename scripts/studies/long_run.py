"""One generation of many tokens from a tiny random model: S, step time and memory by thousand tokens.

    python scripts/tables.py long_run                          # 20,000 sampled tokens
    python scripts/tables.py long_run --tokens 5000 --greedy

The model is small, so that the figures are those of the loop: what grows with the text is the cache and the attention
to it. Needs a clone: the model is one of tests/support/tiny_models.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

import lp

from .harness import Method, Result, Row, Study, Table, option
from .parts.soak import resident_bytes

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive steps of a generation, whose times and memory are compared with those of earlier stretches.

    Args:
        tokens: number of tokens that the steps generated.
        steps: number of steps.
        step_ms: median time of a step, in ms, callback included.
        host_ms: median time of a step outside of model and collectives, in ms.
        resident_bytes: the process's memory after the last step; None where the system reports none (all but Linux).
    """

    tokens: int
    steps: int
    step_ms: float
    host_ms: float
    resident_bytes: int | None


def endure(
    decoder: lp.Decoder, ids: Sequence[int], max_new_tokens: int, stretch: int = 1000, **options: Any
) -> tuple[lp.GenerationOutput, list[Stretch]]:
    """Generate, and divide the steps into stretches of about `stretch` tokens.

    Args:
        decoder: generates the text.
        ids, max_new_tokens, options: arguments of `Decoder.generate`.
        stretch: tokens of a stretch; the last one may have fewer.
    """
    ends = [time.perf_counter()]  # of every step, behind the start of the call
    totals = [0]  # tokens before every step, and at the end
    cuts = [0]  # steps at which a stretch begins, and the end
    memory: list[int | None] = []  # at the end of every stretch

    def on_tokens(tokens: list[int], step: int) -> None:
        ends.append(time.perf_counter())
        totals.append(totals[-1] + len(tokens))
        if totals[-1] // stretch > totals[-2] // stretch:
            cuts.append(step + 1)
            memory.append(resident_bytes())

    output = decoder.generate(ids, max_new_tokens, on_tokens=on_tokens, **options)
    if cuts[-1] < len(totals) - 1:
        cuts.append(len(totals) - 1)
        memory.append(resident_bytes())
    stretches = []
    for start, end, resident in zip(cuts, cuts[1:], memory, strict=False):
        times = [ends[step + 1] - ends[step] for step in range(max(start, 1), end)]  # the first holds the prefill
        part = Stretch(
            tokens=totals[end] - totals[start],
            steps=end - start,
            step_ms=1e3 * median(times or [0.0]),
            host_ms=1e3 * median(stats.host_s for stats in output.step_stats[start:end]),
            resident_bytes=resident,
        )
        stretches.append(part)
    return output, stretches


@dataclass(kw_only=True)
class LongRun(Study):
    """Generates one long text, and shows how S, step time and memory go on with its length."""

    tokens: int = option(20_000)
    greedy: bool = option(False)
    SHARED = ("tokens", "greedy")

    def rows(self) -> Iterable[Row]:
        return [Row({"model": "tiny"})]

    def methods(self) -> Mapping[str, Method]:
        def run(row: Row) -> Result:
            from tests.support.tiny_models import tiny_model  # of the clone alone

            torch.set_num_threads(1)
            model = tiny_model(dtype=torch.float32, max_position_embeddings=self.tokens + 1)  # the prompt is one token
            sampling = None if self.greedy else lp.SamplingParams(temperature=0.8, seed=1)
            decoder = lp.LookaheadDecoder(model)
            decoder.generate([1], 64, sampling)
            output, stretches = endure(decoder, [1], self.tokens + 1000, sampling=sampling)
            found = {"generated": len(output.tokens), "finish_reason": output.finish_reason}
            return found | {"cache_bytes": output.cache_bytes, "stretches": [asdict(part) for part in stretches]}

        return {"": run}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        (result,) = results
        lines = []
        tokens = 0
        for part in result["stretches"]:
            tokens += part["tokens"]
            resident = "-" if part["resident_bytes"] is None else f"{part['resident_bytes'] / MIB:.0f}"
            times = (f"{part['step_ms']:.2f}", f"{part['host_ms']:.2f}")
            lines.append((str(tokens), str(part["steps"]), f"{part['tokens'] / part['steps']:.2f}", *times, resident))
        ended = f"ended by {result['finish_reason']} after {result['generated']} tokens"
        title = f"{ended}; cache {result['cache_bytes'] / MIB:.1f} MiB"
        yield Table(("tokens", "steps", "S", "ms a step", "of it host", "resident MiB"), lines, title)
