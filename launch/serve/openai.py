"""OpenAI's endpoints: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from lp.sampling.logprob_sampler import Logprob

from ..text.detokenizer import Detokenizer, TokenWalk
from .acceptance import acceptance
from .api_errors import ApiError
from .bodies import ChatBody, CompletionBody, OpenAI, Sampled, plain_text
from .chat_template import answer, chat_prompt, tool_format, uses_tools
from .engine_loop import Ending, Piece
from .logprobs import LegacyLogprobs, chat_logprobs, prompt_offsets
from .reasoning import Reasoning
from .responses import streamed, whole
from .served import FINISH_REASON, Served, TextGroup, Wanted, usage
from .spec import SentTensors, TextSpec

Asked = TypeVar("Asked", bound=Sampled)
Made = TypeVar("Made")

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


def openai_routes(served: Served) -> APIRouter:
    """Create the router with /v1/completions and /v1/chat/completions.

    Args:
        served: the model that generates the answers.
    """
    router = APIRouter()
    timeout_s = served.limits.timeout_s

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        completion = await begun(Completion, served, request, body)
        if body.stream:
            return await streamed(request, completion.chunks(), timeout_s)
        return await whole(request, completion.whole(), timeout_s)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        chat = await begun(Chat, served, request, body)
        if body.stream:
            return await streamed(request, chat.chunks(), timeout_s)
        return await whole(request, chat.whole(), timeout_s)

    return router


async def begun(make: Callable[[Served, Asked], Made], served: Served, request: Request, body: Asked) -> Made:
    """Check a request, download its images, and create the object that generates its answer, such as a `Chat`.

    Args:
        make: creates that object. It is called on another thread with `body` and a copy of `served`, which knows the
            request's client and LoRA adapter.
        served: the model.
        request: the client's request, whose ASGI scope names the client.
        body: the parsed body of the request.

    Raises:
        ApiError: status 404: there is no such model. Status 400: a grammar, an image or another field can't be used.
    """
    served = served.chosen(body.model)
    if served.adapter and body.images:
        raise ApiError(
            400, f"model {served.adapter!r} is an adapter, which takes text alone; leave the image out", "model"
        )
    await served.check_grammar(body.grammar_given, body.grammar_field)
    await served.image_urls.fetch(body.images, body.PROMPT)
    return await asyncio.to_thread(make, served.asked_by(request.scope), body)  # a long text takes seconds to encode


def spec_of(served: Served, body: OpenAI, prompt: list[int], max_tokens: int | None) -> TextSpec:
    """Describe one sequence that a request asks the engine for: the prompt, and the settings in the request's body.

    Args:
        served: the model, with the settings that apply if the body leaves them open.
        body: the parsed body of the request.
        prompt: token ids that the text continues.
        max_tokens: most tokens to generate; None and -1: the server's limit; -2: as many as the context has room for.
    """
    penalised = body.samples_by("penalties")
    return TextSpec(
        prompt=prompt,
        max_new_tokens=served.new_tokens(prompt, max_tokens),
        sampling=served.sampled(body.sampling_given, body.seed),
        eos=served.ends(ignored=body.ignore_eos),
        logit_bias=served.biases(body.logit_bias),
        presence_penalty=(penalised and body.presence_penalty) or 0.0,
        frequency_penalty=(penalised and body.frequency_penalty) or 0.0,
        repeat_last_n=-1 if body.repeat_last_n is None else body.repeat_last_n,
        grammar=body.grammar_given,
        corpora=served.corpora(body.corpora),
    )


class _Answer:
    """The parts that answers of both endpoints share: an id, the choices, the usage.

    Args:
        served: the model.
        body: the request.
        prefix: beginning of the id, such as "cmpl-".
        kind: the response's field "object", such as "chat.completion".
    """

    def __init__(self, served: Served, body: OpenAI, prefix: str, kind: str) -> None:
        self.served = served
        self.body = body
        self.kind = kind
        self.head: dict[str, Any] = {
            "id": f"{prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.short_name,
        }
        self.prompts: list[list[int]] = []
        self.texts: list[Wanted] = []
        self.predicted = 0

    def response(self, choices: list[dict[str, Any]], endings: Sequence[Ending]) -> dict[str, Any]:
        """The body of a response that is not streamed.

        Args:
            choices: the field "choices".
            endings: how the generated texts ended, from which the usage is counted.
        """
        return {**self.head, "object": self.kind, "choices": choices, **self._figures(endings)}

    def chunk(self, choice: dict[str, Any], step_tokens: int = 0) -> dict[str, Any]:
        """The body of one event of a streamed response.

        Args:
            choice: the only entry of the event's field "choices".
            step_tokens: number of tokens that the decode step of this event added.
        """
        kind = self.kind if self.kind == "text_completion" else f"{self.kind}.chunk"
        chunk = {**self.head, "object": kind, "choices": [choice], "step_tokens": step_tokens}
        return {**chunk, "usage": None} if self._with_usage else chunk

    def last_chunk(self, endings: Sequence[Ending]) -> list[dict[str, Any]]:
        """The last event, with the usage, as a list; empty where `stream_options.include_usage` does not ask for it."""
        if not self._with_usage:
            return []
        return [{**self.chunk({}), "choices": [], **self._figures(endings)}]

    def _figures(self, endings: Sequence[Ending]) -> dict[str, Any]:
        """Fields of the whole answer: its figures, and the seed; as of vLLM, draft tokens of a single text alone."""
        drafts = acceptance(endings[0].steps) if len(endings) == 1 else None
        figures = usage(self.prompts, endings, self.predicted)
        return {"usage": figures, "metrics": {"speculative_decoding": drafts}, **self._seed()}

    @property
    def _with_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def _seed(self) -> dict[str, Any]:
        """The seed that repeats the text, as a field; no field if it was not sampled."""
        sampling = self.texts[0].spec.sampling if self.texts else None
        return {"seed": sampling["seed"]} if sampling and sampling["temperature"] else {}

    def choices_of(self, spec: TextSpec) -> list[Wanted]:
        """The n texts to generate for a prompt, each of which becomes a choice of the answer.

        Args:
            spec: the text of the first choice; the others differ from it by `sequence`.
        """
        stop = [*self.served.stop, *self.body.stop]
        field = self.body.grammar_field
        return [Wanted(replace(spec, sequence=index), field, stop) for index in range(self.body.n)]


class Completion(_Answer):
    """Generates the answer to one request to /v1/completions, in one piece (`whole`) or streamed (`chunks`).

    Args:
        served: the model, with the client and the LoRA adapter of this request.
        body: the parsed body of the request.

    Raises:
        ApiError: status 400: a field of the body has a value that can't be used.
    """

    body: CompletionBody

    def __init__(self, served: Served, body: CompletionBody) -> None:
        super().__init__(served, body, "cmpl-", "text_completion")
        if body.logprobs is not None:
            served.check_logprobs()
        prompts = [self._gap(body.suffix)] if body.suffix else self._given()
        served.check_count(len(prompts) * body.n, "prompt" if body.n == 1 else "n")
        self.prompts = [served.checked(prompt, "prompt") for prompt in prompts]
        self.echoes = self._sent() if body.echo else [""] * len(self.prompts)
        if body.most_tokens == 0:
            return
        limit = COMPLETION_TOKENS if body.most_tokens is None else body.most_tokens
        for prompt in self.prompts:
            spec = spec_of(served, body, prompt, limit)
            spec = replace(spec, eos=served.ends_of(prompt, body.ignore_eos), logprobs=body.logprobs)
            self.texts += self.choices_of(spec)

    def _given(self) -> list[list[int]]:
        prompt = self.body.prompt
        encode = self.served.encode if self.body.echo else self.served.encode_prompt  # what is echoed is as it was sent
        if isinstance(prompt, str):
            return [encode(prompt)]
        if isinstance(prompt[0], int):
            return [list(prompt)]
        return [encode(one) if isinstance(one, str) else list(one) for one in prompt]

    def _gap(self, suffix: str) -> list[int]:
        if self.served.fim is None:
            message = (
                f"suffix is given, but {self.served.short_name} has no tokens for fill-in-the-middle; leave it out, or "
                "name the model's own by fim.prefix, fim.suffix and fim.middle"
            )
            raise ApiError(400, message, "suffix")
        assert isinstance(self.body.prompt, str)
        return self.served.fim.prompt(self.body.prompt, suffix, None)[0]

    def _sent(self) -> list[str]:
        """The prompts as they were sent; those of token ids decoded, but for half a character that may be completed."""
        given = [self.body.prompt] if isinstance(self.body.prompt, str) else self.body.prompt
        texts = []
        for place, prompt in enumerate(self.prompts):
            one = given[place]
            detokenizer = Detokenizer(self.served.words)
            texts.append(one if isinstance(one, str) else detokenizer.push(prompt))
            if self.body.most_tokens == 0:
                texts[-1] += detokenizer.flush()
        return texts

    async def whole(self) -> dict[str, Any]:
        """Generate all texts of the request, and return the response in one piece."""
        texts = [[echo] for echo in self.echoes for _ in range(self.body.n)]
        logprobs = await self._prompt_logprobs()
        endings: dict[int, Ending] = {}
        if self.texts:
            async with aclosing(TextGroup(self.served, self.head["id"], self.texts).events()) as events:
                async for index, event in events:
                    texts[index].append(event.text)
                    if isinstance(event, Ending):
                        endings[index] = event
                    elif logprobs:
                        logprobs[index].add(event.logprobs)
        choices = [
            {
                "index": index,
                "text": "".join(parts),
                "logprobs": logprobs[index].data() if logprobs else None,
                "finish_reason": _reason(endings[index]) if endings else "length",
            }
            for index, parts in enumerate(texts)
        ]
        return self.response(choices, [*endings.values()])

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Generate all texts of the request, and yield the bodies of the streamed response's events.

        Each text has an event for each decode step and one for its end. A last event has the token counts, if the
        request asks for them with `stream_options.include_usage`.
        """
        logprobs = await self._prompt_logprobs()
        echoes = [echo for echo in self.echoes for _ in range(self.body.n)]
        endings: list[Ending] = []

        def chunk(index: int, text: str, reason: str | None = None, tokens: int = 0) -> dict[str, Any]:
            taken = logprobs[index].take() if logprobs else None
            choice = {"index": index, "text": text, "logprobs": taken, "finish_reason": reason}
            return self.chunk(choice, tokens)

        if not self.texts:
            for index, text in enumerate(echoes):
                yield chunk(index, text, "length")
        else:
            heads = dict(enumerate(echoes))  # of texts that have not begun
            async with aclosing(TextGroup(self.served, self.head["id"], self.texts).events()) as events:
                async for index, event in events:
                    text = heads.pop(index, "") + event.text
                    if isinstance(event, Piece):
                        if logprobs:
                            logprobs[index].add(event.logprobs)
                        yield chunk(index, text, None, len(event.tokens))
                    else:
                        endings.append(event)
                        yield chunk(index, text, _reason(event))
        for last in self.last_chunk(endings):
            yield last

    async def _prompt_logprobs(self) -> list[LegacyLogprobs]:
        """Log probabilities of the echoed prompt, for every choice; empty where none are asked for."""
        found: list[LegacyLogprobs] = []
        if self.body.logprobs is None:
            return found
        served = self.served
        for place, prompt in enumerate(self.prompts):
            begun = LegacyLogprobs(served.token_name, TokenWalk(served.words))
            if self.body.echo:
                logprobs = await served.prompt_logprobs(prompt, self.body.logprobs)
                given = self.body.prompt if isinstance(self.body.prompt, str) else self.body.prompt[place]
                offsets = prompt_offsets(served.tokenizer, given, prompt) if isinstance(given, str) else None
                begun.add_prompt(prompt, logprobs, offsets)
            for _ in range(self.body.n):
                found.append(begun.after(TokenWalk(served.words, prompt, len(self.echoes[place]))))
        return found


class Chat(_Answer):
    """Generates the answer to one request to /v1/chat/completions, in one piece (`whole`) or streamed (`chunks`).

    Args:
        served: the model, with the client and the LoRA adapter of this request.
        body: the parsed body of the request.
        prefix: beginning of the answer's id, such as "chatcmpl-".

    Raises:
        ApiError: status 400: a field of the body has a value that can't be used.
    """

    body: ChatBody

    def __init__(self, served: Served, body: ChatBody, prefix: str = "chatcmpl-") -> None:
        super().__init__(served, body, prefix, "chat.completion")
        if body.logprobs:
            served.check_logprobs()
        self.tools = tool_format(served.tokenizer, served.model) if uses_tools(body) else None
        made = chat_prompt(served.tokenizer, body, served.literal, served.images)
        prompt = served.checked(made.tokens, body.PROMPT)
        self.prompts = [prompt]
        spec = spec_of(served, body, prompt, body.most_tokens)
        turn = served.tokenizer.eos_token_id if served.tokenizer.chat_template else None
        ends = [turn] if isinstance(turn, int) else []
        top = body.top_logprobs or 0
        prediction = self._prediction()
        self.predicted = len(prediction)
        spec = replace(
            spec,
            eos=served.ends(ends, body.ignore_eos),
            logprobs=top if body.logprobs else None,
            prediction=prediction,
            reasoning=self._reasoning(prompt),
            images=SentTensors(made.inputs) if made.inputs else None,
        )
        self.texts = self.choices_of(spec)
        self.num_thought = [0] * len(self.texts)  # tokens of each text's reasoning, in the events so far
        self.walks = [TokenWalk(served.words, prompt) for _ in self.texts if body.logprobs]

    async def whole(self) -> dict[str, Any]:
        """Generate all texts of the request, and return the response in one piece."""
        texts = [list[str]() for _ in self.texts]
        thoughts = [list[str]() for _ in self.texts]
        tokens = [list[int]() for _ in self.texts]
        logprobs = [list[Logprob]() for _ in self.texts]
        endings: dict[int, Ending] = {}
        async with aclosing(TextGroup(self.served, self.head["id"], self.texts).events()) as events:
            async for index, event in events:
                texts[index].append(event.text)
                thoughts[index].append(event.thought)
                if isinstance(event, Ending):
                    endings[index] = event
                else:
                    tokens[index] += event.tokens
                    logprobs[index] += event.logprobs
        choices = []
        for index, parts in enumerate(texts):
            message = self._message("".join(parts), tokens[index], endings[index])
            message |= _thought("".join(thoughts[index]))
            reason = "tool_calls" if message.get("tool_calls") else _reason(endings[index])
            content = self._logprobs(index, logprobs[index])
            choices.append({"index": index, "message": message, "logprobs": content, "finish_reason": reason})
        return self.response(choices, [*endings.values()])

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Generate all texts of the request, and yield the bodies of the streamed response's events.

        If the model may call tools, its text and its reasoning are held back, and parsed once the text has ended.
        """
        held = [list[Piece]() for _ in self.texts]
        endings: list[Ending] = []

        def chunk(index: int, delta: dict[str, Any], reason: str | None = None, piece: Piece | None = None) -> Any:
            logprobs = self._logprobs(index, piece.logprobs) if piece else None
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return self.chunk(choice, len(piece.tokens) if piece else 0)

        async with aclosing(TextGroup(self.served, self.head["id"], self.texts).events()) as events:
            begun = set[int]()
            async for index, event in events:
                if index not in begun:
                    begun.add(index)
                    yield chunk(index, {"role": "assistant", "content": ""})
                if isinstance(event, Piece):
                    self.num_thought[index] += event.num_thought
                    if self.tools is None:
                        thought = _thought(event.thought)
                        content = {"content": event.text} if event.text or not thought else {}
                        yield chunk(index, thought | content, None, event)
                    else:
                        held[index].append(event)
                    continue
                endings.append(event)
                reason = _reason(event)
                delta: dict[str, Any] = _thought(event.thought)
                delta |= {"content": event.text} if event.text else {}
                piece = None
                if self.tools is not None:
                    piece = _joined(held[index])
                    message = self._message(piece.text + event.text, piece.tokens, event)
                    calls = message.pop("tool_calls", [])
                    delta = {name: value for name, value in message.items() if name != "role" and value}
                    if calls:
                        reason = "tool_calls"
                        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
                if delta:
                    yield chunk(index, delta, None, piece)
                yield chunk(index, {}, reason)
        for last in self.last_chunk(endings):
            yield last

    def _prediction(self) -> list[int]:
        if self.body.prediction is None:
            return []
        return self.served.expected(plain_text(self.body.prediction.content))

    def _reasoning(self, prompt: Sequence[int]) -> Sequence[int] | None:
        """Where the reasoning of an answer can be; of one that may call tools, the format of calls says it."""
        if self.served.reasoning is None or self.tools is not None:
            return None
        found = Reasoning.after(self.served.reasoning, prompt, self.served.words)
        return None if found is None else (found.begin, found.end, found.is_open)

    def _message(self, text: str, tokens: Sequence[int], ending: Ending) -> dict[str, Any]:
        if self.tools is None:
            return {"role": "assistant", "content": text}
        message = answer(self.served.tokenizer, self.tools, text, tokens, self.prompts[0], self.body)
        if ending.found and message["content"]:  # the tokens have the stop string, too
            message["content"] = message["content"].partition(ending.found)[0]
        return message

    def _logprobs(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        """Log probabilities of the next tokens of a choice."""
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.served.token_name, self.walks[index], logprobs)


def _thought(text: str) -> dict[str, str]:
    """The field of a message with its reasoning, if there is any."""
    return {"reasoning_content": text} if text else {}


def _joined(pieces: Sequence[Piece]) -> Piece:
    """Several pieces of a text as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        [logprob for piece in pieces for logprob in piece.logprobs],
    )


def _reason(ending: Ending) -> str:
    return FINISH_REASON.get(ending.reason, "length")
