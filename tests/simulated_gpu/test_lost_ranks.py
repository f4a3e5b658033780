"""A rank that is lost while the GPUs of others wait for it: it is named, and no process hangs.

A collective of NCCL never ends where a rank has gone. Torch watches those that it starts, and nobody those that a CUDA
graph replays.
"""

from __future__ import annotations

import copy
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

import lp
from lp.errors import CallsDiffer, RankFailed, RankLost
from lp.models.graph_recorder import GraphRecorder
from lp.models.tensor_parallel import divide
from lp.parallel import agreement, device_waits
from lp.parallel.agreement import Outcome
from lp.parallel.context import ParallelContext
from lp.parallel.device_waits import DeviceWaits
from lp.parallel.replica import ProcessReplica
from tests.support.simulated_cuda import SimulatedCuda, run_on_gpus
from tests.support.simulated_cuda.counts import CONFIG, NEW
from tests.support.simulated_cuda.ranks import Gone
from tests.support.simulated_cuda.simulation import HostHangs
from tests.support.tiny_models import tiny_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
TIMEOUT_S = 0.5


def lose_rank_1(tp: bool, capture: str, at: str) -> list[Any]:
    """What a rank meets that decodes with one that goes away in the second text, and how its GPU is then."""
    model = tiny_model(sharpness=2.0)
    wholes: list[Any] = [copy.deepcopy(model).to(f"cuda:{rank}") for rank in range(2)]

    def body(context: ParallelContext, own: SimulatedCuda) -> tuple[str, bool, bool]:
        part = divide(wholes[context.rank], context.replica) if tp else wholes[context.rank]
        decoder = lp.LookaheadDecoder(part, CONFIG, context, capture=capture)
        decoder.generate(IDS, NEW)

        passes, forward = itertools.count(1), decoder.runner.forward_trees

        def going(*args: Any, **keywords: Any) -> Any:
            if next(passes) == (2 if at == "prompt" else 7):  # the prompt takes four
                raise Gone
            return forward(*args, **keywords)

        if context.rank == 1:
            decoder.runner.forward_trees = going  # type: ignore[method-assign]
        with pytest.raises(RankLost) as lost:
            decoder.generate(IDS * 2, NEW, prefill_chunk=8)
        assert own.hang is not None
        return str(lost.value), own.hang.ended, context.ranks.lost

    return run_on_gpus(2, body, tp, TIMEOUT_S)


@pytest.mark.subset(4)
@pytest.mark.parametrize("at", ["prompt", "step"])
@pytest.mark.parametrize("capture", ["graph", "off"])
@pytest.mark.parametrize("tp", [True, False])
def test_a_lost_rank_is_named(tp: bool, capture: str, at: str, gpu: SimulatedCuda) -> None:
    """In a replica's sums, and in the message of ranks that share steps; the kernels that wait are ended."""
    found, nothing = lose_rank_1(tp, capture, at)
    said = "rank 1 does not answer, so rank 0 stops (the GPU was not done with its work after 0.5 s)"
    assert found[0].startswith(said) and found[1:] == (True, True) and nothing is None


def test_a_wait_without_a_limit_would_be_found(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the host waits as it does for work of its own."""
    monkeypatch.setattr(DeviceWaits, "until", lambda self, event: event.synchronize())
    with pytest.raises(HostHangs, match="waits for ever"):
        lose_rank_1(True, "graph", "step")


class _Never:
    """The event of a device that hangs."""

    def query(self) -> bool:
        return False


def test_the_limit_of_a_wait_can_be_changed_and_one_wait_is_the_last() -> None:
    """Setting up may take minutes; behind a wait that was given up, what the device leaves has no meaning."""
    waits, never = DeviceWaits(60), _Never()
    waits.timeout_s = 0.1
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"after 0\.1 s"):
        waits.until(never)  # type: ignore[arg-type]
    assert time.monotonic() - started < 5
    waits.timeout_s = 60
    with pytest.raises(RuntimeError, match="still waits for another rank"):
        waits.until(never)  # type: ignore[arg-type]


def test_other_threads_run_while_one_waits() -> None:
    """A server answers from other threads: a wait that kept the interpreter would stop them all."""
    waits, counted = DeviceWaits(0.5), 0

    def waiting() -> None:
        with pytest.raises(RuntimeError):
            waits.until(_Never())  # type: ignore[arg-type]

    thread = threading.Thread(target=waiting)
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)  # gives the interpreter away, and has to get it back
        counted += 1
    assert counted > 100


def test_a_device_that_cannot_be_freed_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort may wait for the kernel that never ends, and then nothing that touches the GPU returns."""
    ended: list[int] = []
    monkeypatch.setattr(device_waits, "ABORT_S", 0.05)
    monkeypatch.setattr(device_waits, "_abort", lambda groups: time.sleep(1))
    monkeypatch.setattr(device_waits, "_end_within", ended.append)
    waits = DeviceWaits(1)
    waits.abandon()
    waits.abandon()
    assert ended == [device_waits.EXIT_S] and waits.given_up


def test_a_process_that_hangs_at_its_end_is_ended() -> None:
    """Libraries wait for the device where Python no longer runs."""
    code = (
        "import atexit, time; from lp.parallel import device_waits as waits; atexit.register(time.sleep, 90); "
        "waits.EXIT_S = 1; waits.DeviceWaits(1).abandon()"
    )
    ran = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert ran.returncode == -signal.SIGALRM


def test_graphs_go_before_their_communicator(gpu: SimulatedCuda) -> None:
    """NCCL's abort waits for graphs that hold its collectives."""
    waits, graph = DeviceWaits(1), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        torch.ones(2, device="cuda")
    waits.graphs.add(graph)
    waits.abandon()
    with pytest.raises(RuntimeError, match="before a capture has ended"):
        graph.replay()


class _WarmUps:
    """Lets sums fail in the runs before a capture, on some ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: Collection[int], at: int) -> None:
        warm_up, all_reduce = GraphRecorder._warm_up, ProcessReplica.all_reduce
        sums: dict[int, int] = {}  # by rank, in the warm-up that is under way

        def warming_up(recorder: GraphRecorder, work: Callable[[], object]) -> None:
            sums[recorder._replica.rank] = 0
            try:
                warm_up(recorder, work)
            finally:
                del sums[recorder._replica.rank]

        def summed(replica: ProcessReplica, tensor: torch.Tensor) -> torch.Tensor:
            if replica.rank in sums:
                sums[replica.rank] += 1
                if sums[replica.rank] == at and replica.rank in failing:
                    raise MemoryError("no workspace\nand more")
            return all_reduce(replica, tensor)

        monkeypatch.setattr(GraphRecorder, "_warm_up", warming_up)
        monkeypatch.setattr(ProcessReplica, "all_reduce", summed)


def _decoded_by_a_replica(capture: str) -> list[Any]:
    model = tiny_model(sharpness=2.0)
    wholes: list[Any] = [copy.deepcopy(model).to(f"cuda:{rank}") for rank in range(2)]

    def body(context: ParallelContext, own: SimulatedCuda) -> list[int] | str:
        decoder = lp.LookaheadDecoder(divide(wholes[context.rank], context.replica), CONFIG, context, capture=capture)
        try:
            return decoder.generate(IDS, NEW).tokens
        except RankFailed as error:
            return str(error)

    return run_on_gpus(2, body, tp=True)


def test_a_rank_that_fails_amid_a_warm_up_ends_all(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next sum would be taken for the one that the others wait for, of other numbers, or of another size."""
    _WarmUps(monkeypatch, {1}, at=3)
    said = (
        "rank 1 failed while the ranks of its replica were warming up a step, so all of them stop "
        "(MemoryError: no workspace)"
    )
    assert _decoded_by_a_replica("auto") == [said, said]


def test_ranks_that_fail_alike_go_on_uncaptured(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the model's own code waits for the device: no rank has a sum that the others lack."""
    _WarmUps(monkeypatch, {0, 1}, at=3)
    expected = lp.AutoregressiveDecoder(tiny_model(sharpness=2.0)).generate(IDS, NEW).tokens
    assert _decoded_by_a_replica("auto") == [expected, expected]


def test_a_device_that_is_full_is_so_on_all_ranks(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank would give the text up, and the others go on without it, uncaptured, to wait for its next sum."""
    recorded = GraphRecorder._recorded

    def full(recorder: GraphRecorder, work: Callable[[], object]) -> Callable[[], object]:
        graph = recorded(recorder, work)
        if recorder._replica.rank == 1:
            raise torch.OutOfMemoryError("no room for 3 GiB")
        return graph

    monkeypatch.setattr(GraphRecorder, "_recorded", full)
    wholes: list[Any] = [copy.deepcopy(tiny_model(sharpness=2.0)).to(f"cuda:{rank}") for rank in range(2)]

    def body(context: ParallelContext, own: SimulatedCuda) -> str:
        model = divide(wholes[context.rank], context.replica)
        decoder = lp.LookaheadDecoder(model, CONFIG, context, capture="graph")
        try:
            return str(decoder.generate(IDS, NEW).tokens)
        except torch.OutOfMemoryError as error:
            return str(error)

    found = run_on_gpus(2, body, tp=True)
    assert found[1].startswith("no room for 3 GiB") and "rank 1: OutOfMemoryError: no room for 3 GiB" in found[0]


def test_a_rank_that_fails_amid_a_compiled_warm_up(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled does not count its sums; that one rank failed and another did not is enough."""

    def body(context: ParallelContext, own: SimulatedCuda) -> str:
        recorder = GraphRecorder(context.device, True, context.replica, compiled=True)
        values = torch.ones(3, device=context.device)

        def work() -> torch.Tensor:
            if context.rank:
                raise ValueError("not compiled")
            return values + 1

        with pytest.raises(RankFailed) as failed:
            recorder.record(work)
        return str(failed.value)

    for said in run_on_gpus(2, body, tp=True):
        assert said.startswith("rank 1 failed while") and said.endswith("(ValueError: not compiled)")


def test_what_ranks_say_of_their_outcomes(gpu: SimulatedCuda) -> None:
    """A cause that is too long is cut, within no letter; a rank that compares something else meanwhile is told so."""

    def body(context: ParallelContext, own: SimulatedCuda) -> list[Outcome]:
        cause = "OSError: " + "é" * 400 if context.rank else ""
        return agreement.outcomes(context.ranks, "capturing a step", Outcome(context.rank, cause))

    for found in run_on_gpus(2, body):
        assert found[0] == Outcome(0, "") and found[1].collectives == 1
        assert found[1].cause.startswith("OSError: éé") and 400 < len(found[1].cause.encode()) <= 440

    def parted(context: ParallelContext, own: SimulatedCuda) -> None:
        if context.rank:
            agreement.exchange(context.ranks, "making a decoder", [1])
        else:
            agreement.outcomes(context.ranks, "capturing a step", Outcome())

    with pytest.raises(CallsDiffer, match="rank 0 is capturing a step, rank 1 is making a decoder"):
        run_on_gpus(2, parted)
