"""Captured steps of several sequences, whose caches lie in one pool: where each of them lies is data.

T: tokens of all sequences, B: those of the step's bucket, T with padding, Q: places for sequences, V: vocabulary size,
M: slots that a step moves for the commits before it, W: int64s that hold a bit for each of B tokens. Slots are those of
the pool.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from lp.attention.masks import FULL
from lp.models.captured_steps import (
    BITS,
    BUCKETS,
    LARGEST_PADDING,
    CapturedStep,
    CapturedSteps,
    StepTensors,
    fill_visible,
)
from lp.models.graph_recorder import CaptureFailed
from lp.models.kv_cache import StaticKVCache
from lp.models.kv_pool import KVPool
from lp.models.runner import ModelRunner, PassLogits, TreePass, logger

SPARE_SLOTS = LARGEST_PADDING + 1  # behind the pool: padding is written there, and the last one is moved to itself
MOVES = 128  # M; what commits move beyond it is moved before the step
UNCAPTURED = 8  # passes of a size before it is captured, which takes about as long as a few of them
MASKED_SLOTS = 16384  # of a pool, up to which attention reads all of them where it can't read each sequence's alone


class _Inputs(NamedTuple):
    """The parts of a block of int64s, on the host or on the device, that a step of one bucket reads.

    Attributes:
        tokens_B, positions_B: of the step.
        logits_indices_B: the tokens whose logits are computed, then padding.
        slots_B: where each token's keys and values are written.
        sequence_B: of each token.
        sources_M, targets_M: slots that the commits before it move from and to.
        sequences_Q4: of each sequence its first token, its tokens, its first slot and its cached tokens; those behind
            them are padding.
        visible_BW: bit j of row i is whether token i sees token j.
    """

    tokens_B: Any
    positions_B: Any
    logits_indices_B: Any
    slots_B: Any
    sequence_B: Any
    sources_M: Any
    targets_M: Any
    sequences_Q4: Any
    visible_BW: Any

    @classmethod
    def parts(cls, block: Any, bucket: int, num_sequences: int) -> _Inputs:
        """Views of a block, an array or a tensor."""
        ends = [*itertools.accumulate([*[bucket] * 5, MOVES, MOVES, 4 * num_sequences])]
        *flat, sequences = (block[start:end] for start, end in itertools.pairwise([0, *ends]))
        return cls._make([*flat, sequences.reshape(num_sequences, 4), block[ends[-1] :].reshape(bucket, -1)])

    @classmethod
    def size(cls, bucket: int, num_sequences: int) -> int:
        """Int64s of a block."""
        return 5 * bucket + 2 * MOVES + 4 * num_sequences + bucket * -(-bucket // BITS)


class CapturedForests:
    """Runs passes over several sequences as captured steps, where they are; else as `ModelRunner.forward_forest`.

    Args:
        runner: of the model.
        pool: as `pool_for` makes it.
        most_sequences: of a pass.
    """

    def __init__(self, runner: ModelRunner, pool: KVPool, most_sequences: int) -> None:
        self.runner = runner
        self.pool = pool
        self.most_sequences = most_sequences
        self._num_places = max(most_sequences, BUCKETS[-1] // LARGEST_PADDING - 1) + 1  # Q: one for a step's padding
        self._captured: CapturedSteps | None = None  # whose steps these stand beside: of the model as it was
        self._whole: StaticKVCache | None = None  # all slots of the pool
        self._steps: dict[int, CapturedStep] = {}
        self._seen: Counter[int] = Counter()  # passes by bucket
        self._given_up = False
        self._copied: torch.cuda.Event | None = None  # behind the last step's copy of its block, if nobody has waited

    @property
    def captures(self) -> bool:
        """Whether steps are captured."""
        return not self._given_up and captures_forests(self.runner, self.pool.capacity)

    def replays(self, cache: StaticKVCache) -> bool:
        """Whether steps of a text whose cache this is are captured here."""
        return self.captures and cache in self.pool

    def forward(self, trees: Sequence[TreePass]) -> PassLogits:
        """Arguments and result as of `ModelRunner.forward_forest`; valid until the next step."""
        num_tokens = sum(len(tree.tokens) for tree in trees)
        in_pool = all(tree.cache in self.pool for tree in trees)
        if self.captures and in_pool and num_tokens <= BUCKETS[-1] and len(trees) <= self.most_sequences:
            try:
                step = self._step_of(num_tokens)
            except (CaptureFailed, torch.OutOfMemoryError) as error:  # uncaptured ones need less memory
                logger.warning("steps of several texts are not captured: %s", error)
                self._given_up = True
                self._drop_steps()
            else:
                if step is not None:
                    return self._run(step, trees)
        return self.runner.forward_forest(trees)

    def _step_of(self, num_tokens: int) -> CapturedStep | None:
        """The step of the bucket of so many tokens; None as long as it has not come often enough."""
        captured = self.runner.captured
        assert captured is not None
        if captured is not self._captured:  # other weights, or another adapter
            self._drop_steps()
            self._captured = captured
            self._whole = self.pool.whole()
        bucket = next(size for size in BUCKETS if size >= num_tokens)
        self._seen[bucket] += 1
        if bucket not in self._steps:
            if self._seen[bucket] <= UNCAPTURED:
                return None
            self._steps[bucket] = self._capture(captured, bucket)
        return self._steps[bucket]

    def _drop_steps(self) -> None:
        self._await_copy()
        self._steps.clear()
        self._captured = self._whole = None

    def _await_copy(self) -> None:
        """The last step reads its block no more: it can be filled again, or be other pinned memory."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def message_read(self) -> None:
        """What the last step left has been read on the host: the device is done with its block."""
        self._copied = None

    def _run(self, step: CapturedStep, trees: Sequence[TreePass]) -> PassLogits:
        self._await_copy()
        counts = _fill(step.inputs, trees, self.pool)
        logits_BV = step.run()
        self.note_copy()
        return PassLogits(logits_BV, counts, step)

    def note_copy(self) -> None:
        """The device has been given work that reads pinned memory: what fills it again is to wait for that."""
        if self.runner.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _capture(self, captured: CapturedSteps, bucket: int) -> CapturedStep:
        whole, masks, device = self._whole, captured.masks, captured.device
        assert whole is not None
        size = _Inputs.size(bucket, self._num_places)
        host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        staged = _Inputs.parts(host.numpy(), bucket, self._num_places)
        _fill(staged, [], self.pool)
        block = torch.zeros(size, dtype=torch.int64, device=device)
        inputs = _Inputs.parts(block, bucket, self._num_places)
        bits = torch.arange(BITS, device=device)
        visible_BB = torch.zeros(bucket, bucket, dtype=torch.bool, device=device)

        def step() -> torch.Tensor:
            block.copy_(host, non_blocking=True)
            whole.move(inputs.sources_M, inputs.targets_M, captured.kernels.move_slots)
            visible_BB.copy_((inputs.visible_BW[:, :, None] >> bits & 1).flatten(1)[:, :bucket])
            places_B4 = inputs.sequences_Q4.index_select(0, inputs.sequence_B)
            mask = masks.build_pooled(
                visible_BB, inputs.positions_B, inputs.slots_B, places_B4[:, 2], places_B4[:, 3], whole.capacity
            )
            with whole.writing_to(inputs.slots_B):
                arguments = masks.backend.forward_arguments(inputs.slots_B, inputs.sequences_Q4)
                return captured.logits(inputs, mask, whole, arguments)

        tensors = StepTensors(inputs.tokens_B, inputs.logits_indices_B, visible_BB)
        return CapturedStep(bucket, host, staged, tensors, captured.recorder.record(step))


def captures_forests(runner: ModelRunner, num_slots: int) -> bool:
    """Whether passes over sequences in a pool of so many slots are captured."""
    captured = runner.captured
    if captured is None or not captured.recorder.recording or not runner.takes_forests:
        return False
    return num_slots <= MASKED_SLOTS or not reads_all_slots(runner)


def reads_all_slots(runner: ModelRunner) -> bool:
    """Whether captured passes over several sequences read all slots of the pool, with a mask."""
    return not (runner.backend.takes_pools and runner.masks.kinds == {FULL})


def pool_for(runner: ModelRunner, num_slots: int) -> KVPool:
    """A pool for passes over several sequences of a model.

    Raises:
        CacheTooLarge: the device has no room.
    """
    if not captures_forests(runner, num_slots):
        return KVPool(runner.known_kinds, num_slots, runner.cache_without_buffers)
    new_cache = partial(runner.cache_without_buffers, deferred=True)
    return KVPool(runner.known_kinds, num_slots, new_cache, SPARE_SLOTS, reads_all_slots(runner))


def _fill(inputs: _Inputs, trees: Sequence[TreePass], pool: KVPool) -> list[int]:
    """Fill in the block of a step; returns how many logits each sequence has computed."""
    bucket = len(inputs.tokens_B)
    spare = pool.capacity  # the first one
    sources, targets = _moves([tree.cache for tree in trees])
    inputs.sources_M[: len(sources)] = sources
    inputs.targets_M[: len(targets)] = targets
    inputs.sources_M[len(sources) :] = inputs.targets_M[len(targets) :] = spare + SPARE_SLOTS - 1
    inputs.sequences_Q4[:] = 0
    inputs.logits_indices_B[:] = 0
    parents_B = np.full(bucket, -1)
    start = 0
    counts = []
    logits_indices: list[int] = []
    for index, tree in enumerate(trees):
        cache = tree.cache
        end = start + len(tree.tokens)
        slot = cache.first_slot + cache.length
        assert cache.length + len(tree.tokens) <= cache.capacity, "tokens would be written into another text's slots"
        inputs.tokens_B[start:end] = tree.tokens
        inputs.positions_B[start:end] = tree.positions
        inputs.slots_B[start:end] = range(slot, slot + end - start)
        inputs.sequence_B[start:end] = index
        inputs.sequences_Q4[index] = start, end - start, cache.first_slot, cache.length
        parents = np.asarray(tree.parents)
        parents_B[start:end] = np.where(parents < 0, -1, parents + start)
        logits_indices += [start + own for own in tree.logits_indices]
        counts.append(len(tree.logits_indices))
        start = end
    inputs.logits_indices_B[: len(logits_indices)] = logits_indices
    inputs.tokens_B[start:] = 0
    inputs.positions_B[start:] = 0
    for index in range(len(trees), len(inputs.sequences_Q4)):  # padding: one of them, but for a step without sequences
        end = min(start + LARGEST_PADDING, bucket)
        inputs.slots_B[start:end] = range(spare, spare + end - start)
        inputs.sequence_B[start:end] = index
        inputs.sequences_Q4[index] = start, end - start, spare, 0
        start = end
    assert start == bucket
    fill_visible(inputs.visible_BW, parents_B)
    return counts


def _moves(caches: Sequence[StaticKVCache]) -> tuple[list[int], list[int]]:
    """Slots that the caches' commits move from and to; what is beyond M is moved at once."""
    sources: list[int] = []
    targets: list[int] = []
    for cache in caches:
        if len(sources) + cache.num_moves > MOVES:
            cache.flush()
        own_sources, own_targets = cache.take_moves()
        sources += [cache.first_slot + slot for slot in own_sources]
        targets += [cache.first_slot + slot for slot in own_targets]
    return sources, targets
