"""Waits until servers are as a test expects them."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx


def eventually(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it becomes true in time; a connection that fails is a no."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if true():
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    return False
