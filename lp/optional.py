"""Packages that may be there or not."""

from __future__ import annotations

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Whether an import of a top-level package would find it; it is not imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # None stands in sys.modules: an import is blocked
        return False
