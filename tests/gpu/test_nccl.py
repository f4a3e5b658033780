"""Lookahead parallelism on GPUs: NCCL where every rank has one of its own, gloo where ranks share one."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import lp
from launch.running.errors import reported
from lp.models.tensor_parallel import divide
from lp.parallel.replica import ProcessReplica
from tests.conftest import Processes
from tests.support.forked import Forked
from tests.support.launches import check_cases, check_kill
from tests.support.simulated_cuda.counts import CONFIG, NEW
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
TIMEOUT_S = 10.0
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


def decodes_as_the_whole_model(context: lp.ParallelContext, whole: PreTrainedModel) -> None:
    """The ranks of a replica, whose steps and tails are captured with their sums: greedy and sampled text."""
    part = divide(copy.deepcopy(whole).to(context.device), context.replica)
    decoder = lp.LookaheadDecoder(part, CONFIG, context, capture="graph")
    for sampling in (None, lp.SamplingParams(temperature=0.8, seed=3)):
        alone = lp.AutoregressiveDecoder(whole, lp.ParallelContext.single("cpu"))
        expected = alone.generate(IDS, NEW, sampling).tokens
        for _ in range(2):  # the second one captures nothing more
            assert decoder.generate(IDS, NEW, sampling).tokens == expected
    captured = decoder.runner.captured
    assert captured is not None and any(step.tails for step in captured._steps.values())


def replica_main(_folder: Path, killed: bool) -> None:
    """A rank of a replica of captured steps, which ends as apps do; rank 1 is killed in a step, or none is."""
    context = lp.ParallelContext.from_env(tp=2, timeout_s=TIMEOUT_S)
    with reported():
        try:
            decodes_as_the_whole_model(context, tiny_model(sharpness=2.0))
            if killed:
                part = divide(tiny_model(sharpness=2.0).to(context.device), context.replica)
                decoder = lp.LookaheadDecoder(part, CONFIG, context, capture="graph")
                decoder.generate(IDS, NEW)
                decoder.generate(IDS, NEW, on_tokens=lambda tokens, step: _die(context, step))
        finally:
            context.close()


def _die(context: lp.ParallelContext, step: int) -> None:
    if context.rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)


@needs_two
@pytest.mark.parametrize("killed", [False, True])
def test_a_replica_of_captured_steps(tmp_path: Path, killed: bool) -> None:
    """NCCL waits for graphs that hold its collectives, at the end, and for a rank that is gone, for ever."""
    forked = Forked()
    try:
        launch = forked.start(2, replica_main, tmp_path, killed, env={"CUDA_VISIBLE_DEVICES": "0,1"})
        assert launch.wait(120) == ([1, -signal.SIGKILL] if killed else [0, 0]), launch.output()
        assert ("rank 1 does not answer" in launch.output()) == killed, launch.output()
    finally:
        forked.kill()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_one_gpu(processes: Processes, tmp_path: Path, ranks: int) -> None:
    """NCCL refuses two ranks on one GPU, and gloo gathers no GPU tensor."""
    backends, devices = check_cases(processes, tmp_path, ranks, 0, 8, {"CUDA_VISIBLE_DEVICES": "0"})
    assert (backends, devices) == ({"gloo"}, {"cuda:0"})
