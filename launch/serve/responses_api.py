"""OpenAI's Responses endpoint, /v1/responses, whose answers consist of items and are streamed as typed events.

The chat endpoint's code generates the answer. The events come in this order:

response.created, response.in_progress
for each item     response.output_item.added ... response.output_item.done
  reasoning       response.content_part.added, response.reasoning_text.delta ..., .done, response.content_part.done
  message         response.content_part.added, response.output_text.delta ..., .done, response.content_part.done
  function_call   response.function_call_arguments.delta, .done
response.completed, or response.incomplete where the text was cut, or response.failed
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from .api_errors import SHOWN, ApiError
from .openai import Chat, begun
from .responses import streamed, whole
from .responses_bodies import KEPT, ResponsesBody
from .served import Served

Data = dict[str, Any]


def responses_routes(served: Served) -> APIRouter:
    """Create the router with /v1/responses and the paths below it.

    Args:
        served: the model that generates the answers.
    """
    router = APIRouter()
    timeout_s = served.limits.timeout_s

    @router.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        answer = await begun(ResponsesAnswer, served, request, body)
        if body.stream:
            return await streamed(request, answer.events(), timeout_s, done="", failure=answer.failed)
        return await whole(request, answer.whole(), timeout_s)

    @router.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesBody, request: Request) -> Response:
        answer = await begun(ResponsesAnswer, served, request, body)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": answer.num_input})

    @router.post("/v1/responses/compact")
    async def compact() -> Response:
        message = "this server does not compact items; send fewer of them, or a summary that you have asked for"
        raise ApiError(501, message, code="not_supported")

    @router.get("/v1/responses/{name}")
    @router.delete("/v1/responses/{name}")
    @router.post("/v1/responses/{name}/cancel")
    @router.get("/v1/responses/{name}/input_items")
    async def kept(name: str) -> Response:
        raise ApiError(404, f"there is no response {name[:SHOWN]!r}; {KEPT}", code="response_not_found")

    return router


class TextItem:
    """Makes the events of an output item whose text is streamed: a message, or the reasoning before it.

    Args:
        kind: "message" or "reasoning".
        index: the item's index in the response's `output`.
    """

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.is_message = kind == "message"
        self.event = "response.output_text" if self.is_message else "response.reasoning_text"
        self.place = {"item_id": f"{'msg' if self.is_message else 'rs'}_{uuid.uuid4().hex}", "output_index": index}
        self.texts: list[str] = []
        self.logprobs: list[Data] = []

    def began(self) -> Iterator[Data]:
        """Yield the events that begin the item: response.output_item.added and response.content_part.added."""
        yield {"type": "response.output_item.added", "item": self.item("in_progress", []), **self._index}
        yield {"type": "response.content_part.added", **self._part_place, "part": self._part("", [])}

    def grown(self, text: str, logprobs: list[Data]) -> Data:
        """Add text to the item, and return the event that reports it, such as response.output_text.delta.

        Args:
            text: characters to add.
            logprobs: log probabilities of the tokens that the characters are from, in the API's form; empty if the
                request does not ask for them.
        """
        self.texts.append(text)
        self.logprobs += logprobs
        return {"type": f"{self.event}.delta", **self._part_place, "delta": text, **self._logprobs(logprobs)}

    def ended(self, status: str) -> Iterator[Data]:
        """Yield the events that end the item; the last one has the whole item.

        Args:
            status: "completed", or "incomplete" if the text was cut off.
        """
        text = "".join(self.texts)
        part = self._part(text, self.logprobs)
        yield {"type": f"{self.event}.done", **self._part_place, "text": text, **self._logprobs(self.logprobs)}
        yield {"type": "response.content_part.done", **self._part_place, "part": part}
        yield {"type": "response.output_item.done", "item": self.item(status, [part]), **self._index}

    def item(self, status: str, content: list[Data]) -> Data:
        """The item as an entry of the response's `output`.

        Args:
            status: "in_progress", "completed" or "incomplete".
            content: the item's content parts.
        """
        own: Data = {"role": "assistant"} if self.is_message else {"summary": []}
        return {"id": self.place["item_id"], "type": self.kind, "status": status, **own, "content": content}

    def _part(self, text: str, logprobs: list[Data]) -> Data:
        if not self.is_message:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}

    def _logprobs(self, logprobs: list[Data]) -> Data:
        return {"logprobs": [*logprobs]} if self.is_message else {}

    @property
    def _index(self) -> Data:
        return {"output_index": self.place["output_index"]}

    @property
    def _part_place(self) -> Data:
        return {**self.place, "content_index": 0}


class ResponsesAnswer:
    """Generates the answer to one request to /v1/responses, in one piece (`whole`) or streamed (`events`).

    Args:
        served: the model, with the client and the LoRA adapter of this request.
        body: the parsed body of the request.

    Raises:
        ApiError: status 400: a field of the body has a value that can't be used.
    """

    def __init__(self, served: Served, body: ResponsesBody) -> None:
        self._body = body
        self._chat = Chat(served, body.chat, "resp_")
        self._output: list[Data] = []  # items that have ended
        self._item: TextItem | None = None  # the one that grows
        self._logprobs: list[Data] = []  # of the message's tokens whose characters are yet to come
        self._left_out = 0  # how many there were of the reasoning's tokens
        self._more: Data = {}  # what the chat's last event has
        self._number = 0

    @property
    def num_input(self) -> int:
        """Number of tokens of the prompt that the chat template makes from the input items."""
        return len(self._chat.prompts[0])

    async def whole(self) -> Data:
        """Generate the answer, and return it in one piece: the response object that a stream's last event has."""
        last: Data = {}
        async with aclosing(self.events()) as events:
            async for event in events:
                last = event
        response: Data = last["response"]
        return response

    async def events(self) -> AsyncGenerator[Data, None]:
        """Generate the answer, and yield the bodies of the streamed response's events, numbered from 0.

        The first event comes after the first decode step.
        """
        reason = ""
        async with aclosing(self._chat.chunks()) as chunks:
            async for chunk in chunks:
                if not self._number:
                    for name in ("created", "in_progress"):
                        yield self._numbered(self._state(name, "in_progress"))
                if chunk.get("usage"):
                    self._more = chunk
                for choice in chunk["choices"]:
                    reason = choice["finish_reason"] or reason
                    for event in self._of_choice(choice):
                        yield self._numbered(event)
        status = "incomplete" if reason == "length" else "completed"
        for event in self._last_item(status):
            yield self._numbered(event)
        yield self._numbered(self._state(status, status))

    def failed(self, error: ApiError) -> Data:
        """The event response.failed, which ends a stream after an error.

        Args:
            error: the error, whose message the event has.
        """
        state = self._state("failed", "failed")
        state["response"]["error"] = {"code": "server_error", "message": error.message}
        return self._numbered(state)

    def _numbered(self, event: Data) -> Data:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _of_choice(self, choice: Data) -> Iterator[Data]:
        """Events of what an event of the chat brings."""
        delta = choice["delta"]
        new = [_logprob(each) for each in (choice["logprobs"] or {}).get("content", [])]
        thought = min(self._chat.num_thought[0] - self._left_out, len(new))  # the reasoning's come first
        self._left_out += thought
        self._logprobs += new[thought:]
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if text := delta.get(name):
                yield from self._grow(kind, text)
        for call in delta.get("tool_calls", []):
            yield from self._end_item("completed")
            yield from self._call(call)

    def _grow(self, kind: str, text: str) -> Iterator[Data]:
        if self._item is None or self._item.kind != kind:
            yield from self._end_item("completed")
            self._item = TextItem(kind, len(self._output))
            yield from self._item.began()
        logprobs: list[Data] = []
        if kind == "message":
            logprobs, self._logprobs = self._logprobs, []
        yield self._item.grown(text, logprobs)

    def _end_item(self, status: str) -> Iterator[Data]:
        if self._item:
            for event in self._item.ended(status):
                yield event
                if event["type"] == "response.output_item.done":
                    self._output.append(event["item"])
            self._item = None

    def _last_item(self, status: str) -> Iterator[Data]:
        """The end of the item that has grown last; an empty message where there is nothing else."""
        if self._item is None and not self._output:
            self._item = TextItem("message", 0)
            yield from self._item.began()
        if self._item:
            self._item.logprobs += self._logprobs
        yield from self._end_item(status)

    def _call(self, call: Data) -> Iterator[Data]:
        """Events of a call of a function, which comes in one piece."""
        function, index = call["function"], {"output_index": len(self._output)}
        own = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call["id"], "name": function["name"]}
        item = {**own, "status": "completed", "arguments": function["arguments"]}
        place = {"item_id": own["id"], **index}
        kind = "response.function_call_arguments"
        yield {"type": "response.output_item.added", "item": item | {"status": "in_progress", "arguments": ""}, **index}
        yield {"type": f"{kind}.delta", **place, "delta": function["arguments"]}
        yield {"type": f"{kind}.done", **place, "arguments": function["arguments"], "name": function["name"]}
        yield {"type": "response.output_item.done", "item": item, **index}
        self._output.append(item)

    def _state(self, name: str, status: str) -> Data:
        """An event with the response as it is now."""
        body, head, spec = self._body, self._chat.head, self._chat.texts[0].spec
        sampling = spec.sampling or {}
        response = {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": head["model"],
            "output": [*self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.get("temperature"),
            "text": {
                "format": body.form.model_dump(by_alias=True, exclude_none=True) if body.form else {"type": "text"}
            },
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.get("top_p"),
            "truncation": "disabled",
            "usage": _usage(self._more["usage"]) if self._more else None,
        }
        seed = {"seed": self._more["seed"]} if "seed" in self._more else {}
        return {"type": f"response.{name}", "response": response | seed}


def _logprob(of_chat: Data) -> Data:
    """A token's log probability, whose bytes are a list at any rate."""
    top = [each | {"bytes": each["bytes"] or []} for each in of_chat["top_logprobs"]]
    return of_chat | {"bytes": of_chat["bytes"] or [], "top_logprobs": top}


def _usage(of_chat: Data) -> Data:
    """A chat's usage under this endpoint's names, with what the steps came to."""
    figures = {**of_chat}
    cached = figures.pop("prompt_tokens_details")["cached_tokens"]
    thought = figures.pop("completion_tokens_details")["reasoning_tokens"]
    return {
        "input_tokens": figures.pop("prompt_tokens"),
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": figures.pop("completion_tokens"),
        "output_tokens_details": {"reasoning_tokens": thought},
        **figures,
    }
