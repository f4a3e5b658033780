"""The tables of models, which it writes: every tiny model and every mapped type, run as the tests do.

    python scripts/tables.py models

Needs a clone: the models are those of the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .harness import Command


@dataclass(kw_only=True)
class Models(Command):
    """Writes the tables of tested models into their page of the docs."""

    def run(self) -> None:
        from tests.support.architectures import PAGE, page  # of the clone alone
        from tests.support.image_matrix import image_page
        from tests.support.mapped import mapped_page
        from tests.support.quantised_matrix import quantised_page

        torch.set_num_threads(1)
        for make_page in (page, image_page, quantised_page, mapped_page):  # each replaces its own part
            PAGE.write_text(make_page(), encoding="utf-8")
        print(PAGE.read_text(encoding="utf-8"))
