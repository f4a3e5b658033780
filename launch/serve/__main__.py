"""`python -m launch.serve`."""

import sys

from ..cli import start

if __name__ == "__main__":
    start("serve", sys.argv[1:])
