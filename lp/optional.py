"""Detects optional packages, such as triton or peft."""

from __future__ import annotations

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Whether a package is installed, without importing it.

    Args:
        package: name of a top-level package, such as "triton".
    """
    try:
        return find_spec(package) is not None
    except ValueError:  # None stands in sys.modules: an import is blocked
        return False
