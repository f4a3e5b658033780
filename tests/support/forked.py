"""Ranks that are forked from a process which has imported what they need: a start of its own costs each seconds.

They are processes over gloo all the same. What torchrun adds, tests of launches see: `Processes.torchrun`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

PRELOADED = [
    "tests.support.workers.cases",
    "tests.support.workers.shards",
    "transformers.models.llama.modeling_llama",
]


@dataclass(frozen=True)
class Launch:
    """The ranks of one launch, and where their output goes."""

    processes: list[BaseProcess]
    logs: list[Path]
    store: dist.TCPStore  # the ranks meet here; torchrun's agent would hold it

    def output(self) -> str:
        """What all ranks have said so far, on both streams."""
        return "".join(log.read_text() for log in self.logs if log.exists())

    def goes_on(self) -> bool:
        """Whether no rank has ended."""
        return all(process.is_alive() for process in self.processes)

    def wait(self, timeout_s: float = 120) -> list[int]:
        """The exit codes of all ranks, each of which must end by itself."""
        end = time.monotonic() + timeout_s
        for rank, process in enumerate(self.processes):
            process.join(max(end - time.monotonic(), 0))
            assert process.exitcode is not None, f"rank {rank} goes on\n{self.output()}"
        return [process.exitcode or 0 for process in self.processes]

    def check(self, timeout_s: float = 120) -> None:
        """Wait for the end of all ranks without a failure."""
        assert set(self.wait(timeout_s)) == {0}, self.output()


class Forked:
    """Starts ranks, and kills at the end those that are left."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.launches: list[Launch] = []

    def start(
        self, ranks: int, main: Callable[..., None], folder: Path, *args: object, env: dict[str, str] | None = None
    ) -> Launch:
        """Call `main(folder, *args)` on every rank, with torchrun's variables and `env`."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "CUDA_VISIBLE_DEVICES": "", **(env or {})}
        launch = Launch([], [folder / f"{rank}.log" for rank in range(ranks)], store)
        self.launches.append(launch)
        for rank, log in enumerate(launch.logs):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = self.context.Process(target=_rank, args=(own, log, main, folder, *args))
            process.start()
            launch.processes.append(process)
        return launch

    def kill(self) -> None:
        """End all that is left."""
        for process in (process for launch in self.launches for process in launch.processes):
            process.kill()
            process.join()


def _rank(env: dict[str, str], log: Path, main: Callable[..., None], *args: object) -> None:
    os.environ.update(env)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(*args)


@pytest.fixture
def forked() -> Iterator[Forked]:
    """Starts ranks, which are all killed when the test ends, however it ends."""
    started = Forked()
    try:
        yield started
    finally:
        started.kill()
