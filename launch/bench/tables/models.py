"""Write the matrix of docs/models.md: run every tiny model, as tests/unit/test_architectures.py does.

python scripts/models_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.architectures import PAGE, page


def main() -> None:
    """Run the matrix and replace it on the page."""
    torch.set_num_threads(1)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
