"""The entry point of `python -m launch.batch`, which answers a file of requests."""

import sys

from ..cli import start

if __name__ == "__main__":
    start("batch", sys.argv[1:])
