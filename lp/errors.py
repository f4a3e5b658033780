"""Exceptions that a caller may want to tell apart: a user's mistake, and ranks that can't continue together."""

from __future__ import annotations


class UserError(ValueError):
    """A setting, an input or a file that cannot be used; the message names the value, the limit and the remedy.

    It is a ValueError, so programs may catch either. The apps print it as one line, without a traceback.
    """


class RanksParted(RuntimeError):
    """The ranks can't continue together: every rank raises it or one of its subclasses, and none takes another step."""


class CallsDiffer(RanksParted):
    """Ranks have made different calls, such as `generate` on one rank and `Engine` on another."""


class RankFailed(RanksParted):
    """A rank failed between collectives of a tensor-parallel model: its later ones would not match the others'."""


class RankLost(RanksParted):
    """Another rank has exited, hangs, or did not come to a collective in time."""
