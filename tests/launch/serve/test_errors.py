"""launch.serve and bad requests: a status and a message each, and nothing else disturbed. Full queues, lost clients."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest

import lp
from tests.support.serving import Running, serving

for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")
httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")

COMPLETE, CHAT, LLAMA, INFILL = "/v1/completions", "/v1/chat/completions", "/completion", "/infill"
USER = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f"}}
# Path, body, status, the field at fault, and what the message says.
BAD: list[tuple[str, Any, int, str | None, str]] = [
    (COMPLETE, {}, 400, "prompt", "prompt is missing"),
    (COMPLETE, [], 400, None, "the body is no JSON object"),
    (COMPLETE, '"text"', 400, None, "the body is no JSON object"),
    (COMPLETE, {"prompt": None}, 400, "prompt", "prompt is missing"),
    (COMPLETE, {"prompt": 3}, 400, "prompt", "prompt is 3; give a text, texts, token ids, or lists of token ids"),
    (COMPLETE, {"prompt": []}, 400, "prompt", "prompt is []; give a text, "),
    (COMPLETE, {"prompt": [[]]}, 400, "prompt", "prompt[0] is []; give one token id or more"),
    (COMPLETE, {"prompt": [1, "a"]}, 400, "prompt", "prompt[1] is 'a'; give a text, texts, token ids"),
    (COMPLETE, {"prompt": ["a", 1]}, 400, "prompt", "prompt[1] is 1; give a text, texts, token ids"),
    (COMPLETE, {"prompt": [[5], [5, True]]}, 400, "prompt", "prompt[1][1] is True; give token ids; a token id is an"),
    (COMPLETE, {"prompt": [-1]}, 400, "prompt", "prompt[0] is -1; give a text, texts, token ids"),
    (COMPLETE, {"prompt": [1.5]}, 400, "prompt", "prompt[0] is 1.5; give a text, texts, token ids"),
    (COMPLETE, {"prompt": [4096]}, 400, "prompt", "token id 4096; this model's vocabulary is 0..4095"),
    (COMPLETE, {"prompt": [5] * 2048}, 400, "prompt", "2048 tokens, the model's context 2048; shorten it"),
    (COMPLETE, {"prompt": "\ud800"}, 400, "prompt", "prompt: half a character at 0"),
    (COMPLETE, {"prompt": "a", "model": "\ud800"}, 400, "model", "model: half a character at 0"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", "messages[0].content: half a"),
    (COMPLETE, {"prompt": "a", "max_tokens": -2}, 400, "max_tokens", "max_tokens is -2; input should be greater"),
    (COMPLETE, {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens", "max_tokens is '9'; input should be a valid int"),
    (
        COMPLETE,
        {"prompt": "a", "max_tokens": 0},
        400,
        "max_tokens",
        "max_tokens is 0, which leaves nothing to do without echo",
    ),
    (COMPLETE, {"prompt": "a", "temperature": -0.1}, 400, "temperature", "temperature is -0.1; "),
    (COMPLETE, {"prompt": "a", "temperature": 1e-310}, 400, "temperature", "temperature is 1e-310; give 0, which is"),
    (COMPLETE, {"prompt": "a", "temperature": 2.1}, 400, "temperature", "less than or equal to 2"),
    (COMPLETE, '{"prompt": "a", "temperature": NaN}', 400, "temperature", "finite number"),
    (COMPLETE, {"prompt": "a", "top_p": 1.1}, 400, "top_p", "less than or equal to 1"),
    (COMPLETE, {"prompt": "a", "n": 0}, 400, "n", "n is 0; input should be greater than or equal to 1"),
    (COMPLETE, {"prompt": "a", "n": 129}, 400, "n", "less than or equal to 128"),
    (COMPLETE, {"prompt": ["a"] * 80}, 400, "prompt", "for 80 texts; this server takes 72 at a time"),
    (COMPLETE, {"prompt": [[5]] * 40, "n": 2, "echo": True, "max_tokens": 0}, 400, "n", "for 80 texts; this server"),
    (COMPLETE, {"prompt": "a", "best_of": 3}, 400, "best_of", "best_of is 3 and n is 1; texts are not ranked"),
    (COMPLETE, {"prompt": "a", "seed": 1.5}, 400, "seed", "seed is 1.5; "),
    (COMPLETE, {"prompt": "a", "stop": ["x", ""]}, 400, "stop", "at least 1 character"),
    (COMPLETE, {"prompt": "a", "stop": ["x"] * 17}, 400, "stop", "at most 16"),
    (COMPLETE, {"prompt": "a", "stop": 3}, 400, "stop", "stop is 3; "),
    (COMPLETE, {"prompt": "a", "stream": "yes"}, 400, "stream", "stream is 'yes'; "),
    (
        COMPLETE,
        {"prompt": "a", "stream_options": {}},
        400,
        "stream_options",
        "stream_options is given, but stream is not true",
    ),
    (COMPLETE, {"prompt": "a", "logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "the key 'x' is no token id"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "is no token id"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"4096": 1}}, 400, "logit_bias", "vocabulary is 0..4095"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"1": 101}}, 400, "logit_bias", "less than or equal to 100"),
    (
        COMPLETE,
        {"prompt": "a", "logit_bias": {"1": "x"}},
        400,
        "logit_bias",
        "logit_bias of token 1 is 'x'; give a number",
    ),
    (COMPLETE, '{"prompt": "a", "logit_bias": {"1": NaN}}', 400, "logit_bias", "logit_bias of token 1 is nan"),
    (COMPLETE, {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty", "less than or equal to 2"),
    (
        COMPLETE,
        {"prompt": "a", "repetition_penalty": 0},
        400,
        "repetition_penalty",
        "or equal to 0.000001",
    ),
    (COMPLETE, {"prompt": "a", "repeat_penalty": 1e300}, 400, "repeat_penalty", "less than or equal to 1000000"),
    (
        COMPLETE,
        {"prompt": "a", "repeat_penalty": 2, "repetition_penalty": 3},
        400,
        "repetition_penalty",
        "repetition_penalty is 3 and repeat_penalty is 2",
    ),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, 400, "suffix", "demo has no tokens for fill-in-the-middle"),
    (COMPLETE, {"prompt": "a", "suffix": "b", "echo": True}, 400, "echo", "echo is true with a suffix"),
    (COMPLETE, {"prompt": ["a"], "suffix": "b"}, 400, "suffix", "prompt is no single text"),
    (COMPLETE, {"prompt": "a", "use_beam_search": True}, 400, "use_beam_search", "use_beam_search is not supported"),
    (
        COMPLETE,
        {"prompt": "a", "guided_regex": "[0-9]"},
        400,
        "guided_regex",
        "guided_regex is not supported; give response_",
    ),
    (
        CHAT,
        {"messages": USER, "grammar": 'root ::= "a"'},
        400,
        "grammar",
        "grammar is not supported; give response_format",
    ),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format", "is 'xml'; "),
    (
        COMPLETE,
        {"prompt": "a", "response_format": {"type": "regex"}},
        400,
        "response_format",
        "give response_format.regex",
    ),
    (COMPLETE, {"prompt": "a", "model": "other"}, 404, "model", "there is no model 'other'; this server has 'demo'"),
    (COMPLETE, '{"prompt": ', 400, None, "the body is not JSON"),
    (COMPLETE, b'{"prompt": "\xff"}', 400, None, "body"),
    (COMPLETE, "[" * 100_000, 400, None, "body"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1 item"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "a message of role 'user' has no content"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages", "messages[0].role is 'robot'; "),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages",
        "takes text alone",
    ),
    (
        CHAT,
        {"messages": USER, "max_completion_tokens": 0},
        400,
        "max_completion_tokens",
        "max_completion_tokens is 0; ",
    ),
    (CHAT, {"messages": USER, "max_tokens": 0}, 400, "max_tokens", "max_tokens is 0; ask for one token or more"),
    (
        CHAT,
        {"messages": USER, "reasoning_effort": "low"},
        400,
        "reasoning_effort",
        "reasoning_effort is not supported; give what",
    ),
    (
        CHAT,
        {"messages": USER, "top_logprobs": 2},
        400,
        "top_logprobs",
        "top_logprobs is given, but logprobs is not true",
    ),
    (CHAT, {"messages": USER, "tools": [TOOL]}, 400, "tools", "transformers describes no format of calls for llama"),
    (CHAT, {"messages": USER, "tool_choice": "auto"}, 400, "tool_choice", "tool_choice is given without tools"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice", "'required'; "),
    (
        CHAT,
        {"messages": USER, "functions": [{"name": "f"}]},
        400,
        "functions",
        "functions is not supported; give tools",
    ),
    (CHAT, {"messages": USER, "prediction": {"type": "x"}}, 400, "prediction", "prediction.type is 'x'; "),
    (
        CHAT,
        {"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 'mine' }}"}},
        400,
        "chat_template_kwargs",
        "chat_template_kwargs.chat_template is \"{{ 'mine' }}\", and the server sets chat_template itself",
    ),
    (
        CHAT,
        {"messages": USER, "chat_template_kwargs": {"add_generation_prompt": False}},
        400,
        "chat_template_kwargs",
        "chat_template_kwargs.add_generation_prompt is False, and the server sets add_generation_prompt itself",
    ),
    (
        CHAT,
        {"messages": USER, "chat_template": "{{ 1 }}"},
        400,
        "chat_template",
        "chat_template is not supported; the server has",
    ),
    (
        CHAT,
        {"messages": USER, "continue_final_message": True},
        400,
        "continue_final_message",
        "continue_final_message is not supported",
    ),
    (
        CHAT,
        {"messages": USER, "documents": [{"text": "a"}]},
        400,
        "documents",
        "documents is not supported; give chat_template_",
    ),
    (
        LLAMA,
        {"prompt": "a", "logit_bias": [[5, False]]},
        400,
        "logit_bias",
        "logit_bias is not supported; /v1/completions",
    ),
    (LLAMA, {"prompt": "a", "n_predict": -3}, 400, "n_predict", "greater than or equal to -2"),
    (LLAMA, {"prompt": ["a"]}, 400, "prompt", "prompt[0] is 'a'; give one text, or its token ids; /v1/completions"),
    (LLAMA, {"prompt": []}, 400, "prompt", "prompt is []; give one text, or its token ids"),
    (LLAMA, {"prompt": "a", "presence_penalty": 1e300}, 400, "presence_penalty", "less than or equal to 1000000"),
    (LLAMA, {"prompt": "a", "samplers": ["top_k", "tup_p"]}, 400, "samplers", "samplers has 'tup_p'; give some of"),
    (LLAMA, {"prompt": "a", "samplers": "kq"}, 400, "samplers", "samplers has 'q'; give some of"),
    (LLAMA, {"prompt": "a", "top_n_sigma": 1.5}, 400, "top_n_sigma", "top_n_sigma is not supported; take temperature"),
    (LLAMA, {"prompt": "a", "t_max_predict_ms": -2}, 400, "t_max_predict_ms", "greater than or equal to -1"),
    (LLAMA, {"prompt": "a", "min_p": 1}, 400, "min_p", "less than 1"),
    (LLAMA, {"prompt": "a", "mirostat": 2}, 400, "mirostat", "mirostat is not supported; take temperature"),
    (LLAMA, {"prompt": "a", "tfs_z": 0.5}, 400, "tfs_z", "tfs_z is not supported; take temperature"),
    (LLAMA, {"prompt": "a", "repetition_penalty": 0.5}, 400, "repetition_penalty", "give repeat_penalty"),
    (LLAMA, {"prompt": "a", "bad_words_ids": [[5]]}, 400, "bad_words_ids", "OpenAI's endpoints have logit_bias"),
    (COMPLETE, {"prompt": "a", "n_indent": 2}, 400, "n_indent", "n_indent is not supported; /completion has it"),
    (
        LLAMA,
        {"prompt": "a", "json_schema": {}, "ignore_eos": True},
        400,
        "ignore_eos",
        "ignore_eos is true with a json_schema, whose text an EOS ends; leave one of them out",
    ),
    (
        COMPLETE,
        {"prompt": "a", "response_format": {"type": "json_object"}, "ignore_eos": True},
        400,
        "ignore_eos",
        "ignore_eos is true with a response_format, whose text an EOS ends; leave one of them out",
    ),
    (INFILL, {"input_prefix": "a"}, 400, "input_suffix", "input_suffix is missing"),
    (INFILL, {"input_prefix": "a", "input_suffix": "b"}, 501, None, "demo has no tokens for fill-in-the-middle"),
    ("/tokenize", {"content": 3}, 400, "content", "content has a wrong type: input should be a valid string"),
    ("/detokenize", {"tokens": [5000]}, 400, "tokens", "vocabulary is 0..4095"),
    ("/detokenize", {"tokens": [5] * (1 << 17) + [5]}, 400, "tokens", "at most 131072 items"),
    ("/v1/embeddings", {"input": "a"}, 404, None, "there is no path '/v1/embeddings'"),
]


# Forms that are none: path, body without a prompt, the field at fault, and what the message begins with.
BAD_FORMS: list[tuple[str, Any, str, str]] = [
    (LLAMA, {"grammar": "root ::= ("}, "grammar", "grammar is not taken: "),
    (LLAMA, {"grammar": "#" * 40_000}, "grammar", "grammar has 40000 characters, of at most 32768; "),
    (LLAMA, {"json_schema": {"type": "no"}}, "json_schema", "json_schema is not taken: "),
    (
        COMPLETE,
        {"type": "grammar", "grammar": "root ::= ("},
        "response_format",
        "response_format.grammar is not taken: ",
    ),
    (COMPLETE, {"type": "regex", "regex": "("}, "response_format", "response_format.regex is not taken: "),
    (
        COMPLETE,
        {"type": "json_object", "schema": {"type": "no"}},
        "response_format",
        "response_format.schema is not taken: ",
    ),
    (
        CHAT,
        {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}},
        "response_format",
        "response_format.json_schema is not taken: ",
    ),
]


@pytest.fixture(scope="module")
def http(demo_server: Running) -> Any:
    return demo_server.http()


def post(http: Any, path: str, body: Any, **headers: str) -> Any:
    """Send a body as it is, or as JSON."""
    content = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body)
    return http.post(path, content=content, headers={"Content-Type": "application/json", **headers})


def test_bad_requests(demo_server: Running, http: Any) -> None:
    """Each has its status, its field and its remedy, while another text goes on as if there were none."""
    ids = demo_server.encode("def fibonacci(n):\n")
    sampling = lp.SamplingParams(temperature=0.8, seed=1)
    alone = demo_server.decode(demo_server.decoder.generate(ids, 120, sampling, eos_token_id=()).tokens)
    texts: list[str] = []

    def long_text() -> None:
        asked = {"prompt": ids, "max_tokens": 120, "temperature": 0.8, "seed": 1, "ignore_eos": True}
        texts.append(post(http, COMPLETE, asked).json()["choices"][0]["text"])

    thread = threading.Thread(target=long_text)
    thread.start()
    try:
        for path, body, status, param, message in BAD:
            what = f"{path} {body!r:.100}"
            answer = post(http, path, body)
            assert answer.status_code == status, f"{what}: {answer.status_code} {answer.text}"
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, what
            assert message in error["message"], f"{what}: {error['message']}"
            assert error["param"] == param, f"{what}: {error['param']}"
    finally:
        thread.join()
    assert texts == [alone]
    assert len(BAD) >= 40


@pytest.mark.parametrize("path, form, param, message", BAD_FORMS)
def test_bad_forms(http: Any, path: str, form: dict[str, Any], param: str, message: str) -> None:
    """A bad `grammar` was called `ebnf`, and no field was said to be at fault."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    given = form if path == LLAMA else {"response_format": form}
    answer = post(http, path, {**({"messages": USER} if path == CHAT else {"prompt": "a"}), **given})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"].startswith(message)


def test_errors_before_a_stream_have_a_status(http: Any) -> None:
    answer = post(http, COMPLETE, {"prompt": [5] * 2048, "stream": True})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_other_methods_and_types_are_refused(http: Any) -> None:
    answer = http.get(COMPLETE)
    assert answer.status_code == 405 and answer.json()["error"]["message"] == f"{COMPLETE} does not take GET"
    form = http.post(COMPLETE, content='{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert form.status_code == 400 and "Content-Type: application/json" in form.json()["error"]["message"]
    assert "access-control-allow-origin" not in http.options(COMPLETE, headers={"Origin": "http://x"}).headers


def test_bodies_of_no_type_are_refused(http: Any) -> None:
    """A page of another site may send those without asking, which starts texts here."""
    for content_type in ({}, {"Content-Type": "text/plain; application/json"}, {"Content-Type": "x/json"}):
        answer = http.post(COMPLETE, content='{"prompt": "a", "max_tokens": 1}', headers=content_type)
        assert answer.status_code == 400 and "no JSON object" in answer.json()["error"]["message"], content_type


@pytest.mark.parametrize("depth", range(900, 1000, 3))
def test_bodies_of_many_levels(depth: int, http: Any) -> None:
    """A body that can just be read was an error of the server where it was written again for the grammar's compiler."""
    deep = "[" * depth + "]" * depth
    bodies = [
        (LLAMA, f'{{"prompt": "a", "json_schema": {{"a": {deep}}}}}'),
        (COMPLETE, f'{{"prompt": "a", "response_format": {{"type": "json_object", "schema": {{"a": {deep}}}}}}}'),
    ]
    for path, body in bodies:
        assert post(http, path, body).status_code == 400, path


def lists_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists in a schema of pydantic's core."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for each in schema.values():
            yield from lists_of(each)
    elif isinstance(schema, list | tuple):
        for each in schema:
            yield from lists_of(each)


def test_the_first_bad_item_is_enough() -> None:
    """A million of them in one body took 12 s, in which the server did nothing else, and more than a gigabyte."""
    from launch.serve import bodies

    names = ["CompletionBody", "ChatBody", "LlamaCpp", "InfillBody", "TokenizeBody", "DetokenizeBody"]
    lists = [each for name in names for each in lists_of(getattr(bodies, name).__pydantic_core_schema__)]
    assert len(lists) >= 20 and all(each.get("fail_fast") for each in lists)
    wrong = {"logit_bias": {str(token): 101 for token in range(1000)}, "stop": [1] * 1000, "prompt": [-1] * 1000}
    with pytest.raises(ValueError) as error:
        bodies.CompletionBody.model_validate(wrong)
    assert error.value.error_count() < 10  # type: ignore[attr-defined]


def test_names_of_the_server(demo_server: Running, http: Any) -> None:
    """A web page whose own name leads here is of the server's own origin, and could read what it answers."""
    for path in ("/", "/health", "/v1/models"):
        for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"):
            answer = http.get(path, headers={"Host": name})
            assert answer.status_code == 403, (path, name)
            assert "call it by one of 127.0.0.1, ::1, localhost, or give it an api_key" in answer.text
        for name in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "[::1]"):
            assert http.get(path, headers={"Host": name}).status_code == 200, (path, name)


def test_any_name_with_a_key_or_another_address(demo_server: Running, small_server: Running) -> None:
    """A proxy passes on the name that its clients use."""
    from fastapi.testclient import TestClient

    from launch.serve.api import build_app

    there = {"Host": "models.example", "Authorization": "Bearer s3cret"}
    http = small_server.http()
    assert http.get("/v1/models", headers=there).status_code == 200
    assert http.get("/ready", headers={"Host": "models.example"}).status_code == 200
    # A page whose own name leads here has no key: it could read what needs none.
    assert http.get("/metrics", headers={"Host": "evil.example"}).status_code == 403
    assert http.get("/metrics", headers=there).status_code == 200
    for host in ("0.0.0.0", "10.0.0.1"):
        client = TestClient(build_app(demo_server.served, host=host))
        assert client.get("/v1/models", headers=there).status_code == 200


def test_bodies_are_bounded(http: Any) -> None:
    """By what the client announces, and by what it sends where it announces nothing."""
    large = json.dumps({"prompt": "a" * (1 << 20)}).encode()

    def parts() -> Iterator[bytes]:
        yield from (large[at : at + 65536] for at in range(0, len(large), 65536))

    for content in (large, parts()):
        answer = http.post(COMPLETE, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
    assert http.get("/health").json() == {"status": "ok"}


@pytest.fixture(scope="module")
def small_server() -> Iterator[Running]:
    """One text at a time, and one that may wait; with a key."""
    with serving(*lp.load("demo"), max_sequences=1, max_waiting=1, api_key="s3cret") as running:
        yield running


LONG = {"prompt": "def f(x):\n", "max_tokens": 2000, "temperature": 1.0, "ignore_eos": True, "stream": True}


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_the_api_key(small_server: Running) -> None:
    http = small_server.http()
    for header in ({}, {"Authorization": "Bearer other"}, {"Authorization": "s3cret"}):
        answer = http.get("/v1/models", headers=header)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    for scheme in ("Bearer", "bearer"):  # RFC 9110: in any case
        assert http.get("/v1/models", headers={"Authorization": f"{scheme} s3cret"}).status_code == 200
    assert http.get("/v1/models", headers={"Authorization": "Basic s3cret"}).status_code == 401
    for path in ("/health", "/ready", "/", "/metrics"):  # probes and scrapers have no key
        assert http.get(path).status_code == 200, path
    for path in ("/props", "/models", "/v1/models/demo", "/v1/health", "/metrics/"):
        assert http.get(path, follow_redirects=False).status_code == 401, path


def test_head_is_get_without_a_body(small_server: Running) -> None:
    """Load balancers and monitors of uptime ask by HEAD."""
    http = small_server.http()
    for path in ("/health", "/ready", "/"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
        assert answer.headers["content-length"] == http.get(path).headers["content-length"]
    assert http.head(COMPLETE).status_code == http.get(COMPLETE).status_code


def test_what_the_api_key_covers_is_the_servers_choice() -> None:
    """A router that lists models has no key; metrics may be nobody else's affair."""
    with serving(*lp.load("demo"), api_key="s3cret", metrics_key=True, models_key=False) as running:
        http = running.http()
        assert http.get("/metrics").status_code == 401
        assert http.get("/v1/models").status_code == http.get("/models").status_code == 200
        assert http.post(COMPLETE, json={"prompt": "a"}).status_code == 401


def test_gauges_that_routers_read(small_server: Running) -> None:
    """llm-d and vLLM's stack choose a server by them: under other names all servers look alike."""
    http = small_server.http()

    def gauges() -> list[float]:
        lines = [line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line.startswith("vllm:")]
        values = {name: float(value) for name, value in lines}
        assert values["vllm:kv_cache_usage_perc"] == values["vllm:gpu_cache_usage_perc"]
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return [values[f"vllm:{name}"] for name in names]

    key = {"Authorization": "Bearer s3cret"}
    assert eventually(lambda: gauges()[:2] == [0, 0])
    assert gauges()[2] == 0  # whatever is kept for reuse: else an idle server would look full
    with http.stream("POST", COMPLETE, json=LONG, headers=key) as one:
        lines = one.iter_lines()
        next(lines)
        assert gauges()[:2] == [1, 0]
        waiting = threading.Thread(target=lambda: http.post(COMPLETE, json=LONG | {"max_tokens": 3}, headers=key))
        waiting.start()
        assert eventually(lambda: gauges()[:2] == [1, 1])
        assert 0 < gauges()[2] <= 1
    waiting.join()
    assert eventually(lambda: gauges() == [0, 0, 0])


def test_a_full_queue_answers_429(small_server: Running) -> None:
    """With Retry-After; and there is room again as soon as a client leaves."""
    http = small_server.http()
    key = {"Authorization": "Bearer s3cret"}
    loop = small_server.served.loop
    with http.stream("POST", COMPLETE, json=LONG, headers=key) as one:
        lines = one.iter_lines()  # which closes the response when it is dropped
        next(lines)
        waiting = threading.Thread(target=lambda: http.post(COMPLETE, json=LONG | {"max_tokens": 3}, headers=key))
        waiting.start()
        assert eventually(lambda: loop.texts == 2)
        refused = http.post(COMPLETE, json=LONG, headers=key)
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
        assert "2 texts run or wait, of 2 that may" in refused.json()["error"]["message"]
    waiting.join()
    assert eventually(lambda: loop.texts == 0)


def test_a_full_queue_has_a_status_with_echo(small_server: Running) -> None:
    """The echo came before the place in the queue, behind which the client saw 200 and then an error."""
    loop = small_server.served.loop
    key = {"Authorization": "Bearer s3cret"}
    http = small_server.http()
    with http.stream("POST", COMPLETE, json=LONG, headers=key) as one:
        lines = one.iter_lines()
        next(lines)
        refused = http.post(COMPLETE, json=LONG | {"echo": True, "n": 2}, headers=key)
    assert refused.status_code == 429
    assert eventually(lambda: loop.texts == 0)


class SlowScores:
    """Takes the place of `prompt_logprobs`: waits until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.calls = 0

    def __call__(self, *_: Any) -> list[Any]:
        self.calls += 1
        assert self.let_go.wait(20)
        return []


def test_prompts_to_score_are_bounded(small_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as texts; the next gets 429, and one whose client has left is not computed."""
    slow = SlowScores()
    monkeypatch.setattr("launch.serve.engine_loop.prompt_logprobs", slow)
    loop = small_server.served.loop
    headers = {"Authorization": "Bearer s3cret"}
    body = {"prompt": [5], "echo": True, "logprobs": 0, "max_tokens": 0}
    http = small_server.http()
    with ThreadPoolExecutor() as pool:
        try:
            first = pool.submit(http.post, COMPLETE, json=body, headers=headers)
            assert eventually(lambda: slow.calls == 1)
            second = pool.submit(http.post, COMPLETE, json=body, headers=headers)
            assert eventually(lambda: len(loop._scorings) == 1)
            third = HTTPConnection(small_server.url.removeprefix("http://"))
            third.request("POST", COMPLETE, json.dumps(body), {**headers, "Content-Type": "application/json"})
            assert eventually(lambda: len(loop._scorings) == 2)
            refused = http.post(COMPLETE, json=body, headers=headers)
            third.close()
            assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
            assert eventually(lambda: not loop._scorings[1].wanted)
        finally:
            slow.let_go.set()
        assert first.result().status_code == second.result().status_code == 200
    assert eventually(lambda: not loop._scorings) and slow.calls == 2


def test_texts_go_on_between_prompts_to_score(demo_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a step: clients that score prompts all the time would stop all texts."""
    from launch.serve.engine_loop import Scoring

    loop = demo_server.served.loop
    events: list[str] = []
    step = loop.engine.step

    def stepped() -> bool:
        events.append("step")
        return step()

    def scored(*_: Any) -> list[Any]:
        events.append("score")
        return []

    monkeypatch.setattr(loop.engine, "step", stepped)
    monkeypatch.setattr("launch.serve.engine_loop.prompt_logprobs", scored)
    with loop._changed:  # the engine's thread sees them all at once
        for _ in range(4):
            loop.score(Scoring([5], 0, lambda _: None))
    assert eventually(lambda: events.count("score") == 4)
    assert "score score" not in " ".join(events)


def test_a_long_prompt_is_encoded_beside_others(demo_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, in which streams got nothing and /health did not answer."""
    from launch.serve.served import Served

    http = demo_server.http()
    encode = Served.encode
    answered: list[int] = []

    def slow(self: Any, *arguments: Any) -> list[int]:
        answered.append(httpx.get(f"{demo_server.url}/health", timeout=5.0).status_code)
        return encode(self, *arguments)

    monkeypatch.setattr(Served, "encode", slow)
    for path, body in [
        (COMPLETE, {"prompt": "a", "max_tokens": 1}),
        (LLAMA, {"prompt": "a", "n_predict": 1}),
        ("/tokenize", {"content": "a"}),
    ]:
        assert http.post(path, json=body).status_code == 200, path
    assert answered == [200] * 3


def test_pieces_are_decoded_beside_others(demo_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a megabyte take seconds, in which streams got nothing and /health did not answer."""
    from launch.serve.served import Served

    answered: list[int] = []

    def slow(self: Any, token: int) -> str:
        answered.append(httpx.get(f"{demo_server.url}/health", timeout=5.0).status_code)
        return "x"

    monkeypatch.setattr(Served, "piece", slow)
    answer = demo_server.http().post("/tokenize", json={"content": "a", "with_pieces": True})
    assert answer.json() == {"tokens": [{"id": 65, "piece": "x"}]} and answered == [200]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_sequence(small_server: Running, stream: bool) -> None:
    """In the next step: the engine takes no other one for it."""
    loop = small_server.served.loop
    steps: list[int] = []
    client = HTTPConnection(small_server.url.removeprefix("http://"))
    with contextlib.closing(client):
        headers = {"Authorization": "Bearer s3cret", "Content-Type": "application/json"}
        client.request("POST", COMPLETE, json.dumps(LONG | {"stream": stream}), headers)
        if stream:
            assert client.getresponse().readline()
        assert eventually(lambda: loop.engine.running == 1)
        ended = loop.engine._core._end

        def counted(text: Any, *reasons: Any) -> None:
            steps.append(len(text.stats))
            ended(text, *reasons)

        loop.engine._core._end = counted
    try:
        assert eventually(lambda: loop.texts == 0)
    finally:
        del loop.engine._core._end
    most = LONG["max_tokens"] // 2  # the machine may be busy
    assert loop.engine.running == 0 and all(count < most for count in steps)


def test_a_text_that_takes_too_long_ends() -> None:
    """With 504; in a stream, which has its status already, with an event."""
    with serving(*lp.load("demo"), timeout_s=0.5) as running:
        loop = running.served.loop
        step = loop.engine.step

        def slowed() -> bool:
            time.sleep(0.05)
            return step()

        loop.engine.step = slowed
        whole = running.http().post(COMPLETE, json=LONG | {"stream": False})
        streamed = running.http().post(COMPLETE, json=LONG)
        assert whole.status_code == 504 and "not done within 0.5 s" in whole.json()["error"]["message"]
        assert streamed.status_code in (200, 504)  # on a busy machine no token may have come in time
        if streamed.status_code == 200:
            last = json.loads(streamed.text.strip().splitlines()[-1].removeprefix("data: "))
            assert "not done within 0.5 s" in last["error"]["message"]
        assert eventually(lambda: loop.texts == 0)


def test_a_failed_engine_says_so() -> None:
    """What runs ends with an error, /health tells why, and nothing new is taken."""
    with serving(*lp.load("demo")) as running:
        http = running.http()

        def fail() -> bool:
            raise RuntimeError("the device is gone")

        running.served.loop.engine.step = fail
        answer = http.post(COMPLETE, json={"prompt": "a", "max_tokens": 3})
        assert answer.status_code == 500 and "the device is gone" in answer.json()["error"]["message"]
        health = http.get("/health")
        assert health.status_code == 503 and "the device is gone" in health.json()["error"]["message"]
        assert http.post(COMPLETE, json={"prompt": "a"}).status_code == 503


def test_metrics_count(demo_server: Running, http: Any) -> None:
    """Texts, tokens, steps and draft tokens, under vLLM's names too; and no path that a client makes up."""

    def values() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    before = values()
    body = http.post(COMPLETE, json={"prompt": "import os\n", "max_tokens": 30, "temperature": 0}).json()
    answer, drafts = body["usage"], body["metrics"]["speculative_decoding"]
    http.get("/no/such/path")
    after = values()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["lp_generated_tokens_total"] == 30 and grown["lp_steps_total"] == answer["steps"]
    for name in ("lp_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"):
        assert grown[name] == answer["accepted_draft_tokens"] > 0
    assert grown["lp_draft_tokens_total"] == answer["draft_tokens"]
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == drafts["num_draft_tokens"] == answer["draft_tokens"]
    assert grown["vllm:spec_decode_num_drafts_total"] == drafts["num_spec_steps"]
    assert grown['lp_texts_total{reason="length"}'] == 1
    assert grown['lp_requests_total{path="/v1/completions",status="200"}'] == 1
    assert grown['lp_requests_total{path="other",status="404"}'] == 1
    assert grown["lp_time_to_first_token_seconds_count"] == grown["lp_time_per_token_seconds_count"] == 1
    assert after["lp_texts_running"] == after["lp_texts_waiting"] == 0
    assert 0 < after["lp_cache_slots_free"] <= after["lp_cache_slots"]


def test_a_prompt_that_was_never_cached_is_not_counted(small_server: Running) -> None:
    """Its client has left while it waited: prompts would seem to be cached faster than they are."""
    from launch.serve.engine_loop import Ending

    def cached() -> list[str]:
        text = small_server.served.metrics.text().decode()
        return [line for line in text.splitlines() if line.startswith("lp_prompt_tokens_total ")]

    before = cached()
    small_server.served.metrics.ended(Ending(reason="cancelled", prompt_tokens=600))
    assert before and cached() == before


@pytest.mark.parametrize("drain_s", [0, 30])
def test_a_server_that_is_asked_to_end(drain_s: int) -> None:
    """While texts have time to end it answers, but takes no more; when that is up, their clients are told."""
    import uvicorn

    from launch.serve.draining import DrainingServer

    with serving(*lp.load("demo")) as running:
        http = running.http()
        loop = running.served.loop
        server = DrainingServer(uvicorn.Config(None, log_config=None), loop, drain_s)
        with http.stream("POST", COMPLETE, json=LONG | {"max_tokens": 300, "seed": 1}) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            next(lines)
            server.handle_exit(signal.SIGTERM, None)
            if drain_s:
                assert eventually(lambda: http.get("/ready").status_code == 503)
                assert http.get("/health").json() == {"status": "draining"}  # it works, and is not to be killed
                refused = http.post(COMPLETE, json={"prompt": "a"})
                assert refused.status_code == 503 and "about to end" in refused.json()["error"]["message"]
                assert refused.headers["Retry-After"] == "1"
                assert not server.should_exit
            rest = [*lines]
        if drain_s:
            assert rest[-1] == "[DONE]" and json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        else:
            assert json.loads(rest[-1])["error"]["message"] == "the server ended before the text did; ask again"
        assert eventually(lambda: server.should_exit) and loop.texts == 0
