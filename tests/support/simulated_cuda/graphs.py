"""CUDA graphs: what is captured does not run, and a replay runs it on the same memory.

All that Python knew during the capture is baked in: lengths, branches, numbers, values of CPU tensors without
dimensions. After a capture, memory that it allocated holds nothing of meaning, and other memory what it held before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.simulated_cuda.copies import Copies
from tests.support.simulated_cuda.memory import Block, address, is_pinned, poison
from tests.support.simulated_cuda.simulation import CudaTensor, DeviceError, simulation
from tests.support.simulated_cuda.streams import Stream, StreamContext, current_stream


class _Call:
    """One operation of a graph, on host tensors."""

    def __init__(self, call: Callable[..., Any], args: Any, kwargs: Any, out: list[torch.Tensor]) -> None:
        self.call = call
        self.args = args
        self.kwargs = kwargs
        self.out = out  # the memory that its results go to

    def replay(self) -> None:
        for target, result in zip(self.out, _tensors(self.call(*self.args, **self.kwargs)), strict=bool(self.out)):
            target.copy_(result)


class Recording:
    """The operations of a graph, and the memory they use.

    Attributes:
        valid: nothing was asked for that can't be captured.
    """

    def __init__(self) -> None:
        self.valid = True
        self._calls: list[_Call] = []
        self._own: dict[int, torch.Tensor] = {}  # memory that was allocated within the capture, by its address
        self._others: dict[int, weakref.ref[Block]] = {}
        self._origins: dict[int, str] = {}
        self._before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # memory, and what it held
        self._changed: set[int] = set()

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any, targets: list[Any], fresh: bool) -> Any:
        """Record an operation; it runs too, since Python needs the shapes of its results, and is undone later."""
        for target in targets:
            self._keep(target.raw)
        raw_args = self._baked(args)
        raw_kwargs = self._baked(kwargs)
        out = call(*raw_args, **raw_kwargs)
        results = _tensors(out) if fresh else []
        self._own |= {address(result): result for result in results}
        self._calls.append(_Call(call, raw_args, raw_kwargs, results))
        return out

    def end(self) -> None:
        """The capture is over: undo what it wrote."""
        for memory, before in self._before:
            memory.copy_(before)
        self._before.clear()
        for tensor in self._own.values():
            poison(tensor)

    def replay(self) -> None:
        """Run all operations on the memory that they were captured with.

        Raises:
            DeviceError: some of it was freed, so that by now it may be another tensor's.
        """
        for at, block in self._others.items():
            if block() is None:
                raise DeviceError(
                    f"a graph reads or writes memory that was freed; it was allocated at {self._origins[at]}"
                )
        with torch._C._InferenceMode(True), _disable_current_modes():
            for call in self._calls:
                call.replay()

    def _keep(self, raw: torch.Tensor) -> None:
        at = address(raw)
        if at not in self._own and at not in self._changed:
            self._changed.add(at)
            storage = raw.untyped_storage()
            self._before.append((storage, storage.clone()))

    def _baked(self, value: Any) -> Any:
        """Arguments as the graph has them: of a CPU tensor its value, of pinned memory its address."""
        if isinstance(value, CudaTensor):
            at = address(value.raw)
            if at not in self._own:
                self._others[at] = weakref.ref(value.block)
                self._origins[at] = value.block.origin
            return value.raw
        if isinstance(value, torch.Tensor):
            return value if is_pinned(value) else value.clone()
        if isinstance(value, tuple | list):
            return type(value)(self._baked(item) for item in value)
        if isinstance(value, dict):
            return {name: self._baked(item) for name, item in value.items()}
        return value


class CUDAGraph:
    """Takes the place of torch.cuda.CUDAGraph: records operations in a capture, and runs them again."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recording: Recording | None = None
        self._outer: Copies | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        here = simulation()
        if here.recording is not None:
            raise RuntimeError("CUDA error: a capture is under way already")
        if current_stream() is here.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        here.recording = Recording()
        self._outer = here.copies
        here.copies = Copies()  # nothing is copied now

    def capture_end(self) -> None:
        here = simulation()
        assert here.recording is not None and self._outer is not None
        recording = here.recording
        here.recording = None
        here.copies = self._outer
        with _disable_current_modes(), torch._C._InferenceMode(True):
            recording.end()
        if not recording.valid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._recording = recording

    def replay(self) -> None:
        here = simulation()
        if self._recording is None:
            raise RuntimeError("CUDAGraph::replay called before a capture has ended")
        here.refuse_in_capture("a graph's replay")
        here.launched("graph")
        self._recording.replay()

    def reset(self) -> None:
        self._recording = None

    def pool(self) -> tuple[int, int]:
        return (0, id(self))


class graph:
    """Takes the place of torch.cuda.graph; a capture that fails leaves its stream the current one, as it does there."""

    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **options: Any) -> None:
        self.cuda_graph = cuda_graph
        self.stream_context = StreamContext(stream or Stream())

    def __enter__(self) -> None:
        simulation().wait("capture of a graph")
        self.stream_context.__enter__()
        self.cuda_graph.capture_begin()

    def __exit__(self, *failure: object) -> None:
        self.cuda_graph.capture_end()
        self.stream_context.__exit__(*failure)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, tuple | list) else []
