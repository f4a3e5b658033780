"""Exceptions on one rank among several: the others must learn of them by a message, or they would wait in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lp.errors import RanksParted
from lp.models.kv_cache import CacheTooLarge
from lp.parallel.context import ParallelContext
from lp.parallel.message import Stop

T = TypeVar("T")


class Failures:
    """Keeps an exception in a text's work on this rank until the other ranks have learned of it from a message.

    Args:
        context: who this rank is, and which ranks share its steps.
        announced: tells whether the other ranks of this replica (tensor parallelism) know of an exception already.
        explained: makes the error that a user is shown if the device has no room for the cache.

    Attributes:
        failure: the exception that this rank has failed with; None if it has not.
        pending_stop: flags for this rank's next message: why all ranks should end the text.
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
        """Whether this rank still computes the text's forward passes.

        After a failure it does so only because the other ranks of its replica can't compute theirs without it.
        """
        return not self.failure or self.context.replica.size > 1

    def attempt(self, work: Callable[[], T], in_any_case: bool = False) -> T | None:
        """Call a function; among ranks, keep its exception in `failure` instead of raising it.

        Args:
            work: function to call. It is skipped if this rank has failed before and no replica needs it.
            in_any_case: call it even then.

        Returns:
            The function's result; None if it failed or was skipped.

        Raises:
            Exception: the function's exception, if there is no other rank, or if other ranks of the replica wait for
                this one without knowing of it.
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
        """Raise the kept exception, if there is one, once the text has ended on all ranks.

        Raises:
            BaseException: the exception that this rank has failed with.
        """
        if self.failure:
            try:
                raise self.failure
            finally:
                self.failure = None  # whose traceback has the text: both, and the cache, would stay until gc finds it
