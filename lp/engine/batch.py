"""A fixed batch of prompts, by an engine that is made for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lp.engine.engine import MAX_SEQUENCES, Engine, Handle
from lp.engine.inputs import Prompt
from lp.engine.interrupts import Interrupted
from lp.engine.output import GenerationOutput
from lp.engine.step_decoder import StepDecoder
from lp.errors import UserError
from lp.sampling.params import SamplingParams


class BatchDecoder(StepDecoder):
    """A decoder that generates one text, or several together."""

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
        return _outputs(engine, handles)


def _outputs(engine: Engine, handles: Sequence[Handle]) -> list[GenerationOutput]:
    """The outputs of all texts of an engine; they end when one of them fails.

    Raises:
        Interrupted: as of `BatchDecoder.generate_batch`.
        BaseException: what a text failed with.
    """
    engine.run(stops_at_failure=True)
    for handle in handles:
        engine.cancel(handle)  # if it has not ended
    outputs = [handle.result() for handle in handles]
    cut = [output for output in outputs if output.finish_reason in ("interrupted", "cancelled")]
    if not cut and not engine.signal:
        return outputs
    error = Interrupted((cut or outputs)[0], engine.signal)
    error.outputs = outputs
    error.finished = [output for output in outputs if output not in cut]
    raise error


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    """One for each prompt, of one for all or a list."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise UserError(f"{name} has {len(given)} values for {count} prompts; give one for all, or one for each")
    return list(given)
