"""What fails on this rank alone: the others learn it from its next message, or they would wait for their time-out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lp.errors import RanksParted
from lp.models.kv_cache import CacheTooLarge
from lp.parallel.context import ParallelContext
from lp.parallel.message import Stop

T = TypeVar("T")


class Failures:
    """Runs a text's work on this rank, and keeps what it failed with.

    Args:
        context: who this rank is, and which ranks share its steps.
        announced: whether the ranks of this replica know of an error on this one.
        explained: the error that a user is shown where the device has no room for the cache.

    Attributes:
        failure: what this rank has failed with.
        pending_stop: why this rank wants all to stop, until its next message.
    """

    def __init__(
        self,
        context: ParallelContext,
        announced: Callable[[Exception], bool],
        explained: Callable[[CacheTooLarge], Exception],
    ) -> None:
        self.context = context
        self.failure: BaseException | None = None
        self.pending_stop = Stop.NONE
        self._announced = announced
        self._explained = explained

    @property
    def computes(self) -> bool:
        """The text takes part in passes: where it has failed it does so for the other ranks of its replica alone."""
        return not self.failure or self.context.replica.size > 1

    def attempt(self, work: Callable[[], T], in_any_case: bool = False) -> T | None:
        """Do what may fail on this rank alone.

        Args:
            work: what to do.
            in_any_case: also where this rank has failed before.

        Returns:
            What the work returns; None where it failed, now or before.

        Raises:
            Exception: what the work raised, where there is no other rank, or where those of the replica don't know.
        """
        replica_computes = self.context.replica.size > 1  # whose ranks can't compute without this one
        try:
            if in_any_case or replica_computes or not self.failure:
                return work()
        except RanksParted:  # the others have it too
            raise
        except Exception as error:
            replica_waits = replica_computes and not self._announced(error)
            if self.context.alone or replica_waits:  # in the model: it learns that this rank has ended
                if isinstance(error, CacheTooLarge):
                    raise self._explained(error) from error
                raise
            self.failure = self._explained(error) if isinstance(error, CacheTooLarge) else error
            self.pending_stop |= Stop.FAILED
        return None

    def raise_failure(self) -> None:
        """Raise what this rank has failed with, if it has.

        Raises:
            BaseException: what it failed with.
        """
        if self.failure:
            try:
                raise self.failure
            finally:
                self.failure = None  # whose traceback has the text: both, and the cache, would stay until gc finds it
