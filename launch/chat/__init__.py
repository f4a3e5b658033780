"""`lp chat`: talk to a model at a terminal, or through a pipe.

With several ranks, rank 0 reads the keyboard and prints. It sends each line to all ranks, which do the same with it, so
that all have the same history. `--cfg job` shows the keys.
"""

from .conversation import chat

__all__ = ["chat"]
