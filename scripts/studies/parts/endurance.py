"""One long generation: its S, step time and memory along the way."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive steps of a generation.

    Args:
        tokens: generated in them.
        steps: how many.
        step_ms: median time of one, in ms, callback included.
        host_ms: median time outside of model and collectives.
        resident_bytes: of the process at the end; None where the system does not report it (all but Linux).
    """

    tokens: int
    steps: int
    step_ms: float
    host_ms: float
    resident_bytes: int | None

    @property
    def compression(self) -> float:
        """S: generated tokens a step."""
        return self.tokens / self.steps


def resident_bytes(process: int | str = "self") -> int | None:
    """A process's resident memory now.

    Args:
        process: its id.
    """
    statm = Path(f"/proc/{process}/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None


def endure(
    decoder: Decoder, ids: Sequence[int], max_new_tokens: int, stretch: int = 1000, **options: Any
) -> tuple[GenerationOutput, list[Stretch]]:
    """Generate, and divide the steps into stretches of about `stretch` tokens.

    Args:
        decoder, ids, max_new_tokens, options: as in Decoder.generate.
        stretch: tokens; the last one may have fewer.
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
