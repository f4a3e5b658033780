"""Prints the lowest release of every range in pyproject.toml, as constraints for pip.

`python scripts/lowest_versions.py`; what has no lower bound is left to pip.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def lowest(requirements: list[str]) -> list[str]:
    """Constraints `name==bound`, sorted, one for each requirement that has a lower bound."""
    bounds = {}
    for requirement in requirements:  # no packaging: right after an environment was made it has pip alone
        specifiers = requirement.partition(";")[0]
        name, bound = re.match(r"[\w.-]+", specifiers), re.search(r">=\s*([\w.]+)", specifiers)
        if name and bound:
            bounds[name[0]] = bound[1]
    return [f"{name}=={bounds[name]}" for name in sorted(bounds)]


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    print(*lowest([*project["dependencies"], *extras]), sep="\n")


if __name__ == "__main__":
    main()
