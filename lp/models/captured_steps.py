"""Captured steps: padded to a few sizes, so that a step is one replay of kernels recorded before.

T: step tokens, B: tokens of the step's bucket, T with padding, C: capacity of the cache in slots, V: vocabulary size.
How many tokens are cached is data, not shape: the step's KV is written to the cache slots of a slot mapping, and the
mask hides what lies behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.attention.base import AttentionBackend
from lp.attention.masks import StepMasks
from lp.config import Capture
from lp.errors import UserError
from lp.models.fused import FusedModel
from lp.models.kv_cache import StaticKVCache

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens
LARGEST_PADDING = BUCKETS[-1] // 4  # tokens
CAPACITY_UNIT = 256  # capacities are multiples of it, so that prompts of like lengths share captured steps
WARM_UPS = 2  # runs before a capture, in which libraries allocate their workspaces


class CaptureFailed(RuntimeError):
    """The model's step can't be recorded."""


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


@dataclass(frozen=True)
class _CapturedStep:
    """The static buffers that the step of one bucket reads, and what runs it on them."""

    inputs_4B: torch.Tensor  # int64: tokens, positions, cache slots, indices of the tokens whose logits are computed
    visible_BB: torch.Tensor  # bool
    run: Callable[[], torch.Tensor]  # logits (B, V), overwritten by the next run


class CapturedSteps:
    """Owns the cache, the static buffers and the graphs of all buckets; captures a bucket when it is first needed.

    Generations of one decoder take turns at the cache; one that starts within another gets one of its own, uncaptured.

    Args:
        model: on its device; or its fused layers.
        masks: of its backend.
        mode: GRAPH records the model's own kernels, COMPILE what torch.compile makes of them (recorded on a GPU); OFF
            runs them over the same buffers, as they are: for the probe, and where there is no GPU.

    Attributes:
        reserved: a running generation has the cache.
    """

    def __init__(self, model: PreTrainedModel | FusedModel, masks: StepMasks, mode: Capture) -> None:
        self.model = model
        self.masks = masks
        self.mode = mode
        self.device = masks.device
        self.cache: StaticKVCache | None = None
        self.reserved = False
        self._steps: dict[int, _CapturedStep] = {}  # by B, as the next
        self._staging: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def empty_cache(self, capacity: int) -> StaticKVCache:
        """The cache, for at least so many slots and a step's padding; a larger one than before is allocated anew."""
        units = -(-(capacity + LARGEST_PADDING) // CAPACITY_UNIT)
        if self.cache is None or self.cache.capacity < units * CAPACITY_UNIT:
            self.release()
            self.cache = StaticKVCache(self.masks.config.num_hidden_layers, units * CAPACITY_UNIT, zeroed=True)
        self.cache.clear()
        return self.cache

    def fits(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens has a bucket."""
        return num_tokens <= BUCKETS[-1]

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], visible: np.ndarray, logits_indices: Sequence[int]
    ) -> torch.Tensor:
        """Logits (len(logits_indices), V), as `ModelRunner.forward`; valid until the next run."""
        assert self.cache is not None
        num_tokens = len(tokens)
        bucket = next(size for size in BUCKETS if size >= num_tokens)
        inputs_4B, visible_BB = self._staging_buffers(bucket)
        inputs_4B.zero_()
        inputs_4B[0, :num_tokens] = torch.tensor(tokens)
        inputs_4B[1] = positions[0]
        inputs_4B[1, :num_tokens] = torch.tensor(positions)
        torch.arange(self.cache.length, self.cache.length + bucket, out=inputs_4B[2])
        inputs_4B[3, : len(logits_indices)] = torch.tensor(logits_indices)
        torch.eye(bucket, out=visible_BB)  # padding sees itself
        visible_BB[:num_tokens, :num_tokens] = torch.from_numpy(visible)
        step = self._steps.get(bucket)
        if step is None:
            step = self._steps[bucket] = self._try_to_capture(inputs_4B, visible_BB)
        else:
            step.inputs_4B.copy_(inputs_4B, non_blocking=True)
            step.visible_BB.copy_(visible_BB, non_blocking=True)
        return step.run()[: len(logits_indices)]

    def release(self) -> None:
        """Free graphs, buffers and cache."""
        self._steps.clear()
        self.cache = None

    def _staging_buffers(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Host memory that a bucket's inputs are copied from; the last copy is over, since its logits were needed."""
        if bucket not in self._staging:
            pinned = self.device.type == "cuda"
            inputs_4B = torch.zeros(4, bucket, dtype=torch.int64, pin_memory=pinned)
            visible_BB = torch.zeros(bucket, bucket, dtype=torch.bool, pin_memory=pinned)
            self._staging[bucket] = inputs_4B, visible_BB
        return self._staging[bucket]

    def _try_to_capture(self, inputs_4B: torch.Tensor, visible_BB: torch.Tensor) -> _CapturedStep:
        try:
            return self._capture(inputs_4B, visible_BB)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model may do anything that no graph takes
            raise CaptureFailed(
                f"a step of {len(visible_BB)} tokens can't be captured ({error}); choose capture=off"
            ) from error

    def _capture(self, inputs_4B: torch.Tensor, visible_BB: torch.Tensor) -> _CapturedStep:
        assert self.cache is not None
        cache = self.cache
        inputs_4B = inputs_4B.to(self.device, copy=True)
        visible_BB = visible_BB.to(self.device, copy=True)
        tokens_B, positions_B, slot_mapping_B, logits_indices_B = inputs_4B

        def forward() -> torch.Tensor:
            mask = self.masks.build(visible_BB, positions_B, cache.capacity, slot_mapping_B)
            output = self.model(
                input_ids=tokens_B[None],
                position_ids=positions_B[None],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logits_indices_B,
                **self.masks.backend.forward_arguments(slot_mapping_B),
            )
            return output.logits[0]

        # Every bucket of every model is a compilation of its own, or torch would take one for a change of another.
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "isolate_recompiles": True}
        compiled = torch.compile(forward, **options) if self.mode is Capture.COMPILE else forward

        def step() -> torch.Tensor:
            with cache.writing_to(slot_mapping_B):
                return compiled()

        recorded = self.device.type == "cuda" and self.mode is not Capture.OFF
        return _CapturedStep(inputs_4B, visible_BB, _recorded(step, self.device) if recorded else step)


def _recorded(forward: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """The forward pass as a CUDA graph over the same buffers."""
    # A capture that fails leaves its stream the current one: the outer block makes it what it was.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream()):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):  # torch's own stream for it may be of another device
            logits = forward()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay
