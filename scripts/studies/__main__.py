"""`python -m scripts.studies NAME`, as `python scripts/tables.py NAME`."""

from . import main

main()
