"""What a capture finds before it begins: operations in which the host waits, on the capturing thread alone."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch

from lp.models.graph_recorder import CaptureFailed, GraphRecorder
from lp.models.host_waits import NoWaiting
from tests.simulated_gpu.test_device import KERNELS, WAITING
from tests.support.simulated_cuda import SimulatedCuda

EXPLICIT = {"synchronize", "stream", "event"}  # these are no operations: the capture finds them


@pytest.mark.parametrize("how", [name for name in WAITING if name not in EXPLICIT])
def test_every_operation_that_waits_is_found(gpu: SimulatedCuda, how: str) -> None:
    """Found in the capture, it would leave torch's allocator there, and memory would never be given back."""
    values = torch.arange(6.0).to("cuda")
    runs = []

    def work() -> None:
        runs.append(gpu.recording)
        WAITING[how](values)

    with torch.inference_mode(), pytest.raises(CaptureFailed, match="synchronizing CUDA operation"):
        GraphRecorder(values.device, True).record(work)
    assert runs == [None, None]


@pytest.mark.parametrize("work", KERNELS)
def test_no_kernel_is_taken_for_one(gpu: SimulatedCuda, work: Callable[..., object]) -> None:
    """A step that could be captured would run kernel by kernel."""
    values = torch.arange(6.0).to("cuda")
    with torch.inference_mode(), NoWaiting():
        work(values)


def test_copies_that_do_not_wait_pass(gpu: SimulatedCuda) -> None:
    """A captured step begins with one, and its tail ends with one."""
    pinned = torch.ones(6).pin_memory()
    values = torch.zeros(6, device="cuda")
    with torch.inference_mode(), NoWaiting():
        values.copy_(pinned, non_blocking=True)
        pinned.copy_(values, non_blocking=True)
        values.to("cpu", non_blocking=True)


def test_another_thread_may_wait_meanwhile(gpu: SimulatedCuda) -> None:
    """Torch's own mode is the whole process's: a second model's step would fail while the first one captures."""
    inside, waited = threading.Event(), threading.Event()
    outcome: list[object] = []

    def second_model() -> None:
        with SimulatedCuda():
            inside.wait(20)
            try:
                outcome.append(torch.ones(3, device="cuda").sum().item())
            except RuntimeError as error:
                outcome.append(error)
            waited.set()

    values = torch.ones(4, device="cuda")
    runs = []

    def work() -> torch.Tensor:
        runs.append(1)
        if len(runs) == 2:  # the run in which waiting is an error
            inside.set()
            assert waited.wait(20)
        return values + 1

    thread = threading.Thread(target=second_model)
    thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay = GraphRecorder(values.device, True).record(work)
    thread.join()
    assert outcome == [3.0] and len(runs) == 3
    assert replay().tolist() == [2.0] * 4
