"""Prints the lowest release of every range in pyproject.toml, as constraints for pip.

`python scripts/lowest_versions.py`; what has no lower bound is left to pip.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def lowest(requirements: list[str]) -> list[str]:
    """Of each that has a lower bound: `name==bound`, sorted, each once."""
    bounds = {
        requirement.name: specifier.version
        for requirement in map(Requirement, requirements)
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    return [f"{name}=={bounds[name]}" for name in sorted(bounds)]


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    print(*lowest([*project["dependencies"], *extras]), sep="\n")


if __name__ == "__main__":
    main()
