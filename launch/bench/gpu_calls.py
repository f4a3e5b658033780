"""Count what a decode step asks of a GPU: kernel launches, kernels and waits, as torch's profiler sees them."""

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
    """How often the GPU is called, per decode step in `lp profile`.

    Many launches or waits mean that the host limits the speed.

    Args:
        launches: calls by which the host starts kernels; replaying a CUDA graph is one call.
        kernels: kernels that the GPU ran, including those in CUDA graphs.
        waits: calls in which the host waits for the GPU.
    """

    launches: float
    kernels: float
    waits: float


def count(events: Iterable[tuple[str, bool]]) -> GpuCalls:
    """Count launches, kernels and waits among a profiler's events.

    Args:
        events: pairs of an event's name, as in "cudaLaunchKernel", and whether the event ran on the GPU.
    """
    events = list(events)
    host = [name for name, on_gpu in events if not on_gpu and name.startswith("cu")]  # not torch's own operators
    return GpuCalls(
        launches=sum(any(part in name for part in LAUNCHES) for name in host),
        kernels=sum(on_gpu and not name.startswith(COPIES) for name, on_gpu in events),
        waits=sum("Synchronize" in name for name in host),
    )


def calls_per_step(decode: Callable[[int], GenerationOutput], tokens: int) -> GpuCalls | None:
    """Mean GPU calls per decode step, without those of the prefill.

    A text of one token and a long text are decoded under torch's profiler. The difference in calls is divided by the
    difference in decode steps.

    Args:
        decode: generates as many tokens as its argument says, on a GPU; CUDA graphs of its steps are already captured.
        tokens: number of tokens in the long text.

    Returns:
        The means; None if the long text took no more steps than the short one.
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
    """Whether a profiler's event ran on this kind of device; kinds are compared by value, not by identity.

    Args:
        event: an event of torch's profiler.
        kind: DeviceType.CPU or DeviceType.CUDA.
    """
    return bool(event.device_type == kind)
