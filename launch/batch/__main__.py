"""The entry point of `python -m launch.batch`."""

import sys

from ..cli import start

if __name__ == "__main__":
    start("batch", sys.argv[1:])
