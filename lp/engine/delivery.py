"""How a text reaches the caller: tokens streamed step by step, when they end the text, and what each step took."""

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
    """Delivers one text.

    Args:
        request: the checked call.
        context: who this rank is, and which ranks share its steps.
        timer: splits the steps' time, and leaves the callbacks' out.
        failures: what fails on this rank alone.

    Attributes:
        num_kept: new tokens to return.
        stopped_by: what of some rank's message ended the text.
        stats: what each step took.
        thread_s: seconds of this thread in the last step.
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
        """Why this rank wants all to stop."""
        pending = self.failures.pending_stop
        return pending | Stop.INTERRUPTED if self.request.signals.requested else pending

    def stop(self, stop: Stop, length: int, tokens: Sequence[int]) -> Stop:
        """Some rank wants to stop: its step's tokens are dropped, those before it are returned.

        Args:
            stop: why any rank wants it.
            length: tokens to return, where rank 0 has found the end of the text.
            tokens: generated before the step.
        """
        self.stopped_by = stop
        end_of_text = stop & ~(Stop.INTERRUPTED | Stop.FAILED)
        self.num_kept = length if end_of_text else len(tokens)
        return end_of_text or Stop.INTERRUPTED

    def deliver(self, tokens: Sequence[int], step: StepStats) -> Stop:
        """Stream the step's tokens, decide whether they end the text, and note what the step took.

        Args:
            tokens: all that have been generated.
            step: what was computed, without the seconds.
        """
        self.thread_s = self.timer.thread_s()  # now: the user's own code comes next
        reason = self._stream(tokens, step.accepted + 1)
        forward_s, exchange_s, host_s = self.timer.seconds()
        self.stats.append(step._replace(forward_s=forward_s, exchange_s=exchange_s, host_s=host_s))
        return reason

    def _stream(self, tokens: Sequence[int], num_new: int) -> Stop:
        """Stream the newest tokens and decide whether they end the text.

        What only this rank knows (a criterion, which may look at the clock; a failure) goes into the next header.
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
            return reason  # every rank has the same: a failure in the last step must not wait for ranks that have ended
        self.failures.pending_stop = reason or (Stop.FAILED if failed else Stop.NONE)
        return Stop.NONE
