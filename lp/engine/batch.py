"""A fixed batch of prompts, by an engine that is made for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

from lp.checks import check_callback, check_int, check_kind
from lp.engine.core import EngineCore, Handle
from lp.engine.engine import MAX_SEQUENCES, MOST_SEQUENCES, Engine, slots_within_memory
from lp.engine.inputs import Prompt, prompt_ids
from lp.engine.interrupts import Interrupted
from lp.engine.memory import remedy_named
from lp.engine.output import GenerationOutput
from lp.engine.request import Request
from lp.engine.step_decoder import StepDecoder
from lp.errors import UserError
from lp.models.kv_pool import KVPool
from lp.models.loader import context_limit
from lp.sampling.params import SamplingParams
from lp.waits import waiting

OnBatchTokens = Callable[[int, list[int], int], None]  # index of the prompt, new tokens, step of its text


class BatchDecoder(StepDecoder):
    """A decoder that generates one text, or several together."""

    def generate_batch(
        self,
        inputs: Sequence[Prompt | Mapping[str, Any]],
        max_new_tokens: int | Sequence[int] = 256,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        on_tokens: OnBatchTokens | None = None,
        max_sequences: int = MAX_SEQUENCES,
        **options: Any,
    ) -> list[GenerationOutput]:
        """Generate from several prompts, whose texts take steps together; each gets the tokens that it gets alone.

        Args:
            inputs: prompts, each as in `generate`, or what a processor gives for one: its token ids and images by name.
            max_new_tokens, sampling: see `generate`; one for all prompts, or one for each. Where they are sampled with
                one seed, the noise of each is that of its index, as `sequence` of `generate`.
            on_tokens: called with (index of the prompt, new tokens, step of its text).
            max_sequences: most texts that take a step together; the others wait.
            options: other arguments of `generate`, for all prompts.

        Returns:
            The outputs, in the order of the prompts.

        Raises:
            Interrupted: as `generate`; `outputs` has all texts as far as they are, `finished` those that ended.
            ValueError: as `generate`.
        """
        calls = calls_of_batch(inputs, max_new_tokens, sampling, on_tokens, options)
        return generate_together(self, calls, max_sequences)

    def _generate(self, request: Request) -> GenerationOutput:
        """The output of a batch of one, whose cache takes its buffers in the first pass."""
        self.check(request)
        slots = request.limit + 1 + self.most_step_tokens
        pool = KVPool({}, slots, self.runner.cache_without_buffers)
        handle = Handle(request)
        with EngineCore(self, pool, 1, request.prefill_chunk, False, request.signals) as core:
            core.waiting.append(handle)
            core.admit()  # which may capture steps, and shows it
            with waiting("reading the prompt", num_tokens := len(request.prompt) - 1, "tokens") as wait:
                while handle.num_cached < num_tokens and core.step():
                    wait.done = handle.num_cached
            while core.step():
                pass
        try:
            return handle.result()
        finally:
            handle.error = None  # whose traceback has this frame, and so the cache


def calls_of_batch(
    inputs: Sequence[Prompt | Mapping[str, Any]],
    max_new_tokens: int | Sequence[int],
    sampling: SamplingParams | Sequence[SamplingParams | None] | None,
    on_tokens: OnBatchTokens | None,
    options: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The arguments of `generate` for each prompt of a batch, by name.

    Args:
        inputs, max_new_tokens, sampling, on_tokens, options: see `BatchDecoder.generate_batch`.

    Raises:
        ValueError: as many values as prompts are wanted, and there are more or fewer.
    """
    check_kind("inputs", inputs, Sized, "a list of prompts")
    check_callback("on_tokens", on_tokens, "a function of (prompt, new tokens, step), or None")
    first = check_int("sequence", options.get("sequence", 0), 0, 2**63 - 1, "number the sequences of a batch from 0")
    news = _one_each("max_new_tokens", max_new_tokens, len(inputs))
    samplings = _one_each("sampling", sampling, len(inputs))
    options = {name: [*value] if isinstance(value, Iterator) else value for name, value in options.items()}
    calls: list[dict[str, Any]] = []
    for index, (prompt, new, own) in enumerate(zip(inputs, news, samplings, strict=True)):
        given = {**prompt} if isinstance(prompt, Mapping) and "input_ids" in prompt else {"input_ids": prompt}
        if others := sorted({"max_new_tokens", "sampling", "sequence", "on_tokens", *options} & given.keys()):
            raise UserError(f"prompt {len(calls)} has {others[0]!r}; give it beside the prompts, not among them")
        call = {**options, **given, "max_new_tokens": new, "sampling": own, "sequence": first + index}
        if on_tokens is not None:
            call["on_tokens"] = partial(on_tokens, index)
        calls.append(call)
    return calls


@remedy_named()
def generate_together(
    decoder: StepDecoder, calls: Sequence[Mapping[str, Any]], max_sequences: int = MAX_SEQUENCES
) -> list[GenerationOutput]:
    """The outputs of several calls; all end when one of them fails.

    Args:
        calls: arguments of `generate`, by name.
        max_sequences: most texts that take a step together.

    Raises:
        Interrupted: as of `BatchDecoder.generate_batch`; where a text has failed too, that is the cause.
        BaseException: what a text failed with.
    """
    if not calls:
        return []
    max_sequences = check_int("max_sequences", max_sequences, 1, math.inf, f"try {MAX_SEQUENCES}")
    context = context_limit(decoder.model) or math.inf
    lengths = []
    for call in calls:
        new = check_int("max_new_tokens", call["max_new_tokens"], 1, math.inf, "ask for at least one token")
        lengths.append(int(min(len(prompt_ids(decoder.model, call["input_ids"])) + new, context)))
    slots = sorted((length + 1 + decoder.most_step_tokens for length in lengths), reverse=True)
    cache_tokens = max(slots[0], slots_within_memory(decoder, sum(slots[:max_sequences])))
    handles: list[Handle] = []
    with Engine(decoder, min(max_sequences, MOST_SEQUENCES), cache_tokens, reuse_prefixes=False) as engine:
        try:
            handles += [engine.submit(**call) for call in calls]
            engine.run(stops_at_failure=True)
            outputs, failures = _ended(engine, handles)
        finally:
            handles.clear()  # in a frame of an error's traceback, its handle would keep both until gc finds the cycle
    cut = [output for output in outputs if output.could_go_on]
    if not (failures or cut or engine.signal):
        return outputs
    try:
        if failures and not engine.signal:
            raise failures[0]
        raise _interrupted(outputs, cut, engine.signal) from next(iter(failures), None)
    finally:
        failures.clear()  # as above


def _ended(engine: Engine, handles: Sequence[Handle]) -> tuple[list[GenerationOutput], list[BaseException]]:
    """The outputs of all texts as far as they are, and what some failed with; those that have not ended are cancelled.

    A signal that came with a failure must not cost the tokens of all texts.
    """
    for handle in handles:
        engine.cancel(handle)
    outputs = [handle.output or GenerationOutput(handle.tokens, "cancelled", []) for handle in handles]
    return outputs, [handle.error for handle in handles if handle.error]


def _interrupted(outputs: list[GenerationOutput], cut: list[GenerationOutput], signal: int) -> Interrupted:
    """What to raise where some of the texts were cut."""
    error = Interrupted((cut or outputs)[0], signal)
    error.outputs = outputs
    error.finished = [output for output in outputs if not output.could_go_on]
    return error


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    """One for each prompt, of one for all or a list."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise UserError(f"{name} has {len(given)} values for {count} prompts; give one for all, or one for each")
    return list(given)
