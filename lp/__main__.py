"""`python -m lp` runs the command `lp`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

if __name__ == "__main__":
    # A clone that is not installed has the apps beside lp/, not in it.
    package = "lp.launch" if find_spec("lp.launch") else "launch"
    import_module(f"{package}.cli").program()
