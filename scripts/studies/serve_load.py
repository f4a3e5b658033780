"""launch.serve under load, and beside `transformers serve` with the same model.

    python scripts/tables.py serve_load --requests 500 --clients 16 --rounds 5

First the load, for launch.serve alone: requests of mixed lengths, some of whose clients leave and some of which are
malformed; failures that are not the client's, and the server's memory along the way. Then the same greedy streams for
all servers in turn, from one client and from many; no two have the same beginning, so that no cached prefix helps.
Each server has a process of its own; ratios are medians over rounds. Needs the packages openai and, for the other
servers, those of transformers[serving].
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from launch import cli
from lp.errors import UserError
from lp.models.loader import DEMO_MODEL
from lp.optional import is_installed

from .harness import Method, PromptStudy, Result, Row, Table, grouped, option, ratios, spread, values
from .parts.load import Request, draw_requests, send_all
from .parts.soak import resident_bytes

OURS, TRANSFORMERS = "launch.serve", "transformers serve"
BATCHING = "--continuous-batching"  # of transformers serve, which without it answers one request after the other
PACKAGES = ("fastapi", "uvicorn", "typer", "accelerate")  # of transformers[serving], beside openai
MEMORY_POINTS = 5  # of the load
START_S = 300  # for a server to load its model
MIB = 1 << 20


@dataclass(frozen=True)
class Server:
    """A server that runs, and what it takes to ask it and to measure it.

    Args:
        name: the server's name in the table.
        model: what a request calls the server's model.
        pid: id of its process, whose memory is measured.
        client: an `openai.OpenAI` that asks this server.
    """

    name: str
    model: str
    pid: int
    client: Any


@dataclass(kw_only=True)
class ServeLoad(PromptStudy):
    """Loads launch.serve, then compares the servers' speed with one and with many clients."""

    requests: int = option(500, "of the load; 0 leaves it out")
    clients: int = option(16, "of the load, and of the second comparison")
    streams: int = option(3, "of each client in a round of the comparison")
    rounds: int = option(5, "of the comparison; 0 leaves it out")
    ours: list[str] = option([], "overrides of launch.serve")
    max_new_tokens: int = option(96)
    WARM_UP = 1

    def run(self) -> None:
        if not is_installed("openai"):
            raise UserError("serve_load needs the client openai; pip install openai")
        if self.requests:
            print(self.load(self.servers[0]))
        if self.rounds:
            super().run()

    @cached_property
    def servers(self) -> list[Server]:
        """Ours, and transformers' where its packages are installed."""
        folder = str(DEMO_MODEL if self.model == "demo" else Path(self.model).resolve())
        app = [sys.executable, "-m", cli.__name__, "serve", "port=0", "model=hf", f"model.name={folder}"]
        command = [*app, f"model.dtype={self.dtype}", *self.ours]
        found = [self.stack.enter_context(process(OURS, Path(folder).name, command, self.threads))]
        missing = [package for package in PACKAGES if not is_installed(package)]
        if missing and self.rounds:
            print(f"no {TRANSFORMERS}: it needs {', '.join(missing)}; pip install 'transformers[serving]'")
        elif self.rounds:
            app = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--host", "127.0.0.1"]
            command = [*app, "--port", "0", "--dtype", self.dtype, "--device", "cpu"]
            for options in ([], [BATCHING]):
                name = " ".join([TRANSFORMERS, *options])
                found.append(self.stack.enter_context(process(name, folder, [*command, *options], self.threads)))
        return found

    def rows(self) -> Iterable[Row]:
        return [Row({"clients": clients}) for clients in (1, self.clients)]

    def methods(self) -> Mapping[str, Method]:
        return {server.name: self.serving(server) for server in self.servers}

    def serving(self, server: Server) -> Method:
        """Streams of a server; another one than ours that fails gets no more of them.

        Raises:
            RuntimeError: ours failed.
        """
        failed: dict[int, str] = {}
        sent: dict[int, int] = {}

        def method(row: Row) -> Result:
            clients = row.key["clients"]
            if clients in failed:
                return {"failed": failed[clients]}
            number = sent[clients] = sent.get(clients, -1) + 1
            streams = [self.stream(server, number, index) for index in range(clients * self.streams)]
            answers, wall_s = send_all(server.client, streams, clients)
            failures = [answer.failure for answer in answers if answer.failure]
            if failures and server is self.servers[0]:
                raise RuntimeError(f"{server.name} failed: {failures[0]}")
            if failures:
                failed[clients] = failures[0]
                return {"failed": failures[0]}
            return {
                "seconds": wall_s,
                "tokens": sum(answer.tokens for answer in answers),
                "first_s": [answer.first_s for answer in answers if answer.first_s is not None],
                "request_s": [answer.total_s for answer in answers],
            }

        return method

    def stream(self, server: Server, number: int, index: int) -> Request:
        """A greedy stream whose beginning no other one has."""
        fields = {
            "model": server.model,
            "prompt": f"# {number}.{index}\n{self.prompts[index % len(self.prompts)].text}",
            "max_tokens": self.max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Request(fields=fields)

    def load(self, server: Server) -> str:
        """Many requests of all kinds: failures that are not the client's, and memory."""
        requests = draw_requests(server.model, [prompt.text for prompt in self.prompts], self.requests)
        memory = [resident_bytes(server.pid)]
        points = {self.requests * point // MEMORY_POINTS for point in range(1, MEMORY_POINTS + 1)}

        def on_answer(count: int) -> None:
            if count in points:
                memory.append(resident_bytes(server.pid))

        answers, wall_s = send_all(server.client, requests, self.clients, on_answer)
        failures = [answer.failure for answer in answers if answer.failure]
        malformed = sum(request.malformed for request in requests)
        left = sum(request.leaves_after is not None and not request.malformed for request in requests)
        mib = [None if each is None else round(each / MIB) for each in memory]
        every = self.requests // MEMORY_POINTS
        lines = [
            f"{server.name}, {self.model}, {self.clients} clients: {len(requests)} requests in {wall_s:.1f} s, of them "
            f"{malformed} malformed and {left} whose clients leave; {len(failures)} failures that are not the client's",
            *(f"  {failure}" for failure in failures[:5]),
            f"resident MiB of the server before, and after every {every} requests: {mib}\n",
        ]
        return "\n".join(lines)

    def tables(self, results: list[Result]) -> Iterable[Table]:
        heads = ("server", "clients", "tokens/s", "first token, p50", "p99", "request, p50", "p99")
        lines, notes = [], []
        for clients, of in grouped(results, "clients").items():
            by_server = {server.name: grouped(of, "method")[server.name] for server in self.servers}
            ours = by_server[self.servers[0].name]
            for name, found in by_server.items():
                if failed := [each["failed"] for each in found if "failed" in each]:
                    notes.append(f"{name}, {clients} clients: failed ({failed[0]})")
                    lines.append([name, str(clients), "failed", *["-"] * (len(heads) - 3)])
                    continue
                speeds, our_speeds = (ratios(values(each, "tokens"), values(each)) for each in (found, ours))
                times = f", {median(ratios(our_speeds, speeds)):.2f} x" * (found is not ours)
                first, whole = ([s for each in found for s in each[part]] for part in ("first_s", "request_s"))
                quantile_ms = (f"{1e3 * each:.0f} ms" for each in (*quantiles(first), *quantiles(whole)))
                lines.append([name, str(clients), spread(speeds) + times, *quantile_ms])
        yield Table(heads, lines, f"x is how many times as fast {OURS} is", "\n".join(notes))


@contextmanager
def process(name: str, model: str, command: Sequence[str], threads: int) -> Iterator[Server]:
    """A server that runs until the block ends, on a free port that it names itself.

    Raises:
        RuntimeError: it ended, or named none in time.
    """
    import openai

    path = os.pathsep.join(filter(None, sys.path))  # a script's own folder is in no child's path
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    environment.pop("LP_API_KEY", None)
    with tempfile.TemporaryFile("w+") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)
        try:
            url = address(started, log)
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
                yield Server(name, model, started.pid, client)
        finally:
            started.terminate()
            try:
                started.wait(30)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def address(started: subprocess.Popen[str], log: Any) -> str:
    """Where a server listens, once its log says it."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        ended = started.poll() is not None
        log.seek(0)
        text = log.read()
        if found := re.search(r"(?:serving|running) .*(http://[\d.]+:\d+)", text):
            return found[1]
        if ended:
            break
        time.sleep(0.1)
    raise RuntimeError(f"{' '.join(map(str, started.args))} does not listen:\n{text[-2000:]}")  # type: ignore[arg-type]


def quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile of seconds."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99))
    return float(p50), float(p99)
