"""Keep a server busy for long, and see whether its memory, file handles and threads stay where they are.

    python scripts/soak.py --hours 2 --ranks 2 --output soak.jsonl         # the demo model
    python scripts/soak.py --hours 2 decoder=lookahead W=5 N=4 G=8         # with overrides of launch.serve

Requests of mixed lengths come from several clients, some of which leave, and some requests are malformed. The output
has a sample of all processes of the server every `--every` seconds. Ends with the slope of each quantity, its interval
of 95 %, a verdict, and one JSON line. Exit code 1: something grew, a request failed, or the time did not decide it; 2:
too short a time for a verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.data.prompts import load_builtin
from lp.errors import UserError
from scripts.studies.parts.load import draw_requests, send_all
from scripts.studies.parts.soak import Sample, check_count, take_sample, verdict
from scripts.studies.serve_load import address

REQUESTS = 50  # drawn at a time
END_S = 60.0  # for the server to end


class Sampler(threading.Thread):
    """Writes a sample of a server's processes every few seconds until it is stopped.

    Args:
        root: id of the server's process; its descendants are sampled too.
        every_s: seconds between two samples.
        path: JSONL file that gets a line for each sample.

    Attributes:
        samples: all samples so far, for the verdict.
        answers, failures: requests that were answered, and that failed, so far; who sends the load counts them here.
    """

    def __init__(self, root: int, every_s: float, path: Path) -> None:
        super().__init__(daemon=True)
        self._root, self._every_s, self._path = root, every_s, path
        self.stop = threading.Event()
        self.samples: list[Sample] = []
        self.answers = 0
        self.failures = 0

    def run(self) -> None:
        """Sample until `stop` is set."""
        began = time.monotonic()
        with self._path.open("w", encoding="utf-8") as file:
            while not self.stop.wait(self._every_s):
                sample = take_sample(self._root, time.monotonic() - began, self.answers, self.failures)
                self.samples.append(sample)
                file.write(json.dumps(sample.as_record()) + "\n")
                file.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--most-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--output", type=Path, default=Path("soak.jsonl"), help="of the samples")
    parser.add_argument("overrides", nargs="*", help="of launch.serve")
    args = parser.parse_args()
    try:
        if not args.hours > 0:
            raise UserError(f"--hours is {args.hours}; it must be a number > 0; try 2")
        check_count(int(min(3600 * args.hours / max(args.every, 1e-3), 1e9)))  # before the load; hours may be inf
        return run(args)
    except UserError as error:  # each sample took longer than --every
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Start the server, send the load, and print the verdict; the exit code."""
    import openai

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM ended it"))  # and so the server
    command = ["bash", "torchrun.sh", "launch.serve", "port=0", *args.overrides]
    added = {"NPROC": str(args.ranks), "LP_SETUP": "skip", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "LP_API_KEY"} | added
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parent.parent,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            url = address(server, log)
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
                sampler = soak(server.pid, client, args)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                code = server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                raise
    found, lines = verdict(sampler.samples)
    print("\n".join(lines))
    figures = {"verdict": found, "hours": args.hours, "ranks": args.ranks, "samples": len(sampler.samples)}
    figures |= {"answers": sampler.answers, "failures": sampler.failures, "server_exit_code": code}
    print(json.dumps(figures))
    return int(found != "flat" or sampler.failures > 0)


def soak(root: int, client: object, args: argparse.Namespace) -> Sampler:
    """Send requests until the time is over; returns the sampler, with what it saw."""
    name = client.models.list().data[0].id  # type: ignore[attr-defined]
    prompts = [prompt.text for prompt in load_builtin()]
    sampler = Sampler(root, args.every, args.output)
    sampler.start()
    end = time.monotonic() + 3600 * args.hours
    seed = 0
    while time.monotonic() < end:
        requests = draw_requests(name, prompts, REQUESTS, seed, args.most_tokens)
        answers, _ = send_all(client, requests, args.clients)
        seed += 1
        sampler.answers += len(answers)
        for answer in answers:
            if answer.failure:
                sampler.failures += 1
                print(f"failure: {answer.failure}", flush=True)
    sampler.stop.set()
    sampler.join()
    return sampler


if __name__ == "__main__":
    sys.exit(main())
