"""What the engine knows of a decoder: how texts of it begin, and who shares their steps."""

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
    """A decoder whose texts may share steps.

    Attributes:
        runner: computes forward passes, and knows the model.
    """

    runner: ModelRunner

    @property
    def steps_with(self) -> ParallelContext:
        """The ranks that decode a text together."""
        return self.context

    @property
    @abstractmethod
    def most_step_tokens(self) -> int:
        """Tokens that a step of one text may have on a rank."""

    @property
    def exact(self) -> Exact:
        """The mode that its texts are made in."""
        return Exact.BITWISE if self.runner.widths else Exact.TOKENS

    @property
    def kv_dtype(self) -> KVDtype:
        """What its caches hold keys and values as."""
        return self.runner.kv_dtype

    @property
    def takes_adapters(self) -> bool:
        """Whether a text may choose an adapter."""
        return True

    @property
    def step_times(self) -> StepTimes | None:
        """Step times by which its texts decide how many tokens a step computes; None where they do not decide it."""
        return None

    def check(self, request: Request) -> None:
        """Compare the call over the ranks.

        Raises:
            ValueError: they were asked for different things.
        """

    @abstractmethod
    def begin(self, request: Request, texts: int = 1) -> Beginning:
        """What a text begins with: the same on every rank.

        Args:
            texts: most texts that a step may compute together.
        """

    @abstractmethod
    def generation(self, request: Request, beginning: Beginning, cache: StaticKVCache, timer: StepTimer) -> Generation:
        """A text that is to be generated; arguments as of `Generation`."""

    def capture_steps(self, capture: Callable[[], None]) -> None:
        """Capture a text's steps before its first one, by `capture`: the same call on every rank."""
        capture()

    def ended(self, stats: list[StepStats]) -> None:
        """Called after every text that has ended, with what its steps took."""
