"""The interface between the engine and a decoder: how a request begins, and which ranks share its decode steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from lp.budget.step_times import StepTimes
from lp.config import Exact, KVDtype
from lp.engine.decoder import Decoder
from lp.engine.generation import Beginning, Generation
from lp.engine.output import StepStats, StepTimer
from lp.engine.request import Request
from lp.models.kv_cache import StaticKVCache
from lp.models.runner import ModelRunner
from lp.parallel.context import ParallelContext


class StepDecoder(Decoder, ABC):
    """Base class of the decoders that the engine runs: several requests may share a decode step.

    Attributes:
        runner: computes the model's forward passes.
    """

    runner: ModelRunner

    @property
    def steps_with(self) -> ParallelContext:
        """The ranks that share the decode steps of a request."""
        return self.context

    @property
    @abstractmethod
    def most_step_tokens(self) -> int:
        """Most tokens that one sequence may have in a step on one rank, padding included."""

    @property
    def exact(self) -> Exact:
        """Whether this decoder's logits equal plain decoding's bit for bit (BITWISE), or up to rounding (TOKENS)."""
        return Exact.BITWISE if self.runner.widths else Exact.TOKENS

    @property
    def kv_dtype(self) -> KVDtype:
        """How this decoder's KV caches store keys and values: in the model's dtype (AUTO), or in 8 bits (INT8, FP8)."""
        return self.runner.kv_dtype

    @property
    def takes_adapters(self) -> bool:
        """Whether this decoder's `generate` accepts the argument `adapter`, a LoRA adapter for one request."""
        return True

    @property
    def step_times(self) -> StepTimes | None:
        """Seconds of a step by its number of tokens, by which token budgets choose that number; None if it is fixed."""
        return None

    def check(self, request: Request) -> None:
        """Check, before a request is queued, that all ranks were given the same call and settings.

        Args:
            request: this rank's call.

        Raises:
            ValueError: the ranks' calls differ.
        """

    @abstractmethod
    def begin(self, request: Request, texts: int = 1) -> Beginning:
        """Make the draft source and the token budget for a request, equal on every rank.

        Args:
            request: the checked call.
            texts: most sequences that a step may compute together.
        """

    @abstractmethod
    def generation(self, request: Request, beginning: Beginning, cache: StaticKVCache, timer: StepTimer) -> Generation:
        """Make the state of a request that begins, which the engine then advances step by step.

        Args:
            request: the checked call.
            beginning: draft source and token budget, from `begin`.
            cache: the request's KV cache.
            timer: measures the engine's steps.
        """

    def capture_steps(self, capture: Callable[[], None]) -> None:
        """Have CUDA graphs captured before a request's first step; every rank calls it, since one may wait for another.

        Args:
            capture: captures this rank's graphs.
        """
        capture()

    def ended(self, stats: list[StepStats]) -> None:
        """Called when a request has ended; the base class does nothing.

        Args:
            stats: statistics of the request's decode steps.
        """
