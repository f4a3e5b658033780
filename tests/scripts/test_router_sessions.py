"""The study of sessions behind routers: a router and servers of the test's own, which answer at once."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the package httpx is not installed")

from lp.errors import UserError
from scripts.studies.router_sessions import RouterSessions
from scripts.studies.session_routing import FOLLOW_UPS

TOKENS = 6  # of every answer, in half as many steps
# A router as `smg launch` is: it takes its options, says which servers it has, and sends requests to them in turn.
ROUTER = """#!{python}
import itertools, json, sys, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
args = sys.argv[1:]
first = args.index("--worker-urls") + 1
urls = list(itertools.takewhile(lambda each: not each.startswith("--"), args[first:]))
policy, port = args[args.index("--policy") + 1], int(args[args.index("--port") + 1])
turns = itertools.cycle(urls) if policy == "round_robin" else itertools.repeat(urls[0])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(json.dumps({{"workers": [{{"url": url, "is_healthy": True}} for url in urls]}}).encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with urllib.request.urlopen(urllib.request.Request(next(turns) + self.path, body)) as answer:
            self.answer(answer.read())

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Server(ThreadingHTTPServer):
    """Answers chats by their last message, and counts as `lp serve` does: what it has seen before is cached."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.seen: list[list[Any]] = []
        self.computed = self.reused = self.answers = 0
        self.lock = threading.Lock()

    def chat(self, asked: dict[str, Any]) -> str:
        messages = asked["messages"]
        with self.lock:
            known = max((_alike(messages, before) for before in self.seen), default=0)
            self.reused += known
            self.computed += len(messages) - known
            self.answers += 1
            self.seen.append(messages)
        return f"{len(messages)} {messages[0]['content'][:9]} {asked['temperature']} {asked['seed']}"

    def metrics(self) -> str:
        figures = {
            "lp_generated_tokens_total": TOKENS * self.answers,
            "lp_steps_total": TOKENS // 2 * self.answers,
            "lp_prompt_tokens_total": self.computed,
            "lp_cached_prompt_tokens_total": self.reused,
        }
        return "".join(f"# HELP {name} a count\n{name} {float(value)}\n" for name, value in figures.items())


def _alike(one: list[Any], other: list[Any]) -> int:
    """How many messages both begin with."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(self.server.metrics())

    def do_POST(self) -> None:
        text = self.server.chat(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(json.dumps({"choices": [{"message": {"content": text}}]}))

    def _answer(self, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Sessions(RouterSessions):
    """The study with servers that compute nothing."""

    @contextmanager
    def server(self) -> Iterator[str]:
        server = Server()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def test_sessions_behind_a_router_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn of every session once, by the servers' counts; what a session loses that changes its server shows."""
    program = tmp_path / "smg"
    program.write_text(ROUTER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("LP_ROUTERS", str(tmp_path))
    study = Sessions(routers=["smg"], policies=["first", "round_robin"], limit=2, clients=1, temperatures=[0.0])
    results = [row.key | study.replayed(row) for row in study.rows()]
    answers = 2 * (1 + len(FOLLOW_UPS))
    messages = 2 * sum(1 + 2 * turn for turn in range(1 + len(FOLLOW_UPS)))
    assert [each["tokens"] for each in results] == [TOKENS * answers] * 3
    assert all(each["computed"] + each["reused"] == messages for each in results)
    alone, one, turns = results
    assert one["shares"] == [TOKENS * answers, 0] and turns["shares"] == [TOKENS * answers // 2] * 2
    assert one["computed"] == alone["computed"] < turns["computed"]
    (table,) = study.tables(results)
    lines = str(table).splitlines()[-3:]
    assert [line.split("|")[1].strip() for line in lines] == ["-", "smg", "smg"]
    assert all("| 2.00 | +0.0% |" in line for line in lines)
    results[2]["texts"][0] = "another"
    with pytest.raises(RuntimeError, match="texts differ from one server's"):
        [*study.tables(results)]


def test_a_router_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LP_ROUTERS", str(tmp_path))
    for name, message in (("nginx", "--routers has 'nginx'; give some of smg"), ("smg", "smg is not installed; pip")):
        with pytest.raises(UserError, match=message):
            Sessions(routers=[name]).rows()
