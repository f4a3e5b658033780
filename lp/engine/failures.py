"""Exceptions on one rank among several: the other ranks must learn of them by a message, or they would wait in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lp.errors import RanksParted
from lp.models.kv_cache import CacheTooLarge
from lp.parallel.context import ParallelContext
from lp.parallel.message import Stop

T = TypeVar("T")


class Failures:
    """Keeps an exception that is raised on this rank while it works on a request, until the other ranks know of it.

    A message tells them.

    Args:
        context: who this rank is, and which ranks share its steps.
        announced: tells whether the other ranks that hold parts of this copy of the model (tensor parallelism) know of
            an exception already.
        explained: turns the exception for a KV cache that does not fit into the error that a user is shown.

    Attributes:
        failure: the exception that this rank has failed with; None if it has not failed.
        pending_stop: flags for this rank's next message that say why all ranks should end generation.
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
        """Whether this rank still computes forward passes for the request.

        After a failure it does so only under tensor parallelism, where the other ranks need its part of each pass.
        """
        return not self.failure or self.context.replica.size > 1

    def attempt(self, work: Callable[[], T], in_any_case: bool = False) -> T | None:
        """Call a function; if there are several ranks, keep its exception in `failure` instead of raising it.

        Args:
            work: function to call. After an earlier failure it is skipped, except under tensor parallelism, where other
                ranks need this rank's part of the work.
            in_any_case: call the function even after an earlier failure.

        Returns:
            The function's result; None if it failed or was skipped.

        Raises:
            Exception: the function's exception, if there is no other rank, or if other ranks of a tensor-parallel model
                would wait for this one without knowing of it.
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
        """Raise the exception kept in `failure`, if there is one; called when generation has ended on all ranks.

        Raises:
            BaseException: the exception that this rank has failed with.
        """
        if self.failure:
            try:
                raise self.failure
            finally:
                self.failure = None  # whose traceback has the text: both, and the cache, would stay until gc finds it
