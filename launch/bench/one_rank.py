"""Rank r of R on one device: its exact share in the real loop, with the collectives of a recorded run.

All ranks first run as threads, and the results of their collectives are recorded; then rank r alone decodes the same
text again, and every collective returns its recorded result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from lp.config import LookaheadConfig, PoolScope
from lp.engine.lookahead import LookaheadDecoder
from lp.engine.output import GenerationOutput
from lp.errors import UserError
from lp.models.fused import Output
from lp.models.loader import vocabulary_size
from lp.models.runner import ModelRunner
from lp.parallel.context import ParallelContext
from lp.parallel.message import BEST, COUNT, DIGEST, HEADER, SAMPLED_SHIFT, TOKEN_BITS
from lp.parallel.rank_group import RankGroup
from lp.parallel.thread_ranks import run_lockstep

# The bits of a word that are known before the forward pass.
LAYOUT_BITS = ~((1 << TOKEN_BITS) - 1 << SAMPLED_SHIFT)

Build = Callable[[ParallelContext], LookaheadDecoder]
Decode = Callable[[LookaheadDecoder], GenerationOutput]


@dataclass
class RecordedCollectives:
    """Results of the collectives of a run, in order: the same on every rank, so that one recording serves them all.

    Attributes:
        results: what every collective returned, the decoder's construction first.
        num_construction: how many those are.
        position: index of the next result.
    """

    results: list[torch.Tensor] = field(default_factory=list)
    num_construction: int = 0
    position: int = 0

    def next(self) -> torch.Tensor:
        """What the next collective returned in the recorded run."""
        self.position += 1
        return self.results[self.position - 1]

    @property
    def payload_bytes(self) -> int:
        """Bytes of each rank's message in the last all-gather."""
        return self.results[-1][0].nbytes


@dataclass(frozen=True)
class _RecordingGroup(RankGroup):
    """Another group, whose results it records."""

    inner: RankGroup = field(default_factory=RankGroup)
    recorded: RecordedCollectives = field(default_factory=RecordedCollectives)

    def all_gather(self, message: torch.Tensor) -> torch.Tensor:
        self.recorded.results.append(self.inner.all_gather(message))
        return self.recorded.results[-1]

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        self.recorded.results.append(self.inner.gather_message(call, message, patient))
        return self.recorded.results[-1]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        self.recorded.results.append(self.inner.broadcast(tensor, source).clone())
        return tensor


@dataclass(frozen=True)
class _ReplayGroup(RankGroup):
    """A rank whose collectives return recorded results; they take as long as those of a single rank.

    The header of its message is its own, so that a rank whose state is another fails, and Ctrl-C ends the text. Its
    nodes must be the recorded ones, which the others have merged. Its samples and logits are the recorded ones:
    captured steps may round otherwise, and an idle model computes none.
    """

    recorded: RecordedCollectives = field(default_factory=RecordedCollectives)

    def all_gather(self, message: torch.Tensor) -> torch.Tensor:
        own = super().all_gather(message)  # the copy to the host, which also waits for the device
        messages = self.recorded.next().clone()
        if own[0, DIGEST] == messages[self.rank, DIGEST]:
            self._check_layout(own[0], messages[self.rank])
        messages[self.rank, :BEST] = own[0, :BEST]
        return messages

    def _check_layout(self, own: torch.Tensor, recorded: torch.Tensor) -> None:
        words = slice(HEADER, HEADER + int(recorded[COUNT]))
        if own[COUNT] != recorded[COUNT] or ((own[words] ^ recorded[words]) & LAYOUT_BITS).any():
            raise RuntimeError(f"rank {self.rank} lays out other nodes than in the recorded run: it is no replay of it")

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        messages = self.recorded.next().clone()
        messages[self.rank] = message
        return messages

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.copy_(self.recorded.next())


def check_alike(config: LookaheadConfig) -> None:
    """Refuse a decoder whose second run of a text is not like the first.

    Raises:
        ValueError: its pool remembers other texts, or its steps follow step times, which are those of other ranks.
    """
    if config.adaptive:
        raise UserError("the config is adaptive, whose steps follow this machine's step times; give W, N or G")
    if config.pool_scope is PoolScope.SESSION:
        raise UserError("pool_scope is 'session', so that no run is like the one before; take pool.scope=request")
    if config.history is not None:
        raise UserError(f"history is {config.history!r}, so that no run is like the one before; take pool.history=null")


def record(build: Build, decode: Decode, ranks: int) -> RecordedCollectives:
    """Run all ranks as threads of this process and record their collectives.

    Args:
        build: a decoder in a context.
        decode: one call of it, its seed known if it samples.

    Raises:
        ValueError: as `check_alike`.
    """
    recorded = RecordedCollectives()

    def body(context: ParallelContext) -> None:
        if context.is_main:
            group = _RecordingGroup(0, ranks, inner=context.ranks, recorded=recorded)
            context = replace(context, ranks=group, steps=group)
        decoder = build(context)
        check_alike(decoder.config)
        if context.is_main:
            recorded.num_construction = len(recorded.results)
        decode(decoder)

    run_lockstep(ranks, body)
    return recorded


class IdleModel:
    """Computes nothing: what a model is to a CPU beside a GPU that runs it.

    Args:
        vocabulary: how many logits a token has; all are zero.
    """

    def __init__(self, vocabulary: int) -> None:
        self.zeros_1V = torch.zeros(1, vocabulary)

    def __call__(self, input_ids: torch.Tensor, logits_to_keep: int | torch.Tensor, **keywords: object) -> Output:
        """Zeros in the shape of `FusedModel`'s logits."""
        kept = logits_to_keep if isinstance(logits_to_keep, int) else len(logits_to_keep)
        return Output(self.zeros_1V.expand(1, kept or input_ids.shape[1], -1))


@contextmanager
def idle_model(runner: ModelRunner) -> Iterator[None]:
    """Within the block the runner's steps compute nothing."""
    network = runner.network
    runner.network = IdleModel(vocabulary_size(runner.model))
    try:
        yield
    finally:
        runner.network = network


def replayed(
    build: Build, decode: Decode, rank: int, ranks: int, recorded: RecordedCollectives
) -> Callable[[], GenerationOutput]:
    """A decode as one rank of the recorded run, alone, to be called any number of times.

    Raises:
        RuntimeError: when called, it is not the same decode.
        KeyboardInterrupt: when called, a signal ended it.
    """
    recorded.position = 0
    group = _ReplayGroup(rank, ranks, recorded=recorded)
    decoder = build(ParallelContext(rank, ranks, rank, ranks=group, steps=group))

    def again() -> GenerationOutput:
        recorded.position = recorded.num_construction
        return decode(decoder)

    return again
