"""Run a program that a model wrote, in a child process with limits of time and memory, and without a network."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lp.errors import UserError

PASSED = "passed"
TIME_LIMIT_S = 10.0
MEMORY_BYTES = 2 << 30
FILE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a program that a model wrote ended.

    Args:
        outcome: PASSED if the program ran to its end; else what ended it, as in "ZeroDivisionError" or "no end in 10
            s".
        files: whether the kernel kept the program from writing outside its folder.
    """

    outcome: str
    files: bool = False


def run_program(program: str, seconds: float = TIME_LIMIT_S, memory_bytes: int = MEMORY_BYTES) -> Outcome:
    """Run a Python program in a child process, until it ends or breaks a limit; limited.py lists what it cannot do.

    Args:
        program: source code; it passes if its last line is reached.
        seconds: most seconds of wall-clock time; CPU time is limited to about a second more.
        memory_bytes: largest address space, in bytes.

    Raises:
        UserError: programs cannot be run under limits on this machine.
    """
    # A word that the program cannot know: neither its output nor an early exit looks like the end of its tests.
    passed = secrets.token_hex(16)
    task = {"program": program, "passed": passed, "cpu_s": int(seconds) + 1}
    task |= {"memory_bytes": memory_bytes, "file_bytes": FILE_BYTES}
    command = [sys.executable, "-I", "-B", str(Path(__file__).with_name("limited.py"))]
    # ignore_cleanup_errors: a program may leave folders that nobody may enter.
    with tempfile.TemporaryDirectory(prefix="lp-program-", ignore_cleanup_errors=True) as folder:
        environment = {"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        try:
            ended = subprocess.run(
                command,
                input=json.dumps(task).encode(),
                capture_output=True,
                cwd=folder,
                env=environment,
                timeout=seconds,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return Outcome(outcome=f"no end in {seconds:g} s")
    if ended.stderr:  # written before the program began, as its own goes nowhere
        raise UserError(f"programs cannot be run under limits here: {ended.stderr.decode().strip().splitlines()[-1]}")
    try:
        verdict = json.loads(ended.stdout)
        outcome, files = str(verdict["outcome"]), bool(verdict["files"])
    except (ValueError, TypeError, KeyError):
        return Outcome(outcome=f"ended by itself (exit code {ended.returncode})")
    return Outcome(outcome=PASSED if outcome == passed else outcome, files=files)


def check_limits() -> bool:
    """Refuse a machine that cannot run programs under limits, before a model generates any.

    Returns:
        Whether the kernel also keeps programs from writing outside their folder (Landlock).

    Raises:
        ValueError: the kernel has no seccomp (Linux has it on x86-64 and aarch64), or even an empty program fails.
    """
    if sys.platform != "linux":
        raise UserError(f"pass_at_1 runs programs under Linux's seccomp, and this is {sys.platform}; leave it out")
    ended = run_program("")
    if ended.outcome != PASSED:
        raise UserError(f"an empty program does not pass here: {ended.outcome}; leave pass_at_1 out")
    return ended.files
