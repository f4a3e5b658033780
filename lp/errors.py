"""Errors that a caller may want to tell apart."""

from __future__ import annotations


class UserError(ValueError):
    """A setting, an input or a file that cannot be used; the message names the value, the limit and the remedy.

    It is a ValueError, so programs may catch either. The apps print it as one line, without a traceback.
    """


class RanksParted(RuntimeError):
    """The ranks can't go on together. Every rank has such an error, and none takes another step."""


class CallsDiffer(RanksParted):
    """Ranks are in different calls."""


class RankFailed(RanksParted):
    """A rank failed amid collectives of a replica, so that its next ones would meet other ones of the other ranks."""


class RankLost(RanksParted):
    """Another rank has ended, hangs, or came too late."""
