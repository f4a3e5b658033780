"""Captured decode steps over several sequences, whose KV caches lie in one pool.

A captured step replays a fixed recording of GPU work. So the place of each sequence in the pool is not recorded: it is
among the inputs that the step reads.

Q: places for sequences in a step. M: cache slots that a step can move, to bring the tokens that earlier steps accepted
side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from lp.attention.masks import FULL
from lp.config import KVDtype
from lp.models import captured_steps
from lp.models.captured_step import BUCKETS, LARGEST_PADDING, SPARE_SLOTS, BlockShape, CapturedStep, bucket_of
from lp.models.captured_steps import CapturedSteps
from lp.models.equal_widths import WIDTHS
from lp.models.graph_recorder import CaptureFailed
from lp.models.kv_cache import StaticKVCache
from lp.models.kv_pool import KVPool
from lp.models.runner import ModelRunner, PassLogits, logger
from lp.models.sharded_layers import replica_of
from lp.models.tree_pass import TreePass

MOVES = 128  # M; slots that commits move beyond so many are moved before the step
MASKED_SLOTS = 16384  # size of a pool up to which attention may read all slots, with a mask


class CapturedForests:
    """Runs forward passes over several sequences as captured steps (recorded GPU work that is replayed) where it can.

    Other passes run uncaptured, by `ModelRunner.forward_trees`.

    Args:
        runner: runs the model's passes.
        pool: the cache slots of all sequences, from `pool_for`.
        most_sequences: the most sequences that one pass has.
    """

    def __init__(self, runner: ModelRunner, pool: KVPool, most_sequences: int) -> None:
        self.runner = runner
        self.pool = pool
        self.most_sequences = most_sequences
        padding = -(-WIDTHS[-1] // LARGEST_PADDING) if runner.widths else 1
        self._num_places = max(most_sequences + padding, BUCKETS[-1] // LARGEST_PADDING)  # Q
        self._captured: CapturedSteps | None = None  # steps of the model as it was when `_steps` were captured
        self._whole: StaticKVCache | None = None  # all slots of the pool
        self._steps: dict[int, CapturedStep] = {}
        self._seen: Counter[int] = Counter()  # passes by bucket
        self._uncaptured = 0  # passes for which there was no step
        self._given_up = False
        self._copied: torch.cuda.Event | None = None  # after the last step's copy of its inputs; None: waited for

    @property
    def captures(self) -> bool:
        """Whether passes over several sequences are captured and replayed, not launched one operation at a time."""
        return not self._given_up and captures_forests(self.runner, self.pool.capacity)

    def replays(self, cache: StaticKVCache) -> bool:
        """Whether decode steps of this sequence can run as captured steps, recorded GPU work that is replayed.

        Args:
            cache: the sequence's KV cache; steps are captured only over caches in the pool.
        """
        return self.captures and cache in self.pool

    def forward(self, trees: Sequence[TreePass]) -> PassLogits:
        """Compute the tokens of one or more sequences in one forward pass, by replaying a captured step where possible.

        Args:
            trees: the tokens of each sequence, at least one.

        Returns:
            Logits of the tokens at each tree's `logits_indices`, in the order of the trees; valid until the next step.
        """
        num_tokens = sum(len(tree.tokens) for tree in trees)
        in_pool = all(tree.cache in self.pool and tree.adapter is None for tree in trees)
        fits = self.runner.captured is not None and self.runner.captured.fits(num_tokens)
        if self.captures and in_pool and fits and len(trees) <= self.most_sequences:
            try:
                step = self._step_of(num_tokens)
            except (CaptureFailed, torch.OutOfMemoryError) as error:  # uncaptured ones need less memory
                logger.warning("steps of several texts are not captured: %s", error)
                self._given_up = True
                self._drop_steps()
            else:
                if step is not None:
                    return self._run(step, trees)
        return self.runner.forward_trees(trees)

    def _step_of(self, num_tokens: int) -> CapturedStep | None:
        """The captured step that computes so many tokens; None in an engine's first passes, which run uncaptured.

        Until steps of a bucket have been needed often, a captured step of a larger bucket runs instead: a GPU takes
        little longer for more tokens, and a host much longer to launch one kernel after the other.
        """
        captured = self.runner.captured
        assert captured is not None
        if captured is not self._captured:  # other weights, or another adapter
            self._drop_steps()
            self._captured = captured
            self._whole = self.pool.whole()
        bucket = bucket_of(num_tokens, captured.buckets)
        self._seen[bucket] += 1
        if bucket not in self._steps:
            serving = (size for size in self._steps if num_tokens <= size <= num_tokens + LARGEST_PADDING)
            larger = min(serving, default=None)
            if larger is not None and self._seen[bucket] <= captured_steps.UNCAPTURED:
                return self._steps[larger]
            self._uncaptured += larger is None
            if larger is None and self._uncaptured <= captured_steps.UNCAPTURED:
                return None
            assert self._whole is not None
            self._steps[bucket] = captured.capture(self._whole, BlockShape(bucket, MOVES, self._num_places))
        return self._steps[bucket]

    def _drop_steps(self) -> None:
        self._await_copy()
        self._steps.clear()
        self._captured = self._whole = None

    def _await_copy(self) -> None:
        """Wait until the device has copied the last step's input block, which can then be filled again or freed."""
        if self._copied is not None:
            replica_of(self.runner.model).wait_for(self._copied)
            self._copied = None

    def inputs_read(self) -> None:
        """Note that the host has read the last step's results, so the next step can write its inputs without waiting.

        The device is then done with the last step's input block, which the next step overwrites.
        """
        self._copied = None

    def _run(self, step: CapturedStep, trees: Sequence[TreePass]) -> PassLogits:
        self._await_copy()
        step.stage(trees)
        logits_BV = step.run()
        self.note_copy()
        return PassLogits(logits_BV, [len(tree.logits_indices) for tree in trees], step)

    def note_copy(self) -> None:
        """Note that the device was given work that reads a step's inputs from pinned host memory.

        The next step waits until that work is done, before it writes its own inputs to that memory.
        """
        if self.runner.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()


def captures_forests(runner: ModelRunner, num_slots: int) -> bool:
    """Whether forward passes over several sequences run as captured steps, recorded GPU work that is replayed.

    They do not where attention would have to read all slots of a large pool, of more than `MASKED_SLOTS` slots.

    Args:
        runner: runs the model's passes.
        num_slots: slots of the pool that holds the sequences' keys and values.
    """
    captured = runner.captured
    if captured is None or not captured.recorder.recording or not runner.takes_forests:
        return False
    return num_slots <= MASKED_SLOTS or not reads_all_slots(runner)


def reads_all_slots(runner: ModelRunner) -> bool:
    """Whether attention in captured passes over several sequences reads all slots of their pool.

    Captured passes are recorded once and then replayed. They read all slots where the attention backend needs a mask,
    and where keys and values are stored quantised. Otherwise they read each sequence's own slots only.
    """
    return not (runner.backend.takes_pools and runner.masks.kinds == {FULL} and runner.kv_dtype is KVDtype.AUTO)


def pool_for(runner: ModelRunner, num_slots: int) -> KVPool:
    """Allocate one pool of KV cache slots for all sequences that an engine decodes together.

    Args:
        runner: runs the model's passes.
        num_slots: slots for the sequences' tokens; where passes are captured, spare slots for padding are added.

    Raises:
        CacheTooLarge: the device has no room for the slots.
    """
    if not captures_forests(runner, num_slots):
        return KVPool(runner.known_kinds, num_slots, runner.cache_without_buffers)
    new_cache = partial(runner.cache_without_buffers, deferred=True)
    return KVPool(runner.known_kinds, num_slots, new_cache, SPARE_SLOTS, reads_all_slots(runner))
