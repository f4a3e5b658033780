"""The tables and figures of the docs, by name; without a name, the list of them.

    python scripts/tables.py                    # the list
    python scripts/tables.py exactness --help   # the options of one
    NPROC=2 bash torchrun.sh scripts.tables link

Each is one module of scripts/studies/.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.studies import main

if __name__ == "__main__":
    main()
