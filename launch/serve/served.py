"""Objects that all endpoints share: the model with the server's settings, and the texts that a request generates."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lp
from lp.config import chosen_corpora
from lp.errors import RanksParted, UserError
from lp.models.loader import context_limit
from lp.models.vocabulary import embedded_tokens
from lp.sampling.grammar import GrammarError
from lp.sampling.logprob_sampler import Logprob
from lp.sampling.reasoning import ReasoningBlock

from ..text.chat_tokens import LiteralCopy, text_tokens
from ..text.detokenizer import Vocabulary
from ..text.image_prompts import ImagePrompts
from .acceptance import draft_tokens
from .api_errors import SHOWN, ApiError
from .engine_loop import Abandoned, Busy, Closing, Ending, EngineLoop, Event, LiveText, Scoring
from .fim import FAMILIES, FimPrompts, lacking_family
from .image_urls import ImageUrls
from .metrics import Metrics
from .named_keys import Client
from .names import ModelNames
from .reasoning import Reasoning, ReasoningWatch
from .spec import TextSpec
from .stopping import TextWatch
from .unfinished import UnfinishedRequests

RETRY_AFTER_S = 1
DRAWN_SEEDS = (-1, 0xFFFFFFFF)  # as in llama.cpp, a client that gives one of these gets another text every time
FINISH_REASON = {"eos": "stop", "stop_string": "stop"}  # the others are cut: "length"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request in tokens and time.

    Args:
        max_new_tokens: most tokens to generate where the request names no limit.
        timeout_s: seconds after which a request ends with an error; 0 is no limit.
    """

    max_new_tokens: int = 1024
    timeout_s: float = 600.0


CLIENT = "lp.client"  # where a request's ASGI scope has its Client


@dataclass(frozen=True, kw_only=True)
class Served:
    """The served model, with the settings and checks that endpoints need to answer a request.

    Each request works with a copy that knows the request's client and LoRA adapter (`asked_by`, `chosen`).

    Args:
        name: the model's name, as the user gave it.
        served_as: names that requests give instead of the model's own; see `ModelNames.of`.
        model, tokenizer: the loaded model and its tokenizer.
        loop: runs the engine.
        sampling: sampling for requests that do not set it themselves; None: the checkpoint's, else greedy.
        stop: strings that end every text.
        limits: limits that each request has.
        metrics: counts texts and tokens for /metrics.
        unfinished: keeps a file for each request until it ends.
        fim: builds fill-in-the-middle prompts; None: the model has no tokens for them.
        reasoning: tokens that begin and end reasoning in chat answers; None: reasoning is not separated from the
            answer.
        created: time at which the server started, in seconds since 1970.
        client: the client that the request comes from, set by `asked_by`.
        adapters: names of the LoRA adapters that requests may name instead of the model.
        adapter: name of the adapter that the request has chosen, set by `chosen`; None: the model without an adapter.
        images: makes prompts with images; None: the model takes only text.
        image_urls: downloads images that requests name by their addresses.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    loop: EngineLoop
    sampling: lp.SamplingParams | None = None
    stop: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics
    unfinished: UnfinishedRequests = field(default_factory=lambda: UnfinishedRequests(None))
    fim: FimPrompts | None = None
    reasoning: ReasoningBlock | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    served_as: Sequence[str] = ()
    client: Client = field(default_factory=Client)
    adapters: tuple[str, ...] = ()
    adapter: str | None = None
    images: ImagePrompts | None = None
    image_urls: ImageUrls = field(default_factory=ImageUrls)
    literal: LiteralCopy = field(init=False)  # of the tokenizer
    words: Vocabulary = field(init=False)  # its tokens
    names: ModelNames = field(init=False)
    _token_names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "literal", LiteralCopy(self.tokenizer))
        object.__setattr__(self, "words", Vocabulary(self.tokenizer))
        object.__setattr__(self, "names", ModelNames.of(self.name, self.served_as))

    def asked_by(self, scope: Mapping[str, Any]) -> Served:
        """Return a copy of this object that knows which client a request comes from.

        Args:
            scope: ASGI scope of the request, which has the client under the key CLIENT.
        """
        return self._with("client", scope.get(CLIENT, Client()))

    def _with(self, name: str, value: str | Client | None) -> Served:
        """This model with one field changed, and all that was made of its tokenizer."""
        changed = copy.copy(self)
        object.__setattr__(changed, name, value)
        return changed

    @property
    def short_name(self) -> str:
        """The name in the `model` field of answers: the chosen adapter's, or else the model's."""
        return self.adapter or self.names.shown

    @property
    def context(self) -> int | None:
        """The model's context length in tokens, prompt and generated text together; None: there is no limit."""
        return context_limit(self.model)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model embeds: token ids in requests must be below it."""
        return embedded_tokens(self.model)

    def chosen(self, name: str | None) -> Served:
        """Look up a request's `model` field: return this object for the model, or a copy that uses the named adapter.

        Args:
            name: value of the field; None means the model itself.

        Raises:
            ApiError: status 404: there is no model or adapter with this name.
        """
        self.check_model(name)
        return self.adapted(name)

    def adapted(self, name: str | None) -> Served:
        """Return a copy that uses the LoRA adapter with this name, or this object itself if there is no such one.

        Args:
            name: value of a request's `model` field.
        """
        return self._with("adapter", name) if name in self.adapters else self

    def check_model(self, name: str | None) -> None:
        """Refuse a request's `model` field that names neither this model nor one of its adapters.

        Args:
            name: value of the field; None means the model itself.

        Raises:
            ApiError: status 404: there is no model or adapter with this name.
        """
        if name and name not in self.adapters and not self.names.has(name):
            known = " or ".join(map(repr, (*self.names.listed, *self.adapters)))
            message = f"there is no model {name[:SHOWN]!r}; this server has {known}, or leave model out"
            raise ApiError(404, message, "model", "model_not_found")

    def encode(self, text: str, special: bool = True, parsed: bool = True) -> list[int]:
        """Encode a text that a client sent, and return its token ids.

        Args:
            text: the text.
            special: whether the tokenizer adds its own special tokens, such as BOS.
            parsed: whether names of special tokens in the text, such as "<|im_end|>", become these tokens. False: they
                are encoded as plain text.

        Raises:
            ValueError: the text has a special token that the tokenizer can't encode as plain text.
        """
        if not parsed:
            return text_tokens(self.tokenizer, text, self.literal, add_special_tokens=special)
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a client's prompt, which may already be in a fill-in-the-middle format; return its token ids.

        Args:
            text: the prompt, such as "<PRE> before <SUF>after <MID>".

        Raises:
            ApiError: status 400: the format is another model family's, whose tokens this model lacks.
        """
        ids = self.encode(text)
        own = self.fim
        if own is not None and own.is_gap(ids):
            return ids
        if own is not None and (texts := own.format.texts(text)):
            return own.prompt(*texts, None)[0]  # tokens whose names a tokenizer takes for text, as CodeLlama's
        if (family := lacking_family(text, self.tokenizer)) is None:
            return ids
        theirs = ", ".join(FAMILIES[family].tokens)
        remedy = (
            f"let the client write its own, {', '.join(own.format.tokens)}"
            if own
            else "let the client send the text before the gap alone, or serve a model that has such tokens"
        )
        message = f"prompt is a gap in the tokens of {family} ({theirs}), which {self.short_name} lacks; {remedy}"
        raise ApiError(400, message, "prompt")

    def checked(self, ids: Sequence[int], param: str) -> list[int]:
        """Check that a prompt's token ids are in the vocabulary, and that the context has room for at least one more.

        Args:
            ids: token ids; an empty prompt becomes BOS, or EOS if the model has no BOS.
            param: name of the body's field that has the prompt, for error messages.

        Returns:
            The token ids.

        Raises:
            ApiError: status 400: a check failed, or an empty prompt can't be replaced.
        """
        start = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id
        ids = list(ids) or ([start] if isinstance(start, int) else [])
        if not ids:
            raise ApiError(400, f"{param} is empty; give at least one token", param)
        for token in ids:
            if token >= self.vocabulary:
                message = f"{param} has token id {token}; this model's vocabulary is 0..{self.vocabulary - 1}"
                raise ApiError(400, message, param)
        if self.context is not None and len(ids) >= self.context:
            message = f"{param} has {len(ids)} tokens, the model's context {self.context}; shorten it"
            raise ApiError(400, message, param, "context_length_exceeded")
        return ids

    def new_tokens(self, prompt: Sequence[int], wanted: int | None) -> int:
        """The most tokens to generate after a prompt: the request's limit, but no more than the context has room for.

        Args:
            prompt: token ids of the prompt.
            wanted: the request's limit; None and -1 take the server's limit, -2 fills the context, as in llama.cpp.
        """
        most = self.limits.max_new_tokens if wanted is None or wanted < 0 else wanted
        if wanted == -2 and self.context is not None:
            return self.context - len(prompt)
        return most if self.context is None else min(most, self.context - len(prompt))

    def sampled(
        self, wanted: Mapping[str, Any], seed: int | None, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Complete a request's sampling settings by the server's, the checkpoint's and the endpoint's, in this order.

        Args:
            wanted: fields of lp.SamplingParams that the request gives.
            seed: the request's seed, any integer; None takes the server's. A random seed is drawn if there is none, or
                if the request's is one of DRAWN_SEEDS (-1 and 2**32 - 1).
            defaults: the endpoint's own defaults, for fields that are left open; if nothing sets the sampling, decoding
                is greedy.

        Returns:
            All fields of lp.SamplingParams by name; the seed is None if decoding is greedy.
        """
        given = dict(wanted)
        if given.get("top_p") == 0:
            given |= {"temperature": 0.0, "top_p": 1.0}
        params = replace(self._unasked(defaults), **given)
        if params.greedy:
            return asdict(replace(params, seed=None))
        chosen = params.seed if seed is None else seed
        if chosen is None or seed in DRAWN_SEEDS:
            chosen = secrets.randbits(48)  # exact in JavaScript too
        return asdict(replace(params, seed=chosen % 2**63))

    def _unasked(self, defaults: Mapping[str, Any]) -> lp.SamplingParams:
        """Sampling where the client gives nothing: by the server's settings, else the checkpoint's, else defaults."""
        checkpoint = self.loop.engine.decoder.checkpoint()
        neutral = asdict(lp.SamplingParams())
        own = asdict(self.sampling or lp.SamplingParams())
        said = {**defaults, **checkpoint.sampling}
        if self.sampling is None and not checkpoint.samples and not defaults:
            said["temperature"] = 0.0
        return lp.SamplingParams(**said | {name: value for name, value in own.items() if value != neutral[name]})

    def corpora(self, asked: Sequence[str] | None) -> tuple[str, ...] | None:
        """Choose the corpora (files made by `lp corpus`) that a text may take draft tokens from; return their names.

        Args:
            asked: names in the request; None: all that the client may use.

        Returns:
            The names; None: all corpora of the server.

        Raises:
            ApiError: status 400: there is no corpus with a name, or the client may not use it.
        """
        known, own = self.loop.engine.decoder.corpora, self.client.corpora
        if own is not None:  # without those of a config whose decoder looks in none
            known = own = tuple(name for name in own if name in known)
        try:
            chosen = chosen_corpora(asked, known)
        except UserError as error:
            raise ApiError(400, str(error), "corpora") from None
        return own if chosen is None else chosen

    def ends(self, others: Sequence[int] = (), ignored: bool = False) -> list[int] | None:
        """Ids of the tokens that end a text; None stands for the model's own EOS only.

        Args:
            others: token ids that end the text, in addition to the model's own EOS.
            ignored: whether no token ends the text; the result is then empty.
        """
        if ignored:
            return []
        own = self.model.generation_config.eos_token_id
        return [*([own] if isinstance(own, int) else own or ()), *others] if others else None

    def ends_of(self, prompt: Sequence[int], ignored: bool = False) -> list[int] | None:
        """Ids of the tokens that end the text after a prompt; None stands for the model's own EOS only.

        A fill-in-the-middle prompt adds the tokens that end its format's filling.

        Args:
            prompt: token ids, which may be in a fill-in-the-middle format.
            ignored: whether no token ends the text; the result is then empty.
        """
        return self.ends(self.fim.ends_of(prompt) if self.fim else (), ignored)

    def biases(self, given: dict[str, float] | None) -> list[tuple[int, float]]:
        """Convert a request's logit_bias to pairs of token id and bias, the number to add to the token's logit.

        Args:
            given: the field, whose keys are token ids as decimal text, such as {"312": -100}; None gives an empty list.

        Raises:
            ApiError: status 400: a token id is outside the vocabulary.
        """
        biases = [(int(token), bias) for token, bias in (given or {}).items()]
        for token, _ in biases:
            if token >= self.vocabulary:
                message = f"logit_bias has token id {token}; this model's vocabulary is 0..{self.vocabulary - 1}"
                raise ApiError(400, message, "logit_bias")
        return biases

    def check_count(self, texts: int, param: str = "n") -> None:
        """Refuse a request for more texts than the server takes at a time.

        Args:
            texts: number of texts, including those with no token to generate.
            param: name of the body's field to blame in the error.

        Raises:
            ApiError: status 400: the texts are too many.
        """
        if texts > self.loop.max_texts:
            message = f"the request is for {texts} texts; this server takes {self.loop.max_texts} at a time"
            raise ApiError(400, message, param)

    async def check_grammar(self, grammar: tuple[str, str] | None, field: str) -> None:
        """Compile a request's grammar before its text begins, on another thread, and refuse the request if that fails.

        Args:
            grammar: kind and source of the grammar, such as ("regex", "[0-9]+"); None: there is nothing to check.
            field: name of the body's field that has the grammar, such as "response_format", for error messages.

        Raises:
            ApiError: status 400: the grammar is not valid or not supported.
        """
        if grammar is None:
            return
        try:
            await asyncio.to_thread(self.loop.grammars.grammar, *grammar)
        except UserError as error:
            message = str(error)
            if message.startswith(grammar[0]):  # the kind, which is no field's name
                message = field + message.removeprefix(grammar[0])
            raise ApiError(400, message, field.partition(".")[0]) from None

    def check_logprobs(self) -> None:
        """Refuse log probabilities if several ranks share a decode step: each rank then has only some tokens' logits.

        Raises:
            ApiError: status 400: there are several ranks.
        """
        if not self.loop.context.alone:
            ranks = self.loop.context.world_size
            message = f"logprobs is given, but each of {ranks} ranks has only its own nodes; leave it out"
            raise ApiError(400, message, "logprobs")

    def token_name(self, token: int) -> str:
        """A token's name in log probabilities: the text that it adds, such as " the".

        A token that adds no text of its own has another name; see `Vocabulary.name`.

        Args:
            token: token id.
        """
        if token not in self._token_names:  # a prompt's log probabilities name twenty of them for every token
            self._token_names[token] = self.words.name(token)
        return self._token_names[token]

    def piece(self, token: int) -> str | list[int]:
        """The text of a token, for /tokenize; if the token splits a character, a list of its bytes, as in llama.cpp."""
        name, data = self.token_name(token), self.words.data(token)
        return list(data) if data and data.decode(errors="ignore").encode() != data else name

    def expected(self, text: str) -> list[int]:
        """Encode a request's predicted output, whose tokens are used as draft tokens; no text is refused.

        Args:
            text: the text; names of special tokens in it are encoded as plain text if the tokenizer can do that.
        """
        try:
            ids = self.encode(text, special=False, parsed=False)
        except UserError:  # a tokenizer that can't take them as text
            ids = self.encode(text, special=False)
        return [token for token in ids if token < self.vocabulary]

    async def prompt_logprobs(self, prompt: list[int], num_top: int) -> list[Logprob]:
        """Compute the log probability of each token of a prompt, given the tokens before it; the first token has none.

        Args:
            prompt: token ids of the prompt.
            num_top: how many of the likeliest tokens are reported beside each token.

        Returns:
            One entry for each token but the first.

        Raises:
            ApiError: status 400: the request has chosen an adapter. Status 429: too many prompts wait. Status 503: the
                server is ending.
        """
        if self.adapter:
            message = f"logprobs of an echoed prompt are the model's own alone; leave echo out for {self.adapter!r}"
            raise ApiError(400, message, "echo")
        event_loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Logprob] | BaseException] = event_loop.create_future()

        def done(result: list[Logprob] | BaseException) -> None:
            def settle() -> None:
                if not future.done():
                    future.set_result(result)

            with contextlib.suppress(RuntimeError):  # the event loop has ended
                event_loop.call_soon_threadsafe(settle)

        scoring = Scoring(prompt, num_top, done)
        try:
            self.loop.score(scoring)
        except Busy:
            raise busy(f"{self.loop.max_texts} prompts are waiting to be scored, of {self.loop.max_texts}") from None
        except Closing:
            raise closing(self.loop) from None
        try:
            result = await future
        finally:
            scoring.wanted = False
        if isinstance(result, BaseException):
            raise failed(result)
        return result


@dataclass(frozen=True)
class Wanted:
    """A text that a request asks for: how it is generated, and the client's conditions for its end.

    Args:
        spec: prompt, sampling and the engine's other arguments.
        grammar_field: name of the body's field that has the text's grammar, for error messages.
        stop, min_indent, time_limit_s: stop strings, and limits of indentation and time, that end the text; see
            `TextWatch`.
    """

    spec: TextSpec
    grammar_field: str = ""
    stop: Sequence[str] = ()
    min_indent: int = 0
    time_limit_s: float | None = None


class TextGroup:
    """Submits the texts of one request to the engine, and yields their events as they come.

    Args:
        served: the model, with the client and the LoRA adapter of this request.
        name: the request's id, such as "cmpl-1f0c".
        wanted: the texts to generate.

    Raises:
        ApiError: status 429: too many texts wait already. Status 503: the server is ending.
    """

    def __init__(self, served: Served, name: str, wanted: Sequence[Wanted]) -> None:
        self._served = served
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._event_loop = asyncio.get_running_loop()
        self._left = len(wanted)
        self._grammar_fields = [text.grammar_field for text in wanted]
        self._began = time.perf_counter()
        self._waits_for_first = set(range(len(wanted)))
        loop = served.loop
        served.check_count(len(wanted))
        specs = [replace(text.spec, owner=served.client.name, adapter=served.adapter) for text in wanted]
        unfinished = served.unfinished
        key = unfinished.key(specs)
        self._noted = unfinished.begin(name, key, texts=len(wanted), seed=(specs[0].sampling or {}).get("seed"))
        specs = unfinished.resumed(specs, key)
        texts = [replace(text, spec=spec) for text, spec in zip(wanted, specs, strict=True)]
        for index, spec in enumerate(specs):
            self._noted.add(index, spec.resumed)
        self._resumed = {index for index, spec in enumerate(specs) if spec.resumed}  # whose first tokens are noted
        try:
            self._ids = loop.submit([self._live(index, text) for index, text in enumerate(texts)])
        except (Busy, Closing) as error:
            self._noted.end()
            if isinstance(error, Closing):
                raise closing(loop) from None
            raise busy(f"{loop.texts} texts run or wait, of {loop.max_texts}") from None
        if self._noted.has_tokens:
            unfinished.taken(key)

    def _live(self, index: int, text: Wanted) -> LiveText:
        words, prompt = self._served.words, text.spec.prompt
        answer = TextWatch(words, prompt, text.stop, text.min_indent, text.time_limit_s)
        watch: TextWatch | ReasoningWatch = answer
        if text.spec.reasoning is not None:
            begin, end, is_open = text.spec.reasoning
            watch = ReasoningWatch(words, prompt, Reasoning(begin, end, bool(is_open)), answer)

        def tell(event: Event) -> None:
            self._note(index, event)
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._event_loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

        return LiveText(text.spec, watch, tell)

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield pairs (index of the text, event) until all texts have ended; closing the generator cancels the rest.

        Raises:
            ApiError: a text has failed.
        """
        try:
            while self._left:
                index, event = await self._queue.get()
                if isinstance(event, Ending):
                    if event.error:
                        raise failed(event.error, self._grammar_fields[index])
                    self._left -= 1
                yield index, event
        finally:
            if self._left:
                for number in self._ids:
                    self._served.loop.cancel(number)
            if not self._left or self._served.loop.takes_texts:  # else the next server may go on with it
                self._noted.end()

    def _note(self, index: int, event: Event) -> None:
        """Count an event for metrics and restarts; on the engine's thread, whether or not a client still listens."""
        if isinstance(event, Ending):
            self._served.metrics.ended(event)
            return
        if index in self._resumed:
            self._resumed.remove(index)
        else:
            self._noted.add(index, event.tokens)
        if index in self._waits_for_first:
            self._waits_for_first.remove(index)
            self._served.metrics.first_token(time.perf_counter() - self._began)


def busy(waiting: str) -> ApiError:
    """The error for a request that the server has no room for: status 429, with Retry-After.

    Args:
        waiting: beginning of the message, such as "8 texts run or wait, of 8".
    """
    return ApiError(429, f"{waiting} that may; try again later", headers={"Retry-After": str(RETRY_AFTER_S)})


def closing(loop: EngineLoop) -> ApiError:
    """The error for a request that comes when the server is about to end or its engine has failed: status 503."""
    message = f"the engine has failed: {loop.failure}" if loop.failure else "the server is about to end"
    return ApiError(503, message, headers={"Retry-After": str(RETRY_AFTER_S)})  # a router has another server by then


def failed(error: BaseException, grammar_field: str = "") -> ApiError:
    """Convert an exception that the engine raised for a text to an API error with status 400, 500 or 503.

    Args:
        error: the exception.
        grammar_field: name of the body's field that has the text's grammar, for the message; "" if there is no grammar.
    """
    if isinstance(error, GrammarError) and grammar_field:
        message = grammar_field + str(error).removeprefix("the grammar")
        return ApiError(400, message, grammar_field.partition(".")[0])
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, Abandoned):
        return ApiError(503, "the server ended before the text did; ask again")
    if isinstance(error, RanksParted):
        return ApiError(503, f"the ranks have parted: {error}")
    return ApiError(500, f"generating failed: {type(error).__name__}: {error}")


def usage(prompts: Sequence[Sequence[int]], endings: Sequence[Ending], predicted: int = 0) -> dict[str, Any]:
    """OpenAI's field `usage`, with counts of decode steps and draft tokens added.

    Args:
        prompts: token ids of each prompt; a prompt with n choices is given once.
        endings: last events of the request's texts, which have their counts.
        predicted: number of tokens of the request's predicted output.
    """
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    completion_tokens = sum(ending.num_tokens for ending in endings)
    steps = sum(len(ending.steps) for ending in endings)
    accepted = sum(ending.predicted for ending in endings)
    cached = sum(ending.cached for ending in endings if not ending.sequence)  # of a prompt's first choice
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(ending.num_thought for ending in endings),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(predicted * len(endings) - accepted, 0),
        },
        "steps": steps,
        "tokens_per_step": sum(ending.generated for ending in endings) / steps if steps else 0.0,
        "draft_tokens": sum(draft_tokens(ending.steps) for ending in endings),
        "accepted_draft_tokens": sum(step.accepted for ending in endings for step in ending.steps),
    }
