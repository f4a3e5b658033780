"""Runs Triton kernels in Triton's interpreter."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from tests.conftest import Processes

FIXED = "3.7"  # the first Triton whose interpreter runs with numpy 2.5


def interpreted(module: str, *arguments: str) -> Any:
    """What a program of the tests prints as JSON, its kernels interpreted.

    It runs in a process of its own: whether kernels are interpreted is settled when Triton is imported.
    """
    import triton  # here: not every machine that runs tests has it

    if Version(triton.__version__) < Version(FIXED) and Version(np.__version__) >= Version("2.5"):
        pytest.skip(f"the interpreter of Triton {triton.__version__} fails with numpy {np.__version__}")
    processes = Processes()
    try:
        command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
        ran = processes.run(command, {"TRITON_INTERPRET": "1"}, timeout_s=900)
    finally:
        processes.kill()
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
