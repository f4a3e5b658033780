"""Puts the simulation in the place of torch.cuda for the time of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lp.attention.parts import InParts
from lp.models import kernel_choice
from tests.support.simulated_cuda import guard
from tests.support.simulated_cuda.events import LAUNCH
from tests.support.simulated_cuda.graphs import CUDAGraph, graph
from tests.support.simulated_cuda.memory import forget_pinned
from tests.support.simulated_cuda.simulation import SimulatedCuda, simulation
from tests.support.simulated_cuda.streams import (
    CurrentDevice,
    Event,
    Stream,
    StreamContext,
    current_stream,
    set_device,
    set_stream,
)

why_not = guard.why_not
GIB = 1 << 30


@contextlib.contextmanager
def simulated_cuda() -> Iterator[SimulatedCuda]:
    """CUDA devices are simulated within the block; yields what this thread asks of its own.

    Threads that are started within it enter a `SimulatedCuda` of their own.
    """
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with (
        guard.lent(),
        patch.multiple(torch.cuda, **_replacements()),
        patch.object(kernel_choice, "_seconds", _launches),
        patch.object(InParts, "of", _in_parts),
    ):
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes parameters anew
        try:
            with SimulatedCuda() as here:
                yield here
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
            forget_pinned()


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """What the host computes for itself, such as an oracle, without the simulation, which doubles its time."""
    with _disable_current_modes():
        yield


def _replacements() -> dict[str, Any]:
    """What replaces the attributes of torch.cuda."""
    return {
        "CUDAGraph": CUDAGraph,
        "Event": Event,
        "Stream": Stream,
        "_lazy_init": lambda: None,
        "current_device": lambda: simulation().index,
        "current_stream": current_stream,
        "device": CurrentDevice,
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "a simulated GPU",
        "graph": graph,
        "get_sync_debug_mode": lambda: SimulatedCuda.sync_debug_mode,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: simulation().recording is not None,
        "mem_get_info": lambda device=None: (60 * GIB, 80 * GIB),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "set_device": set_device,
        "set_stream": set_stream,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "stream": StreamContext,
        "synchronize": lambda device=None: simulation().wait("cuda.synchronize"),
    }


def _launches(operation: Callable[[], object]) -> float:
    """How many kernels an operation starts: takes the place of its time, of which the simulation knows nothing."""
    before = simulation().events.total(LAUNCH)
    operation()
    return simulation().events.total(LAUNCH) - before


def _in_parts(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> InParts:
    """Takes the place of `InParts.of`: a simulated tensor can't have another class too. Nobody uses the whole."""
    on_host = torch.empty(whole.shape, dtype=whole.dtype).as_subclass(InParts)
    on_host.parts = list(parts)
    return on_host


def _set_sync_debug_mode(mode: int | str) -> None:
    SimulatedCuda.sync_debug_mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode
