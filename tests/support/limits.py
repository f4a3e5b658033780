"""Bounds of the operating system on what this process may do."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """Within the block, the process may have so much of something.

    Args:
        what: RLIMIT_FSIZE of resource, bytes of a file, or RLIMIT_NOFILE: no file gets this number or a larger one.
        most: how much.
    """
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)
