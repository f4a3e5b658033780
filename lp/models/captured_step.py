"""A captured step of one size: what it reads, as a block of numbers that the host fills, and the work that replays.

T: step tokens, B: those of the step's bucket, T with padding, Q: places for sequences, V: vocabulary size, M: slots
that a step moves for the commits before it, W: int64s that hold a bit for each of B tokens.
How much is cached, and where, is data and no shape: tokens are written to the slots that the block names, and a mask
hides what lies behind them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from lp.compiled import ONE, U64, compiled_array, compiled_ints, jit
from lp.models.kv_cache import StaticKVCache
from lp.models.tree_pass import TreePass

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens
LARGEST_PADDING = BUCKETS[-1] // 4  # tokens
SPARE_SLOTS = LARGEST_PADDING + 1  # that a cache has behind all others, for padding; the last one is moved to itself
BITS = 64  # of an int64


class BlockShape(NamedTuple):
    """What a step's block has room for.

    Attributes:
        bucket: B.
        moves: M; what commits move beyond it is moved before the step.
        places: Q of a step over a pool, one of them for padding; 0: one sequence has the cache to itself.
    """

    bucket: int
    moves: int
    places: int

    @property
    def sizes(self) -> list[int]:
        """Number of int64s that every part of `StepInputs` has, in order."""
        words = -(-self.bucket // BITS)
        return [*[self.bucket] * 6, self.moves, self.moves, 4 * self.places, self.bucket * words]


class StepInputs(NamedTuple):
    """The parts of a block of int64s, on the host or on the device, that a step reads.

    Attributes:
        tokens_B, positions_B: tokens of all sequences, then padding.
        rotary_B: the positions that each token's keys and queries are turned by.
        logits_indices_B: the tokens whose logits are computed, then padding.
        slots_B: where each token's keys and values are written.
        sequence_B: the place of each token's sequence.
        sources_M, targets_M: slots that the commits before it move from and to; padding moves a slot to itself.
        sequences_Q4: first token, tokens, first slot and cached tokens of each sequence; those behind them are padding.
        visible_BW: bit j of row i is whether token i sees token j.
    """

    tokens_B: Any
    positions_B: Any
    rotary_B: Any
    logits_indices_B: Any
    slots_B: Any
    sequence_B: Any
    sources_M: Any
    targets_M: Any
    sequences_Q4: Any
    visible_BW: Any

    @classmethod
    def parts(cls, block: Any, shape: BlockShape) -> StepInputs:
        """Views of a block, an array or a tensor."""
        ends = itertools.accumulate(shape.sizes, initial=0)
        *flat, sequences, visible = (block[start:end] for start, end in itertools.pairwise(ends))
        return cls._make([*flat, sequences.reshape(shape.places, 4), visible.reshape(shape.bucket, -1)])

    def fill(self, trees: Sequence[TreePass], cache: StaticKVCache) -> None:
        """Fill in the passes of some sequences; without any, a step changes nothing that is cached.

        Args:
            trees: one for each sequence.
            cache: all that the step reads and writes.
        """
        self.logits_indices_B[:] = self.tokens_B[:] = self.positions_B[:] = self.rotary_B[:] = 0
        self.sources_M[:] = self.targets_M[:] = cache.capacity - 1
        sources, targets = _moves([tree.cache for tree in trees], len(self.sources_M))
        self.sources_M[: len(sources)] = sources
        self.targets_M[: len(targets)] = targets
        parents_B = np.full(len(self.tokens_B), -1)
        start = 0
        logits_indices: list[int] = []
        for index, tree in enumerate(trees):
            own = tree.cache
            end = start + len(tree.tokens)
            slot = own.first_slot + own.length
            assert own.length + end - start <= own.capacity, "tokens would be written into another text's slots"
            self.tokens_B[start:end] = tree.tokens
            self.positions_B[start:end] = tree.positions
            self.rotary_B[start:end] = self.positions_B[start:end] + tree.rotary_offset
            self.slots_B[start:end] = np.arange(slot, slot + end - start)
            parents = np.asarray(tree.parents)
            parents_B[start:end] = np.where(parents < 0, -1, parents + start)
            logits_indices += [start + each for each in tree.logits_indices]
            if len(self.sequences_Q4):
                self.sequence_B[start:end] = index
                self.sequences_Q4[index] = start, end - start, own.first_slot, own.length
            start = end
        self.logits_indices_B[: len(logits_indices)] = logits_indices
        self._pad(start, len(trees), cache)
        fill_visible(self.visible_BW, parents_B)

    def _pad(self, start: int, num_sequences: int, cache: StaticKVCache) -> None:
        """Where the tokens from `start` on are written: behind a sequence that has the cache to itself, else in the
        spare slots, as sequences of their own: one, but for a step without any other.
        """
        bucket = len(self.tokens_B)
        if not len(self.sequences_Q4):
            self.slots_B[start:] = np.arange(cache.length + start, cache.length + bucket)
            return
        spare = cache.capacity - SPARE_SLOTS
        self.sequences_Q4[num_sequences:] = 0
        for index in range(num_sequences, len(self.sequences_Q4)):
            end = min(start + LARGEST_PADDING, bucket)
            self.slots_B[start:end] = np.arange(spare, spare + end - start)
            self.sequence_B[start:end] = index
            self.sequences_Q4[index] = start, end - start, spare, 0
            start = end
        assert start == bucket


class StepTensors(NamedTuple):
    """What a step reads on the device, which work captured behind it may read too.

    Attributes:
        tokens_B: the step's tokens, then padding.
        logits_indices_B: the tokens whose logits are computed, then padding.
        visible_BB: bool, the tokens of the step that each one sees.
    """

    tokens_B: torch.Tensor
    logits_indices_B: torch.Tensor
    visible_BB: torch.Tensor


@dataclass(frozen=True)
class CapturedStep:
    """The step of one bucket.

    Attributes:
        cache: all that it reads and writes: one sequence's, or all slots of a pool.
        host: the block in (pinned) host memory, which the step begins by copying.
        inputs: the block's parts, as arrays.
        tensors: what the step reads on the device.
        run: the step; returns logits (B, V), overwritten by the next run.
        tails: what was captured to run behind it, by what it depends on; kept as long as the step.
    """

    cache: StaticKVCache
    host: torch.Tensor
    inputs: StepInputs
    tensors: StepTensors
    run: Callable[[], torch.Tensor]
    tails: dict[Hashable, Any] = field(default_factory=dict)

    def stage(self, trees: Sequence[TreePass]) -> None:
        """Make the next run compute these passes. The device must have copied what the block held before."""
        self.inputs.fill(trees, self.cache)
        self.cache.begin_replay(len(self.inputs.tokens_B))

    def run_empty(self) -> torch.Tensor:
        """Run the step without a token of any text: its logits (B, V), of padding. Nothing that is cached changes."""
        self.inputs.fill([], self.cache)
        return self.run()


def bucket_of(num_tokens: int, buckets: Sequence[int] = BUCKETS) -> int:
    """The smallest bucket that has so many tokens."""
    return next(size for size in buckets if size >= num_tokens)


def _moves(caches: Sequence[StaticKVCache], most: int) -> tuple[list[int], list[int]]:
    """Slots that the caches' commits move from and to; what is beyond `most` is moved at once."""
    sources: list[int] = []
    targets: list[int] = []
    for cache in caches:
        if len(sources) + cache.num_moves > most:
            cache.flush()
        own_sources, own_targets = cache.take_moves()
        sources += [cache.first_slot + slot for slot in own_sources]
        targets += [cache.first_slot + slot for slot in own_targets]
    return sources, targets


def fill_visible(visible_BW: np.ndarray, parents: Sequence[int] | np.ndarray) -> None:
    """Set the bits of what each token sees: its parent, what that one sees, and itself; padding sees itself."""
    _fill_bits(compiled_array(visible_BW.view(np.uint64)), compiled_ints(parents))


@jit
def _fill_bits(visible_BW, parents):  # type: ignore[no-untyped-def]
    for token in range(len(visible_BW)):
        parent = parents[token] if token < len(parents) else -1
        for word in range(visible_BW.shape[1]):
            visible_BW[token, word] = visible_BW[parent, word] if parent >= 0 else U64(0)
        visible_BW[token, token // BITS] |= ONE << U64(token % BITS)
