"""One lock for each model, held while threads change what this package keeps on the model, such as its runners.

Threads that decode with one model share its lock. Ranks that run as threads of one process and divide a model each hold
their own part of it, and so take different locks. This is needed: while one rank holds a lock, it may wait for the
others in a collective.
"""

from __future__ import annotations

import threading
from typing import Any

_NAME = "_lp_lock"  # attribute of the model


class _Kept(dict[str, Any]):
    """The lock of a model; a copy of the model has one of its own, and a saved one none."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()

    def __deepcopy__(self, memo: object) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[()]]:
        return dict, ()  # so that a saved model can be loaded without this package


def lock_of(model: Any) -> threading.RLock:
    """Get the lock that guards what this package keeps on a model, such as its runners.

    A thread that holds the lock may take it again.
    """
    kept = vars(model).get(_NAME)
    if not isinstance(kept, _Kept):
        if isinstance(kept, dict):  # of a saved model
            vars(model).pop(_NAME, None)
        kept = vars(model).setdefault(_NAME, _Kept())  # at once, whatever other threads do
    lock: threading.RLock = kept.lock
    return lock
