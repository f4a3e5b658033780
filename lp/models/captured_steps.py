"""Captured decode steps of a sequence: padded to a few sizes, so that a step is one replay of kernels recorded before.

B: tokens of a step's bucket (one of those sizes), C: capacity of a cache in slots, V: vocabulary size.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import FunctionType

import torch
from transformers import PreTrainedModel

from lp.attention.base import AttentionBackend, PooledView, StepView, View
from lp.attention.masks import StepMasks
from lp.config import Capture, KVDtype
from lp.errors import UserError
from lp.models.captured_step import (
    BITS,
    BUCKETS,
    SPARE_SLOTS,
    BlockShape,
    CapturedStep,
    StepInputs,
    StepTensors,
    bucket_of,
)
from lp.models.fused import FusedModel
from lp.models.graph_recorder import CaptureFailed, GraphRecorder
from lp.models.kernel_choice import NO_KERNELS
from lp.models.kv_cache import CacheTooLarge, StatesKind, StaticKVCache
from lp.models.new_cache import new_cache
from lp.models.recurrent_states import RecurrentShape
from lp.models.releases import CACHE_NAMES
from lp.models.tree_pass import TreePass
from lp.parallel.replica import Replica

logger = logging.getLogger(__name__)
CAPACITY_UNIT = 256  # capacities are multiples of it, so that prompts of like lengths share captured steps
GROWTH = 1.5  # the least factor between capacities, or a text a little longer each time would be captured each time
MOVES = 64  # M of one sequence; the slots of longer paths are moved before the step
UNCAPTURED = 8  # passes of a size before it is captured, which takes about as long as a few of them
LONGEST_PROMPT = 256  # tokens; a longer pass keeps a GPU busy while the host launches it, captured or not


def capture_mode(capture: Capture, model: PreTrainedModel, shifting: bool, backend: AttentionBackend) -> Capture | None:
    """Choose how a model's decode steps are captured, which means recorded once for each size and then replayed.

    AUTO takes a CUDA graph on a GPU where nothing rules it out.

    Args:
        capture: the user's choice.
        model: the model, on its device.
        shifting: whether the model's rotary frequencies change with the length of the text.
        backend: the attention backend that steps run.

    Returns:
        GRAPH or COMPILE; None: steps are not captured.

    Raises:
        ValueError: the user's choice, other than AUTO, is impossible here; names the reason and a remedy.
    """
    device = model.get_input_embeddings().weight.device
    obstacle = backend.capture_obstacle
    if shifting:
        obstacle = "the model's rotary frequencies change with the length of the text"
    elif len({parameter.device for parameter in model.parameters()}) > 1:
        obstacle = "the model lies on more than one device"
    elif obstacle is None and capture is Capture.GRAPH and device.type != "cuda":
        obstacle = f"the model is on {device.type!r}, and CUDA graphs need a GPU"
    elif obstacle is None and capture is Capture.COMPILE and not backend.compiles:
        obstacle = f"torch.compile does not take attention={backend.name}"
    if capture is Capture.AUTO:
        return Capture.GRAPH if device.type == "cuda" and obstacle is None else None
    if capture is Capture.OFF:
        return None
    if obstacle is not None:
        raise UserError(f"capture is {str(capture)!r}, but {obstacle}; choose capture=off")
    return capture


class CapturedSteps:
    """Records a model's decode steps when they are first needed, and owns the KV caches and graphs that the steps use.

    Generations take turns with its cache. A generation that starts while another one runs gets a cache of its own, and
    its steps are not captured.

    Args:
        model: the model on its device, or its fused layers.
        masks: builds the masks for its attention backend.
        mode: GRAPH records the model's own kernels, COMPILE the kernels that torch.compile makes of it (recorded on a
            GPU). OFF runs the model over the same buffers without recording: to check its masks, and where there is no
            GPU.
        known: how many key and value tensors of each kind (size, dtype, device) all layers have, see `StaticKVCache`.
        recurrent: shape of the recurrent state by layer, see `HybridCache`; empty: the model has no recurrent layers.
        replica: the ranks that the model is divided among; None: this rank has all of it.
        cache_keyword: the argument of the model's forward that takes the cache, such as "past_key_values".
        buckets: numbers of tokens that a captured step may have, ascending; a step is padded to the next of them.
        may_round: whether steps may run kernels that round differently from the operations of uncaptured passes.
        kv_dtype: dtype in which caches store keys and values.

    Attributes:
        cache: cache of the generation that is running, or of the last one; None before the first.
        reserved: whether a running generation has the cache.
        shared: further buffers on the device that captured work uses, by purpose and what their size depends on.
        kernels: Triton kernels that run in the place of torch's operations, where layers are fused.
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
        buckets: Sequence[int] = BUCKETS,
        may_round: bool = True,
        kv_dtype: KVDtype = KVDtype.AUTO,
    ) -> None:
        self.model = model
        self._cache_keyword = cache_keyword
        self.replica = replica or Replica()
        self.recurrent = recurrent or {}
        self.masks = masks
        self.mode = mode
        self.buckets = buckets
        self.known = {} if known is None else known
        self.kv_dtype = kv_dtype
        self.device = masks.device
        self.recorder = self._new_recorder()
        self.cache: StaticKVCache | None = None
        self.reserved = False
        self.shared: dict[Hashable, torch.Tensor] = {}
        self._caches: list[StaticKVCache] = []  # by capacity, ascending
        self._steps: dict[tuple[int, int], CapturedStep] = {}  # by C and B
        self._prompts: Counter[int] = Counter()  # chunks of prompts for which there was no step, by B
        self._prompts_given_up = False
        self._in_flight: torch.cuda.Event | None = None  # recorded after a step that nobody has waited for
        fused = isinstance(model, FusedModel) and mode is Capture.GRAPH
        self.kernels = model.choose_kernels(self.replica, may_round) if fused else NO_KERNELS

    def empty_cache(self, capacity: int) -> StaticKVCache:
        """Get an empty cache for a generation: the smallest that is large enough, or else a new one.

        A new cache has at least 1.5 times the slots of the largest cache so far. Smaller caches stay for shorter
        sequences, unless memory is short.

        Args:
            capacity: slots that the prefix and the tokens of a step need; slots for a step's padding are added.

        Raises:
            CacheTooLarge: the device has no room for the cache.
        """
        needed = capacity + SPARE_SLOTS
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
        """Whether a step of so many tokens is small enough to be captured: it fits into the largest size (bucket)."""
        return num_tokens <= self.buckets[-1]

    def staged(self, tree: TreePass) -> CapturedStep:
        """Prepare the captured step that computes this pass: write its inputs, and leave it to the caller to `run` it.

        The pass must be over the cache of the generation that is running. Inputs overwrite those of the step before,
        which the device must have copied. A caller that has read that step's results has waited for the copy already.
        After `run_unread`, this call waits for it.

        Args:
            tree: the sequence's tokens, and which of them each one sees.

        Raises:
            CaptureFailed: the step can't be captured.
        """
        if self._in_flight is not None:
            self.replica.wait_for(self._in_flight)
            self._in_flight = None
        step = self.step_of(len(tree.tokens))
        step.stage([tree])
        return step

    def takes_prompt(self, num_tokens: int) -> bool:
        """Whether a chunk of a prompt is to run as a captured step, which is captured once such chunks have come often.

        A host takes some 15 ms to launch the kernels of 30 layers one by one, and a GPU a tenth of that to run them.
        Once a capture has failed, no other one is tried for prompts: they run uncaptured.

        Args:
            num_tokens: tokens of the chunk.
        """
        assert self.cache is not None
        if self.mode is not Capture.GRAPH or self.recurrent or num_tokens > min(LONGEST_PROMPT, self.buckets[-1]):
            return False
        bucket = bucket_of(num_tokens, self.buckets)
        if (self.cache.capacity, bucket) in self._steps:
            return True
        self._prompts[bucket] += 1
        if self._prompts[bucket] <= UNCAPTURED or self._prompts_given_up:
            return False
        try:
            self.step_of(num_tokens)
        except (CaptureFailed, torch.OutOfMemoryError) as error:
            logger.warning("prompts are not captured: %s", error)
            self._prompts_given_up = True
        return not self._prompts_given_up

    def run_unread(self, step: CapturedStep) -> torch.Tensor:
        """Run a captured step that `staged` prepared, without waiting for its results, as for a prompt.

        The next `staged` waits until the device has copied the step's inputs.

        Args:
            step: the prepared step.

        Returns:
            Logits (B, V), B tokens of the step with its padding, V the vocabulary size.
        """
        logits = step.run()
        if self.device.type == "cuda":
            self._in_flight = torch.cuda.Event()
            self._in_flight.record()
        return logits

    def step_of(self, num_tokens: int) -> CapturedStep:
        """Get the captured step of the smallest size with room for so many tokens; captures it if it doesn't exist yet.

        Raises:
            CaptureFailed: the step can't be captured.
        """
        assert self.cache is not None
        key = self.cache.capacity, bucket_of(num_tokens, self.buckets)
        if key not in self._steps:
            self.cache.flush()  # a capture writes after the prefix, where what is left to move may lie
            try:
                self._steps[key] = self.capture(self.cache, BlockShape(key[1], MOVES, 0))
            except CaptureFailed as error:
                raise CaptureFailed(
                    f"a step of {key[1]} tokens can't be captured ({error}); choose capture=off"
                ) from error
        return self._steps[key]

    def steps_up_to(self, num_tokens: int) -> list[CapturedStep]:
        """Capture steps of all sizes up to the one that fits so many tokens, so that none is captured while decoding.

        Returns:
            The captured steps, by size, ascending.

        Raises:
            CaptureFailed: a step can't be captured.
        """
        assert self.cache is not None
        largest = next((size for size in self.buckets if size >= num_tokens), self.buckets[-1])
        return [self.step_of(bucket) for bucket in self.buckets if bucket <= largest]

    def logits(self, inputs: StepInputs, visible_BB: torch.Tensor, cache: StaticKVCache) -> torch.Tensor:
        """Run the model on a step's inputs; this call is what a capture records.

        Args:
            inputs: the step's inputs, on the device.
            visible_BB: bool; [i, j]: token i sees token j of the step, which has B tokens, padding included.
            cache: the cache that the step reads and writes.

        Returns:
            Logits (B, V) of the tokens at `inputs.logits_indices_B`, V the vocabulary size.
        """
        slots_B, dtype = inputs.slots_B, self.masks.dtype
        view: View
        if len(inputs.sequences_Q4):
            places_B4 = inputs.sequences_Q4.index_select(0, inputs.sequence_B)
            places = slots_B, places_B4[:, 2], places_B4[:, 3], inputs.sequences_Q4, cache.capacity
            view = PooledView(visible_BB, inputs.positions_B, *places, None, dtype)
            arguments = self.masks.backend.forward_arguments(slots_B, inputs.sequences_Q4)
        else:
            view = StepView(visible_BB, inputs.positions_B, cache.capacity, slots_B, None, dtype)
            arguments = self.masks.backend.forward_arguments(slots_B)
        output = self.model(
            input_ids=inputs.tokens_B[None],
            position_ids=inputs.rotary_B[None],
            attention_mask=self.masks.build(view),
            use_cache=True,
            logits_to_keep=inputs.logits_indices_B,
            **{self._cache_keyword: cache},
            **arguments,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def settle(self) -> None:
        """Wait until the device is done with a step that was interrupted, or whose results were not read.

        Until then it may still read the step's inputs.
        """
        if self.device.type == "cuda" and not self.replica.lost:
            self.replica.wait_for(torch.cuda.current_stream(self.device).record_event())

    def release(self) -> None:
        """Free all graphs, buffers and caches; later steps allocate and capture anew."""
        self._steps.clear()
        self._caches.clear()
        self.shared.clear()
        self.recorder = self._new_recorder()  # a memory pool is of no more use once its graphs are gone
        self.cache = None

    def _new_recorder(self) -> GraphRecorder:
        recording = self.device.type == "cuda" and self.mode is not Capture.OFF
        return GraphRecorder(self.device, recording, self.replica, self.mode is Capture.COMPILE)

    def _new_cache(self, slots: int) -> StaticKVCache:
        capacity = -(-slots // CAPACITY_UNIT) * CAPACITY_UNIT
        layers = self.masks.config.num_hidden_layers
        cache = new_cache(layers, capacity, True, True, self.known, self.recurrent, self.kv_dtype)
        cache.allocate()
        return cache

    def capture(self, cache: StaticKVCache, shape: BlockShape) -> CapturedStep:
        """Capture a decode step of one size: record its work on the device, to be replayed.

        Args:
            cache: the cache that the step reads and writes: one sequence's, or all slots of a pool.
            shape: the sizes of the step's input block.

        Raises:
            CaptureFailed: the step can't be captured.
        """
        host = torch.zeros(sum(shape.sizes), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        staged = StepInputs.parts(host.numpy(), shape)
        staged.fill([], cache)
        block = host.to(self.device, copy=True)
        inputs = StepInputs.parts(block, shape)
        visible_BB = torch.eye(shape.bucket, dtype=torch.bool, device=self.device)
        bits = torch.arange(BITS, device=self.device)

        def forward() -> torch.Tensor:
            return self.logits(inputs, visible_BB, cache)

        compiles = self.mode is Capture.COMPILE and not shape.places
        if compiles and not cache.claimed:  # layers take their buffers in the first pass, which no compiled one can do
            cache.begin(visible_BB)
            with cache.writing_to(inputs.slots_B):
                forward()
        compiled = compiled_by_itself(forward) if compiles else forward

        def step() -> torch.Tensor:
            block.copy_(host, non_blocking=True)
            cache.move(inputs.sources_M, inputs.targets_M, self.kernels.move_slots)
            visible_BB.copy_((inputs.visible_BW[:, :, None] >> bits & 1).flatten(1)[:, : shape.bucket])
            cache.begin(visible_BB)
            with cache.writing_to(inputs.slots_B):
                return compiled()

        tensors = StepTensors(inputs.tokens_B, inputs.logits_indices_B, visible_BB)
        return CapturedStep(cache, host, staged, tensors, self.recorder.record(step))


def compiled_by_itself(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Compile a step by torch.compile, apart from other steps that are made from the same source lines.

    Torch files compiled code under the code object of a function, which the steps of all sizes and models would share.
    It would take each step for a change of the one before, and stop compiling after 8
    (`torch._dynamo.config.recompile_limit`). So each step gets a code object of its own.

    Args:
        function: computes a step of fixed shapes; takes no arguments.
    """
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace()
    return torch.compile(function, fullgraph=True, dynamic=False)
