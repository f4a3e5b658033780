"""torchrun for users: it divides the CPU threads among ranks, ends with the app's own exit code, and leaves no process.

    python -m launch.torchrun --standalone --nproc-per-node 2 -m launch.generate W=7    # options as torchrun takes them

torchrun itself ends every failure with code 1, two log lines and a traceback of its own on top of the ranks' output.
LOGLEVEL=INFO, or any other level, shows its log again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from lp.errors import UserError

from .config.arguments import STDIN, read_stdin

USER_ERROR = 2
# A rank that hangs in a collective ends no other way: a launch must end within 30 s of losing another rank.
GRACE_S = "15"
FORWARD = "LP_FORWARD"  # an environment variable: names of signals that go to the ranks, separated by commas
HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # by torchrun, which ends the ranks


def exit_code(code: int) -> int:
    """The exit code that a shell shows for a process: its own, or 128 + N where signal N ended it.

    Args:
        code: the process' own exit code, or -N after signal N, as subprocess gives it.
    """
    return code if code >= 0 else 128 - code


def of_ranks(codes: dict[int, int]) -> int:
    """Choose the exit code of a launch from those of its failed ranks: their code if all have the same one, else 1.

    Args:
        codes: exit code of each failed rank, by rank; -N after signal N. Ranks that SIGTERM ended do not count, because
            torchrun ends the other ranks with it when one fails.
    """
    causes = {code for code in codes.values() if code != -signal.SIGTERM} or {-signal.SIGTERM}
    return exit_code(causes.pop()) if len(causes) == 1 else 1


def forward(number: int, ends: bool) -> None:
    """Signal handler: pass a signal on to the ranks, which act on it; before there are ranks, end the launch.

    Args:
        number: the signal's number.
        ends: whether the signal ends the ranks. torchrun must then not start new ranks in their place, as it would
            under --max-restarts.
    """
    asked = children()
    signal_children(number)
    if not asked:
        sys.exit(exit_code(-number))
    if ends:
        threading.Thread(target=end_with, args=(asked, number), daemon=True).start()


def end_with(asked: set[str], number: int) -> None:
    """Wait until torchrun restarts ranks that a signal has ended, then kill the new ranks and end the launch.

    Args:
        asked: process ids of the ranks that got the signal.
        number: the signal's number; the launch ends with its exit code, 128 + number.
    """
    while not children() - asked:
        time.sleep(0.1)
    signal_children(signal.SIGKILL)
    os._exit(exit_code(-number))


def children() -> set[str]:
    """Process ids of the ranks that torchrun has started, as text; an empty set on systems without /proc."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")  # Linux only
    return {*listed.read_text().split()} if listed.exists() else set()


def signal_children(number: int) -> None:
    """Send a signal to every rank and to the processes that the rank has started.

    Args:
        number: the signal's number.
    """
    for pid in children():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid), number)  # torchrun gives every rank a session of its own


def main(args: list[str]) -> int:
    # Until torchrun has ranks to end, and a handler that ends them, Ctrl-C needs no traceback.
    """Launch ranks as torchrun does, and wait until they end.

    Args:
        args: torchrun's options, then the program and its arguments, as in ["--nproc-per-node", "2", "-m",
            "launch.chat"].

    Returns:
        The exit code of the ranks: 0 if all succeeded.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import main as torchrun

    options = get_args_parser().parse_args(args)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // int(options.nproc_per_node))))
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    names = [name for name in HANDLED if name in os.environ.get(FORWARD, "").split(",")]
    if names and hasattr(options, "signals_to_handle"):
        # A chat's ranks stop an answer and go on, a server's finish their texts: torchrun would end them.
        for name in names:
            signal.signal(signal.Signals[name], lambda number, frame: forward(number, "SIGTERM" in names))
        args = ["--signals-to-handle", ",".join(name for name in HANDLED if name not in names), *args]
    if "-" in options.training_script_args:  # a prompt, which every rank needs and one process can read
        try:
            os.environ[STDIN] = read_stdin()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return USER_ERROR
    if hasattr(options, "shutdown_timeout"):  # not in every torch that we take
        args = ["--shutdown-timeout", GRACE_S, *args]
    try:
        torchrun(args)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        code = of_ranks(codes)
        if code != USER_ERROR:
            print("torchrun.sh: exit codes of ranks:", codes, file=sys.stderr)
        return code
    except SignalException as error:
        return exit_code(-error.sigval)
    finally:
        signal_children(signal.SIGKILL)  # torchrun forgets its ranks when one more Ctrl-C interrupts its wait for them
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
