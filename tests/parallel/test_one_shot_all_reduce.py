"""Sums in one kernel. Torch's needs GPUs: here it is one over gloo, or one that is missing or wrong on a rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

import lp
from lp.parallel.one_shot_all_reduce import MOST_BYTES, OneShotSum, one_shot_sum
from lp.parallel.replica import ProcessReplica
from tests.support.forked import Forked


def made(group: dist.ProcessGroup, device: torch.device, off_by: float = 0.0) -> OneShotSum:
    """A `OneShotSum` whose kernel is gloo's all-reduce; `off_by` is added to the sum, to plant a wrong kernel."""

    def kernel(shared: torch.Tensor, tensor: torch.Tensor, op: str, name: str) -> torch.Tensor:
        assert (shared.dtype, op, name) == (tensor.dtype, "sum", group.group_name)
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total + off_by

    return OneShotSum(torch.zeros(MOST_BYTES, dtype=torch.uint8), group.group_name, kernel)


def rank_main(_folder: Path) -> None:
    """What every rank does."""
    context = lp.ParallelContext.from_env(tp=2, one_shot_sums=True)
    replica, here = context.replica, torch.device("cpu")
    assert isinstance(replica, lp.parallel.replica.ProcessReplica) and replica.group
    assert replica.one_shot is None, "the CPU has no such kernel"
    object.__setattr__(replica, "one_shot", one_shot_sum(replica.group, here, made))
    small, odd = torch.full((2, 8), 1.0 + context.rank), torch.full((3,), 1.0 + context.rank)
    summed = replica.all_reduce(small)
    assert summed.tolist() == [[3.0] * 8] * 2 and small[0, 0] == 1 + context.rank, "by the kernel, in new memory"
    assert replica.all_reduce(odd) is odd and odd.tolist() == [3.0] * 3, "by the group"
    whole = torch.zeros(MOST_BYTES // 4 + 4)
    assert replica.all_reduce(whole) is whole, "by the group"
    wrong = one_shot_sum(replica.group, here, lambda *args: made(*args, off_by=float(context.rank)))
    assert wrong is None, "on the other rank too"

    def on_rank_0(*args: object) -> OneShotSum:
        if context.rank:
            raise RuntimeError("no such link")
        return made(*args)  # type: ignore[arg-type]

    assert one_shot_sum(replica.group, here, on_rank_0) is None, "on the other rank too"
    context.close()


def test_ranks_agree_on_the_kernel_and_its_sums(forked: Forked, tmp_path: Path) -> None:
    """A rank that sums otherwise, or by another call, would have other tokens, or wait for ever."""
    launch = forked.start(2, rank_main, tmp_path)
    launch.check()
    said = launch.output()
    assert "the device is cpu, not cuda" in said and "no such link" in said
    assert "its sums are not those of torch.distributed" in said and "another rank of the replica cannot" in said


def test_a_compiled_step_with_sums_is_compiled_once() -> None:
    """A count of sums that the compiled code reads would be another one in each step: torch compiles anew for it, which
    takes minutes, and gives up at the ninth."""

    def kernel(shared: torch.Tensor, tensor: torch.Tensor, op: str, name: str) -> torch.Tensor:
        return tensor * 2

    one_shot = OneShotSum(torch.zeros(MOST_BYTES, dtype=torch.uint8), "", kernel)
    replica = ProcessReplica(0, 2, one_shot=one_shot)
    values, counter = torch.ones(4), CompileCounter()

    def step() -> torch.Tensor:
        return replica.all_reduce(replica.all_reduce(values) + 1)

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=False)
    for _ in range(3):
        assert compiled().tolist() == [6.0] * 4
    assert counter.frame_count == 1
    replica.all_reduce(values)
    assert replica.started == 1
