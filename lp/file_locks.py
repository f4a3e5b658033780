"""A file or a folder that one process at a time may use is locked by it, and free again once the process has ended."""

from __future__ import annotations

import fcntl


def lock(handle: int) -> bool:
    """Keep other processes from a file or a folder until it is closed; False where another one has it.

    Some file systems have no locks: there, nobody is kept from it.

    Args:
        handle: number of the open file.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
