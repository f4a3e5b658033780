"""launch.serve under load, and beside `transformers serve` with the same model: docs/experiments/serving.md.

    python scripts/tables.py serve_load --requests 500 --clients 16 --rounds 5

First the load, for launch.serve alone: requests of mixed lengths, some of whose clients leave and some of which are
malformed; failures that are not the client's, and the server's memory along the way. Then the same greedy streams for
all servers in turn, from one client and from many; no two have the same beginning, so that no cached prefix helps.
Each server has a process of its own; ratios are medians over rounds. Needs the packages openai and, for the other
servers, those of transformers[serving].
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from launch import cli
from launch.bench.summary import markdown
from launch.data.prompts import Prompt
from lp.errors import UserError
from lp.models.loader import DEMO_MODEL
from lp.optional import is_installed

from ._common import add_prompt_arguments, load_prompts, median_and_range
from .parts.endurance import resident_bytes
from .parts.load import Answer, Request, draw_requests, send_all

OURS, TRANSFORMERS = "launch.serve", "transformers serve"
BATCHING = "--continuous-batching"  # of transformers serve, which without it answers one request after the other
PACKAGES = ("fastapi", "uvicorn", "typer", "accelerate")  # of transformers[serving], beside openai
MEMORY_POINTS = 5  # of the load
START_S = 300  # for a server to load its model
HEADS = ("server", "clients", "tokens/s", "first token, p50", "p99", "request, p50", "p99")
MIB = 1 << 20


@dataclass(frozen=True)
class Server:
    """A server's process.

    Args:
        name: in the table.
        model: what clients call its model.
        pid: of the process.
        client: of the package openai.
    """

    name: str
    model: str
    pid: int
    client: Any


@dataclass(frozen=True)
class Round:
    """The streams of one server in one round.

    Args:
        answers: to them.
        wall_s: seconds of them all.
    """

    answers: list[Answer]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.wall_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="folder or demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--requests", type=int, default=500, help="of the load; 0 leaves it out")
    parser.add_argument("--clients", type=int, default=16, help="of the load, and of the second comparison")
    parser.add_argument("--streams", type=int, default=3, help="of each client in a round of the comparison")
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison; 0 leaves it out")
    parser.add_argument("--ours", nargs="*", default=[], help="overrides of launch.serve")
    add_prompt_arguments(parser, max_new_tokens=96)


def run(args: argparse.Namespace) -> None:
    if not is_installed("openai"):
        raise UserError("serve_load needs the client openai; pip install openai")
    folder = str(DEMO_MODEL if args.model == "demo" else Path(args.model).resolve())
    prompts = load_prompts(args)
    figures: dict[str, Any] = {"model": args.model, "torch": torch.__version__}
    with ExitStack() as servers:
        ours = servers.enter_context(launch_serve(folder, args))
        if args.requests:
            figures["load"] = load(ours, [prompt.text for prompt in prompts], args)
        if not args.rounds:
            return
        compared = [ours]
        missing = [package for package in PACKAGES if not is_installed(package)]
        if missing:
            print(f"no {TRANSFORMERS}: it needs {', '.join(missing)}; pip install 'transformers[serving]'")
        else:
            for options in ([], [BATCHING]):
                compared.append(servers.enter_context(transformers_serve(folder, options, args)))
        figures["compared"] = compare(compared, prompts, args)
    print(json.dumps(figures))


def launch_serve(folder: str, args: argparse.Namespace) -> Any:
    """Our server."""
    app = [sys.executable, "-m", cli.__name__, "serve", "port=0", "model=hf", f"model.name={folder}"]
    return process(OURS, Path(folder).name, [*app, f"model.dtype={args.dtype}", *args.ours], args.threads)


def transformers_serve(folder: str, options: Sequence[str], args: argparse.Namespace) -> Any:
    """The other one, with these options."""
    app = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--host", "127.0.0.1", "--port", "0"]
    command = [*app, "--dtype", args.dtype, "--device", "cpu", *options]
    return process(" ".join([TRANSFORMERS, *options]), folder, command, args.threads)


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


def load(server: Server, prompts: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Many requests of all kinds: failures that are not the client's, and memory."""
    requests = draw_requests(server.model, prompts, args.requests)
    memory = [resident_bytes(server.pid)]
    points = {args.requests * point // MEMORY_POINTS for point in range(1, MEMORY_POINTS + 1)}

    def on_answer(count: int) -> None:
        if count in points:
            memory.append(resident_bytes(server.pid))

    answers, wall_s = send_all(server.client, requests, args.clients, on_answer)
    failures = [answer.failure for answer in answers if answer.failure]
    malformed = sum(request.malformed for request in requests)
    left = sum(request.leaves_after is not None and not request.malformed for request in requests)
    print(
        f"{server.name}, {args.model}, {args.clients} clients: {len(requests)} requests in {wall_s:.1f} s, of them "
        f"{malformed} malformed and {left} whose clients leave; {len(failures)} failures that are not the client's"
    )
    for failure in failures[:5]:
        print(f"  {failure}")
    mib = [None if each is None else round(each / MIB) for each in memory]
    print(f"resident MiB of the server before, and after every {args.requests // MEMORY_POINTS} requests: {mib}\n")
    return {"failures": failures, "wall_s": wall_s, "resident_mib": mib}


def compare(servers: Sequence[Server], prompts: Sequence[Prompt], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same streams for all servers, in turn. Another one that fails gets a line that says so, and no more streams.

    Raises:
        RuntimeError: ours failed.
    """
    lines, figures = [], []
    for clients in (1, args.clients):
        rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
        failed: dict[str, str] = {}
        for number in range(args.rounds + 1):
            for server in servers[:: 1 if number % 2 else -1]:
                if server.name in failed:
                    continue
                streams = [stream(server, prompts, number, index, args) for index in range(clients * args.streams)]
                measured = Round(*send_all(server.client, streams, clients))
                if failures := [answer.failure for answer in measured.answers if answer.failure]:
                    if server is servers[0]:
                        raise RuntimeError(f"{server.name} failed: {failures[0]}")
                    failed[server.name] = failures[0]
                elif number:  # the one before them warms up
                    rounds[server.name].append(measured)
        for server in servers:
            if server.name in failed:
                print(f"{server.name}, {clients} clients: failed ({failed[server.name]})")
                lines.append([server.name, str(clients), "failed", *["-"] * (len(HEADS) - 3)])
                figures.append({"server": server.name, "clients": clients, "failed": failed[server.name]})
                continue
            speeds = [each.tokens_per_s for each in rounds[server.name]]
            ratios = [ours.tokens_per_s / speed for ours, speed in zip(rounds[servers[0].name], speeds, strict=True)]
            answers = [answer for each in rounds[server.name] for answer in each.answers]
            first = quantiles([answer.first_s for answer in answers if answer.first_s is not None])
            whole = quantiles([answer.total_s for answer in answers])
            speed = median_and_range(speeds) + f", {median(ratios):.2f} x" * (server is not servers[0])
            lines.append([server.name, str(clients), speed, *(f"{1e3 * each:.0f} ms" for each in (*first, *whole))])
            figures.append(
                {"server": server.name, "clients": clients, "speeds": speeds, "first_s": first, "request_s": whole}
            )
    print(
        f"{args.model}, {args.dtype}, {args.threads} thread(s) a server, {args.max_new_tokens} new tokens, greedy, "
        f"{args.streams} streams a client and round, medians of {args.rounds} rounds (least to most); x is how many "
        f"times as fast {OURS} is"
    )
    print(markdown(HEADS, lines))
    return figures


def stream(server: Server, prompts: Sequence[Prompt], number: int, index: int, args: argparse.Namespace) -> Request:
    """A greedy stream whose beginning no other one has."""
    fields = {
        "model": server.model,
        "prompt": f"# {number}.{index}\n{prompts[index % len(prompts)].text}",
        "max_tokens": args.max_new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Request(fields=fields)


def quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99))
    return float(p50), float(p99)
