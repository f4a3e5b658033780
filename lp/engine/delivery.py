"""Hands generated tokens to the caller: streams each step's tokens, finds the end of the text, records step times."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from lp.engine.failures import Failures
from lp.engine.output import StepStats, StepTimer
from lp.engine.request import Request
from lp.errors import RanksParted
from lp.parallel.context import ParallelContext
from lp.parallel.message import Stop


class Delivery:
    """Hands the tokens generated for one request to its caller, and decides with the other ranks when generation ends.

    Args:
        request: the checked call, with the caller's callback and stopping criteria.
        context: who this rank is, and which ranks share its steps.
        timer: measures the parts of each step; time in the caller's callbacks does not count.
        failures: collects this rank's exceptions, such as one that the callback raised.

    Attributes:
        num_kept: how many of the generated tokens to return.
        stopped_by: flags from the messages of a step that ended generation before the step's tokens were used;
            Stop.NONE until then.
        stats: statistics, one entry for each decode step.
        thread_s: CPU seconds of this thread in the last step, without callbacks.
    """

    def __init__(self, request: Request, context: ParallelContext, timer: StepTimer, failures: Failures) -> None:
        self.request = request
        self.context = context
        self.timer = timer
        self.failures = failures
        self.num_kept = 0
        self.stopped_by = Stop.NONE
        self.stats: list[StepStats] = []
        self.thread_s = 0.0

    @property
    def wanted_stop(self) -> Stop:
        """Why all ranks should end generation, as flags for this rank's next message; Stop.NONE: it should continue."""
        pending = self.failures.pending_stop
        return pending | Stop.INTERRUPTED if self.request.signals.requested else pending

    def stop(self, stop: Stop, length: int, tokens: Sequence[int]) -> Stop:
        """End generation because a rank's message says so; the tokens sampled in this step are dropped.

        Args:
            stop: the flags that any rank's message has set.
            length: number of generated tokens to return, if rank 0 has found the end of the text.
            tokens: the tokens generated before this step.

        Returns:
            The flag that determines the finish reason.
        """
        self.stopped_by = stop
        end_of_text = stop & ~(Stop.INTERRUPTED | Stop.FAILED)
        self.num_kept = length if end_of_text else len(tokens)
        return end_of_text or Stop.INTERRUPTED

    def deliver(self, tokens: Sequence[int], step: StepStats) -> Stop:
        """Stream the tokens of a decode step, check whether they end the text, and record the step's times.

        Args:
            tokens: all generated tokens, this step's included.
            step: statistics of the step; its seconds are filled in here.

        Returns:
            Why generation ends now; Stop.NONE: it continues.
        """
        self.thread_s = self.timer.thread_s()  # now: the user's own code comes next
        reason = self._stream(tokens, step.accepted + 1)
        forward_s, exchange_s, host_s = self.timer.seconds()
        self.stats.append(step._replace(forward_s=forward_s, exchange_s=exchange_s, host_s=host_s))
        return reason

    def _stream(self, tokens: Sequence[int], num_new: int) -> Stop:
        """Stream the `num_new` newest tokens, and check whether they end the text.

        What this rank alone knows (the result of a criterion, which may look at the clock; a failure of a callback)
        does not end the text at once: other ranks learn it from the header of this rank's next message.
        """
        stopping = self.request.stopping
        alone = self.context.alone
        if not alone and stopping.criteria and not self.context.is_main:
            self.num_kept = len(tokens)
            return Stop.NONE
        reason = Stop.NONE
        try:
            with self.timer.callback if stopping.criteria else nullcontext():
                reason, self.num_kept = stopping.check(tokens, num_new)
            streamed = [*tokens[len(tokens) - num_new : self.num_kept]]
            if self.request.on_tokens and streamed:
                with self.timer.callback:
                    self.request.on_tokens(streamed, len(self.stats))
        except BaseException as error:
            if alone or isinstance(error, RanksParted):
                raise
            self.failures.failure = error
        failed = self.failures.failure is not None
        if alone or not (stopping.criteria or (failed and not reason)):
            return reason  # equal on all ranks, which end now: after the last step, no message could tell of a failure
        self.failures.pending_stop = reason or (Stop.FAILED if failed else Stop.NONE)
        return Stop.NONE
