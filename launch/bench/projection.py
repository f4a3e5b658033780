"""Project the speed of R ranks from one device, which runs and times each rank's exact part of every step in turn.

Each rank runs the real decoder alone, with the collectives of a recorded run, so forward pass and host time are
measured. A step takes as long as its slowest rank, plus the time of its collective, which a model of the link gives.
Every rank is assumed to have an equal device and memory of its own.
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
    """A model of the connection between ranks, which gives the seconds of a ring all-gather.

    The time is latency plus bytes / bandwidth.

    Args:
        base_us: microseconds that every collective takes, whatever its size and the number of ranks.
        hop_us: microseconds of latency for each of the R - 1 hops.
        gb_s: bandwidth between neighbours, in 10^9 bytes per second.
        source: origin of the figures, for people, as in "data sheet".
    """

    base_us: float
    hop_us: float
    gb_s: float
    source: str

    def all_gather_s(self, ranks: int, payload_bytes: int) -> float:
        """Seconds of an all-gather; 0 for one rank.

        Args:
            ranks: R, how many ranks there are.
            payload_bytes: bytes that each rank sends.
        """
        if ranks == 1:
            return 0.0
        hop_us = self.hop_us + payload_bytes / (1e3 * self.gb_s)
        return (self.base_us + (ranks - 1) * hop_us) / 1e6

    @classmethod
    def measured(cls, context: ParallelContext, source: str, rounds: int = 200) -> Link:
        """Build the model of the link between this run's ranks from the measured times of all-gathers.

        All-gathers of 8 bytes and of 1 MiB per rank run in turn, and the median of each size counts. All latency is put
        into `hop_us`. Every rank calls this.

        Args:
            context: this rank's context, with at least two ranks.
            source: name of the measurement, for people.
            rounds: how many all-gathers of each size are timed.
        """
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
    """Projected times of one prompt on R ranks, without the exchange between ranks; `decode_s` adds it for a link.

    Args:
        ranks: R, how many ranks there are.
        tokens: generated tokens.
        steps: decode steps, equal on all ranks.
        compute_s: seconds of all steps without exchange, each step as long as on its slowest rank.
        forward_s: part of `compute_s` that forward passes take.
        host_s: part of `compute_s` that the host takes.
        num_tokens: tokens that the busiest rank computes in a step, the mean over the steps.
        payload_bytes: bytes that each rank sends in the all-gather of a step.
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
        """Seconds of decoding over a link, with one all-gather in each step.

        Args:
            link: the model of the connection between the ranks.
        """
        return self.compute_s + self.steps * link.all_gather_s(self.ranks, self.payload_bytes)


Run = list[GenerationOutput]  # by rank


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Decodes a prompt as each of R ranks would, one after the other on this device, to time every rank's steps.

    Args:
        decoder: the decoder to run; its context is replaced by those of the ranks, and not restored.
        decode: runs a decoder on the prompt, with a known seed if it samples.
        ranks: R, how many ranks there are.

    Raises:
        ValueError: the decoder's config cannot be projected: see `check_projectable`.
    """

    decoder: LookaheadDecoder
    decode: Decode
    ranks: int

    def __post_init__(self) -> None:
        check_projectable(self.decoder.config)

    @cached_property
    def recorded(self) -> RecordedCollectives:
        """Collectives of a run of all ranks as threads, which `run` replays for one rank after the other.

        They are recorded at the first use. That run records no CUDA graphs, since threads cannot capture at the same
        time.
        """

        def build(context: ParallelContext) -> LookaheadDecoder:
            own = self.decoder
            settings = own.runner.attention, Capture.OFF, own.step_times, Exact.AUTO, own.runner.kv_dtype
            uncaptured = LookaheadDecoder(own.model, own.config, None, *settings)
            uncaptured.merges_late = own.merges_late  # of a full pool, other entries make room
            return _in_context(uncaptured, context)

        return record(build, self.decode, self.ranks)

    def run(self) -> Run:
        """Decode the prompt as every rank in turn, each alone on this device, and return the outputs by rank.

        Raises:
            KeyboardInterrupt: a signal came meanwhile.
        """
        build = partial(_in_context, self.decoder)
        return [replayed(build, self.decode, rank, self.ranks, self.recorded)() for rank in range(self.ranks)]

    def summed(self, runs: Sequence[Run]) -> Projected:
        """Combine several runs into projected times: a rank's time for a step is its median over the runs.

        With a single run, the slowest rank of a step would often be one that other work had disturbed by chance.

        Args:
            runs: results of `run`.
        """
        return _summed(runs, self.recorded.payload_bytes)

    def host_runs(self, rounds: int) -> list[Run]:
        """Run every rank with a model that computes nothing, to measure the host's part of each decode step alone.

        Args:
            rounds: how many times every rank runs.

        Returns:
            Results of `run`, one for each round.
        """
        self.recorded  # noqa: B018 - recorded before the model is idle
        with idle_model(self.decoder.runner):
            return [self.run() for _ in range(rounds)]

    def slowest_host_s(self, runs: Sequence[Run]) -> float:
        """Mean host seconds per decode step on the slowest rank.

        For each step the least time over the runs counts, since anything above it is other work on the machine.

        Args:
            runs: results of `host_runs`.
        """
        by_rank = ([run[rank].step_stats for run in runs] for rank in range(self.ranks))
        return max(fmean(min(s.host_s for s in step) for step in zip(*of_runs, strict=True)) for of_runs in by_rank)


def check_projectable(config: LookaheadConfig) -> None:
    """Refuse a decoder whose ranks cannot be timed one after the other.

    Args:
        config: the decoder's config.

    Raises:
        ValueError: kv_sync=broadcast, since no model of a link covers its second collective; an n-gram pool that
            remembers earlier texts; or an adaptive decoder.
    """
    if config.ablation.kv_sync is KVSync.BROADCAST:
        raise UserError("kv_sync is 'broadcast', whose second collective is not modelled; project kv_sync=recompute")
    check_alike(config)


def _in_context(decoder: LookaheadDecoder, context: ParallelContext) -> LookaheadDecoder:
    """The decoder with another context, set here: its constructor would compare models that are one and the same."""
    decoder.context = context
    return decoder


def _summed(runs: Sequence[Run], payload_bytes: int) -> Projected:
    """Add up steps, each as long as its slowest rank; a rank's time for a step is the median over the runs."""
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
