"""Rank r of R on one device: its exact shard in the real loop, which hears from a tape what the others said.

All ranks first run as threads, and what the collectives gave is kept; then rank r alone decodes the same text again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lp.config import LookaheadConfig, PoolScope
from lp.engine.lookahead import LookaheadDecoder
from lp.engine.output import GenerationOutput
from lp.errors import UserError
from lp.parallel.context import ParallelContext
from lp.parallel.lockstep import run_lockstep
from lp.parallel.message import HEADER

Build = Callable[[ParallelContext], LookaheadDecoder]
Decode = Callable[[LookaheadDecoder], GenerationOutput]


@dataclass
class Tape:
    """What the collectives of a run gave, in order: the same to every rank, so that one tape serves them all.

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

    @property
    def payload_bytes(self) -> int:
        """What each rank gave to the last all-gather."""
        return self.records[-1][0].nbytes


@dataclass(frozen=True)
class _Recorded(ParallelContext):
    """The same as another context, onto a tape."""

    inner: ParallelContext = field(default_factory=ParallelContext)
    tape: Tape = field(default_factory=Tape)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        self.tape.records.append(self.inner.all_gather(row))
        return self.tape.records[-1]

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        self.tape.records.append(self.inner.gather_message(call, message, patient))
        return self.tape.records[-1]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        self.tape.records.append(self.inner.broadcast(tensor, source).clone())
        return tensor


@dataclass(frozen=True)
class _Replayed(ParallelContext):
    """A rank among others that are on tape; its collectives cost what they cost a single rank.

    Its header is its own, so that a rank that does not do what it did is told, and Ctrl-C and failures end the text.
    What it read is from the tape: captured steps may round otherwise.
    """

    tape: Tape = field(default_factory=Tape)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        mine = super().all_gather(row)  # the copy to the host, which also waits for the device
        everyone = self.tape.heard().clone()
        everyone[self.rank, :HEADER] = mine[0, :HEADER]
        return everyone

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        everyone = self.tape.heard().clone()
        everyone[self.rank] = message
        return everyone

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.copy_(self.tape.heard())


def check_alike(config: LookaheadConfig) -> None:
    """Refuse a decoder whose second run of a text is not like the first.

    Raises:
        ValueError: its pool remembers other texts, or its steps follow step times, which are those of other ranks.
    """
    if config.adaptive:
        raise UserError("decoder.adaptive is true, whose steps follow this machine's step times; make it false")
    if config.pool_scope is PoolScope.SESSION:
        raise UserError("pool_scope is 'session', so that no run is like the one before; take pool.scope=request")


def record(build: Build, decode: Decode, ranks: int) -> Tape:
    """Run all ranks as threads of this process and keep what they heard.

    Args:
        build: a decoder in a context.
        decode: one call of it, its seed known if it samples.

    Raises:
        ValueError: as `check_alike`.
    """
    tape = Tape()

    def body(context: ParallelContext) -> None:
        if context.is_main:
            context = _Recorded(0, ranks, inner=context, tape=tape)
        decoder = build(context)
        check_alike(decoder.config)
        if context.is_main:
            tape.made = len(tape.records)
        decode(decoder)

    run_lockstep(ranks, body)
    return tape


def replayed(build: Build, decode: Decode, rank: int, ranks: int, tape: Tape) -> Callable[[], GenerationOutput]:
    """The same decode of that rank alone, to be called as often as one likes.

    Raises:
        RuntimeError: when called, it is not the same decode.
        KeyboardInterrupt: when called, a signal ended it.
    """
    tape.at = 0
    decoder = build(_Replayed(rank, ranks, rank, tape=tape))

    def again() -> GenerationOutput:
        tape.at = tape.made
        return decode(decoder)

    return again
