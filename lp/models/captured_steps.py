"""Captured steps: padded to a few sizes, so that a step is one replay of kernels recorded before.

T: step tokens, B: tokens of the step's bucket, T with padding, C: capacity of the cache in slots, V: vocabulary size,
M: slots that a step moves for the commit before it, W: int64s that hold a bit for each of B tokens.
How many tokens are cached is data, not shape: the step's KV is written to the cache slots of a slot mapping, and the
mask hides what lies behind them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.attention.base import AttentionBackend
from lp.attention.masks import Masks, StepMasks
from lp.compiled import ONE, U64, compiled_array, compiled_ints, jit
from lp.config import Capture
from lp.errors import UserError
from lp.models.fused import FusedModel
from lp.models.graph_recorder import CaptureFailed, GraphRecorder
from lp.models.kernel_choice import NO_KERNELS
from lp.models.kv_cache import CacheTooLarge, StatesKind, StaticKVCache
from lp.models.new_cache import new_cache
from lp.models.recurrent_states import RecurrentShape
from lp.models.releases import CACHE_NAMES
from lp.parallel.replica import Replica

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens
LARGEST_PADDING = BUCKETS[-1] // 4  # tokens
CAPACITY_UNIT = 256  # capacities are multiples of it, so that prompts of like lengths share captured steps
GROWTH = 1.5  # the least factor between capacities, or a text a little longer each time would be captured each time
MOVES = 64  # M; longer paths are moved before the step
BITS = 64  # of an int64


def capture_mode(capture: Capture, model: PreTrainedModel, shifting: bool, backend: AttentionBackend) -> Capture | None:
    """How to capture steps, None for not at all; `auto` is a graph on a GPU where that can be right.

    Args:
        shifting: the model's rotary frequencies change with the length.

    Raises:
        ValueError: an explicit choice that can't be; names why and a remedy.
    """
    device = model.get_input_embeddings().weight.device
    obstacle = backend.capture_obstacle
    if shifting:
        obstacle = "the model's rotary frequencies change with the length of the text"
    elif len({parameter.device for parameter in model.parameters()}) > 1:
        obstacle = "the model lies on more than one device"
    elif obstacle is None and capture is Capture.GRAPH and device.type != "cuda":
        obstacle = f"the model is on {device.type!r}, and CUDA graphs need a GPU"
    if capture is Capture.AUTO:
        return Capture.GRAPH if device.type == "cuda" and obstacle is None else None
    if capture is Capture.OFF:
        return None
    if obstacle is not None:
        raise UserError(f"capture is {str(capture)!r}, but {obstacle}; choose capture=off")
    return capture


class _Inputs(NamedTuple):
    """The parts of a block of int64s, on the host or on the device, that a step of one bucket reads.

    Attributes:
        tokens_B, positions_B: of the step.
        logits_indices_B: the tokens whose logits are computed, then padding.
        sources_M, targets_M: cache slots that the commit before it moves from and to; padding moves a slot to itself.
        length_1: L, cached tokens.
        visible_BW: bit j of row i is whether token i sees token j.
    """

    tokens_B: Any
    positions_B: Any
    logits_indices_B: Any
    sources_M: Any
    targets_M: Any
    length_1: Any
    visible_BW: Any

    @classmethod
    def parts(cls, block: Any, bucket: int) -> _Inputs:
        """Views of a block, an array or a tensor."""
        ends = [*itertools.accumulate([bucket, bucket, bucket, MOVES, MOVES, 1])]
        flat = [block[start:end] for start, end in itertools.pairwise([0, *ends])]
        return cls._make([*flat, block[ends[-1] :].reshape(bucket, -1)])

    @classmethod
    def size(cls, bucket: int) -> int:
        """Int64s of a block."""
        return 3 * bucket + 2 * MOVES + 1 + bucket * -(-bucket // BITS)


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
        bucket: B.
        host: the block in (pinned) host memory, which the step begins by copying.
        inputs: its parts, as arrays.
        tensors: on the device.
        run: the step; returns logits (B, V), overwritten by the next run.
        tails: what was captured to run behind it, by what it depends on; kept as long as the step.
    """

    bucket: int
    host: torch.Tensor
    inputs: Any
    tensors: StepTensors
    run: Callable[[], torch.Tensor]
    tails: dict[Hashable, Any] = field(default_factory=dict)


class CapturedSteps:
    """Owns caches, static buffers and graphs; captures a bucket when it is first needed.

    Generations take turns: one that starts within another has a cache of its own, and its steps are not captured.

    Args:
        model: on its device; or its fused layers.
        masks: of its backend.
        mode: GRAPH records the model's own kernels, COMPILE what torch.compile makes of them (recorded on a GPU); OFF
            runs them over the same buffers, as they are: for the probe, and where there is no GPU.
        known: as of `StaticKVCache`.
        recurrent: as `shapes` of `HybridCache`; empty: the model has no recurrent layers.
        replica: the ranks that the model is divided among; None: it is whole.
        cache_keyword: under which the model takes its cache.

    Attributes:
        cache: of the generation that is running, or of the last one.
        reserved: a running generation has the cache.
        shared: other memory of the device that captured work reads, by what it is for and what depends on its size.
        kernels: in the place of torch's operations, where layers are fused.
    """

    def __init__(
        self,
        model: PreTrainedModel | FusedModel,
        masks: StepMasks,
        mode: Capture,
        known: dict[StatesKind, int] | None = None,
        recurrent: Mapping[int, RecurrentShape] | None = None,
        replica: Replica | None = None,
        cache_keyword: str = CACHE_NAMES[0],
    ) -> None:
        self.model = model
        self._cache_keyword = cache_keyword
        self.replica = replica
        self.recurrent = recurrent or {}
        self.masks = masks
        self.mode = mode
        self.known = {} if known is None else known
        self.device = masks.device
        self.recorder = self._new_recorder()
        self.cache: StaticKVCache | None = None
        self.reserved = False
        self.shared: dict[Hashable, torch.Tensor] = {}
        self._caches: list[StaticKVCache] = []  # by capacity, ascending
        self._steps: dict[tuple[int, int], CapturedStep] = {}  # by C and B
        self._in_flight: torch.cuda.Event | None = None  # behind a step that nothing has waited for
        fused = isinstance(model, FusedModel) and mode is Capture.GRAPH
        self.kernels = model.choose_kernels(self.replica or Replica()) if fused else NO_KERNELS

    def empty_cache(self, capacity: int) -> StaticKVCache:
        """The smallest cache that has so many slots and a step's padding; made where there is none.

        A new one is larger by a factor, and those before stay for shorter texts, unless memory lacks.

        Raises:
            CacheTooLarge: there is no memory for it.
        """
        needed = capacity + LARGEST_PADDING + 1  # the last slot is where padding moves
        self.cache = next((cache for cache in self._caches if cache.capacity >= needed), None)
        if self.cache is None:
            largest = self._caches[-1].capacity if self._caches else 0
            try:
                self.cache = self._new_cache(max(needed, int(GROWTH * largest)))
            except CacheTooLarge:
                self.release()
                self.cache = self._new_cache(needed)
            self._caches.append(self.cache)
        self.cache.clear()
        return self.cache

    def fits(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens has a bucket."""
        return num_tokens <= BUCKETS[-1]

    def staged(
        self,
        tokens: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray,
        parents: Sequence[int] | np.ndarray,
        logits_indices: Sequence[int],
    ) -> CapturedStep:
        """The captured step of their bucket, with these inputs in its block.

        The device must have copied what the block held before: whoever reads a step's message has waited for that, and
        behind `run_unread` this call waits. Arguments are those of `ModelRunner.staged`.

        Raises:
            CaptureFailed: it can't be captured.
        """
        assert self.cache is not None
        if self._in_flight is not None:
            self._in_flight.synchronize()
            self._in_flight = None
        num_tokens = len(tokens)
        step = self.step_of(num_tokens)
        inputs = step.inputs
        sources, targets = self.cache.take_moves()
        inputs.tokens_B[:num_tokens] = tokens
        inputs.tokens_B[num_tokens:] = 0
        inputs.positions_B[:num_tokens] = positions
        inputs.positions_B[num_tokens:] = positions[0]
        inputs.logits_indices_B[:] = 0
        inputs.logits_indices_B[: len(logits_indices)] = logits_indices
        inputs.sources_M[: len(sources)] = sources
        inputs.targets_M[: len(sources)] = targets
        inputs.sources_M[len(sources) :] = inputs.targets_M[len(sources) :] = self.cache.capacity - 1
        inputs.length_1[0] = self.cache.length
        self.cache.begin_replay(step.bucket)
        fill_visible(inputs.visible_BW, parents)
        return step

    def run_unread(self, step: CapturedStep) -> torch.Tensor:
        """Run a staged step of which no message is read, so that the host may be ahead of it: its logits (B, V)."""
        logits = step.run()
        if self.device.type == "cuda":
            self._in_flight = torch.cuda.Event()
            self._in_flight.record()
        return logits

    def step_of(self, num_tokens: int) -> CapturedStep:
        """The step of the bucket of so many tokens; captured if it has not been. The cache has nothing left to move.

        Raises:
            CaptureFailed: it can't be.
        """
        assert self.cache is not None
        bucket = next(size for size in BUCKETS if size >= num_tokens)
        step = self._steps.get((self.cache.capacity, bucket))
        if step is None or self.cache.num_moves > MOVES:
            self.cache.flush()  # capturing runs a step more than once, and moving twice is not the same as once
        if step is None:
            step = self._steps[self.cache.capacity, bucket] = self._capture(self.cache, bucket)
        return step

    def steps_up_to(self, num_tokens: int) -> list[CapturedStep]:
        """The steps of all buckets up to that of so many tokens; if they are run, they change nothing that is cached.

        Raises:
            CaptureFailed: one can't be captured.
        """
        assert self.cache is not None
        largest = next((size for size in BUCKETS if size >= num_tokens), BUCKETS[-1])
        steps = [self.step_of(bucket) for bucket in BUCKETS if bucket <= largest]
        for step in steps:
            _stage_nothing(step.inputs, self.cache)
        return steps

    def logits(self, inputs: Any, mask: Masks, cache: StaticKVCache, arguments: dict[str, Any]) -> torch.Tensor:
        """The logits (B, V) of a step's tokens.

        Args:
            inputs: has `tokens_B`, `positions_B` and `logits_indices_B`.
            mask: of the step.
            cache: that it writes to.
            arguments: for the attention function.
        """
        output = self.model(
            input_ids=inputs.tokens_B[None],
            position_ids=inputs.positions_B[None],
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=inputs.logits_indices_B,
            **{self._cache_keyword: cache},
            **arguments,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def settle(self) -> None:
        """Wait for a step that was cut: the device may still read its block."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Free graphs, buffers and caches."""
        self._steps.clear()
        self._caches.clear()
        self.shared.clear()
        self.recorder = self._new_recorder()  # a memory pool is of no more use once its graphs are gone
        self.cache = None

    def _new_recorder(self) -> GraphRecorder:
        recording = self.device.type == "cuda" and self.mode is not Capture.OFF
        return GraphRecorder(self.device, recording, self.replica)

    def _new_cache(self, slots: int) -> StaticKVCache:
        capacity = -(-slots // CAPACITY_UNIT) * CAPACITY_UNIT
        layers = self.masks.config.num_hidden_layers
        cache = new_cache(layers, capacity, True, True, self.known, self.recurrent)
        cache.allocate()
        return cache

    def _capture(self, cache: StaticKVCache, bucket: int) -> CapturedStep:
        size = _Inputs.size(bucket)
        host = torch.zeros(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        staged = _Inputs.parts(host.numpy(), bucket)
        fill_visible(staged.visible_BW, ())
        _stage_nothing(staged, cache)
        block = torch.zeros(size, dtype=torch.int64, device=self.device)
        inputs = _Inputs.parts(block, bucket)
        slot_mapping_B = torch.arange(cache.length, cache.length + bucket, device=self.device)
        visible_BB = torch.zeros(bucket, bucket, dtype=torch.bool, device=self.device)
        bits = torch.arange(BITS, device=self.device)
        tokens = torch.arange(bucket, device=self.device)

        def forward() -> torch.Tensor:
            mask = self.masks.build(visible_BB, inputs.positions_B, cache.capacity, slot_mapping_B)
            return self.logits(inputs, mask, cache, self.masks.backend.forward_arguments(slot_mapping_B))

        cache.begin(visible_BB)
        if not cache.claimed:  # layers take their buffers in the first pass, which no compiled one can do
            with cache.writing_to(slot_mapping_B):
                forward()
        compiled = compiled_by_itself(forward) if self.mode is Capture.COMPILE else forward

        def step() -> torch.Tensor:
            block.copy_(host, non_blocking=True)
            cache.move(inputs.sources_M, inputs.targets_M, self.kernels.move_slots)
            torch.add(tokens, inputs.length_1, out=slot_mapping_B)
            visible_BB.copy_((inputs.visible_BW[:, :, None] >> bits & 1).flatten(1)[:, :bucket])
            cache.begin(visible_BB)
            with cache.writing_to(slot_mapping_B):
                return compiled()

        try:
            tensors = StepTensors(inputs.tokens_B, inputs.logits_indices_B, visible_BB)
            return CapturedStep(bucket, host, staged, tensors, self.recorder.record(step))
        except CaptureFailed as error:
            raise CaptureFailed(f"a step of {bucket} tokens can't be captured ({error}); choose capture=off") from error


def _stage_nothing(inputs: _Inputs, cache: StaticKVCache) -> None:
    """Let a step move nothing, and write behind the prefix: what ran last may have been another text's."""
    inputs.sources_M[:] = inputs.targets_M[:] = cache.capacity - 1
    inputs.length_1[0] = cache.length


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


def compiled_by_itself(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Compile a step of one fixed shape, apart from the others of the same lines.

    Torch keeps what it compiled by the code object of a function, which all buckets of all models share: it would take
    each for a change of the one before, and stop compiling after 8 (`torch._dynamo.config.recompile_limit`). So each
    gets a code object of its own.
    """
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace()
    return torch.compile(function, fullgraph=True, dynamic=False)
