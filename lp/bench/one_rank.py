"""Rank r of R on one device: its exact shard in the real loop, which hears from a tape what the others said.

All ranks first run as threads, and what the collectives gave is kept; then rank r alone decodes the same text again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lp.decoding.base import Decoder, GenerationOutput
from lp.distributed import ParallelContext, run_lockstep

Build = Callable[[ParallelContext], Decoder]
Decode = Callable[[Decoder], GenerationOutput]


@dataclass
class Tape:
    """What the collectives of a rank gave, in order.

    Attributes:
        records: every result, those of a decoder's making first.
        made: how many those are.
        at: the next one to be heard.
    """

    records: list[torch.Tensor] = field(default_factory=list)
    made: int = 0
    at: int = 0

    def heard(self) -> torch.Tensor:
        """The next result."""
        self.at += 1
        return self.records[self.at - 1]


@dataclass(frozen=True)
class _Recorded(ParallelContext):
    """The same as another context, onto a tape."""

    inner: ParallelContext = field(default_factory=ParallelContext)
    tape: Tape = field(default_factory=Tape)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        self.tape.records.append(self.inner.all_gather(row))
        return self.tape.records[-1]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        self.tape.records.append(self.inner.broadcast(tensor, source).clone())
        return tensor


@dataclass(frozen=True)
class _Replayed(ParallelContext):
    """A rank among others that are on tape; its collectives cost what they cost a single rank."""

    tape: Tape = field(default_factory=Tape)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        super().all_gather(row)  # the copy to the host, which also waits for the device
        return self.tape.heard()

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.copy_(self.tape.heard())


def record(build: Build, decode: Decode, rank: int, ranks: int) -> Tape:
    """Run all ranks as threads of this process and keep what rank `rank` heard.

    Args:
        build: a decoder in a context.
        decode: one call of it.
    """

    def body(context: ParallelContext) -> Tape:
        tape = Tape()
        decoder = build(_Recorded(context.rank, ranks, context.rank, inner=context, tape=tape))
        tape.made = len(tape.records)
        decode(decoder)
        return tape

    return run_lockstep(ranks, body)[rank]


def replayed(build: Build, decode: Decode, rank: int, ranks: int, tape: Tape) -> Callable[[], GenerationOutput]:
    """The same decode of that rank alone, to be called as often as one likes."""
    decoder = build(_Replayed(rank, ranks, rank, tape=tape))

    def again() -> GenerationOutput:
        tape.at = tape.made
        return decode(decoder)

    return again
