"""The tables and figures of the docs: `python scripts/tables.py NAME` makes one.

Every module of this folder but `harness` and `places` is a study, and its file name is the study's name. It has

- a docstring, whose first line describes it in the list and whose whole is its `--help`;
- a subclass of `harness.Study`, which says what is measured, or of `harness.Command`, its last class of these.

A new study is one new file, and a line of `places`. parts/ has what several of them, or other scripts, share.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lp.errors import UserError

from .places import PLACES

if TYPE_CHECKING:
    from .harness import Command

FOLDER = Path(__file__).parent
OTHERS = ("__init__", "__main__", "harness", "places")


def table_names() -> list[str]:
    """All studies, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in OTHERS)


def docstring(name: str) -> str:
    """A study's docstring, read from its source: importing all of them takes seconds."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def study_of(name: str) -> type[Command]:
    """The study of a module of this folder."""
    from .harness import Command  # here, since it would make the list slow

    module = import_module(f".{name}", __name__)
    own = (each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__)
    return [each for each in own if issubclass(each, Command)][-1]


def main(args: Sequence[str] | None = None) -> None:
    """List the studies, or run the one that is named."""
    listing = "\n".join(
        f"  {name:18} {docstring(name).splitlines()[0]} ({PLACES.get(name, 'no page')})" for name in table_names()
    )
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        usage="%(prog)s NAME [options]", epilog=f"tables:\n{listing}", formatter_class=plain
    )
    parser.add_argument("name", nargs="?", choices=table_names(), metavar="NAME", help="which table")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="its own; NAME --help lists them")
    chosen = parser.parse_args(args)
    if chosen.name is None:
        parser.print_help()
        return
    study = study_of(chosen.name)
    own = study.parser(f"{parser.prog} {chosen.name}", docstring(chosen.name))
    try:
        command = study(**vars(own.parse_args(chosen.options)))
        with command.stack:
            command.run()
    except UserError as error:
        own.error(str(error))
    import torch  # here, since it would make the list slow

    from launch.bench.machine import machine_now, remarks

    for line in remarks([{"machine": machine_now(torch.device("cpu"), 1)}]):
        print(line, file=sys.stderr)  # the table may end with a line for programs
