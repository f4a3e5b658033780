"""What decoders share whose texts take steps of `lp.engine.decode_loop`: one text, or several together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from lp.engine.decode_loop import Beginning, Generation
from lp.engine.decoder import Decoder
from lp.engine.inputs import Prompt
from lp.engine.output import GenerationOutput, StepStats, StepTimer
from lp.engine.request import Request
from lp.errors import UserError
from lp.models.kv_cache import StaticKVCache
from lp.models.runner import ModelRunner
from lp.parallel.context import ParallelContext
from lp.sampling.params import SamplingParams

MAX_SEQUENCES = 8  # that take a step together, unless asked for otherwise


class StepDecoder(Decoder):
    """A decoder whose texts may share steps.

    Attributes:
        runner: of the model.
    """

    runner: ModelRunner

    @property
    @abstractmethod
    def steps_with(self) -> ParallelContext:
        """The ranks that share steps."""

    @property
    @abstractmethod
    def most_step_tokens(self) -> int:
        """Tokens that a step of one text may have on a rank."""

    def check(self, request: Request) -> None:
        """Compare the call over the ranks.

        Raises:
            ValueError: they were asked for different things.
        """

    @abstractmethod
    def begin(self, request: Request, texts: int = 1) -> Beginning:
        """What a text begins with: the same on every rank.

        Args:
            texts: that a step may compute together, at most.
        """

    @abstractmethod
    def generation(
        self, request: Request, beginning: Beginning, cache: StaticKVCache, timer: StepTimer | None = None
    ) -> Generation:
        """A text that is to be generated; arguments as of `Generation`."""

    def ended(self, stats: list[StepStats]) -> None:
        """Called after every text."""

    def generate_batch(
        self,
        inputs: Sequence[Prompt],
        max_new_tokens: int | Sequence[int] = 256,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        on_tokens: Callable[[int, list[int], int], None] | None = None,
        max_sequences: int = MAX_SEQUENCES,
        **options: Any,
    ) -> list[GenerationOutput]:
        """Generate from several prompts, whose texts take steps together; each gets the tokens that it gets alone.

        Args:
            inputs: prompts, each as in `generate`.
            max_new_tokens, sampling: as in `generate`, for all prompts or one for each. Where they are sampled with one
                seed, the noise of each is that of its index, as `sequence` of `generate`.
            on_tokens: called with (index of the prompt, new tokens, step of its text).
            max_sequences: that take a step together; the others wait.
            options: as in `generate`, for all prompts.

        Returns:
            The outputs, in the order of the prompts.

        Raises:
            Interrupted: as `generate`; `outputs` has all texts as far as they are, `finished` those that ended.
            ValueError: as `generate`.
        """
        from lp.engine.engine import Engine, run_batch  # which is made of this

        news = _one_each("max_new_tokens", max_new_tokens, len(inputs))
        samplings = _one_each("sampling", sampling, len(inputs))
        engine = Engine(self, max_sequences=max_sequences)
        first = options.pop("sequence", 0)
        handles = [
            engine.submit(
                prompt,
                new,
                own,
                on_tokens=None if on_tokens is None else lambda tokens, step, i=index: on_tokens(i, tokens, step),
                sequence=first + index,
                **options,
            )
            for index, (prompt, new, own) in enumerate(zip(inputs, news, samplings, strict=True))
        ]
        return run_batch(engine, handles)


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    """One for each prompt, of one for all or a list."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise UserError(f"{name} has {len(given)} values for {count} prompts; give one for all, or one for each")
    return list(given)
