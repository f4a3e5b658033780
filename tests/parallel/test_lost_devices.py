"""Ranks that are processes, one of which is killed while the other waits for its GPU: only the GPU is pretended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import lp
from launch.running.errors import reported
from tests.support.forked import Forked

TIMEOUT_S = 2.0


class _Never:
    """The event of a device on which a captured collective waits for a rank that is gone."""

    def query(self) -> bool:
        return False


def main(_folder: Path, tp: int) -> None:
    """Rank 1 is killed; rank 0 waits for its device, in a replica's sums or for the message, and ends as apps do."""
    context = lp.ParallelContext.from_env(timeout_s=TIMEOUT_S, tp=tp)
    with reported():
        try:
            context.share_text("both are here")
            if context.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            waiting = context.replica if tp > 1 else context.ranks
            waiting.wait_for(_Never())  # type: ignore[arg-type]
        finally:
            context.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_lost_rank_is_named_and_the_process_ends(forked: Forked, tmp_path: Path, tp: int) -> None:
    """Without a limit the process would hang until somebody ends it, and nobody would know which rank it was."""
    launch = forked.start(2, main, tmp_path, tp)
    started = time.monotonic()
    assert launch.wait(60) == [1, -signal.SIGKILL], launch.output()
    assert time.monotonic() - started < 40
    said = "error: rank 1 does not answer, so rank 0 stops (the GPU was not done with its work after 2 s)"
    assert said in launch.output(), launch.output()
