"""The speed of R ranks projected from one device, which runs and times every rank's exact share of every step in turns.

One rank after the other runs the very decoder alone, with the collectives of a recorded run, so that forward pass and
host time are its own. A step takes as long as its slowest rank, plus the collective as a model of the link has it.
Ranks are taken to be alike, each with a device and a memory of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean, median

import torch

from lp.config import Capture, Exact, KVSync, LookaheadConfig
from lp.engine.lookahead import LookaheadDecoder
from lp.engine.output import GenerationOutput
from lp.errors import UserError
from lp.parallel.context import ParallelContext

from .one_rank import Decode, RecordedCollectives, check_alike, idle_model, record, replayed


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The alpha-beta model of a ring all-gather.

    Args:
        base_us: what any collective takes, in microseconds.
        hop_us: what each of its R - 1 steps takes, in microseconds.
        gb_s: bandwidth between neighbours, in 10^9 bytes a second.
        source: where the figures are from.
    """

    base_us: float
    hop_us: float
    gb_s: float
    source: str

    def all_gather_s(self, ranks: int, payload_bytes: int) -> float:
        """Seconds to gather this many bytes from each rank; nothing for one rank."""
        if ranks == 1:
            return 0.0
        hop_us = self.hop_us + payload_bytes / (1e3 * self.gb_s)
        return (self.base_us + (ranks - 1) * hop_us) / 1e6

    @classmethod
    def measured(cls, context: ParallelContext, source: str, rounds: int = 200) -> Link:
        """The ranks' link: medians of gathers of 8 bytes and of 1 MiB a rank, in turn; `hop_us` has all the latency."""
        messages = [torch.zeros(words, dtype=torch.int64, device=context.device) for words in (1, 1 << 17)]
        seconds: list[list[float]] = [[], []]
        for _ in range(rounds):
            for message, times in zip(messages, seconds, strict=True):
                start = time.perf_counter()
                context.steps.all_gather(message)
                times.append(time.perf_counter() - start)
        small, large = map(median, seconds)
        hops = context.world_size - 1
        gb_s = hops * 8 * ((1 << 17) - 1) / (max(large - small, 1e-9) * 1e9)
        return cls(base_us=0.0, hop_us=1e6 * small / hops, gb_s=gb_s, source=source)


@dataclass(frozen=True, kw_only=True)
class Projected:
    """The projection of R ranks on a text.

    Args:
        ranks: R.
        tokens, steps: new tokens and steps, which all ranks have alike.
        compute_s: seconds of all steps, each as long as its slowest rank.
        forward_s, host_s: the forward passes' and the host's parts of these seconds.
        num_tokens: mean step tokens of the largest rank.
        payload_bytes: bytes of a rank's message in a step's all-gather.
    """

    ranks: int
    tokens: int
    steps: int
    compute_s: float
    forward_s: float
    host_s: float
    num_tokens: float
    payload_bytes: int

    def decode_s(self, link: Link) -> float:
        """Seconds of decoding, with one all-gather a step."""
        return self.compute_s + self.steps * link.all_gather_s(self.ranks, self.payload_bytes)


Run = list[GenerationOutput]  # by rank


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Decodes a text as each of R ranks would, on this one device.

    Args:
        decoder: runs as every rank in turn; it is left in the context of one of them.
        decode: calls the decoder once, its seed known if it samples.
        ranks: R.

    Raises:
        ValueError: as `check_projectable`.
    """

    decoder: LookaheadDecoder
    decode: Decode
    ranks: int

    def __post_init__(self) -> None:
        check_projectable(self.decoder.config)

    @cached_property
    def recorded(self) -> RecordedCollectives:
        """Collectives of all ranks, whose steps are not captured, since threads cannot capture at the same time."""

        def build(context: ParallelContext) -> LookaheadDecoder:
            own = self.decoder
            settings = own.runner.attention, Capture.OFF, own.step_times, Exact.AUTO, own.runner.kv_dtype
            uncaptured = LookaheadDecoder(own.model, own.config, None, *settings)
            uncaptured.merges_late = own.merges_late  # of a full pool, other entries make room
            return _in_context(uncaptured, context)

        return record(build, self.decode, self.ranks)

    def run(self) -> Run:
        """Decode the text as every rank in turn, each alone on this device.

        Raises:
            KeyboardInterrupt: a signal came meanwhile.
        """
        build = partial(_in_context, self.decoder)
        return [replayed(build, self.decode, rank, self.ranks, self.recorded)() for rank in range(self.ranks)]

    def summed(self, runs: Sequence[Run]) -> Projected:
        """Several runs as one: a rank's time for a step is the median, or the slowest rank would be the unluckiest."""
        return _summed(runs, self.recorded.payload_bytes)

    def host_runs(self, rounds: int) -> list[Run]:
        """Runs of every rank with a model that computes nothing: host times as beside a GPU."""
        self.recorded  # noqa: B018 - recorded before the model is idle
        with idle_model(self.decoder.runner):
            return [self.run() for _ in range(rounds)]

    def slowest_host_s(self, runs: Sequence[Run]) -> float:
        """Host time of a step of the slowest rank, for a device on which the forward passes of all ranks take as long.

        A step's is the least of the runs, which do the same: what is more is other work of the machine.
        """
        by_rank = ([run[rank].step_stats for run in runs] for rank in range(self.ranks))
        return max(fmean(min(s.host_s for s in step) for step in zip(*of_runs, strict=True)) for of_runs in by_rank)


def check_projectable(config: LookaheadConfig) -> None:
    """Refuse what ranks cannot be timed with.

    Raises:
        ValueError: kv_sync=broadcast, whose second collective has no model here, or a pool that remembers other texts.
    """
    if config.ablation.kv_sync is KVSync.BROADCAST:
        raise UserError("kv_sync is 'broadcast', whose second collective is not modelled; project kv_sync=recompute")
    check_alike(config)


def _in_context(decoder: LookaheadDecoder, context: ParallelContext) -> LookaheadDecoder:
    """The decoder, moved behind its constructor, which would compare models that are one."""
    decoder.context = context
    return decoder


def _summed(runs: Sequence[Run], payload_bytes: int) -> Projected:
    """Every step as its slowest rank takes it, each rank's time the median over runs."""
    first = runs[0]
    forward_s = 0.0
    host_s = 0.0
    largest: list[int] = []
    for step in range(first[0].steps):
        by_rank = [[run[rank].step_stats[step] for run in runs] for rank in range(len(first))]
        times = [(median(s.forward_s for s in stats), median(s.host_s for s in stats)) for stats in by_rank]
        slowest = max(times, key=sum)
        forward_s += slowest[0]
        host_s += slowest[1]
        largest.append(max(stats[0].num_tokens for stats in by_rank))
    return Projected(
        ranks=len(first),
        tokens=len(first[0].tokens),
        steps=first[0].steps,
        compute_s=forward_s + host_s,
        forward_s=forward_s,
        host_s=host_s,
        num_tokens=fmean(largest),
        payload_bytes=payload_bytes,
    )
