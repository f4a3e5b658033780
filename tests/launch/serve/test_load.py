"""launch.serve under load: many clients, requests of mixed lengths, clients that leave, malformed requests."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from launch.data.prompts import load_builtin
from scripts.studies import main
from scripts.studies.parts.load import MALFORMED, Answer, Request, draw_requests, send, send_all
from scripts.studies.parts.soak import resident_bytes
from scripts.studies.serve_load import ServeLoad, Server
from tests.conftest import LONG
from tests.support.serving import Running

pytest.importorskip("openai", reason="the package openai is not installed")
CLIENTS = 16
COUNT = 500 if LONG else 40
PROMPTS = [prompt.text for prompt in load_builtin()]


@pytest.fixture
def client(demo_server: Running) -> Any:
    return demo_server.openai()


def test_a_load_of_all_kinds(demo_server: Running, client: Any) -> None:
    """No failure that is not the client's; nothing is left of it, neither texts nor, in the long form, memory."""
    requests = draw_requests("demo", PROMPTS, COUNT, most_tokens=128 if LONG else 32)
    assert any(request.malformed for request in requests) and any(request.leaves_after for request in requests)
    memory: list[int | None] = []

    def on_answer(count: int) -> None:
        if count in (COUNT // 2, COUNT):
            memory.append(resident_bytes())

    answers, _ = send_all(client, requests, CLIENTS, on_answer)
    assert [answer.failure for answer in answers if answer.failure] == []
    for request, answer in zip(requests, answers, strict=True):
        if not (request.malformed or request.leaves_after or request.fields["stream"]):
            assert 1 <= answer.tokens <= request.fields["max_tokens"]
    loop = demo_server.served.loop
    deadline = time.monotonic() + 10
    while loop.texts and time.monotonic() < deadline:  # of clients that left
        time.sleep(0.01)
    assert loop.texts == 0 and loop.engine.running == 0
    assert demo_server.http().get("/health").json() == {"status": "ok"}
    if LONG and None not in memory:
        half, end = memory
        assert half is not None and end is not None and end < 1.05 * half


@pytest.mark.parametrize("fields", MALFORMED, ids=[next(iter(fields)) for fields in MALFORMED])
def test_malformed_requests_are_refused(client: Any, fields: dict[str, Any]) -> None:
    """One that is not is a failure of the server's, and one that is though it was sound."""
    request = Request(fields={"model": "demo", "prompt": "a", "max_tokens": 1} | fields, malformed=True)
    assert send(client, request).failure == ""
    assert send(client, replace(request, malformed=False)).failure.startswith("refused: ")
    sound = Request(fields={"model": "demo", "prompt": "a", "max_tokens": 1}, malformed=True)
    assert send(client, sound).failure == "a malformed request was not refused"


def test_answers_are_counted(client: Any) -> None:
    """Tokens of streams that say them, and the time of the first characters."""
    fields = {
        "model": "demo",
        "prompt": "def f(",
        "max_tokens": 9,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = send(client, Request(fields=fields))
    streamed = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    stream = send(client, Request(fields=streamed))
    assert whole.tokens == stream.tokens == 9 and whole.first_s is None and not whole.failure + stream.failure
    assert stream.first_s is not None and 0 < stream.first_s < stream.total_s
    left = send(client, Request(fields=streamed, leaves_after=1))
    assert left.tokens == 0 and not left.failure


def test_a_server_that_is_not_there_is_a_failure(client: Any) -> None:
    with_none = client.with_options(base_url="http://127.0.0.1:9/v1")
    answer = send(with_none, Request(fields={"model": "demo", "prompt": "a"}))
    assert answer.failure.startswith("APIConnectionError: Connection error. (ConnectError(")
    assert answer == Answer(total_s=answer.total_s, failure=answer.failure)


def test_a_server_that_fails_costs_no_other_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server of transformers dropped a connection once, and the figures of all servers were lost with it."""
    sent: list[str] = []

    def send_all(client: Any, streams: list[Request], clients: int) -> tuple[list[Answer], float]:
        sent.append(client)
        failure = "gone" if client == "other" and sent.count("other") == 2 else ""
        return [Answer(total_s=1.0, failure=failure, first_s=0.5, tokens=8) for _ in streams], 1.0

    monkeypatch.setattr("scripts.studies.serve_load.send_all", send_all)
    servers: list[Any] = [Server(name, "demo", 0, name) for name in ("ours", "other")]  # type: ignore[arg-type]
    study = ServeLoad(clients=2, streams=1, rounds=2, max_new_tokens=8, requests=0)
    study.servers = servers
    study.run()
    out = capsys.readouterr().out
    lines = [line.split(" | ")[:3] for line in out.splitlines() if line.startswith(("| ours", "| other"))]
    assert lines == [
        ["| ours", "1", "8 (8 to 8)"], ["| other", "1", "failed"],
        ["| ours", "2", "16 (16 to 16)"], ["| other", "2", "16 (16 to 16), 1.00 x"],
    ]  # fmt: skip
    assert "other, 1 clients: failed (gone)" in out and out.count("| other | 1 | failed | - |") == 1
    assert sent.count("ours") == 6 and sent.count("other") == 5, "no more streams for one that has failed"
    monkeypatch.setattr("scripts.studies.serve_load.send_all", lambda *_: ([Answer(total_s=1.0, failure="gone")], 1.0))
    with pytest.raises(RuntimeError, match="ours failed: gone"):
        study.run()


@pytest.mark.slow  # three servers, each in a process of its own
def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The load, and the streams beside transformers serve, where its packages are installed."""
    options = ["--requests", "10", "--clients", "2", "--streams", "1", "--rounds", "1", "--max-new-tokens", "8"]
    main(["serve_load", *options])
    out = capsys.readouterr().out
    assert "10 requests in" in out and "0 failures that are not the client's" in out
    lines = [line for line in out.splitlines() if line.startswith("| launch.serve |")]
    assert [line.split(" | ")[1] for line in lines] == ["1", "2"]
    assert out.count("| transformers serve") == 4 or "no transformers serve: it needs" in out
