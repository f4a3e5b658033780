"""Plots and an HTML report of a folder that the benchmark or the scaling app wrote to: docs/benchmarks.md.

python scripts/tables.py report outputs/2026-01-31_12-00-00-4711
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..report import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)


def run(args: argparse.Namespace) -> None:
    for path in write_report(args.folder):
        print(path)
