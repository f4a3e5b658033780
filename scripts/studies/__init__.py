"""The tables and figures of the docs: `python scripts/tables.py NAME` makes one.

Every module of this folder is a table, and its file name is the table's name. It has

- a docstring, whose first line describes it in the list of tables and whose whole is its `--help`;
- `add_arguments(parser)`, its options;
- `run(args)`, which measures and prints; a UserError ends it with one line.

A new table is one new file. Names that begin with an underscore are helpers.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lp.errors import UserError

FOLDER = Path(__file__).parent


def table_names() -> list[str]:
    """All tables, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def docstring(name: str) -> str:
    """Of a table, read from its source: importing all of them takes seconds."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def main(args: Sequence[str] | None = None) -> None:
    """List the tables, or make the one that is named."""
    listing = "\n".join(f"  {name:18} {docstring(name).splitlines()[0]}" for name in table_names())
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        usage="%(prog)s NAME [options]", epilog=f"tables:\n{listing}", formatter_class=plain
    )
    parser.add_argument("name", nargs="?", choices=table_names(), metavar="NAME", help="of a table")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="its own; NAME --help lists them")
    chosen = parser.parse_args(args)
    if chosen.name is None:
        parser.print_help()
        return
    table = import_module(f".{chosen.name}", __name__)
    own = argparse.ArgumentParser(
        prog=f"{parser.prog} {chosen.name}", description=docstring(chosen.name), formatter_class=plain
    )
    table.add_arguments(own)
    try:
        table.run(own.parse_args(chosen.options))
    except UserError as error:
        own.error(str(error))
    import torch  # here, since it would make the list slow

    from launch.bench.machine import machine_now, remarks

    for line in remarks([{"machine": machine_now(torch.device("cpu"), 1)}]):
        print(line, file=sys.stderr)  # the table may end with a line for programs
