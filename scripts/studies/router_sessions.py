"""What sessions lose behind a real router: S and tokens of prompts computed again, by the servers' own counts.

    LP_ROUTERS=FOLDER python scripts/tables.py router_sessions --model FOLDER --task data/mtbench.jsonl --limit 10

A session is a prompt of the task and follow-ups, each with all that was said before, as of `session_routing`; some
clients have one session each under way. Every line has servers of its own (`lp serve`, pool.scope=session), which have
answered nothing: one without a router, then several behind each router with each policy. Steps have a fixed number of
tokens. A text is the same on any server. Routers: `pip install smg sglang-router vllm-router`, with LP_ROUTERS naming
the folders of their programs, separated as in PATH.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from launch import cli
from lp.errors import UserError
from lp.models.loader import DEMO_MODEL

from .harness import Method, PromptStudy, Result, Row, Table, compression, grouped, option
from .parts.routers import LAUNCH, free_port, program, router_command
from .serve_load import process
from .session_routing import FOLLOW_UPS

ALONE = "-"
START_S = 60  # for a router to find its servers
COUNTS = {  # of a result, and the servers' counters of them
    "tokens": "lp_generated_tokens_total",
    "steps": "lp_steps_total",
    "computed": "lp_prompt_tokens_total",
    "reused": "lp_cached_prompt_tokens_total",
}


@dataclass(kw_only=True)
class RouterSessions(PromptStudy):
    """Counts steps and computed prompt tokens of sessions over servers, by the router in front of them."""

    routers: list[str] = option([*LAUNCH])
    policies: list[str] = option(["cache_aware", "round_robin"], "by the routers' names of them")
    servers: int = option(2, "behind a router")
    clients: int = option(4, "each has one session under way")
    temperatures: list[float] = option([0.0, 0.8], "0 is greedy")
    limit: int | None = option(10, "sessions: the first prompts of the task")
    num_tokens: int = option(16, "of a step")
    cache_tokens: int = option(16384, "of a server")
    max_new_tokens: int = option(48)
    repeats: int = option(1, "of every line, as routers do not always choose alike")
    SHARED = (*PromptStudy.SHARED, "num_tokens", "cache_tokens", "limit", "task_name", "max_new_tokens", "clients")

    @property
    def turns(self) -> int:
        """How often each line is measured."""
        return self.repeats

    @property
    def folder(self) -> Path:
        """Where the model is."""
        return Path(DEMO_MODEL if self.model == "demo" else self.model).resolve()

    def rows(self) -> Iterable[Row]:
        for router in self.routers:
            if router not in LAUNCH:
                raise UserError(f"--routers has {router!r}; give some of {', '.join(LAUNCH)}")
            if not program(router):
                raise UserError(f"{router} is not installed; pip install {router}, and LP_ROUTERS=the folder of it")
        ways = [(router, policy) for router in self.routers for policy in self.policies]
        return [
            Row({"temperature": at, "router": router, "policy": policy, "servers": count})
            for at in self.temperatures
            for router, policy, count in [(ALONE, ALONE, 1), *((*way, self.servers) for way in ways)]
        ]

    def methods(self) -> Mapping[str, Method]:
        return {"": self.replayed}

    def replayed(self, row: Row) -> Result:
        """All sessions, by clients that ask at once."""
        router, policy = row.key["router"], row.key["policy"]
        with ExitStack() as held:
            urls = [held.enter_context(self.server()) for _ in range(row.key["servers"])]
            url = urls[0] if router == ALONE else held.enter_context(routed(router, policy, urls))
            with ThreadPoolExecutor(self.clients) as clients:
                texts = [
                    *clients.map(lambda at: self.session(url, at, row.key["temperature"]), range(len(self.prompts)))
                ]
            found = [counted(each) for each in urls]
        totals = {name: sum(each[name] for each in found) for name in COUNTS}
        shares = [each["tokens"] for each in found]
        return {**totals, "shares": shares, "texts": [digest for session in texts for digest in session]}

    @contextmanager
    def server(self) -> Iterator[str]:
        """The address of a server that has answered nothing."""
        window = max(self.num_tokens // 6, 1)
        shape = ["decoder=lookahead", f"W={window}", "N=2", f"G={self.num_tokens - window}", "pool.scope=session"]
        shape += [f"cache_tokens={self.cache_tokens}", f"max_sequences={self.clients}", f"model.dtype={self.dtype}"]
        command = [
            sys.executable,
            "-m",
            cli.__name__,
            "serve",
            "port=0",
            "model=hf",
            f"model.name={self.folder}",
            *shape,
        ]
        with process("lp serve", self.folder.name, command, self.threads) as server:
            yield str(server.client.base_url).rstrip("/").removesuffix("/v1")

    def session(self, url: str, at: int, temperature: float) -> list[str]:
        """Digests of a session's answers."""
        messages = [{"role": "user", "content": self.prompts[at].text}]
        digests = []
        for turn in range(1 + len(FOLLOW_UPS)):
            if turn:
                messages.append({"role": "user", "content": FOLLOW_UPS[turn - 1]})
            asked = {"model": self.folder.name, "messages": messages, "max_tokens": self.max_new_tokens}
            asked |= {"temperature": temperature, "seed": at}
            answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=600)
            if answer.status_code != 200:
                raise RuntimeError(f"{url} answers {answer.status_code}: {answer.text[:500]}")
            messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
            digests.append(hashlib.sha256(messages[-1]["content"].encode()).hexdigest()[:16])
        return digests

    def tables(self, results: list[Result]) -> Iterable[Table]:
        heads = (
            "router",
            "policy",
            "servers",
            "S",
            "beside one server",
            "prompt tokens computed",
            "tokens of each server",
        )
        for temperature, of in grouped(results, "temperature").items():
            first = of[0]
            if any(each["texts"] != first["texts"] for each in of):
                raise RuntimeError("texts differ from one server's")
            alone = compression([each for each in of if each["router"] == ALONE])
            lines = []
            for (router, policy), found in grouped(of, "router", "policy").items():
                s = [compression([each]) for each in found]
                lines.append(
                    [
                        router,
                        policy,
                        str(found[0]["servers"]),
                        ", ".join(f"{each:.2f}" for each in s),
                        f"{compression(found) / alone - 1:+.1%}",
                        ", ".join(f"{each['computed']:,} of {each['computed'] + each['reused']:,}" for each in found),
                        ", ".join(" + ".join(map(str, each["shares"])) for each in found),
                    ]
                )
            yield Table(heads, lines, f"T = {temperature:g}")


@contextmanager
def routed(router: str, policy: str, urls: list[str]) -> Iterator[str]:
    """The address of a router in front of servers, once it has found them all."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LP_API_KEY")}
    with tempfile.TemporaryFile("w+") as log:
        command = router_command(router, policy, urls, port)
        started = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + START_S
            while not _has_found(url, len(urls)):
                if started.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{router} has not found its servers:\n{log.read()[-2000:]}")
                time.sleep(0.2)
            yield url
        finally:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def _has_found(url: str, count: int) -> bool:
    try:
        workers = httpx.get(f"{url}/workers", timeout=5).json()
    except (httpx.TransportError, ValueError):
        return False
    found = workers.get("workers", []) if isinstance(workers, dict) else workers
    return sum(bool(each.get("is_healthy")) for each in found) == count


def counted(url: str) -> dict[str, int]:
    """What a server says of all its texts."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found = dict(re.findall(r"^(\w+) ([0-9.e+]+)$", text, re.MULTILINE))
    return {name: int(float(found[counter])) for name, counter in COUNTS.items()}
