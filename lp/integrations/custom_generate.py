"""`model.generate(..., custom_generate=lp.generate)`: lookahead behind transformers' own entry point.

B: prompts of the batch, L: length of the padded prompts, T: tokens of the longest text, V: vocabulary.
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

# What transformers hands over by itself, and what changes no token.
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
    """Lookahead decoding for transformers' `generate`: greedy, or sampled when do_sample is set.

    Prompts of a batch take steps together. Two things transformers keeps from a `custom_generate` callable, and
    `lp.accelerate(model)` hands over:
    - a streamer, which given to `generate` gets the prompt and nothing more, so bind it:
      `custom_generate=functools.partial(lp.generate, streamer=streamer)`;
    - the tokenizer that `stop_strings=` needs (it raises), so pass the criterion ready-made:
      `stopping_criteria=[transformers.StopStringCriteria(tokenizer, stop_strings)]`.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config: what transformers hands over.
        window_size, ngram_size, guess_set_size: W, N, G, given to `model.generate` by keyword; with none of them every
            step takes what pays on this machine.
        seed: seed of the sampling; None draws one from torch's generator.
        streamer: gets the prompt, then the tokens as they come; for one prompt.
        exact: "bitwise" gives the logits of `lp.PlainDecoder(model, exact="bitwise")` bit for bit; "auto" and "tokens"
            give plain decoding's up to rounding.
        kv_dtype: "int8" or "fp8" holds keys and values in one byte each, with the tokens of
            `lp.AutoregressiveDecoder(model, kv_dtype=...)`; "auto" is the model's dtype.

    Returns:
        What `generate` would: LongTensor (B, L + T), or GenerateDecoderOnlyOutput if return_dict_in_generate, with
        `scores` (processed, before noise) and `logits` (raw) if asked for: T tensors (B, V). Where a sequence of the
        batch is padding they are zero, while transformers has its model's logits behind padding. It has no cache, and
        an empty one that the caller gives stays empty: transformers hands over its own in the same way.

    Raises:
        Interrupted: a KeyboardInterrupt, as of transformers; SIGINT or SIGTERM came. Its `outputs` are all sequences of
            the batch as far as they are.
        ValueError: what this decoder can't do exactly, by name: beams, use_cache=False, attentions, some processors,
            masks with zeros behind a token, images of several prompts or of a model that `lp.LookaheadDecoder` does
            not take them for, a cache that holds something already, a model
            whose inputs are prepared by code that is not transformers', as PEFT's prompt learning does.
    """
    plan = Plan.of(
        model, input_ids, logits_processor, stopping_criteria, generation_config, streamer=streamer, **model_kwargs
    )
    shape: dict[str, Any] = {"window_size": window_size, "ngram_size": ngram_size, "guess_set_size": guess_set_size}
    return plan.run(LookaheadDecoder(model, LookaheadConfig(**shape), exact=exact, kv_dtype=kv_dtype), seed)


@dataclass(frozen=True)
class Plan:
    """A call of transformers', checked: no rank has told another anything yet.

    Attributes:
        input_ids: (B, L), padded on the left.
        config: the call's generation config.
        processors: logits processors of each prompt.
        stops: when texts end.
        paddings: how many tokens each prompt is padded with on the left.
        inputs: images of the prompt, and what belongs to them, by the names of the model's `forward`; for one prompt.
        streamer: streamer that shows the text; None for none.
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
        """The plan of a call; arguments and errors are those of `generate`."""
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
        """What `generate` returns, by this decoder's steps.

        Args:
            decoder: decoder of the model.
            seed: see `generate`.
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
    """What ends the texts of a call, and whether ended ones are padded.

    Attributes:
        eos: ids of the tokens that end a text.
        max_length: most tokens of a text: the prompt, padding included, and what is generated.
        criteria: all other criteria, subclasses of transformers' own among them.
        pads: whether an ended sequence is padded, as transformers does where a criterion has an `eos_token_id`.
    """

    eos: list[int]
    max_length: int
    criteria: list[StoppingCriteria]
    pads: bool

    @classmethod
    def of(cls, criteria: Iterable[StoppingCriteria], config: GenerationConfig) -> _Stops:
        """What ends the texts of a call; the caller's criteria replace what the config says of EOS and length.

        Transformers hands over the caller's criterion in the place of the one that it makes of the config.
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
    """Outputs of which those with these indices are replaced by others, if these are longer."""
    longer = {index: other for index, other in zip(indices, others, strict=True)}
    return [max(output, longer.get(index, output), key=lambda o: len(o.tokens)) for index, output in enumerate(outputs)]


def _check_asked(config: GenerationConfig, batch: int, streamer: BaseStreamer | None) -> None:
    refused = [*refusals(config).values()]
    if streamer is not None and batch > 1:
        refused.append(f"a streamer for {batch} prompts; it shows one text")
    if refused:
        raise UserError(f"lp.generate does not do this: {'. '.join(refused)}. Leave it out, or use generate as it is")


def _check_preparation(model: PreTrainedModel) -> None:
    """Refuse a model that makes its inputs of the tokens in a way of its own, which the decoder never calls.

    PEFT sets its `prepare_inputs_for_generation` on a base model to add virtual tokens; LoRA and its kin are modules.
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
    """Refuse a cache that holds something, of whatever text; the empty one that transformers makes goes unused."""
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
    """Left padding of every prompt (B,).

    Raises:
        ValueError: the model is to be given something else than tokens, or to skip some.
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
    """What the decoder takes besides the tokens of the one prompt; none where there is no image.

    Raises:
        ValueError: images that lp does not take, or which of several prompts they belong to is not known.
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
    """Turn each prompt's (new tokens, V) into transformers' T times (B, V), float32; zeros behind the end of a text."""
    given = [logits.to(device, torch.float32) for logits in texts if logits is not None]
    return tuple(pad_sequence(given)) if given else None


def _pad_id(config: GenerationConfig) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    return int(pad) if pad is not None else config.pad_token_id or 0
