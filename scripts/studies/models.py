"""The tables of docs/reference/models.md, which it writes: every tiny model and every mapped type, run as the tests do.

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
    from tests.mapped import mapped_page

    torch.set_num_threads(1)
    for make_page in (page, mapped_page):  # each replaces its own part
        PAGE.write_text(make_page(), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
