"""The server's ASGI application: all routes, errors in OpenAI's form, and checks of each request.

A request's API key, Host header and body size are checked before its route runs.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Container, Mapping, MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import lp
from lp.errors import UserError

from .api_errors import SHOWN, ApiError, of_validation
from .llamacpp import llamacpp_routes
from .named_keys import Client, NamedKey
from .openai import openai_routes
from .responses_api import responses_routes
from .served import CLIENT, Served
from .status_endpoints import OPEN_PATHS, open_paths, status_routes

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


PORT = re.compile(r":[0-9]*$")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def build_app(
    served: Served,
    api_key: str | None = None,
    max_body_bytes: int = 4 << 20,
    host: str = LOOPBACK[0],
    metrics_key: bool = False,
    models_key: bool = True,
    named_keys: Mapping[str, NamedKey] | None = None,
) -> Any:
    """Build the server's ASGI application: all endpoints, and checks of each request's key, Host header and body size.

    Args:
        served: the model that the endpoints generate with.
        api_key: the key that clients must send as "Authorization: Bearer KEY"; None: there is no such key.
        max_body_bytes: the largest request body that is accepted, in bytes.
        host: the address that the server listens at. If it is a loopback address, a request without a valid key must
            also have 127.0.0.1, ::1 or localhost as its Host header, which protects against DNS rebinding by web pages.
        metrics_key: whether /metrics needs a key, if the server has keys.
        models_key: whether the list of models needs a key, if the server has keys.
        named_keys: further valid keys, by the name of the client that each belongs to; None: there are none. If neither
            `api_key` nor `named_keys` is given, no request needs a key.

    Returns:
        The application: a `Guard` around a FastAPI application.
    """
    app = FastAPI(title="lp", version=lp.__version__, docs_url=None, redoc_url=None)  # theirs need the internet
    for routes in (openai_routes, responses_routes, llamacpp_routes, status_routes):
        app.include_router(routes(served))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RecursionError, _too_deep)
    app.add_exception_handler(Exception, _failure)
    by_any_name = host not in LOOPBACK
    keys = {} if api_key is None else {api_key: Client()}
    keys |= {named.key: Client(name, named.corpora) for name, named in (named_keys or {}).items()}
    return Guard(app, served, keys, max_body_bytes, by_any_name, open_paths(metrics_key, models_key))


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _user_error(request: Request, error: Exception) -> JSONResponse:
    return await _api_error(request, ApiError(400, str(error)))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _api_error(request, of_validation(error.errors()))


async def _too_deep(request: Request, error: Exception) -> JSONResponse:
    return await _api_error(request, ApiError(400, "the body has too many levels of lists and objects; send fewer"))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    paths = ", ".join(request.app.openapi()["paths"])
    messages = {
        404: f"there is no path {request.url.path[:SHOWN]!r}; there are {paths}; /docs says what they take",
        405: f"{request.url.path} does not take {request.method}",
    }
    headers = dict(error.headers or {})
    return await _api_error(
        request, ApiError(error.status_code, messages.get(error.status_code, str(error.detail)), headers=headers)
    )


async def _failure(request: Request, error: Exception) -> JSONResponse:
    return await _api_error(request, ApiError(500, f"the server failed: {type(error).__name__}"))


class Guard:
    """ASGI middleware that checks each request's key, Host header and body size, and counts all responses.

    Args:
        app: the application with the endpoints; it gets the requests that pass the checks.
        served: the served model, whose metrics count the responses.
        keys: the valid API keys, each with the client that it belongs to; empty: requests need no key.
        max_body_bytes: the largest request body that is accepted, in bytes.
        by_any_name: whether the Host header may be anything. If False, a request without a valid key must have
            127.0.0.1, ::1 or localhost there; if the server has keys, paths such as "/health" (OPEN_PATHS) are exempt.
        open_paths: paths that need no key.

    Attributes:
        BODY_TIMEOUT_S: seconds within which a request's whole body must arrive; else it is answered with status 408.
    """

    BODY_TIMEOUT_S = 30.0  # for a whole body: a client that sends it byte by byte must not hold a connection for ever

    def __init__(
        self,
        app: FastAPI,
        served: Served,
        keys: Mapping[str, Client],
        max_body_bytes: int,
        by_any_name: bool,
        open_paths: Container[str],
    ) -> None:
        self.app = app
        self.served = served
        self.max_body_bytes = max_body_bytes
        self.by_any_name = by_any_name
        self.open_paths = open_paths
        self._keys = {key.encode(): client for key, client in keys.items()}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as GET: uvicorn, which knows what was asked, leaves the body out
            scope = {**scope, "method": "GET"}

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")  # a path that a client invents must not be a label
                self.served.metrics.request(path, message["status"])
            await send(message)

        try:
            self._check_name(scope, self._check_key(scope))
            body = await self._body(scope, receive)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, headers=error.headers)(scope, receive, counted)
            return
        if body is None:  # the client has left
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, counted)

    def _check_key(self, scope: Message) -> bool:
        """Refuse a request that lacks the key it needs, and note whose it is; whether it has one."""
        if not self._keys:
            return False
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        bearer = scheme.lower() == b"bearer"
        clients = [client for key, client in self._keys.items() if hmac.compare_digest(given, key) and bearer]
        has_key = bool(clients)
        scope[CLIENT] = clients[0] if clients else Client()
        if not has_key and scope["path"] not in self.open_paths:
            asked = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "this server needs its API key; send it as Authorization: Bearer KEY", headers=asked)
        return has_key

    def _check_name(self, scope: Message, has_key: bool) -> None:
        """A web page can let its own name lead to this machine, and would be of the server's own origin then."""
        given = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        name = PORT.sub("", given).strip("[]").lower()
        harmless = bool(self._keys) and scope["path"] in OPEN_PATHS
        if not (self.by_any_name or has_key or harmless or not name or name in LOOPBACK):
            names = ", ".join(LOOPBACK)
            message = f"this server is not called {name[:SHOWN]!r}; call it by one of {names}, or give it an api_key"
            raise ApiError(403, message)

    async def _body(self, scope: Message, receive: Receive) -> bytes | None:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        self._check_size(int(length) if length.isdigit() else 0)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._check_size(size)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self.BODY_TIMEOUT_S:g} s; send it at once") from None

    def _check_size(self, size: int) -> None:
        if size > self.max_body_bytes:
            message = f"the body has more than {self.max_body_bytes} bytes; send less, or raise max_body_bytes"
            raise ApiError(413, message)
