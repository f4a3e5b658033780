"""Real routers in front of two servers: texts are a server's own, and a server that is killed loses nothing else.

`pip install smg sglang-router vllm-router` in environments of their own; LP_ROUTERS names their folders
bin, as PATH does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import lp
from scripts.studies.parts.routers import LAUNCH, free_port, program, router_command
from tests.conftest import Processes

for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")
httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")

from tests.support.eventually import eventually  # noqa: E402

pytestmark = pytest.mark.slow
REQUESTS = 24
NEW = 120
KILLED_AFTER = 6  # requests of the second round
RETRYABLE = (500, 502, 503, 504)
COMPLETIONS = 'lp_requests_total{path="/v1/completions",status="200"}'


class Site:
    """Two servers of the demo model, and a router in front of them.

    Args:
        processes: starts them; what they print goes to files in `folder`.
        router, policy: which router, and how it chooses a server.
    """

    def __init__(self, processes: Processes, folder: Path, router: str, policy: str) -> None:
        self.processes = processes
        self.folder = folder
        self.ports = [free_port(), free_port()]
        self.servers = [self.start_server(port) for port in self.ports]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        assert all(eventually(lambda url=url: self.status(f"{url}/ready") == 200, 120) for url in self.urls)  # type: ignore[misc]
        port = free_port()
        self.router = self.start(router_command(router, policy, self.urls, port), "router")
        self.url = f"http://127.0.0.1:{port}"

    def routes(self) -> bool:
        """Whether the router answers, once it has found the servers."""
        return eventually(lambda: self.complete(0, stream=False)[0] == 200, 60)

    def close(self) -> None:
        """End the router: it writes its name over its environment, by which `processes` would find it."""
        os.killpg(self.router.pid, signal.SIGKILL)
        self.router.wait()

    def start(self, args: list[str], name: str) -> subprocess.Popen[str]:
        with (self.folder / name).open("a") as file:
            return self.processes.start(args, stdout=file, stderr=subprocess.STDOUT)

    def start_server(self, port: int) -> subprocess.Popen[str]:
        return self.start([sys.executable, "-m", "launch.serve", "model=demo", f"port={port}"], str(port))

    @staticmethod
    def status(url: str) -> int:
        return int(httpx.get(url, timeout=5).status_code)

    def completions(self, index: int) -> float:
        """How many requests a server has answered."""
        lines = httpx.get(f"{self.urls[index]}/metrics", timeout=10).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(COMPLETIONS))

    def complete(self, seed: int, stream: bool) -> tuple[int, str]:
        """Status and text of a request through the router; status 0 where its stream broke off."""
        asked = {"model": "demo", "prompt": prompt(seed), "max_tokens": NEW, "temperature": 0.8, "seed": seed}
        asked |= {"stream": stream}
        text = ""
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=asked, timeout=120) as answer:
                if answer.status_code != 200 or not stream:
                    body = answer.read()
                    good = answer.status_code == 200
                    return answer.status_code, json.loads(body)["choices"][0]["text"] if good else body.decode()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            return 0, line
                        text += "".join(choice["text"] for choice in event["choices"])
        except httpx.TransportError as error:
            return 0, repr(error)
        return 200, text

    def load(self, kill: int | None = None) -> dict[int, tuple[int, str]]:
        """Answers by seed, of requests that come one after another; every second one is a stream.

        Args:
            kill: the first server is killed behind so many requests; None: it is not.
        """
        answers: dict[int, tuple[int, str]] = {}

        def ask(seed: int) -> None:
            answers[seed] = self.complete(seed, stream=seed % 2 == 0)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(REQUESTS)]
        for number, thread in enumerate(threads):
            if number == kill:
                self.servers[0].kill()
                self.servers[0].wait()
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        return answers


def prompt(seed: int) -> str:
    return f"def f{seed}(a, b):\n"


@pytest.fixture(scope="module")
def expected() -> dict[int, Any]:
    """What a decoder gives under these seeds, by seed."""
    model, tokenizer = lp.load("demo")
    decoder = lp.LookaheadDecoder(model)

    def text(seed: int) -> str:
        ids = tokenizer(prompt(seed))["input_ids"]
        tokens = decoder.generate(ids, NEW, lp.SamplingParams(temperature=0.8, seed=seed)).tokens
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return {seed: (200, text(seed)) for seed in range(REQUESTS)}


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
@pytest.mark.parametrize("router", LAUNCH)
def test_two_servers_behind_a_router(
    router: str, policy: str, processes: Processes, tmp_path: Path, expected: dict[int, Any]
) -> None:
    """A probe, a status or a field that a router does not understand would cost requests, or a server for ever."""
    if not program(router):
        pytest.skip(f"{router} is not installed; pip install {router}, and LP_ROUTERS=its folder bin")
    with closing(Site(processes, tmp_path, router, policy)) as site:
        assert site.routes(), (tmp_path / "router").read_text()[-2000:]
        assert site.load() == expected
        answers = site.load(kill=KILLED_AFTER)
        lost = {seed: answer for seed, answer in answers.items() if answer[0] != 200}
        assert {seed: answers[seed] for seed in answers.keys() - lost.keys()} == {
            seed: expected[seed] for seed in answers.keys() - lost.keys()
        }
        # Streams that were under way on the killed server break off; what had sent nothing was tried on the other one.
        assert all(seed < KILLED_AFTER or status in RETRYABLE for seed, (status, _) in lost.items()), lost
        site.servers[0] = site.start_server(site.ports[0])
        assert eventually(lambda: site.status(f"{site.urls[0]}/ready") == 200, 120)
        if policy == "round_robin":
            assert eventually(lambda: site.load() == expected and site.completions(0) > 0, 120)
        assert site.load() == expected
