"""Places that requests of a batch can be sent to: the engine of this process, and servers with OpenAI's endpoints."""

from __future__ import annotations

import math
import re
import time
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from lp.errors import UserError

from ..serve.engine_loop import EngineLoop
from .lines import Request

AHEAD = 2  # requests beyond the engine's places: when a text ends, the next one need not be read first
CONNECT_S = 10.0
PATIENCE_S = 30.0  # that a server has, beyond timeout_s, to say that a text took too long
LOOK_S = 5.0  # a server's places are looked at as often
MOST_REST_S = 30.0  # of a server that fails again and again
MOST_RETRY_AFTER_S = 600.0
NOT_NOW = (429, 503)  # nothing was done
FAILED = (500, 502)  # something may have been done
LOAD = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? ([0-9.eE+]+)$", re.MULTILINE)
SHOWN = 200  # characters of a body that is no JSON


class Reply(NamedTuple):
    """The answer to a request; it may be an error that the request itself is to blame for.

    Attributes:
        status: HTTP status code.
        body: the answer's JSON, or an error in OpenAI's form.
        request_id: the server's id for the request; None if the server gives none.
    """

    status: int
    body: dict[str, Any]
    request_id: str | None


class Later(NamedTuple):
    """Returned in place of an answer: the request is to be sent again, to this or another engine or server.

    Attributes:
        why: the reason, for messages.
        under_way: whether the engine or server may have begun on the request, so that the request may be the cause.
    """

    why: str
    under_way: bool


class Place:
    """Base class of an engine or server that requests are sent to, with the number of requests that it can take.

    Args:
        name: its name in messages, such as the server's address.
        client: HTTP client that sends requests to it.

    Attributes:
        busy: number of requests that it has now.
        most_at_once: most requests that it had at a time since it last had none.
        seen_s: the last time at which it was known to take requests, by time.monotonic().
        trouble: its last problem, for messages; "" once it has answered a request again.
    """

    def __init__(self, name: str, client: httpx.AsyncClient) -> None:
        self.name = name
        self.client = client
        self.busy = self.most_at_once = 0
        self.seen_s = time.monotonic()
        self.trouble = ""

    @property
    def free(self) -> int:
        """How many more requests this engine or server takes now; 0 or less: none."""
        raise NotImplementedError

    async def ask(self, request: Request) -> Reply | Later:
        """Send a request to this engine or server, and wait for the answer.

        Args:
            request: the request to send.

        Returns:
            The answer, or a `Later` if the request is to be sent again.
        """
        raise NotImplementedError

    def drain(self) -> None:
        """Prepare to stop: no more requests will come, but those that were sent may be finished."""

    def abandon(self) -> None:
        """Cut off the requests that were sent and are not answered yet."""


class OwnEngine(Place):
    """The engine of this process, which answers a batch's requests through `lp serve`'s endpoints, without a network.

    Args:
        app: the ASGI application with the endpoints.
        loop: the loop that runs the engine.
    """

    def __init__(self, app: Any, loop: EngineLoop) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        super().__init__("the engine", httpx.AsyncClient(transport=transport, base_url="http://localhost"))
        self._loop = loop
        self._most = loop.engine.max_sequences + AHEAD

    @property
    def free(self) -> int:
        return self._most - self.busy

    async def ask(self, request: Request) -> Reply | Later:
        """Send a request to the engine, and wait for the answer.

        Args:
            request: the request to send.

        Returns:
            The answer, or a `Later` if the engine is shutting down.

        Raises:
            BaseException: the error that the engine failed with.
        """
        answer = await _post(self.client, request)
        if self._loop.failure and answer.status_code != 200:
            raise self._loop.failure
        self.seen_s = time.monotonic()
        return Later("the engine ends", False) if answer.status_code == 503 else _reply(answer)

    def drain(self) -> None:
        self._loop.close(0)

    def abandon(self) -> None:
        self._loop.abandon()


class Server(Place):
    """A server with OpenAI's endpoints that answers a batch's requests: one of `lp serve`, or another engine's.

    It gets requests only after a health check (`look`). After each failure it gets none for a while, longer each time,
    and is then checked again.

    Args:
        url: the server's address without /v1, such as "http://a:8000".
        api_key: the server's API key; None: it needs none.
        slots: how many requests the server computes at a time, unless its /props says otherwise.
        timeout_s: seconds that a request may take; 0: no limit.
        transport: httpx transport, for tests; None takes the network.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        slots: int,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(timeout_s + PATIENCE_S if timeout_s else None, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, transport=transport, follow_redirects=False
        )
        super().__init__(url, client)
        self._slots = slots
        self._others = 0  # requests of other clients
        self._rests_until_s = 0.0
        self._rest_s = 1.0  # the next one
        self._works = False  # since it was last looked at
        self._forbids = False  # it has answered 403 for what is no request
        self._answered = False  # it has answered a request
        self._full = False  # it refused the last request: it works, but takes none
        self._looked_s = float("-inf")

    @property
    def free(self) -> int:
        if not self._works or time.monotonic() < self._rests_until_s:
            return 0
        return max(self._slots - self._others, 1) - self.busy

    @property
    def is_due(self) -> bool:
        """Whether it is time for a health check (`look`).

        It is time if the pause after a failure is over, and either the server has failed since the last check, or that
        check is more than LOOK_S seconds old.
        """
        now_s = time.monotonic()
        return now_s >= self._rests_until_s and (not self._works or now_s - self._looked_s > LOOK_S)

    async def ask(self, request: Request) -> Reply | Later:
        """Send a request to the server, and wait for the answer.

        Args:
            request: the request to send.

        Returns:
            The answer, or a `Later` if the server is full, failed or cannot be reached.

        Raises:
            ValueError: the server refuses the API key, or redirects to another address.
        """
        try:
            answer = await _post(self.client, request)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            return self._failed(error, False)
        except httpx.HTTPError as error:
            return self._failed(error, True)
        if answer.status_code in NOT_NOW:
            return self._refused(answer)
        if answer.status_code == 401:
            raise self._locked(answer)
        if answer.status_code == 403 and self._forbids and not self._answered:
            said = answer.text[:SHOWN]
            raise UserError(f"{self.name} refuses all requests (403: {said}); if it wants a key, give it as LP_API_KEY")
        self._check_address(answer)
        if answer.status_code in FAILED or (answer.status_code > 500 and not _is_object(answer)):
            return self._failed(f"it answered {answer.status_code}: {answer.text[:SHOWN]}", True)
        self.seen_s, self._rest_s, self.trouble, self._full = time.monotonic(), 1.0, "", False
        self._answered = True
        return _reply(answer)

    async def look(self) -> None:
        """Check the server's health, and learn how many requests it takes and how many it has from other clients.

        This asks /ready and /metrics, and after a failure also /props. The result shows in `free` and `trouble`.

        Raises:
            ValueError: the server refuses the API key, or redirects to another address.
        """
        self._looked_s = time.monotonic()
        try:
            ready = await self._get("/ready")
            if ready.status_code == 401:
                raise self._locked(ready)
            self._forbids |= ready.status_code == 403
            self._check_address(ready)
            if ready.status_code >= 500:
                self.trouble = f"/ready answered {ready.status_code}"
                self._works = False
                self._rest(retry_after_s(ready))
                return
            if not self._works:
                await self._learn_slots()
            load = await self._get("/metrics")
        except httpx.HTTPError as error:
            self._failed(error, False)
            return
        counts = LOAD.findall(load.text) if load.status_code == 200 else []
        self._others = max(int(sum(map(float, counts))) - self.busy, 0)
        self._works = True
        if not self._full:
            self.seen_s = time.monotonic()

    async def _learn_slots(self) -> None:
        """Learn how many requests the server computes at a time from /props, which lp and llama.cpp have."""
        properties = await self._get("/props")
        if properties.status_code == 401:
            raise self._locked(properties)
        self._forbids |= properties.status_code == 403  # of a gateway, which may let requests through
        try:
            slots = properties.json()["total_slots"]
        except (ValueError, KeyError, TypeError):  # another engine
            return
        if isinstance(slots, int) and slots > 0:
            self._slots = slots

    async def _get(self, path: str) -> httpx.Response:
        return await self.client.get(path, timeout=CONNECT_S)

    def _refused(self, answer: httpx.Response) -> Later:
        """Note that the server takes no request now, being full or about to end."""
        self.trouble = f"it answered {answer.status_code}"
        self._works = self._full = answer.status_code == 429
        self._rest(retry_after_s(answer))
        return Later(self.trouble, False)

    def _check_address(self, answer: httpx.Response) -> None:
        """Refuse an address that redirects elsewhere, as a redirect is no answer to a request.

        Raises:
            ValueError: names the address that the redirect gives.
        """
        if answer.is_redirect:
            url = answer.headers.get("location", "").removesuffix(answer.request.url.path)
            raise UserError(f"{self.name} redirects to {url!r} ({answer.status_code}); give that address in servers")

    def _locked(self, answer: httpx.Response) -> UserError:
        return UserError(f"{self.name} wants its API key ({answer.status_code}); give it as LP_API_KEY")

    def _failed(self, what: httpx.HTTPError | str, under_way: bool) -> Later:
        self.trouble = what if isinstance(what, str) else f"{type(what).__name__}: {what}".rstrip(": ")
        self._works = False
        self._rest(None)
        return Later(self.trouble, under_way)

    def _rest(self, seconds: float | None) -> None:
        """Send the server nothing for so many seconds; None: twice as long as the time before, at most MOST_REST_S."""
        if seconds is None:
            seconds, self._rest_s = self._rest_s, min(2 * self._rest_s, MOST_REST_S)
        self._rests_until_s = max(self._rests_until_s, time.monotonic() + seconds)


def retry_after_s(answer: httpx.Response) -> float | None:
    """Seconds until a server wants to be asked again, from its answer's header Retry-After; None without a usable one.

    Args:
        answer: the server's answer; the header may hold seconds or a date.
    """
    given = answer.headers.get("retry-after", "")
    try:
        seconds = float(given)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(given).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), MOST_RETRY_AFTER_S) if math.isfinite(seconds) else None


def server_urls(given: list[str]) -> list[str]:
    """Check the addresses in the config key `servers`, and return them without /v1 at the end.

    Args:
        given: addresses, such as ["http://a:8000/v1"].

    Raises:
        ValueError: a value is no address, or an address is given twice.
    """
    urls = [url.rstrip("/").removesuffix("/v1") for url in given]
    for url in urls:
        if not _is_address(url):
            raise UserError(f"servers has {url!r}; give addresses, as in servers=[http://a:8000,http://b:8000]")
        if urls.count(url) > 1:
            raise UserError(f"servers has {url} twice; give each once")
    return urls


def _is_address(url: str) -> bool:
    try:
        httpx.URL(url)
        parts = urlsplit(url)
        beyond = parts.query or parts.fragment or " " in url or parts.port == 0
    except (ValueError, httpx.InvalidURL):  # a port or a bracket that is none
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not beyond


async def _post(client: httpx.AsyncClient, request: Request) -> httpx.Response:
    return await client.post(request.url, content=request.body, headers={"Content-Type": "application/json"})


def _is_object(answer: httpx.Response) -> bool:
    """Whether an answer is a JSON object, as a server's errors are, and not the error page of a proxy."""
    return isinstance(_body(answer), dict)


def _body(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return None


def _reply(answer: httpx.Response) -> Reply:
    body = _body(answer)
    if not isinstance(body, dict):
        message = f"the answer is no JSON object: {answer.text[:SHOWN]}"
        body = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
        status = answer.status_code if answer.status_code != 200 else 502
        return Reply(status, body, answer.headers.get("x-request-id"))
    named = answer.headers.get("x-request-id") or body.get("id")
    return Reply(answer.status_code, body, named if isinstance(named, str) else None)
