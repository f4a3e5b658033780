"""Run rank r of R alone on one device, to time exactly the work that it has when R ranks share each decode step.

First all R ranks run as threads, and the results of their collectives are recorded. Then rank r alone decodes the same
prompt again, and each of its collectives returns the recorded result at once.
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
    """Results of a run's collectives in order, with which one rank can decode the same prompt again alone.

    The results are the same on every rank, so one recording serves all ranks.

    Attributes:
        results: what every collective returned, in order; the collectives of the decoder's construction come first.
        num_construction: number of results that belong to the decoder's construction; a replay begins after them.
        position: index in `results` of the result that the next collective returns.
    """

    results: list[torch.Tensor] = field(default_factory=list)
    num_construction: int = 0
    position: int = 0

    def next(self) -> torch.Tensor:
        """Return the recorded result of the next collective, and move on to the one after it."""
        self.position += 1
        return self.results[self.position - 1]

    @property
    def payload_bytes(self) -> int:
        """Bytes that each rank sent in the last all-gather."""
        return self.results[-1][0].nbytes


@dataclass(frozen=True)
class _RecordingGroup(RankGroup):
    """A group of ranks that passes collectives on to another group and records their results."""

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
    """A group of ranks with one rank present: its collectives return recorded results, as fast as with a single rank.

    The header of this rank's message is its own: so a rank whose state differs is noticed, and Ctrl-C ends the text.
    The nodes of its draft tree must be the recorded ones, which other ranks have merged. Samples and logits come from
    the recording: captured steps may round otherwise, and an idle model computes none.
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
    """Refuse a decoder that may decode a prompt differently the second time, as its run could not be replayed.

    Args:
        config: the decoder's config.

    Raises:
        ValueError: the n-gram pool remembers earlier texts, or the decoder chooses step sizes by measured step times.
    """
    if config.adaptive:
        raise UserError("the config is adaptive, whose steps follow this machine's step times; give W, N or G")
    if config.pool_scope is PoolScope.SESSION:
        raise UserError("pool_scope is 'session', so that no run is like the one before; take pool.scope=request")
    if config.history is not None:
        raise UserError(f"history is {config.history!r}, so that no run is like the one before; take pool.history=null")


def record(build: Build, decode: Decode, ranks: int) -> RecordedCollectives:
    """Decode once on all ranks, as threads of this process, and record the results of their collectives.

    Args:
        build: makes the decoder for a rank, from the rank's context.
        decode: runs that decoder on the prompt, with a known seed if it samples.
        ranks: R, how many ranks there are.

    Raises:
        ValueError: the decoder cannot be replayed: see `check_alike`.
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
    """Stands in for the model and computes nothing, so that only the host's part of a decode step takes time.

    Args:
        vocabulary: V, the number of logits per token; all logits are zero.
    """

    def __init__(self, vocabulary: int) -> None:
        self.zeros_1V = torch.zeros(1, vocabulary)

    def __call__(self, input_ids: torch.Tensor, logits_to_keep: int | torch.Tensor, **keywords: object) -> Output:
        """Zeros in the shape of the model's logits, float32 (1, T, V).

        Args:
            input_ids: token ids, (1, tokens).
            logits_to_keep: how many of the last tokens get logits, 0 for all; or the indices of the tokens that do.
        """
        kept = logits_to_keep if isinstance(logits_to_keep, int) else len(logits_to_keep)
        return Output(self.zeros_1V.expand(1, kept or input_ids.shape[1], -1))


@contextmanager
def idle_model(runner: ModelRunner) -> Iterator[None]:
    """Within the block, a decoder's forward passes compute nothing, so that the time of a step is the host's alone.

    Args:
        runner: runs the decoder's forward passes.
    """
    network = runner.network
    runner.network = IdleModel(vocabulary_size(runner.model))
    try:
        yield
    finally:
        runner.network = network


def replayed(
    build: Build, decode: Decode, rank: int, ranks: int, recorded: RecordedCollectives
) -> Callable[[], GenerationOutput]:
    """Make a function that decodes as one rank of a recorded run, without the other ranks.

    The function may be called any number of times.

    Args:
        build: makes the decoder for a rank, from the rank's context.
        decode: runs that decoder on the recorded prompt.
        rank: the rank to run as, from 0.
        ranks: R, how many ranks there are.
        recorded: the recorded run.

    Raises:
        RuntimeError: when the function is called, the rank computes other draft-tree nodes than in the recorded run.
        KeyboardInterrupt: when the function is called, a signal ends it.
    """
    recorded.position = 0
    group = _ReplayGroup(rank, ranks, recorded=recorded)
    decoder = build(ParallelContext(rank, ranks, rank, ranks=group, steps=group))

    def again() -> GenerationOutput:
        recorded.position = recorded.num_construction
        return decode(decoder)

    return again
