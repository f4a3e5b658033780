"""Streams, events and the current device, in place of those of torch.cuda. All streams of a thread are one queue."""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.support.simulated_cuda.simulation import Hang, simulation


class Stream:
    """Takes the place of torch.cuda.Stream: all streams are one queue, so that nothing needs to wait."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device

    def synchronize(self) -> None:
        simulation().wait("Stream.synchronize")

    def wait_stream(self, stream: Stream) -> None:
        """The device waits, not the host."""

    def wait_event(self, event: Event) -> None:
        """The device waits, not the host."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


def current_stream(device: Any = None) -> Stream:
    """The current stream of this thread, in place of torch.cuda.current_stream; made at the first call."""
    here = simulation()
    if here.stream is None:
        here.stream = here.default_stream = Stream()
    return here.stream


def set_stream(stream: Stream) -> None:
    current_stream()  # or the default one would be made later
    simulation().stream = stream


class StreamContext:
    """Takes the place of torch.cuda.stream: makes a stream the current one within the block."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = current_stream()
        set_stream(self.stream or self.before)

    def __exit__(self, *failure: object) -> None:
        set_stream(self.before)


class Event:
    """Takes the place of torch.cuda.Event: remembers which copies are over once the host has waited for it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._copies = 0
        self._seconds = 0.0
        self._hang: Hang | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._copies = simulation().copies.count
        self._hang = simulation().hang
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """The device waits, not the host."""

    def synchronize(self) -> None:
        if self._hang:
            self._hang.refuse()
        simulation().wait("Event.synchronize", self._copies)

    def query(self) -> bool:
        """Whether all before it is over: the host asks until it is, which counts as waiting."""
        if self._hang and not self._hang.ended:
            return False
        self.synchronize()
        return True

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds between two events, by the host's clock: their value says nothing of a GPU."""
        return 1e3 * (later._seconds - self._seconds)


class CurrentDevice:
    """Takes the place of torch.cuda.device: makes a device the current one within the block."""

    def __init__(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else torch.device(device).index

    def __enter__(self) -> None:
        here = simulation()
        self.before = here.index
        here.index = self.before if self.index is None else self.index

    def __exit__(self, *failure: object) -> None:
        simulation().index = self.before


def set_device(device: Any) -> None:
    CurrentDevice(device).__enter__()
