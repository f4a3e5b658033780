"""Write the tables of docs/models.md: run every tiny model, as tests/unit/test_architectures.py and test_mapped.py do.

python scripts/models_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.architectures import PAGE, page
from tests.mapped import mapped_page


def main() -> None:
    """Run the matrix, then every mapped type, and replace both on the page."""
    torch.set_num_threads(1)
    for made in (page, mapped_page):
        PAGE.write_text(made(), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
