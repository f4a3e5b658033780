"""Kill servers behind a real router for hours, and count what is lost.

    LP_ROUTERS=FOLDER python scripts/soak_router.py --hours 2 --ranks 2 --model FOLDER --output soak-router.jsonl

Clients send the same few requests again and again, half of them streams, and compare every text with plain decoding's.
Every `--kill-every` seconds a server is killed, with all its ranks or its last rank alone in turn, and is started again
once it has ended. A request that fails is sent again with its seed, as clients do. The output has a line for each kill,
each failure and, every 30 s, what the processes hold. Ends with one JSON line.

A kill may cost the answers that the server had begun, and 500 to 504 for what a router sends to it before it knows.
Exit code 1: a text is wrong, a request got no answer after `--tries`, or one failed otherwise. Routers: `pip install
smg`, with LP_ROUTERS naming the folder of its program.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lp
from launch.data.prompts import load_builtin
from lp.errors import UserError
from lp.models.loader import DEMO_MODEL
from scripts.studies.parts.routers import LAUNCH, free_port, program
from scripts.studies.parts.soak import HELD, descendants, take_sample
from scripts.studies.router_sessions import routed

ROOT = Path(__file__).resolve().parent.parent
START_S = 1200.0  # for a server to be ready on a busy machine
FOUND_S = 15.0  # after a server is ready again, for a router to send it requests
SAMPLE_S = 30.0
AGAIN_S = 1.0  # between a failure and the next try
BROKEN = 0  # the status of an answer that broke off
MALFORMED = -1  # of one that is no answer
RETRYABLE = (500, 502, 503, 504)  # of a router whose server has gone


@dataclass(frozen=True)
class Asked:
    """A request of /v1/completions, and the text that plain decoding gives."""

    fields: dict[str, Any]
    expected: str


@dataclass
class Down:
    """When a server was killed, and when requests could reach it again, on the clock of time.monotonic()."""

    killed: float
    until: float = float("inf")


@dataclass
class Record:
    """What clients saw, and the file that gets a line of each event; threads share it."""

    file: IO[str]
    began: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    downs: list[Down] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, event: str, **values: object) -> None:
        """One line of the output."""
        line = {"t_s": round(time.monotonic() - self.began, 1), "event": event, **values}
        with self.lock:
            print(json.dumps(line), file=self.file, flush=True)

    def failed(self, start: float, status: int, what: str) -> None:
        """Count a failure, as one that a kill may cost or as one that it may not.

        Args:
            start: when the request was sent.
            status: its HTTP status, BROKEN or MALFORMED.
            what: the message.
        """
        now = time.monotonic()
        kind = {BROKEN: "broke off", MALFORMED: "malformed"}.get(status, str(status))
        allowed = status in (BROKEN, *RETRYABLE) and any(
            now >= down.killed and start <= (down.killed if status == BROKEN else down.until) for down in self.downs
        )
        with self.lock:
            self.counts[f"failed: {kind}"] += 1
            self.counts["failed otherwise"] += not allowed
        self.write("failure", status=kind, allowed=allowed, started_s=round(start - self.began, 1), message=what[:300])


class Server:
    """A server that is started again after each kill, at the same port."""

    def __init__(self, args: argparse.Namespace, name: str, folder: Path) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / name
        self._ranks = args.ranks
        model = [] if args.model == DEMO_MODEL else ["model=hf", f"model.name={Path(args.model).resolve()}"]
        self._command = ["bash", "torchrun.sh", "launch.serve", f"port={self.port}", *model, *args.overrides]
        self.start()

    def start(self) -> None:
        """Start it; what it prints goes to its file."""
        added = {"NPROC": str(self._ranks), "LP_SETUP": "skip", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        environment = {name: value for name, value in os.environ.items() if name != "LP_API_KEY"} | added
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_until_ready(self) -> None:
        """Wait until it takes requests.

        Raises:
            RuntimeError: it ended, or takes too long.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"server {self.name} is not ready:\n{self._log.read_text()[-2000:]}")

    def kill(self, whole: bool) -> None:
        """Kill all its processes, or its last rank alone; returns when all have ended."""
        processes = descendants(self._process.pid)
        for process in processes if whole else self._last_rank(processes):
            _kill(process)
        try:
            self._process.wait(60)  # a rank that is lost ends the others
        finally:
            for process in processes:
                _kill(process)
            self._process.wait()

    def end(self) -> int:
        """End it as an operator does; its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(60)
        finally:
            if self._process.poll() is None:
                self.kill(whole=True)

    def _last_rank(self, processes: Sequence[int]) -> list[int]:
        last = f"RANK={self._ranks - 1}".encode()
        of_rank = [each for each in processes if last in Path(f"/proc/{each}/environ").read_bytes().split(b"\0")]
        return of_rank[:1]


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--kill-every", type=float, default=600.0, help="seconds")
    parser.add_argument("--model", default=DEMO_MODEL, help="its folder")
    parser.add_argument("--router", default="smg", choices=[*LAUNCH])
    parser.add_argument("--policy", default="round_robin", help="by the router's name of it")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of a server")
    parser.add_argument("--clients", type=int, default=3, help="each has one request under way")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds of a client between two requests, on average")
    parser.add_argument("--requests", type=int, default=24, help="different ones")
    parser.add_argument("--most-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--tries", type=int, default=5, help="of a request")
    parser.add_argument("--output", type=Path, default=Path("soak-router.jsonl"))
    parser.add_argument("overrides", nargs="*", help="of launch.serve")
    args = parser.parse_args()
    if not program(args.router):
        print(f"error: {args.router} is not installed; pip install it, and LP_ROUTERS=its folder", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM ended it"))  # and so the servers
    try:
        requests = draw_requests(args)
        with args.output.open("w", encoding="utf-8") as file:
            return run(args, requests, Record(file))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def draw_requests(args: argparse.Namespace) -> list[Asked]:
    """The requests, and what plain decoding answers to each."""
    loaded = lp.load(args.model, device="cpu")
    decoder = lp.PlainDecoder(loaded.model)
    draw = random.Random(0)
    prompts = [prompt.text for prompt in load_builtin()]
    found = []
    for seed in range(args.requests):
        text = draw.choice(prompts)
        text = text[draw.randrange(len(text)) :]
        temperature = draw.choice([0.0, 0.8])
        most = draw.randint(8, args.most_tokens)
        sampling = lp.SamplingParams(temperature=temperature, seed=seed)
        tokens = decoder.generate(loaded.tokenizer(text)["input_ids"], most, sampling).tokens
        expected = str(loaded.tokenizer.decode(tokens, skip_special_tokens=True))
        fields = {"model": Path(args.model).name, "prompt": text, "max_tokens": most, "temperature": temperature}
        fields |= {"seed": seed, "stream": seed % 2 == 0}
        found.append(Asked(fields, expected))
    return found


def run(args: argparse.Namespace, requests: Sequence[Asked], record: Record) -> int:
    """Start the servers and the router, send the load, kill; the exit code."""
    with tempfile.TemporaryDirectory() as folder, site(args, Path(folder)) as (url, servers), ExitStack() as held:
        record.began = time.monotonic()
        end = record.began + 3600 * args.hours
        threads = [
            threading.Thread(target=ask_until, args=(end, url, requests, index, args, record))
            for index in range(args.clients)
        ]
        threads.append(threading.Thread(target=sample_until, args=(end, record)))
        for thread in threads:
            held.callback(thread.join)
            thread.start()
        number = 0
        while (next_kill := record.began + args.kill_every * (number + 1)) < end - FOUND_S:
            time.sleep(max(next_kill - time.monotonic(), 0))
            kill(servers[number % len(servers)], number // len(servers) % 2 == 0, record)
            number += 1
    counts = record.counts
    wrong, never = counts["wrong texts"], counts["never answered"]
    figures = {"hours": args.hours, "servers": args.servers, "ranks": args.ranks, "kills": len(record.downs), **counts}
    print(json.dumps(figures))
    return int(bool(wrong or never or counts["failed otherwise"] or not counts["answers"]))


@contextmanager
def site(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[Server]]]:
    """Servers and a router in front of them, which has found them all: its address, and the servers."""
    with ExitStack() as held:
        servers = []
        for index in range(args.servers):
            servers.append(Server(args, f"server{index}", folder))
            held.callback(servers[-1].end)
        for server in servers:
            server.wait_until_ready()
        url = held.enter_context(routed(args.router, args.policy, [server.url for server in servers]))
        yield url, servers


def kill(server: Server, whole: bool, record: Record) -> None:
    """Kill a server, start it again, and say when it was down."""
    down = Down(time.monotonic())
    record.downs.append(down)
    record.write("kill", server=server.name, whole=whole)
    server.kill(whole)
    record.write("ended", server=server.name)
    server.start()
    server.wait_until_ready()
    down.until = time.monotonic() + FOUND_S
    record.write("ready", server=server.name, down_s=round(time.monotonic() - down.killed, 1))


def ask_until(
    end: float, url: str, requests: Sequence[Asked], index: int, args: argparse.Namespace, record: Record
) -> None:
    """A client: one request after another, each sent again where it fails."""
    draw = random.Random(index)
    while time.monotonic() < end:
        asked = draw.choice(requests)
        for attempt in range(args.tries):
            start = time.monotonic()
            status, text = ask(url, asked.fields)
            if status == 200:
                with record.lock:
                    record.counts["answers"] += 1
                    record.counts["answers of a second try or later"] += attempt > 0
                    record.counts["wrong texts"] += text != asked.expected
                if text != asked.expected:
                    record.write("wrong text", fields=asked.fields, text=text, expected=asked.expected)
                break
            record.failed(start, status, text)
            time.sleep(AGAIN_S)
        else:
            with record.lock:
                record.counts["never answered"] += 1
        time.sleep(draw.uniform(0, 2 * args.pause))


def ask(url: str, fields: dict[str, Any]) -> tuple[int, str]:
    """Send one request: its status and text, or BROKEN or MALFORMED, and what is wrong with its answer."""
    text = ""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=300) as answer:
            if answer.status_code != 200 or not fields["stream"]:
                body = answer.read().decode()
                good = answer.status_code == 200
                return answer.status_code, json.loads(body)["choices"][0]["text"] if good else body
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return 200, text
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return BROKEN, line
                    text += "".join(choice["text"] for choice in event["choices"])
    except httpx.HTTPError as error:
        return BROKEN, repr(error)
    except (ValueError, LookupError, TypeError) as error:  # no answer of ours is like that
        return MALFORMED, repr(error)
    return BROKEN, "the stream has no end"


def sample_until(end: float, record: Record) -> None:
    """Write what all processes hold, from time to time."""
    while time.monotonic() < end:
        held = take_sample(os.getpid(), 0.0, 0, 0).as_record()
        kept = {name: held[name] for name in ("processes", *HELD)}
        record.write("sample", **kept, answers=record.counts["answers"])
        time.sleep(min(SAMPLE_S, max(end - time.monotonic(), 0)))


if __name__ == "__main__":
    sys.exit(main())
