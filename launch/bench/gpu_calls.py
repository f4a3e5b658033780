"""What a step asks of a GPU: launches, kernels and waits, as torch's profiler sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lp.engine.output import GenerationOutput

LAUNCHES = ("LaunchKernel", "GraphLaunch")  # in the names of CUDA's functions, of the runtime and of the driver
COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True, kw_only=True)
class GpuCalls:
    """How often a step calls the GPU.

    Args:
        launches: calls of the host that start kernels; the replay of a graph is one.
        kernels: kernels that the GPU ran, those of graphs among them.
        waits: calls in which the host waits for the GPU.
    """

    launches: float
    kernels: float
    waits: float


def count(events: Iterable[tuple[str, bool]]) -> GpuCalls:
    """Calls among events: the name of each, and whether it ran on the GPU."""
    events = list(events)
    host = [name for name, on_gpu in events if not on_gpu and name.startswith("cu")]  # not torch's own operators
    return GpuCalls(
        launches=sum(any(part in name for part in LAUNCHES) for name in host),
        kernels=sum(on_gpu and not name.startswith(COPIES) for name, on_gpu in events),
        waits=sum("Synchronize" in name for name in host),
    )


def calls_per_step(decode: Callable[[int], GenerationOutput], tokens: int) -> GpuCalls | None:
    """GPU calls a step: means over the steps by which a text is longer than one of a single token.

    Args:
        decode: makes a text of so many tokens on a GPU, by steps that are captured already.
        tokens: how many tokens the longer text has.

    Returns:
        None where it takes no more steps.
    """
    (short, few), (long, steps) = (_profiled(decode, number) for number in (1, tokens))
    more = steps - few
    if more < 1:
        return None
    return GpuCalls(
        launches=(long.launches - short.launches) / more,
        kernels=(long.kernels - short.kernels) / more,
        waits=(long.waits - short.waits) / more,
    )


def _profiled(decode: Callable[[int], GenerationOutput], tokens: int) -> tuple[GpuCalls, int]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps = decode(tokens).steps
    return count((event.name, ran_on(event, DeviceType.CUDA)) for event in profiler.events()), steps


def ran_on(event: Any, kind: DeviceType) -> bool:
    """Whether an event of the profiler ran on such a device; each event has a `DeviceType` object of its own."""
    return bool(event.device_type == kind)
