"""Locks on files and folders that only one process at a time may use; a lock ends with its process."""

from __future__ import annotations

import fcntl


def lock(handle: int) -> bool:
    """Lock an open file or folder against other processes that call this function, until the file is closed.

    Some file systems have no locks; nothing is locked there, and the result is True.

    Args:
        handle: file descriptor.

    Returns:
        False if another process has the lock, else True.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
