"""Ranks with a GPU each, as threads: the code of ranks that are processes, over an NCCL that refuses host tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

import lp.parallel.device_waits as waits_module
import lp.parallel.rank_group as group_module
import lp.parallel.replica as replica_module
from lp.parallel.context import ParallelContext
from lp.parallel.device_waits import DeviceWaits
from lp.parallel.rank_group import ProcessRankGroup, RankGroup
from lp.parallel.replica import ProcessReplica
from tests.support.simulated_cuda.simulation import CudaTensor, Hang, SimulatedCuda, simulation

T = TypeVar("T")
TIMEOUT_S = 60.0


class Gone(BaseException):
    """A body raises it: the rank's process is killed. NCCL's collectives wait for it from then on, gloo's fail."""


def run_on_gpus(
    world_size: int,
    body: Callable[[ParallelContext, SimulatedCuda], T],
    tp: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> list[T]:
    """Run `body(context, gpu)` for every rank, each in a thread with a GPU of its own, within `simulated_cuda()`.

    Args:
        world_size: ranks.
        body: what each of them does; may raise `Gone`.
        tp: all of them hold one model between them.
        timeout_s: how long the host waits for its device.

    Raises:
        Exception: what the first failing rank raised; the others are released.
    """
    gloo = _Meeting(world_size)
    nccl = _Meeting(world_size, gloo)
    model = _Meeting(world_size, gloo)
    results: list[Any] = [None] * world_size
    errors: list[tuple[bool, int, BaseException]] = []
    gone: list[int] = []

    def roll_call(*args: Any) -> str:
        return f"rank {', '.join(map(str, gone))} does not answer" if gone else "a rank has failed"

    def run(rank: int) -> None:
        device = torch.device("cuda", rank)
        own_gpu = SimulatedCuda(rank)
        group: Any = _Nccl(nccl, rank, device, own_gpu)
        messages: Any = _Gloo(gloo, rank)
        home = rank, world_size
        waits = DeviceWaits(timeout_s)
        waits.groups.append(group)
        ranks = ProcessRankGroup(rank, world_size, (), [], device, "nccl", group, messages, home, waits)
        limits = timeout_s, timeout_s
        context = ParallelContext(rank, world_size, rank, device, "nccl", ranks=ranks, steps=ranks, timeouts=limits)
        if tp:
            own: Any = _Nccl(model, rank, device, own_gpu)
            waits.groups.append(own)
            replica = ProcessReplica(rank, world_size, own, ranks)
            context = replace(context, steps=RankGroup(), replica=replica, replica_ranks=ranks)
        try:
            with own_gpu as gpu:
                results[rank] = body(context, gpu)
        except BaseException as error:
            if isinstance(error, Gone):
                gone.append(rank)
            else:
                errors.append((_released(error), rank, error))
            for meeting in (nccl, model, gloo):
                meeting.lose(gone)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    distributed = _Distributed()
    with (
        patch.multiple(group_module, dist=distributed, announce=_nothing, roll_call=roll_call, set_timeout=_nothing),
        patch.object(waits_module, "atexit"),  # of this process
        patch.multiple(replica_module, dist=distributed),
    ):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise min(errors, key=lambda found: found[:2])[2]
    return results


def _released(error: BaseException | None) -> bool:
    """Whether it is only that another rank has failed."""
    seen: set[int] = set()  # causes may go round in a circle
    while error is not None and id(error) not in seen:
        if isinstance(error, threading.BrokenBarrierError):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


class _Meeting:
    """Where the ranks of a group meet and trade tensors, as a collective does.

    Args:
        world_size: ranks.
        on_host: where the hosts of these ranks meet, if these meet on their devices: a rank that has come there has
            started all that its device does, so that those which wait for it on their devices wait in vain.

    Attributes:
        gone: ranks that will not come any more.
    """

    def __init__(self, world_size: int, on_host: _Meeting | None = None) -> None:
        self.barrier = threading.Barrier(world_size)
        self.given = [torch.empty(0)] * world_size
        self.gone: list[int] = []
        self.waiting: set[int] = set()
        self.lock = on_host.lock if on_host else threading.Lock()
        self.on_host = on_host
        self.on_devices: list[_Meeting] = []
        if on_host:
            on_host.on_devices.append(self)

    def lose(self, ranks: list[int]) -> None:
        """These ranks will not come any more."""
        self.gone = self.gone or ranks
        self.barrier.abort()

    def _come(self, rank: int) -> None:
        with self.lock:
            self.waiting.add(rank)
            if self.on_host and self.on_host.waiting:
                self.lose([*self.on_host.waiting])
            for meeting in self.on_devices:
                if meeting.waiting:
                    meeting.lose([rank])

    def trade(self, rank: int, mine: torch.Tensor) -> list[torch.Tensor]:
        """Give a tensor, wait for all ranks, and get every rank's, on the host."""
        self.given[rank] = mine.clone()
        self._come(rank)
        try:
            self.barrier.wait(TIMEOUT_S)
        finally:
            with self.lock:
                self.waiting.discard(rank)
        everyone = list(self.given)
        with contextlib.suppress(threading.BrokenBarrierError):  # a rank that has all of it may be gone before others
            self.barrier.wait(TIMEOUT_S)
        if len({(tensor.shape, tensor.dtype) for tensor in everyone}) > 1:
            raise RuntimeError("ranks give a collective tensors of different shapes, with which NCCL hangs")
        return everyone


class _Nccl:
    """The group of steps: takes tensors on the rank's GPU alone, and does not let the host wait."""

    def __init__(self, meeting: _Meeting, rank: int, device: torch.device, gpu: SimulatedCuda) -> None:
        self.meeting = meeting
        self.rank = rank
        self.device = device
        self.gpu = gpu

    def trade(self, raw: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor; where one has gone the device waits from here on, and nothing has a meaning."""
        try:
            return self.meeting.trade(self.rank, raw)
        except threading.BrokenBarrierError:
            if not self.meeting.gone:
                raise
            self.gpu.hang = self.gpu.hang or Hang(f"a collective waits for rank {self.meeting.gone}")
            return [raw] * len(self.meeting.given)

    def _get_backend(self, device: torch.device) -> _Nccl:
        return self

    def abort(self) -> None:
        """Kernels that wait for other ranks end."""
        if self.gpu.hang:
            self.gpu.hang.ended = True

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values on the host.

        Raises:
            RuntimeError: it is not on the GPU, or has gaps.
        """
        if not isinstance(tensor, CudaTensor):
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if tensor.device != self.device:
            raise RuntimeError(f"rank {self.rank} has {self.device}, and gives a tensor on {tensor.device}")
        if not tensor.is_contiguous():
            raise RuntimeError("Tensors must be contiguous")
        return tensor.raw

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather every rank's tensor into `output`; a capture records it."""
        self.values(output)
        self.values(tensor)

        def gathered(target: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
            return target.copy_(torch.cat(self.trade(raw)).view(target.shape))

        simulation().run(gathered, (output, tensor), {}, [output])
        simulation().launched("all_gather")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum the tensor over all ranks, in place; a capture records it."""
        self.values(tensor)

        def summed(raw: torch.Tensor) -> torch.Tensor:
            return raw.copy_(torch.stack(self.trade(raw)).sum(0))

        simulation().run(summed, (tensor,), {}, [tensor])
        simulation().launched("all_reduce")

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        target = self.values(tensor)
        target.copy_(self.trade(target)[source])
        simulation().launched("broadcast")


class _Gloo:
    """The group of messages between steps: takes host tensors alone."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> _Done:
        for target, values in zip(outputs[0], self.meeting.trade(self.rank, _on_host(inputs[0])), strict=True):
            _on_host(target).copy_(values)
        return _Done()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self.meeting.trade(self.rank, _on_host(tensor))[source])


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, CudaTensor):
        raise RuntimeError("the group of messages is on the host, and is given a tensor on a GPU")
    return tensor


class _Done:
    def wait(self) -> None:
        """Nothing is left to wait for."""


class _Distributed:
    """Takes the place of torch.distributed, with what lp.parallel.rank_group uses of it."""

    distributed_c10d = dist.distributed_c10d

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, group: _Nccl) -> None:
        group.all_gather(output, tensor)

    def all_reduce(self, tensor: torch.Tensor, group: _Nccl) -> None:
        group.all_reduce(tensor)

    def broadcast(
        self, tensor: torch.Tensor, src: int | None = None, group: Any = None, group_src: int | None = None
    ) -> None:
        source = src if group_src is None else group_src
        assert source is not None
        group.broadcast(tensor, source)


def _nothing(*args: Any) -> None:
    """Takes the place of steps of a roll call, which threads have no use for."""
