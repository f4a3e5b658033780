"""Generation from a fixed list of prompts, by an `Engine` that is made for the one call."""

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

OnBatchTokens = Callable[[int, list[int], int], None]  # index of the prompt, its new tokens, number of its step


class BatchDecoder(StepDecoder):
    """Base of the decoders that run on the engine's loop: `generate` takes one prompt, `generate_batch` several."""

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
        """Generate from several prompts, which share forward passes; each gets the tokens that it would get alone.

        Args:
            inputs: the prompts. Each is token ids as `generate` takes them, or the dict that a processor returns for
                one prompt, with `input_ids` and images.
            max_new_tokens, sampling: see `generate`; one value for all prompts, or a list with one value for each
                prompt. Prompts that are sampled with one seed still get different noise, since noise depends on a
                prompt's index.
            on_tokens: called after each step with (index of the prompt, its new tokens, number of its step, from 0).
            max_sequences: most prompts that generate at a time; the others wait until a running one has ended.
            options: other arguments of `generate`, for all prompts alike.

        Returns:
            One output for each prompt, in the order of the prompts.

        Raises:
            Interrupted: SIGINT or SIGTERM came, as in `generate`. Its `outputs` has every prompt's output with the
                tokens so far, its `finished` only the complete ones.
            ValueError: an argument is refused, as in `generate`.
        """
        calls = calls_of_batch(inputs, max_new_tokens, sampling, on_tokens, options)
        return generate_together(self, calls, max_sequences)

    def _generate(self, request: Request) -> GenerationOutput:
        """Run a checked call as an engine's only text; its KV cache is allocated by the first forward pass."""
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
    """Turn the arguments of a `generate_batch` call into those of one `generate` call for each prompt.

    Args:
        inputs, max_new_tokens, sampling, on_tokens, options: see `BatchDecoder.generate_batch`.

    Returns:
        Keyword arguments of `generate`, one dict for each prompt, in the order of the prompts.

    Raises:
        ValueError: a list of values is not as long as the list of prompts, the dict of one prompt has an argument that
            the call also gives for all prompts, or an argument is of the wrong type.
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
    """Run several `generate` calls on one engine, so that they share decode steps; if one call fails, all calls end.

    Args:
        decoder: the decoder that runs all calls.
        calls: keyword arguments of `generate`, one mapping for each call.
        max_sequences: most calls that run at a time; the others wait.

    Returns:
        One output for each call, in the order of the calls.

    Raises:
        Interrupted: as in `BatchDecoder.generate_batch`; if a call failed as well, its error is the `__cause__`.
        BaseException: the error that a call failed with.
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
    """Cancel the texts that have not ended.

    A failed text has an output too, with its tokens so far: a signal that comes along with a failure must not cost the
    tokens of all texts.

    Returns:
        The outputs of all texts, in the order of the handles, and the errors of those that failed.
    """
    for handle in handles:
        engine.cancel(handle)
    outputs = [handle.output or GenerationOutput(handle.tokens, "cancelled", []) for handle in handles]
    return outputs, [handle.error for handle in handles if handle.error]


def _interrupted(outputs: list[GenerationOutput], cut: list[GenerationOutput], signal: int) -> Interrupted:
    """The exception for a batch of which some texts were cut short.

    Args:
        outputs: all outputs of the batch.
        cut: the outputs that were cut short.
        signal: number of the signal that this process got; 0 for none.
    """
    error = Interrupted((cut or outputs)[0], signal)
    error.outputs = outputs
    error.finished = [output for output in outputs if not output.could_go_on]
    return error


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    """One value for each prompt: the elements of a list, or a lone value repeated."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise UserError(f"{name} has {len(given)} values for {count} prompts; give one for all, or one for each")
    return list(given)
