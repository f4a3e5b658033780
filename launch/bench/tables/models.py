"""The matrix of docs/models.md, which it writes: every tiny model, run as tests/unit/test_architectures.py does.

    python scripts/tables.py models

Needs a clone: the models are those of the tests.
"""

from __future__ import annotations

import argparse

import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(args: argparse.Namespace) -> None:
    from tests.architectures import PAGE, page  # of the clone alone

    torch.set_num_threads(1)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
