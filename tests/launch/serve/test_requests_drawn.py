"""Drawn requests, by the server's own description of what it takes: each gets an answer that is never a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="the extra `dev` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.serve.api import build_app
from tests.conftest import LONG, some_of
from tests.support.requests_of import bodies
from tests.support.serving import Running, serving
from tests.support.tiny_models import letters, tiny_model

EXAMPLES = 1000 if LONG else 80  # of each endpoint
WAIT_S = 120.0  # 40 texts of one request on a busy machine take half a minute
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
)
FORMAT = {  # all of a text is a call, which is never one
    "fields": {"tool_calls": {"open_pattern": r"\s*", "close": "<end>", "repeats": True, "content": "json"}},
}
POSTS = [
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/completion", "/completions", "/infill", "/tokenize",
    "/detokenize", "/v1/responses/input_tokens",
]  # fmt: skip
REFUSED = {"/v1/responses/compact"}  # whatever its body is
SOUND: dict[str, dict[str, Any]] = {  # what half of the bodies have, so that they come further
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/v1/responses": {"input": "abc"},
    "/v1/responses/input_tokens": {"input": "abc"},
    "/infill": {"input_prefix": "abc", "input_suffix": "def"},
    "/tokenize": {"content": "abc"},
    "/detokenize": {"tokens": [1, 2]},
}
GETS = ["/", "/health", "/v1/health", "/ready", "/metrics", "/models", "/v1/models", "/props"]
TAKEN = {200, 400, 404, 405, 408, 413, 422, 429, 501}
drawn = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=not LONG,
    suppress_health_check=[*HealthCheck],
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server whose context every text soon fills, and which has tools and fill-in-the-middle for requests to draw."""
    tokenizer = letters(58)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = FORMAT
    with serving(tiny_model(max_position_embeddings=64), tokenizer, max_body_bytes=1 << 16) as running:
        yield running


@pytest.fixture(scope="module")
def described(server: Running) -> dict[str, Any]:
    """The server's OpenAPI description, which it does not serve."""
    found: dict[str, Any] = build_app(server.served).app.openapi()
    return found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    """One HTTP client for all requests: making one takes longer than most answers."""
    with httpx.Client(base_url=server.url, timeout=WAIT_S, headers={"content-type": "application/json"}) as made:
        yield made


def check(client: httpx.Client, method: str, path: str, **sent: Any) -> int:
    """The status of an answer that is whole, and in its form."""
    with client.stream(method, path, **sent) as response:
        text = response.read().decode()
        assert response.status_code in TAKEN, (response.status_code, text)
        if response.status_code != 200 and method != "HEAD":
            assert json.loads(text)["error"]["message"], text
        elif response.headers["content-type"].startswith("text/event-stream"):
            events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            chosen = "response_fields" in str(sent)  # of which an event may have none
            assert events and all(event == "[DONE]" or json.loads(event) or chosen for event in events)
            assert '"code":500' not in text.replace(" ", "")
        return response.status_code


def test_tools_of_many_levels(client: httpx.Client) -> None:
    """A body that can just be read was an error of the server where the chat template wrote it again."""
    statuses = set()
    for depth in range(900, 1000, 3):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"a": 0}}}
        body = json.dumps(SOUND["/v1/chat/completions"] | {"tools": [tool], "max_tokens": 1})
        deep = body.replace('"a": 0', f'"a": {"[" * depth}{"]" * depth}')
        statuses.add(check(client, "POST", "/v1/chat/completions", content=deep))
    assert 400 in statuses


def test_the_description_has_every_path(described: dict[str, Any]) -> None:
    """A new endpoint must be drawn, too."""
    paths = {path for path in described["paths"] if "{" not in path}
    assert paths == {*POSTS, *GETS, *REFUSED}


@pytest.mark.subset(3)
@pytest.mark.parametrize("path", some_of(POSTS, 5))
def test_drawn_bodies(path: str, client: httpx.Client, described: dict[str, Any]) -> None:
    """A field that nobody thought of, or two of them together, must not end a request with a traceback, or never."""
    schemas = described["components"]["schemas"]
    content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    statuses: list[int] = []

    @drawn
    @given(bodies(content["schema"], schemas), st.booleans())
    def each(body: dict[str, Any], sound: bool) -> None:
        body |= SOUND.get(path, {"prompt": "abc"}) if sound else {}
        statuses.append(check(client, "POST", path, content=json.dumps(body)))

    each()
    assert 400 in statuses or 422 in statuses
    assert 200 in statuses, "nothing was ever taken"
    assert check(client, "GET", "/health") == 200


NO_BODIES = [
    b"", b"null", b"[]", b"{", b"\xff\xfe{}", b"[" * 5000, b'{"a":' * 5000, b'{"prompt": NaN}',
    b'{"prompt": "\\ud800"}', b'{"max_tokens": 1e999, "prompt": "a"}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
]  # fmt: skip
PATHS = [
    *GETS,
    *POSTS,
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/v1/responses/a",
    "/..%2f..%2fetc/passwd",
    "/%00",
    "/v1/models/%ff",
]
METHODS = ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "POST"]


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_no_json(path: str, client: httpx.Client) -> None:
    """What parses is not the only thing that comes."""

    @drawn
    @given(st.binary(max_size=64) | st.sampled_from(NO_BODIES))
    def each(content: bytes) -> None:
        assert check(client, "POST", path, content=content) in {200, 400, 422}

    each()


def test_paths_and_methods(client: httpx.Client) -> None:
    """Neither may lead to a file, or to a traceback."""

    @drawn
    @given(
        st.sampled_from(METHODS),
        st.sampled_from(PATHS) | st.text("ab/.%25é", max_size=12).map(lambda text: "/" + text),
    )
    def each(method: str, path: str) -> None:
        try:
            url = httpx.URL(str(client.base_url).rstrip("/") + path)
        except httpx.InvalidURL:
            return
        with client.stream(method, url) as response:
            text = response.read()
            assert response.status_code < 500, text
            assert b"root:" not in text

    each()
    assert check(client, "GET", "/health") == 200
