"""`python -m launch.bench.tables`, where installed `python -m lp.launch.bench.tables`: the tables by name."""

from __future__ import annotations

from . import main

if __name__ == "__main__":
    main()
