"""Captured steps: rows padded to a few sizes, so that a step is one replay of kernels recorded before.

T: rows of a step, B: rows of its bucket, C: capacity of the cache. How many rows are cached is data, not shape: the
step's rows are written at `places`, and the mask hides what is behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.attention import StepMasks
from lp.config import Attention, Capture
from lp.models.kv_cache import StaticKVCache

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
ROUND = 256  # capacities are multiples of it, so that prompts of like lengths share captured steps
WARM_UPS = 2  # runs before a capture, in which libraries allocate what they keep


class CaptureFailed(RuntimeError):
    """The model's step can't be recorded."""


def capture_mode(capture: Capture, model: PreTrainedModel, shifting: bool, attention: Attention) -> Capture | None:
    """How to capture steps, None for not at all; `auto` is a graph on a GPU where that can be right.

    Args:
        shifting: the model's rotary frequencies change with the length.

    Raises:
        ValueError: an explicit choice that can't be; names why and a remedy.
    """
    why, device = None, model.get_input_embeddings().weight.device
    if shifting:
        why = "the model's rotary frequencies change with the length of the text"
    elif len({parameter.device for parameter in model.parameters()}) > 1:
        why = "the model lies on more than one device"
    elif attention is Attention.FLEX:
        why = "attention=flex makes a mask of another kind each step"
    elif capture is Capture.GRAPH and device.type != "cuda":
        why = f"the model is on {device.type!r}, and CUDA graphs need a GPU"
    if capture is Capture.AUTO:
        return Capture.GRAPH if device.type == "cuda" and not why else None
    if capture is not Capture.OFF and why:
        raise ValueError(f"capture is {str(capture)!r}, but {why}; choose capture=off")
    return None if capture is Capture.OFF else capture


@dataclass(frozen=True)
class _Step:
    """One bucket: where its inputs lie, and what runs it on them."""

    tokens: torch.Tensor  # int64 (B,), as the next three
    positions: torch.Tensor
    places: torch.Tensor
    logits_indices: torch.Tensor
    visible: torch.Tensor  # bool (B, B)
    run: Callable[[], torch.Tensor]  # logits (B, V), overwritten by the next run


class CapturedSteps:
    """Owns the cache, the static buffers and the graphs of all buckets; captures a bucket when first needed.

    Generations of one decoder take turns at the cache; one that starts within another gets one of its own, uncaptured.

    Args:
        model: on its device.
        masks: of its backend.
        how: GRAPH records the model's own kernels, COMPILE what torch.compile makes of them (recorded on a GPU); OFF
            runs them over the same buffers, as they are: for the probe, and where there is no GPU.
    """

    def __init__(self, model: PreTrainedModel, masks: StepMasks, how: Capture) -> None:
        self.model, self.masks, self.how, self.device = model, masks, how, masks.device
        self.cache: StaticKVCache | None = None
        self.taken = False  # by a generation that runs
        self._steps: dict[int, _Step] = {}
        self._staging: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take_cache(self, capacity: int) -> StaticKVCache:
        """The empty cache, for at least so many rows and the padding of a step; a larger one than before is new."""
        wanted = -(-(capacity + BUCKETS[-1] // 4) // ROUND) * ROUND
        if self.cache is None or self.cache.capacity < wanted:
            self.release()
            self.cache = StaticKVCache(self.masks.config.num_hidden_layers, wanted, zeroed=True)
        self.cache.clear()
        return self.cache

    def fits(self, rows: int) -> bool:
        """Whether a step of so many rows has a bucket."""
        return rows <= BUCKETS[-1]

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], visible: np.ndarray, logits_indices: Sequence[int]
    ) -> torch.Tensor:
        """Logits (len(logits_indices), V), as `ModelRunner.forward`; valid until the next run."""
        assert self.cache is not None
        rows = next(size for size in BUCKETS if size >= len(tokens))
        numbers, seen = self._stage(rows)
        count = len(tokens)
        numbers.zero_()
        numbers[0, :count], numbers[3, : len(logits_indices)] = torch.tensor(tokens), torch.tensor(logits_indices)
        numbers[1] = positions[0]
        numbers[1, :count] = torch.tensor(positions)
        torch.arange(self.cache.length, self.cache.length + rows, out=numbers[2])
        torch.eye(rows, out=seen)  # rows that pad see themselves
        seen[:count, :count] = torch.from_numpy(visible)
        step = self._steps.get(rows)
        if step is None:
            step = self._steps[rows] = self._tried(numbers, seen)
        else:
            for mine, given in zip((step.tokens, step.positions, step.places, step.logits_indices), numbers, strict=True):
                mine.copy_(given, non_blocking=True)
            step.visible.copy_(seen, non_blocking=True)
        return step.run()[: len(logits_indices)]

    def release(self) -> None:
        """Free graphs, buffers and cache."""
        self._steps.clear()
        self.cache = None

    def _stage(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Host memory that a bucket's inputs are copied from; the last copy is over, since its step has been read."""
        if rows not in self._staging:
            pinned = self.device.type == "cuda"
            numbers = torch.zeros(4, rows, dtype=torch.int64, pin_memory=pinned)
            self._staging[rows] = numbers, torch.zeros(rows, rows, dtype=torch.bool, pin_memory=pinned)
        return self._staging[rows]

    def _tried(self, numbers: torch.Tensor, seen: torch.Tensor) -> _Step:
        try:
            return self._capture(numbers, seen)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model may do anything that no graph takes
            raise CaptureFailed(
                f"a step of {len(seen)} rows can't be captured ({error}); choose capture=off"
            ) from error

    def _capture(self, numbers: torch.Tensor, seen: torch.Tensor) -> _Step:
        tokens, positions, places, logits_indices = numbers.to(self.device, copy=True)
        visible, cache = seen.to(self.device, copy=True), self.cache
        assert cache is not None

        def forward() -> torch.Tensor:
            mask = self.masks.build(visible, positions, cache.capacity, places)
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logits_indices,
                **self._keywords(places),
            )
            return output.logits[0]

        # Every bucket of every model is a compilation of its own, or torch would take one for a change of another.
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "isolate_recompiles": True}
        compiled = torch.compile(forward, **options) if self.how is Capture.COMPILE else forward

        def placed() -> torch.Tensor:
            with cache.writing_to(places):
                return compiled()

        recorded = self.device.type == "cuda" and self.how is not Capture.OFF
        run = _recorded(placed, self.device) if recorded else placed
        return _Step(tokens, positions, places, logits_indices, visible, run)

    def _keywords(self, places: torch.Tensor) -> dict[str, torch.Tensor]:
        """What our own attention needs; transformers' would not know what to do with it."""
        return {"places": places} if self.masks.attention is Attention.FLASH else {}


def _recorded(forward: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """The forward pass as a CUDA graph over the same buffers."""
    with torch.cuda.device(device):
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
