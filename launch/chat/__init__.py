"""`lp chat`: talk to a model at a terminal, or through a pipe.

Among ranks, rank 0 reads and prints; every rank gets each line and does the same with it, so that all have one history.
`--cfg job` shows the keys.
"""

from .conversation import chat

__all__ = ["chat"]
