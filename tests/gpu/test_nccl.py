"""Lookahead parallelism on GPUs: NCCL where every rank has one of its own, gloo where ranks share one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lp
from lp.parallel.replica import ProcessReplica
from tests.conftest import Processes
from tests.support.forked import Forked
from tests.support.launches import check_cases, check_kill

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs two GPUs, this machine has {GPUS}")


@needs_two
def test_nccl_ranks_give_plain_greedy(processes: Processes, tmp_path: Path) -> None:
    """What works over gloo may still send host tensors, or wait for nothing, over NCCL."""
    backends, devices = check_cases(processes, tmp_path, GPUS, 0, 12, {})
    assert (backends, devices) == ({"nccl"}, {f"cuda:{rank}" for rank in range(GPUS)})


@needs_two
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_nccl_rank_ends_the_launch(processes: Processes, tmp_path: Path, victim: int) -> None:
    """A kernel that waits for a dead rank is not told, as a socket is."""
    check_kill(processes, tmp_path, 2, victim, {})


def one_shot_main(_folder: Path) -> None:
    """A rank of a replica sums by torch's symmetric memory, in a graph too."""
    context = lp.ParallelContext.from_env(tp=2, one_shot_sums=True)
    replica = context.replica
    assert isinstance(replica, ProcessReplica) and replica.one_shot, "the log says why"
    tensor = torch.full((48, 64), 1.0 + context.rank, dtype=torch.bfloat16, device=context.device)
    replica.all_reduce(tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        summed = replica.all_reduce(tensor)
    tensor.fill_(10.0 + context.rank)
    graph.replay()
    assert summed.unique().tolist() == [21.0]
    context.close()


@needs_two
def test_sums_in_one_kernel(tmp_path: Path) -> None:
    """Where GPUs reach each other's memory; else this fails, and says why."""
    forked = Forked()
    try:
        forked.start(2, one_shot_main, tmp_path, env={"CUDA_VISIBLE_DEVICES": "0,1"}).check()
    finally:
        forked.kill()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_one_gpu(processes: Processes, tmp_path: Path, ranks: int) -> None:
    """NCCL refuses two ranks on one GPU, and gloo gathers no GPU tensor."""
    backends, devices = check_cases(processes, tmp_path, ranks, 0, 8, {"CUDA_VISIBLE_DEVICES": "0"})
    assert (backends, devices) == ({"gloo"}, {"cuda:0"})
