"""A captured decode step of one size: the input block that the host fills, and the device work that replays over it.

How many tokens are cached, and in which slots, are inputs, and not fixed by the recording. Tokens are written to the
slots that the block names, and a mask hides all slots after them.

T: step tokens, B: tokens of the step's bucket (T with padding), Q: places for sequences, V: vocabulary size, M: cache
slots that a step can move to bring accepted tokens side by side, W: int64 words that have a bit for each of B tokens.
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
LARGEST_PADDING = BUCKETS[-1] // 4  # tokens of one sequence of padding
SPARE_SLOTS = LARGEST_PADDING + 1  # at the end of a cache, for padding; moves of nothing name the last one
BITS = 64  # of an int64


class BlockShape(NamedTuple):
    """The sizes of the int64 block from which a captured step reads its inputs.

    Attributes:
        bucket: B, tokens of the step, padding included.
        moves: M, how many cache slots the step can move, to bring the tokens that earlier steps accepted side by side;
            further slots are moved before the step runs.
        places: Q, how many sequences a step over a pool can have, sequences of padding included; 0: the step has one
            sequence, which has the cache to itself.
    """

    bucket: int
    moves: int
    places: int

    @property
    def sizes(self) -> list[int]:
        """Number of int64s in each field of `StepInputs`, in the order of the fields."""
        words = -(-self.bucket // BITS)
        return [*[self.bucket] * 6, self.moves, self.moves, 4 * self.places, self.bucket * words]


class StepInputs(NamedTuple):
    """The inputs of a captured step, as parts of one block of int64s: NumPy arrays on the host, tensors on the device.

    A single copy of the block hands all inputs to the device. The tokens of several sequences follow one another, and
    padding comes last. B: tokens, padding included; M: slots to move; Q: places for sequences; W: int64s that hold B
    bits.

    Attributes:
        tokens_B: token ids.
        positions_B: positions of the tokens in their sequences, for masks.
        rotary_B: positions for the rotary embedding; in some models those after an image differ from `positions_B`.
        logits_indices_B: indices of the tokens whose logits are computed, then padding.
        slots_B: cache slot that each token's keys and values are written to.
        sequence_B: number of each token's sequence: its row of `sequences_Q4`.
        sources_M, targets_M: slots that the step moves from and to before it computes, so that the tokens accepted
            before lie side by side; padding moves a slot to itself.
        sequences_Q4: a row for each sequence: index of its first token in the step, its number of tokens in the step,
            its first slot in the pool, and its number of cached tokens. Rows after the last sequence are padding.
        visible_BW: bits; token i sees token j of the step if bit j % 64 of word j // 64 in row i is set.
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
        """Divide a block of int64s into the inputs of a captured step, which are views of the block.

        Args:
            block: an array or a tensor with as many int64s as all `shape.sizes` together.
            shape: the sizes of the inputs.
        """
        ends = itertools.accumulate(shape.sizes, initial=0)
        *flat, sequences, visible = (block[start:end] for start, end in itertools.pairwise(ends))
        return cls._make([*flat, sequences.reshape(shape.places, 4), visible.reshape(shape.bucket, -1)])

    def fill(self, trees: Sequence[TreePass], cache: StaticKVCache) -> None:
        """Write the next step's inputs into the block, on the host: the sequences' tokens, and cache slots to move.

        Slots are moved where the last commit of a sequence left the accepted tokens scattered.

        Args:
            trees: the tokens of each sequence; if empty, the step computes padding alone and changes nothing that is
                cached.
            cache: the cache that the step reads and writes: the sequence's own, or all slots of the pool.
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
        """Fill in the padding tokens, from token `start` on: the cache slots that their keys and values are written to.

        Where a sequence has the cache to itself, these are the slots after its tokens. In a pool they are the spare
        slots, and the padding counts as sequences of its own: as one, or as several in a step without any other
        sequence.
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
    """Inputs of a captured step on the device, for work that is captured to run after the step, such as sampling.

    Attributes:
        tokens_B: int64, the step's token ids, then padding.
        logits_indices_B: int64, indices of the tokens whose logits are computed, then padding.
        visible_BB: bool; [i, j]: token i sees token j of the step.
    """

    tokens_B: torch.Tensor
    logits_indices_B: torch.Tensor
    visible_BB: torch.Tensor


@dataclass(frozen=True)
class CapturedStep:
    """A captured decode step with a fixed number of tokens, its bucket: `stage` writes its inputs, `run` replays it.

    Attributes:
        cache: the KV cache that the step reads and writes: one sequence's, or all slots of a pool.
        host: the step's input block in host memory, int64, pinned for a GPU. The step begins by copying it to the
            device.
        inputs: the parts of `host`, as NumPy arrays.
        tensors: the step's inputs on the device.
        run: computes the step and returns its logits (B, V), B tokens of the bucket; the next run overwrites them.
        tails: further work that was captured to run after the step, such as sampling, by the settings it was captured
            with.
    """

    cache: StaticKVCache
    host: torch.Tensor
    inputs: StepInputs
    tensors: StepTensors
    run: Callable[[], torch.Tensor]
    tails: dict[Hashable, Any] = field(default_factory=dict)

    def stage(self, trees: Sequence[TreePass]) -> None:
        """Write the tokens of these sequences into the step's input block, so that the next run computes them.

        Call it only once the device has copied the previous content of the block.

        Args:
            trees: the tokens of each sequence.
        """
        self.inputs.fill(trees, self.cache)
        self.cache.begin_replay(len(self.inputs.tokens_B))

    def run_empty(self) -> torch.Tensor:
        """Run the step on padding alone, so that work after it can be captured; returns its logits (B, V).

        No cached token changes.
        """
        self.inputs.fill([], self.cache)
        return self.run()


def bucket_of(num_tokens: int, buckets: Sequence[int] = BUCKETS) -> int:
    """The smallest bucket (size that steps are padded to) with room for so many tokens, such as 24 for a step of 17."""
    return next(size for size in buckets if size >= num_tokens)


def _moves(caches: Sequence[StaticKVCache], most: int) -> tuple[list[int], list[int]]:
    """Slots that the caches' last commits move from and to; a cache that does not fit into `most` is moved at once."""
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
    """Write as bits which tokens each token of a step sees: its parent, all that the parent sees, and itself.

    Args:
        visible_BW: int64, written to: bit j % 64 of word j // 64 in row i is set if token i sees token j.
        parents: index of each token's parent, which comes before it; -1: the token has no parent, as a root or padding.
    """
    _fill_bits(compiled_array(visible_BW.view(np.uint64)), compiled_ints(parents))


@jit
def _fill_bits(visible_BW, parents):  # type: ignore[no-untyped-def]
    for token in range(len(visible_BW)):
        parent = parents[token] if token < len(parents) else -1
        for word in range(visible_BW.shape[1]):
            visible_BW[token, word] = visible_BW[parent, word] if parent >= 0 else U64(0)
        visible_BW[token, token // BITS] |= ONE << U64(token % BITS)
