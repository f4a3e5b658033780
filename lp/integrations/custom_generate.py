"""`model.generate(..., custom_generate=lp.generate)`: lookahead decoding for a single call of transformers' generate.

B: prompts of the batch, L: length of the padded prompts, T: generated tokens of the longest text, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    QuantizedCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from lp.config import Exact, KVDtype, LookaheadConfig
from lp.engine.batch import generate_together
from lp.engine.inputs import prompt_ids
from lp.engine.interrupts import Interrupted
from lp.engine.lookahead import LookaheadDecoder
from lp.engine.output import GenerationOutput
from lp.errors import UserError
from lp.models.prompt_images import PromptImages, inputs_of_images, names_not_taken
from lp.models.releases import CACHE_NAMES
from lp.parallel.agreement import shared_seed
from lp.sampling.generation_config import NONE, of_prompt, refusals
from lp.sampling.params import SamplingParams
from lp.sampling.processors import check_processors

# Arguments that need no handling: transformers adds them by itself, or they change no token.
KNOWN = {
    "attention_mask",
    "position_ids",
    "cache_position",
    *CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "return_dict",
    "output_router_logits",
}


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    window_size: int | None = None,
    ngram_size: int | None = None,
    guess_set_size: int | None = None,
    seed: int | None = None,
    streamer: BaseStreamer | None = None,
    exact: str = Exact.AUTO,
    kv_dtype: str = KVDtype.AUTO,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode one call of transformers' `generate` by lookahead: `model.generate(..., custom_generate=lp.generate)`.

    Decoding is greedy, or samples if do_sample is set; the prompts of a batch share decode steps. Transformers does not
    pass two things on to a `custom_generate` callable (`lp.accelerate(model)` gets both):
    - a streamer. If it is given to `generate`, it gets the prompt and nothing more. Bind it instead:
      `custom_generate=functools.partial(lp.generate, streamer=streamer)`;
    - the tokenizer that `stop_strings=` needs, without which transformers raises an error. Pass the criterion instead:
      `stopping_criteria=[transformers.StopStringCriteria(tokenizer, stop_strings)]`.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config: passed by transformers.
        window_size, ngram_size, guess_set_size: W, N and G of lookahead decoding, given to `model.generate` by keyword.
            With none of them, each step takes as many draft tokens as make decoding fastest on this machine.
        seed: seed of a sampled text; None: drawn from torch's generator.
        streamer: gets the prompt, then the new tokens step by step; only for a single prompt.
        exact: "bitwise": logits equal those of `lp.PlainDecoder(model, exact="bitwise")` bit for bit. "auto" and
            "tokens": logits equal plain decoding's up to rounding.
        kv_dtype: "int8" or "fp8": the cache stores keys and values in one byte each, and tokens equal those of
            `lp.AutoregressiveDecoder(model, kv_dtype=...)`. "auto": the cache has the model's dtype.
        model_kwargs: further arguments that transformers passes, such as attention_mask or images.

    Returns:
        What transformers' `generate` returns: LongTensor (B, L + T) for B prompts of padded length L and T new tokens;
        or GenerateDecoderOnlyOutput if return_dict_in_generate is set. The latter has, if asked for, `scores`
        (processed, before noise) and `logits` (the model's): T tensors (B, V), V being the size of the vocabulary. They
        are zero where a sequence of the batch is padding (transformers has logits there). It has no cache; an empty
        cache that the caller gives stays empty.

    Raises:
        Interrupted: SIGINT or SIGTERM came. It is a KeyboardInterrupt whose `outputs` has each prompt's tokens so far.
        ValueError: the call asks for something that lp can't do exactly, and the message names it: beams,
            use_cache=False, attentions, some processors, masks with zeros after a token, images with several prompts or
            with a model whose images lp does not support, a cache that is not empty, or a model with its own code for
            preparing inputs, such as with PEFT's prompt learning.
    """
    plan = Plan.of(
        model, input_ids, logits_processor, stopping_criteria, generation_config, streamer=streamer, **model_kwargs
    )
    shape: dict[str, Any] = {"window_size": window_size, "ngram_size": ngram_size, "guess_set_size": guess_set_size}
    return plan.run(LookaheadDecoder(model, LookaheadConfig(**shape), exact=exact, kv_dtype=kv_dtype), seed)


@dataclass(frozen=True)
class Plan:
    """A checked call of transformers' `generate`, ready to `run`.

    Making a plan involves no other rank, so ranks can still agree to leave the call to transformers.

    Attributes:
        input_ids: token ids of the prompts, int64 (prompts, padded length), padded on the left.
        config: the call's generation config.
        processors: a list of logits processors for each prompt.
        stops: EOS tokens, length limit and other stopping criteria.
        paddings: number of left padding tokens of each prompt.
        inputs: the images of a single prompt as arguments of the model's `forward`, by name, such as pixel_values.
        streamer: gets the tokens as they are generated; None: no streamer.
    """

    input_ids: torch.Tensor
    config: GenerationConfig
    processors: list[list[LogitsProcessor]]
    stops: _Stops
    paddings: list[int]
    inputs: dict[str, Any]
    streamer: BaseStreamer | None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Plan:
        """Check the arguments of a call and build its plan.

        The arguments are those that transformers passes to `lp.generate`, and the errors are those of `lp.generate`.
        """
        config = generation_config or model.generation_config
        _check_asked(config, len(input_ids), streamer)
        _check_preparation(model)
        for name in CACHE_NAMES:
            _check_cache(name, model_kwargs.get(name))
        if unknown := names_not_taken(model, _given_images(model_kwargs)):
            raise UserError(f"lp.generate continues tokens and takes no {', '.join(unknown)}; use generate as it is")
        # Declared as an argument, transformers would hand attention_mask over twice.
        paddings = _paddings(input_ids, config, model_kwargs)
        given = check_processors(logits_processor or ())
        processors = [[of_prompt(processor, index) for processor in given] for index in range(len(input_ids))]
        prompts = [prompt_ids(model, ids[padding:]) for ids, padding in zip(input_ids, paddings, strict=True)]
        inputs = _images(model, prompts, paddings, model_kwargs)
        stops = _Stops.of(stopping_criteria or (), config)
        return cls(input_ids, config, processors, stops, paddings, inputs, streamer)

    def run(self, decoder: LookaheadDecoder, seed: int | None = None) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Run the planned call with a decoder, and return what transformers' `generate` returns.

        Args:
            decoder: a decoder for the same model.
            seed: seed of sampled texts; None: drawn from torch's generator.
        """
        input_ids, config, stops, streamer = self.input_ids, self.config, self.stops, self.streamer
        asked = config.return_dict_in_generate
        sampling = None
        if config.do_sample:  # its warpers are among the processors; one seed for the whole batch
            drawn = shared_seed(decoder.context.ranks, f"drawing the seed of {decoder.call}", seed is None)
            sampling = SamplingParams(seed=drawn if seed is None else seed)
        if streamer is not None:
            streamer.put(input_ids.cpu())

        def call(index: int, new: int, criteria: list[StoppingCriteria]) -> dict[str, Any]:
            ids = input_ids[index].tolist()
            padding = self.paddings[index]
            return {
                "input_ids": ids[padding:],
                "max_new_tokens": new,
                "sampling": sampling,
                "logits_processor": self.processors[index],
                "eos_token_id": stops.eos,
                "stopping_criteria": criteria,
                "on_tokens": None if streamer is None else lambda tokens, step: streamer.put(torch.tensor(tokens)),
                "padding": ids[:padding],
                "sequence": index,
                "output_scores": bool(asked and config.output_scores),
                "output_logits": bool(asked and config.output_logits),
                **self.inputs,
                "generation_config": NONE,  # transformers has made its processors
            }

        def decode(calls: list[dict[str, Any]]) -> list[GenerationOutput]:
            """Decode all prompts of the batch; one prompt alone takes captured steps, where there are any."""
            return [decoder.generate(**calls[0])] if len(calls) == 1 else generate_together(decoder, calls)

        new = max(stops.max_length - input_ids.shape[1], 1)  # criteria are asked behind a token
        try:
            outputs = decode([call(index, new, stops.criteria) for index in range(len(input_ids))])
            if not stops.pads and not any(isinstance(criterion, MaxTimeCriteria) for criterion in stops.criteria):
                # transformers pads where there may be EOS; else, a sequence that met a criterion goes on with the
                # batch.
                longest = max(len(output.tokens) for output in outputs)
                ended = [index for index, output in enumerate(outputs) if output.finish_reason == "criteria"]
                short = [index for index in ended if len(outputs[index].tokens) < longest]
                try:
                    longer = decode([call(index, longest, []) for index in short])
                except Interrupted as error:
                    error.finished = [output for index, output in enumerate(outputs) if index not in short]
                    error.outputs = _replaced(outputs, short, error.outputs)
                    raise
                outputs = _replaced(outputs, short, longer)
        finally:
            if streamer is not None:
                streamer.end()  # which gives out the last word, and frees who waits for more
        texts = [input_ids.new_tensor(output.tokens) for output in outputs]
        padded = pad_sequence(texts, batch_first=True, padding_value=_pad_id(config))
        sequences = torch.cat([input_ids, padded], dim=1)
        if not asked:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=_by_step([output.scores for output in outputs], input_ids.device),
            logits=_by_step([output.logits for output in outputs], input_ids.device),
        )


@dataclass(frozen=True)
class _Stops:
    """What ends the texts of a call, and whether texts that end early are padded.

    Attributes:
        eos: token ids that end a text.
        max_length: most tokens of a text: prompt, padding and generated tokens together.
        criteria: the call's other criteria.
        pads: whether a text that has ended is padded while others of the batch go on, as transformers does if a
            criterion has an `eos_token_id`; else it goes on, too.
    """

    eos: list[int]
    max_length: int
    criteria: list[StoppingCriteria]
    pads: bool

    @classmethod
    def of(cls, criteria: Iterable[StoppingCriteria], config: GenerationConfig) -> _Stops:
        """Find what ends the texts of a call. A criterion for EOS or length overrides what the config says of it.

        Transformers passes the caller's criterion in the place of the one that it makes from the config.

        Args:
            criteria: the criteria that transformers passes.
            config: the call's generation config.
        """
        given = list(criteria)
        eos = [criterion.eos_token_id for criterion in given if type(criterion) is EosTokenCriteria]
        if not eos and getattr(config, "_eos_token_tensor", None) is not None:
            eos = [config._eos_token_tensor]
        lengths = [criterion.max_length for criterion in given if type(criterion) is MaxLengthCriteria]
        return cls(
            [token for ids in eos for token in ids.flatten().tolist()],
            min(lengths, default=config.max_length),
            [criterion for criterion in given if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)],
            bool(eos) or any(hasattr(criterion, "eos_token_id") for criterion in given),
        )


def _replaced(
    outputs: list[GenerationOutput], indices: list[int], others: list[GenerationOutput]
) -> list[GenerationOutput]:
    """Replace the outputs at `indices` by `others`, one for each index, if these have more tokens."""
    longer = {index: other for index, other in zip(indices, others, strict=True)}
    return [max(output, longer.get(index, output), key=lambda o: len(o.tokens)) for index, output in enumerate(outputs)]


def _check_asked(config: GenerationConfig, batch: int, streamer: BaseStreamer | None) -> None:
    refused = [*refusals(config).values()]
    if streamer is not None and batch > 1:
        refused.append(f"a streamer for {batch} prompts; it shows one text")
    if refused:
        raise UserError(f"lp.generate does not do this: {'. '.join(refused)}. Leave it out, or use generate as it is")


def _check_preparation(model: PreTrainedModel) -> None:
    """Refuse a model whose `prepare_inputs_for_generation` is not transformers', since lp never calls it.

    PEFT replaces it on the base model to add virtual tokens (prompt tuning); adapters such as LoRA don't need it.
    """
    prepare, own = model.prepare_inputs_for_generation, getattr(type(model), "prepare_inputs_for_generation", None)
    name = f"{type(model).__name__}.prepare_inputs_for_generation"
    if own is None or getattr(prepare, "__func__", None) is not own:
        setter = type(getattr(prepare, "__self__", prepare)).__name__
        raise UserError(
            f"{name} was replaced on this model (by {setter}), as PEFT does for prefix tuning, prompt tuning and "
            "p-tuning; lp.generate hands over the tokens alone: leave custom_generate out, or use an adapter of the "
            "weights, such as LoRA"
        )
    if own.__module__.partition(".")[0] != "transformers":
        raise UserError(
            f"{name} comes from {own.__module__} and not from transformers; lp.generate never calls it: leave "
            "custom_generate out, or decode with lp.LookaheadDecoder(model), which hands over the tokens alone"
        )


def _check_cache(name: str, cache: Any) -> None:
    """Refuse a cache that is not empty, or quantised; the empty one that transformers makes is not used.

    Args:
        name: name of the argument, for the error.
        cache: a cache of transformers, or None.
    """
    if cache is None:
        return
    try:
        length = int(cache.get_seq_length())
        held = f"{length} tokens" if length else None
    except ValueError:  # none of its layers attends: each keeps a state
        held = "the state of a text" if cache.has_previous_state() else None
    if held:
        raise UserError(
            f"{name} holds {held}; lp.generate fills a cache of its own: leave it out and give the whole text as "
            "input_ids, or use generate as it is"
        )
    if isinstance(cache, QuantizedCache):
        raise UserError(
            "lp.generate has a cache of its own: leave cache_implementation out and give kv_dtype='int8' or 'fp8', or "
            "use generate as it is"
        )


def _paddings(input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> list[int]:
    """Number of left padding tokens of every prompt, by the attention mask: (B,).

    Raises:
        ValueError: the mask has another length than the prompt, or zeros behind a prompt's first token, or positions
            are given that do not count from there.
    """
    images = _given_images(model_kwargs)
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    length = input_ids.shape[1]
    if mask is None:
        mask = torch.ones_like(input_ids)
        covered = getattr(config, "_mask_length", None) or length  # of a mask of ones, which transformers leaves out
    else:
        covered = mask.shape[1]
    if covered != length:
        raise UserError(
            f"the attention_mask covers {covered} tokens, the prompt has {length}; give one column for every token"
        )
    paddings = (mask != 0).int().argmax(1).tolist()
    for index, padding in enumerate(paddings):
        if not mask[index][padding:].all():
            raise UserError(
                f"the attention_mask of prompt {index} has zeros behind its first token (transformers makes one where "
                "the prompt has the pad token); pad on the left, or give a mask of ones if that token is meant"
            )
        if positions is None or images:
            continue
        own = positions[..., index % positions.shape[-2], padding:]  # (L,), or along each of several axes
        if not (own == torch.arange(length - padding, device=own.device)).all():
            raise UserError("lp.generate counts positions from the prompt's first token; leave position_ids out")
    return paddings


def _given_images(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    return inputs_of_images({name: value for name, value in model_kwargs.items() if name not in KNOWN})


def _images(
    model: PreTrainedModel, prompts: list[list[int]], paddings: list[int], model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of the decoder for the images of the only prompt; empty if there are none.

    Raises:
        ValueError: lp does not take the images, or there are several prompts or padding.
    """
    if not (inputs := _given_images(model_kwargs)):
        return {}
    if len(prompts) > 1 or paddings[0]:
        raise UserError(
            f"lp.generate takes {', '.join(sorted(inputs))} for one prompt without padding, and there are "
            f"{len(prompts)} prompts with up to {max(paddings)} tokens of padding; give one prompt a call, or use "
            "generate as it is"
        )
    inputs["position_ids"] = model_kwargs.get("position_ids")
    PromptImages.of(model, prompts[0], inputs)
    return inputs


def _by_step(texts: list[torch.Tensor | None], device: torch.device) -> tuple[torch.FloatTensor, ...] | None:
    """Turn logits by prompt, (new tokens, V), into logits by step as transformers has them: T times (B, V), float32.

    They are zero behind the end of a text. None if no logits were asked for.
    """
    given = [logits.to(device, torch.float32) for logits in texts if logits is not None]
    return tuple(pad_sequence(given)) if given else None


def _pad_id(config: GenerationConfig) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    return int(pad) if pad is not None else config.pad_token_id or 0
