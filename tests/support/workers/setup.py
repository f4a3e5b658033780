"""A rank that takes longer than the time-out of a step: within `setting_up`, and then in a step.

torchrun -m tests.support.workers.setup FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import lp
from lp.checks import env_int
from lp.errors import RankLost
from lp.parallel.agreement import exchange

TIMEOUT_S = 2.0


def main(folder: Path) -> None:
    """Write what became of both waits."""
    rank = env_int("RANK", 0)
    (folder / f"{rank}.here").touch()  # importing torch takes one rank longer than TIMEOUT_S, where cores are busy
    while len([*folder.glob("*.here")]) < 2:
        time.sleep(0.05)
    context = lp.ParallelContext.from_env(timeout_s=TIMEOUT_S, setup_timeout_s=60)
    started = time.monotonic()
    with context.setting_up():
        if not context.is_main:
            time.sleep(2 * TIMEOUT_S)
    waited_s = time.monotonic() - started
    try:
        if not context.is_main:
            time.sleep(3 * TIMEOUT_S)
        exchange(context.ranks, "a step")
        ended = "met"
    except RankLost:
        ended = "lost"
    (folder / f"{rank}.ended").write_text(f"{waited_s} {ended}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
