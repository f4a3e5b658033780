"""Plots and an HTML report of a folder that launch.benchmark or launch.scaling wrote to.

python scripts/plot.py outputs/2026-01-31_12-00-00
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.bench.report import write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    try:
        for path in write_report(parser.parse_args().folder):
            print(path)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
