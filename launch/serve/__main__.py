"""The entry point of `python -m launch.serve`, which starts the HTTP server."""

import sys

from ..cli import start

if __name__ == "__main__":
    start("serve", sys.argv[1:])
