"""torchrun as a user wants it: the threads shared out, the app's own exit code, no report, no process left behind.

    python -m launch.torchrun --standalone --nproc-per-node 2 -m launch.generate W=7    # what torchrun takes

torchrun itself ends every failure with code 1, two log lines and a traceback of its own on top of the ranks' output.
LOGLEVEL=INFO (or any other) brings its log back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

from lp.errors import UserError

from .arguments import STDIN, read_stdin

USER_ERROR = 2
# A rank that hangs in a collective ends no other way: a launch must end within 30 s of losing another rank.
GRACE_S = "15"


def exit_code(code: int) -> int:
    """The shell's code for a process that ended with `code`, negative after a signal."""
    return code if code >= 0 else 128 - code


def of_ranks(codes: dict[int, int]) -> int:
    """One exit code for the failed ranks: theirs where they agree, else 1. Those that torchrun ended do not count."""
    causes = {code for code in codes.values() if code != -signal.SIGTERM} or {-signal.SIGTERM}
    return exit_code(causes.pop()) if len(causes) == 1 else 1


def signal_children(number: int) -> None:
    """Send a signal to every rank."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")  # Linux only
    for pid in children.read_text().split() if children.exists() else []:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid), number)  # torchrun gives every rank a session of its own


def main(args: list[str]) -> int:
    # Until torchrun has ranks to end, and a handler that ends them, Ctrl-C needs no traceback.
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
    if os.environ.get("LP_CTRL_C") == "forward" and hasattr(options, "signals_to_handle"):
        # A chat's ranks act upon Ctrl-C: they stop an answer and go on. torchrun would end them.
        signal.signal(signal.SIGINT, lambda number, frame: signal_children(number))
        args = ["--signals-to-handle", "SIGTERM,SIGHUP,SIGQUIT", *args]
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
