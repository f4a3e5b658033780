"""The base class of all decoders: the `generate` call, and the checks of its arguments."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from lp.checks import check_callback, check_int, check_kind, flat_list
from lp.config import Exact, KVDtype, chosen_corpora
from lp.engine.inputs import (
    Eos,
    Prompt,
    check_model,
    check_sampling,
    check_seed,
    eos_ids,
    listed_criteria,
    listed_processors,
    prompt_ids,
)
from lp.engine.interrupts import DeferredSignals, Interrupted
from lp.engine.memory import remedy_named
from lp.engine.output import GenerationOutput
from lp.engine.request import OnTokens, Request
from lp.engine.stopping import Stopping
from lp.errors import UserError
from lp.models.adapters import check_text_adapter
from lp.models.loader import context_limit, vocabulary_size
from lp.models.prompt_images import PromptImages
from lp.models.rope import rope_boundary
from lp.models.sharded_layers import check_divided
from lp.models.support import check_adapter
from lp.models.vocabulary import embedded_tokens
from lp.parallel.agreement import shared_seed
from lp.parallel.context import ParallelContext
from lp.sampling.generation_config import AUTO, NONE, CheckpointDefaults
from lp.sampling.grammar import Cursor, Grammar, GrammarProcessor
from lp.sampling.params import SamplingParams
from lp.sampling.sampler import build_sampler
from lp.sampling.score_recorder import RecordingSampler

logger = logging.getLogger(__name__)
OWNER = re.compile(r"[A-Za-z0-9_-]{0,64}")


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """A `with` block for running a model: computes no gradients, and makes a device torch's current one.

    Torch uses the streams and events of its current device.

    Args:
        device: the model's device.
    """
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), on_device:
        yield


class Decoder:
    """Base class of the decoders, with the `generate` call; every decoder gives the tokens of plain decoding.

    Args:
        model: an HF causal LM, loaded and on its device.
        context: the ranks to share each decode step with; None: this process alone.

    Attributes:
        follows: default for the argument `generation_config` of `generate`: "auto" follows the checkpoint's
            generation_config.json, "none" ignores it.
        corpora: names of the corpora (indexed files) that draft tokens may be looked up in.
    """

    follows = AUTO
    corpora: Sequence[str] = ()

    def __init__(self, model: PreTrainedModel, context: ParallelContext | None = None) -> None:
        check_model(model)
        check_adapter(model)
        check_kind("context", context, (ParallelContext, type(None)), "lp.ParallelContext, or None for this process")
        self.model, self.context = model, context or ParallelContext(device=model.device)
        self._told = set[str]()
        check_divided(model, self.context.replica)

    def generate(
        self,
        input_ids: Prompt,
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        *,
        logits_processor: Iterable[LogitsProcessor] | None = None,
        eos_token_id: Eos | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: Iterable[StoppingCriteria] | None = None,
        on_tokens: OnTokens | None = None,
        prefill_chunk: int = 512,
        padding: Sequence[int] = (),
        sequence: int = 0,
        output_scores: bool = False,
        output_logits: bool = False,
        prediction: Sequence[int] = (),
        grammar: Grammar | None = None,
        generation_config: str | None = None,
        seed: int | None = None,
        continued: int = 0,
        owner: str | None = "",
        corpora: Sequence[str] | None = None,
        adapter: str | None = None,
        **inputs: Any,
    ) -> GenerationOutput:
        """Generate tokens that continue one prompt.

        Args:
            input_ids: token ids of the prompt, (L,) or (1, L): a list, a numpy array or a tensor of integers.
            max_new_tokens: most tokens to generate.
            sampling: temperature, penalty, warpers and seed; a temperature of 0 is greedy, with the penalty. None: as
                the checkpoint's generation_config.json says (see `generation_config`), or else greedy.
            logits_processor: transformers' processors, applied before the warpers of `sampling`.
            eos_token_id: one token id or several that end the text. None: the model's own; an empty tuple: no token.
            stop_strings: one string or several; the text ends after the token that completes one of them. Needs
                `tokenizer`.
            tokenizer: the model's tokenizer; only `stop_strings` needs it.
            stopping_criteria: transformers' criteria, asked after every token, without scores. Among ranks that share
                steps, rank 0's result counts; plain decoding, which shares none, asks each rank's own.
            on_tokens: called after each decode step, before the next one starts, with (new tokens, number of the step,
                from 0). Among ranks that share steps every rank calls it, or rank 0 alone if there are criteria.
            prefill_chunk: most prompt tokens that a forward pass computes.
            padding: token ids of the prompt's left padding, which processors and criteria see and the model does not.
            sequence: index of the prompt in its batch; prompts that share a seed get different noise by it.
            output_scores: return the logits that each token was chosen by, after processors and warpers and before
                noise; on one rank only.
            output_logits: return the model's own logits of each token; on one rank only.
            prediction: token ids that much of the text may repeat, such as a file that is to be edited. They become
                draft tokens and change no generated token. Decoders without draft tokens ignore them.
            grammar: grammar made by lp.GrammarCompiler that the text must follow up to an EOS; None: no grammar.
            generation_config: "auto" applies the checkpoint's generation_config.json: its settings for scores
                (penalties, suppressed and forced tokens, n-grams, bad words, least lengths) and for sampling.
                `sampling` overrides the file in all fields of SamplingParams, a given processor in that for its class.
                "none" ignores the file. None: the decoder's default, `follows`.
            seed: seed for sampling if `sampling` has none; None: rank 0 draws one for all ranks.
            continued: number of tokens at the end of the prompt that an earlier call generated for this same text, so
                that they count as generated. A grammar has to allow them.
            owner: name of the text's owner, of ASCII letters, digits, "_" and "-". What is kept of a text (a session's
                n-gram pool, a history, an engine's prefixes) is used only for later texts of the same owner. None:
                nothing is kept of this text, and it uses nothing that is kept.
            corpora: names of the decoder's corpora that draft tokens of this text may come from: their file names
                without the ending. An empty list: no corpus; None: all.
            adapter: name of a LoRA adapter that PEFT has loaded on the model, for this text alone. Texts with different
                adapters share an engine's steps. None: the adapters that are active on the model.
            inputs: other outputs of a processor, by name, such as `pixel_values`:
                `generate(**processor(text=..., images=..., return_tensors="pt"))`. The model's own code computes the
                images, in one forward pass. Token types and masks are those of the prompt without `continued` tokens.

        Returns:
            The generated tokens, why they ended, and what each step took.

        Raises:
            Interrupted: SIGINT or SIGTERM came to some rank, and the decode step is finished. It is a KeyboardInterrupt
                that has the output so far. A second signal acts at once, as it would without this call.
            ValueError: the prompt is empty, too long or has ids outside the vocabulary; a value is out of range; or lp
                is not known to be exact for this model with images.
            torch.OutOfMemoryError: the device is full; says what to lower. The decoder can be used again.
        """
        options: dict[str, Any] = {
            "logits_processor": logits_processor,
            "eos_token_id": eos_token_id,
            "stop_strings": stop_strings,
            "tokenizer": tokenizer,
            "stopping_criteria": stopping_criteria,
            "on_tokens": on_tokens,
            "prefill_chunk": prefill_chunk,
            "padding": padding,
            "sequence": sequence,
            "output_scores": output_scores,
            "output_logits": output_logits,
            "prediction": prediction,
            "grammar": grammar,
            "generation_config": generation_config,
            "seed": seed,
            "continued": continued,
            "owner": owner,
            "corpora": corpora,
            "adapter": adapter,
            **inputs,
        }
        signals = DeferredSignals()
        with remedy_named():
            request = self.request(signals, input_ids, max_new_tokens, sampling, **options)
            with signals:
                output = self._generate(request)
        if output.finish_reason == "interrupted" or signals.received:  # which may come in the step that ends the text
            raise Interrupted(output, signals.received)
        return output

    def request(
        self,
        signals: DeferredSignals,
        input_ids: Prompt,
        max_new_tokens: int,
        sampling: SamplingParams | None,
        *,
        logits_processor: Iterable[LogitsProcessor] | None = None,
        eos_token_id: Eos | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: Iterable[StoppingCriteria] | None = None,
        on_tokens: OnTokens | None = None,
        prefill_chunk: int = 512,
        padding: Sequence[int] = (),
        sequence: int = 0,
        output_scores: bool = False,
        output_logits: bool = False,
        prediction: Sequence[int] = (),
        grammar: Grammar | None = None,
        generation_config: str | None = None,
        seed: int | None = None,
        continued: int = 0,
        owner: str | None = "",
        corpora: Sequence[str] | None = None,
        adapter: str | None = None,
        **inputs: Any,
    ) -> Request:
        """Check the arguments of a `generate` call, and gather them in a `Request`.

        Except for `signals`, the arguments and errors are those of `generate`.

        Args:
            signals: holds SIGINT and SIGTERM back; a signal ends generation after the current step.
        """
        check_adapter(self.model)  # again: one may have been added since
        prompt = prompt_ids(self.model, input_ids)
        check_sampling(asked := sampling)
        check_kind("owner", owner, (str, type(None)), "a name, an empty text, or None")
        if owner is not None and not OWNER.fullmatch(owner):
            raise UserError(f"owner is {owner!r}; give up to 64 ASCII letters, digits, '_' and '-'")
        check_callback("on_tokens", on_tokens, "a function of (new tokens, step), or None")
        max_new_tokens = check_int("max_new_tokens", max_new_tokens, 1, math.inf, "ask for at least one token")
        prefill_chunk = check_int("prefill_chunk", prefill_chunk, 1, math.inf, "try 512")
        sequence = check_int("sequence", sequence, 0, 2**63 - 1, "number the sequences of a batch from 0")
        padding = [check_int("padding", token, 0, math.inf, "give token ids") for token in flat_list(padding)]
        recorded = [name for name, asked in (("scores", output_scores), ("logits", output_logits)) if asked]
        if recorded and self.context.steps.size > 1:
            raise UserError(
                f"output_{recorded[0]} is on among {self.context.steps.size} ranks, of which each has only the "
                "logits of its own nodes; leave it out, or generate on one rank"
            )
        context = context_limit(self.model)
        stopping = Stopping.build(
            eos_ids(self.model, eos_token_id),
            max_new_tokens,
            None if context is None else context - len(prompt),
            [*padding, *prompt],
            stop_strings,
            tokenizer,
            listed_criteria(stopping_criteria),
            self.model.device,
        )
        continued = check_int("continued", continued, 0, len(prompt) - 1, "a text continues a prompt")
        asked_tokens = len(prompt) - continued
        images = self._images(prompt[:asked_tokens], inputs)
        if adapter is not None:
            self._check_adapter(adapter, images)
        processors = listed_processors(logits_processor)
        checkpoint = self.checkpoint(generation_config)
        if grammar is not None:
            self._check_grammar(grammar, stopping.eos, prompt[asked_tokens:])
            processors.append(GrammarProcessor(grammar, sorted(stopping.eos), len(padding) + asked_tokens))
        if checkpoint.said(sampling):
            sampling, processors = checkpoint.applied(
                sampling,
                processors,
                model_config=self.model.config,
                padding=len(padding),
                length=len(padding) + asked_tokens,
                max_length=len(padding) + len(prompt) + max_new_tokens,
                eos=stopping.eos,
                device=self.model.device,
            )
        self._tell(checkpoint.line(asked))
        sampling = self._seeded(sampling, seed)
        sampler = build_sampler(
            sampling,
            processors,
            padding=padding,
            sequence=sequence,
            rank=self.context.steps.rank,
            span=self.span,
            noisy_guesses=self.noisy_guesses,
            vocabulary=vocabulary_size(self.model),
            dtype=self.model.dtype,
            device=self.model.device,
        )
        if recorded:
            no_logits = torch.empty(0, vocabulary_size(self.model), dtype=self.model.dtype, device=self.model.device)
            sampler = RecordingSampler(sampler, recorded, no_logits)
        limit = len(prompt) + min(max_new_tokens, stopping.room or max_new_tokens) - 1
        boundary = rope_boundary(self.model.config.get_text_config())
        most = embedded_tokens(self.model) - 1
        expected = [check_int("prediction", token, 0, most, "give token ids") for token in flat_list(prediction)]
        return Request(
            prompt=prompt,
            limit=limit,
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            stopping=stopping,
            on_tokens=on_tokens,
            prefill_chunk=prefill_chunk,
            signals=signals,
            boundary=boundary,
            prediction=expected,
            grammar=grammar,
            seed=None if sampling is None or sampling.greedy else sampling.seed,
            continued=continued,
            owner=owner,
            corpora=chosen_corpora(corpora, self.corpora),
            images=images,
            adapter=adapter,
        )

    def computing(self) -> AbstractContextManager[None]:
        """A `with` block for running the model: without gradients, with the model's device as torch's current one."""
        return computing_on(self.model.device)

    def complete(self, output: GenerationOutput, request: Request) -> None:
        """Add to an output how it was computed (attention, exactness, threads, seed), and logits or scores if asked.

        Args:
            output: output of a request that has ended; changed in place.
            request: the request that the output belongs to.
        """
        output.attention = self.attention
        output.exact = self.exact
        output.threads = torch.get_num_threads() if self.model.device.type == "cpu" else 0
        output.seed = request.seed
        if isinstance(request.sampler, RecordingSampler):
            output.logits = request.sampler.recorded("logits", len(output.tokens))
            output.scores = request.sampler.recorded("scores", len(output.tokens))

    @property
    def exact(self) -> Exact:
        """Whether this decoder's logits equal plain decoding's bit for bit (BITWISE), or up to rounding (TOKENS)."""
        return Exact.TOKENS

    @property
    def kv_dtype(self) -> KVDtype:
        """How this decoder's KV caches store keys and values: in the model's dtype (AUTO), or in 8 bits (INT8, FP8)."""
        return KVDtype.AUTO

    @property
    def takes_adapters(self) -> bool:
        """Whether this decoder's `generate` accepts the argument `adapter`, a LoRA adapter for one request."""
        return False

    @property
    def attention(self) -> str:
        """Name of the attention implementation in use, such as "transformers' sdpa"."""
        return f"transformers' {self.model.config._attn_implementation}"

    @property
    def span(self) -> int:
        """Most consecutive positions for which one step may sample tokens; the sampler keeps noise for that many."""
        return 1

    @property
    def call(self) -> str:
        """Name of the decoder's `generate`, such as "LookaheadDecoder.generate".

        Ranks exchange it to find out whether all of them are in the same call.
        """
        return f"{type(self).__name__}.generate"

    @property
    def noisy_guesses(self) -> bool:
        """Whether the lookahead window's guesses for later positions are sampled under noise, as accepted tokens are.

        Otherwise these guesses, which can't be accepted in the step that samples them, are greedy.
        """
        return True

    def _images(self, prompt: Sequence[int], inputs: dict[str, Any]) -> PromptImages | None:
        """The images of a prompt; None if the call has none.

        Args:
            prompt: ids of the prompt's tokens.
            inputs: what the call was given besides them, as `pixel_values`.

        Raises:
            ValueError: `PromptImages` refuses them, or the decoder is not exact with them: under exact=bitwise, or
                where rotary frequencies change with the length of the text.
        """
        images = PromptImages.of(self.model, prompt, inputs) if inputs else None
        if images is not None and self.exact is Exact.BITWISE:
            raise UserError("exact=bitwise takes no images, whose pass has a size of its own; use exact=tokens")
        if images is not None and rope_boundary(self.model.config.get_text_config()):
            raise UserError(
                f"model type {self.model.config.model_type!r} changes its rotary frequencies with the length, which lp "
                "does not do after images: use generate as it is"
            )
        return images

    def _check_adapter(self, adapter: str, images: PromptImages | None) -> None:
        """Refuse an adapter for one text where lp cannot compute it exactly.

        Args:
            adapter: name of the adapter.
            images: images of the prompt; None for none.

        Raises:
            ValueError: `check_text_adapter` refuses the adapter, or the call has images, exact=bitwise or other
                settings that exclude adapters for one text.
        """
        check_text_adapter(self.model, adapter)
        others = {
            f"{type(self).__name__}, which takes no tree": not self.takes_adapters,
            "exact=bitwise, whose rows would be grouped otherwise in every pass": self.exact is Exact.BITWISE,
            "images, which the model as it stands computes": images is not None,
            "rotary frequencies that change with the length": rope_boundary(self.model.config.get_text_config()),
        }
        for what, there in others.items():
            if there:
                raise UserError(
                    f"adapter={adapter!r} does not go with {what}: leave it out, and set it active on the model"
                )

    def _check_grammar(self, grammar: Any, eos: Collection[int], continued: Sequence[int]) -> None:
        """Refuse a grammar without a matcher or without an EOS of the model, and one that forbids continued tokens."""
        if not hasattr(grammar, "matcher"):
            raise UserError(f"grammar is {grammar!r}; give one that lp.GrammarCompiler made, or None")
        if not eos:
            raise UserError("a grammar is given, but no EOS that can end its text; give eos_token_id")
        vocabulary = vocabulary_size(self.model)
        for token in eos:
            if not 0 <= token < vocabulary:
                raise UserError(
                    f"eos_token_id has {token}, which ends no text with a grammar; the model has the tokens "
                    f"0..{vocabulary - 1}"
                )
        if continued and not (cursor := Cursor(grammar.matcher(sorted(eos)))).go_to(continued):
            at = len(cursor.text)
            raise UserError(
                f"continued is {len(continued)}, and the grammar forbids the token {continued[at]} at place {at} of "
                "these; give the tokens that were generated under it"
            )

    def checkpoint(self, generation_config: str | None = None) -> CheckpointDefaults:
        """Read the sampling settings from the checkpoint's generation_config.json, which `generate` applies.

        Args:
            generation_config: "auto": the file's settings; "none": no settings; None: the decoder's default, `follows`.

        Raises:
            ValueError: `generation_config` is another value.
        """
        chosen = self.follows if generation_config is None else generation_config
        if chosen not in (AUTO, NONE):
            raise UserError(f"generation_config is {chosen!r}; it must be {AUTO!r} or {NONE!r}")
        return CheckpointDefaults.of(self.model.generation_config if chosen == AUTO else GenerationConfig())

    def _tell(self, line: str) -> None:
        """Log a line as a warning on the main rank, once for this decoder; an empty line is not logged."""
        if line and line not in self._told:
            self._told.add(line)
            if self.context.is_main:
                logger.warning(line)

    def _seeded(self, sampling: SamplingParams | None, seed: int | None) -> SamplingParams | None:
        """Complete the sampling settings by a seed: `seed`, or else one that rank 0 draws for all ranks.

        It is a collective call, so ranks whose texts need no seed make it too.
        """
        check_seed(seed)
        if sampling is not None and sampling.seed is None and seed is not None:
            sampling = replace(sampling, seed=seed)
        wanted = sampling is not None and sampling.seed is None and not sampling.greedy
        seed = shared_seed(self.context.ranks, f"drawing the seed of {self.call}", wanted)
        return replace(sampling, seed=seed) if sampling is not None and wanted else sampling

    def _generate(self, request: Request) -> GenerationOutput:
        """Run a checked call until its text ends."""
        with self.computing():
            output = self._decode(request)
        self.complete(output, request)
        return output

    def _decode(self, request: Request) -> GenerationOutput:
        """Decode a text. A decoder overrides this, or `_generate` if its texts may share steps."""
        raise NotImplementedError
