"""`python -m lp` runs the command `lp`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def apps() -> str:
    """Name of the package of the apps that belong to this `lp`.

    It is `lp.launch` where lp is installed. A clone that is not installed has the apps beside lp/, as `launch`; so has
    one that is not the clone from which lp is installed.
    """
    found = find_spec("lp.launch")
    folder = Path(__file__).parent
    belongs = found is not None and Path(found.origin or "").parent.parent in (folder, folder.parent)
    return "lp.launch" if belongs else "launch"


if __name__ == "__main__":
    import_module(f"{apps()}.cli").main()
