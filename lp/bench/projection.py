"""What R ranks would do, from one device: every rank's exact share of every step is run and timed there, in turns.

The ranks are threads that run the very decoder, one at a time from collective to collective, so that forward pass and
host time of each are its own. A step takes as long as its slowest rank, plus the collective as a model of the link has
it. Ranks are taken to be alike, each with a device and a memory of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from transformers import PreTrainedModel

from lp.config import KVSync, LookaheadConfig
from lp.decoding.base import GenerationOutput
from lp.decoding.lookahead import LookaheadDecoder
from lp.decoding.params import SamplingParams
from lp.distributed import LockstepContext, ParallelContext, run_lockstep


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The alpha-beta model of a ring all-gather.

    Args:
        base_us: of any collective, in microseconds.
        hop_us: of each of its R - 1 steps.
        gb_s: bandwidth between neighbours, in 10^9 bytes a second.
        source: where the figures are from.
    """

    base_us: float
    hop_us: float
    gb_s: float
    source: str

    def all_gather_s(self, ranks: int, payload_bytes: int) -> float:
        """Seconds to gather so many bytes from each of so many ranks; nothing for one."""
        hops = ranks - 1
        return (self.base_us * (ranks > 1) + hops * (self.hop_us + payload_bytes / (1e3 * self.gb_s))) / 1e6

    @classmethod
    def measured(cls, context: ParallelContext, source: str, rounds: int = 200) -> Link:
        """Of these ranks: medians of gathers of 8 bytes and of 1 MiB a rank, in turn; `hop_us` has all the latency."""
        rows = [torch.zeros(words, dtype=torch.int64, device=context.device) for words in (1, 1 << 17)]
        taken: list[list[float]] = [[], []]
        for _ in range(rounds):
            for row, times in zip(rows, taken, strict=True):
                start = time.perf_counter()
                context.all_gather(row)
                times.append(time.perf_counter() - start)
        (small, large), hops = map(median, taken), context.world_size - 1
        gb_s = hops * 8 * ((1 << 17) - 1) / (max(large - small, 1e-9) * 1e9)
        return cls(base_us=0.0, hop_us=1e6 * small / hops, gb_s=gb_s, source=source)


@dataclass(frozen=True, kw_only=True)
class Projected:
    """So many ranks on a text.

    Args:
        ranks: R.
        tokens, steps: that all of them take alike.
        compute_s: of all steps, each as long as its slowest rank.
        forward_s, host_s: of that, of the slowest rank.
        rows: mean of the largest rank.
        payload_bytes: what a rank gives to a step's all-gather.
    """

    ranks: int
    tokens: int
    steps: int
    compute_s: float
    forward_s: float
    host_s: float
    rows: float
    payload_bytes: int

    def decode_s(self, link: Link) -> float:
        """With one all-gather a step."""
        return self.compute_s + self.steps * link.all_gather_s(self.ranks, self.payload_bytes)


Run = list[tuple[GenerationOutput, int]]  # by rank: what it gave, and the bytes of its last collective


@dataclass(frozen=True)
class TurnContext(LockstepContext):
    """A rank that is a thread and computes only while it holds the turn; waiting for it counts as exchange.

    Attributes:
        turn: held from collective to collective.
        payloads: bytes of what this rank gave to each collective.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)
    payloads: list[int] = field(default_factory=list)

    def _trade(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self.payloads.append(mine.numel() * mine.element_size())
        self.turn.release()
        try:
            return super()._trade(mine)
        finally:
            self.turn.acquire()


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Decodes a prompt as so many ranks would, on this one device.

    Args:
        model: loaded, on the device.
        config: W, N, G of all ranks together.
        ids: the prompt.
        max_new_tokens: of the run.
        ranks: R.
        sampling: None is greedy; its seed must be known.
        attention: as in LookaheadDecoder.

    Raises:
        ValueError: kv_sync=broadcast, whose second collective has no model here.
    """

    model: PreTrainedModel
    config: LookaheadConfig
    ids: Sequence[int]
    max_new_tokens: int
    ranks: int
    sampling: SamplingParams | None = None
    attention: str = "auto"

    def __post_init__(self) -> None:
        if self.config.kv_sync is KVSync.BROADCAST:
            raise ValueError(
                "kv_sync is 'broadcast', whose second collective is not modelled; project kv_sync=recompute"
            )

    def run(self) -> Run:
        """Once."""
        turn = threading.Lock()

        def body(given: ParallelContext) -> tuple[GenerationOutput, int]:
            assert isinstance(given, LockstepContext)
            device = self.model.device
            context = TurnContext(given.rank, self.ranks, given.rank, device, shared=given.shared, turn=turn)
            with turn:
                decoder = LookaheadDecoder(self.model, self.config, attention=self.attention)
                decoder.context = context  # behind the constructor: all of them have this one model
                output = decoder.generate(self.ids, self.max_new_tokens, self.sampling)
            return output, context.payloads[-1]

        return run_lockstep(self.ranks, body)

    def summed(self, runs: Sequence[Run]) -> Projected:
        """Of several runs; a rank's time for a step is their median, or the slowest rank would be the unluckiest."""
        return _summed([[output for output, _ in run] for run in runs], runs[0][0][1])


def _summed(runs: Sequence[Sequence[GenerationOutput]], payload: int) -> Projected:
    """From the outputs of every run, by rank."""
    first, forward_s, host_s, rows = runs[0], 0.0, 0.0, list[int]()
    for step in range(first[0].steps):
        stats = [[run[rank].step_stats[step] for run in runs] for rank in range(len(first))]
        times = [(median(s.forward_s for s in mine), median(s.host_s for s in mine)) for mine in stats]
        slowest = max(times, key=sum)
        forward_s, host_s = forward_s + slowest[0], host_s + slowest[1]
        rows.append(max(mine[0].slots for mine in stats))
    return Projected(
        ranks=len(first),
        tokens=len(first[0].tokens),
        steps=first[0].steps,
        compute_s=forward_s + host_s,
        forward_s=forward_s,
        host_s=host_s,
        rows=fmean(rows),
        payload_bytes=payload,
    )
