"""HTTP responses whose work is cancelled when the client disconnects: JSON in one piece, or server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from .api_errors import ApiError

T = TypeVar("T")
DONE = "data: [DONE]\n\n"


class ClientLeft(Exception):
    """Raised when the client disconnects before its response is ready."""


async def while_connected(request: Request, work: Awaitable[T], timeout_s: float) -> T:
    """Await some work, but cancel it when the client disconnects or the time is up.

    Args:
        request: the client's request.
        work: an awaitable, such as the generation of an answer.
        timeout_s: seconds that the work may take; 0 is no limit.

    Returns:
        The result of `work`.

    Raises:
        ClientLeft: the client has disconnected.
        ApiError: status 504: the time is up.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, leaving}, timeout=timeout_s or None, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if leaving.done():
            raise ClientLeft
        raise _late(timeout_s)
    finally:
        for each in (task, leaving):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def whole(request: Request, work: Awaitable[dict[str, Any]], timeout_s: float) -> Response:
    """Await the body of a response that is not streamed, and return the response.

    Args:
        request: the client's request.
        work: makes the body; cancelled when the client disconnects.
        timeout_s: seconds that `work` may take, after which an ApiError with status 504 is raised; 0 is no limit.
    """
    try:
        return JSONResponse(await while_connected(request, work, timeout_s))
    except ClientLeft:
        return Response(status_code=499)  # which nobody reads


async def streamed(
    request: Request,
    chunks: AsyncGenerator[dict[str, Any], None],
    timeout_s: float,
    done: str = DONE,
    failure: Callable[[ApiError], dict[str, Any]] = ApiError.body,
) -> Response:
    """Make a streamed response (server-sent events) from a generator of event bodies.

    The first event is awaited here. An error before it is raised, so that the response has the error's status; a later
    error is sent as an event.

    Args:
        request: the client's request.
        chunks: yields the bodies of the events; closed when the client disconnects.
        timeout_s: seconds that the whole stream may take; 0 is no limit.
        done: text that ends a stream without an error, such as "data: [DONE]"; "" sends nothing more.
        failure: makes the body of the event that reports an error.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s if timeout_s else None
    try:
        first = await while_connected(request, anext(chunks, None), timeout_s)
    except BaseException as error:
        await chunks.aclose()
        if isinstance(error, ClientLeft):
            return Response(status_code=499)
        raise

    async def events() -> AsyncIterator[str]:
        chunk = first
        try:
            while chunk is not None:
                yield _event(chunk)
                async with asyncio.timeout_at(deadline):  # not around `yield`, where it would end the sending
                    chunk = await anext(chunks, None)
            yield done
        except TimeoutError:
            yield _event(failure(_late(timeout_s)))
        except ApiError as error:
            yield _event(failure(error))

    return _EventStream(events(), chunks)


class _EventStream(StreamingResponse):
    """Server-sent events; however sending them ends, what makes them is closed.

    Args:
        events: the events to send.
        chunks: what they are made of.
    """

    def __init__(self, events: AsyncIterator[str], chunks: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._chunks = chunks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _late(timeout_s: float) -> ApiError:
    return ApiError(504, f"the text was not done within {timeout_s:g} s; ask for fewer tokens, or raise timeout_s")


def _event(data: dict[str, Any]) -> str:
    """An event, under the name of its type where it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
