"""The entry point of `python -m launch.chat`."""

import sys

from ..cli import start

if __name__ == "__main__":
    start("chat", sys.argv[1:])
