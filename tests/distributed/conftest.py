"""Ranks on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.forked import Forked


@pytest.fixture
def forked() -> Iterator[Forked]:
    """Starts ranks, which are all killed when the test ends, however it ends."""
    started = Forked()
    try:
        yield started
    finally:
        started.kill()
