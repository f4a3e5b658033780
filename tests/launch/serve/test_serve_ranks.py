"""launch.serve as a user starts it, on two ranks: the tokens of one rank, and an end as asked."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import lp
from lp.sampling.penalties import CountPenalty
from tests.conftest import Processes
from tests.support.apps import save_tiny_model

for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")
httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")

APP = "launch.serve"
ADDRESS = re.compile(r" on (http://[\d.]+:\d+); Ctrl-C ends it")
IDLE_S = 6  # longer than what httpx keeps an idle connection for
LONG = {"prompt": "import os\n", "max_tokens": 600, "temperature": 0.8, "seed": 3, "stream": True}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)
    fixed = ["decoder=lookahead", "W=5", "N=3", "G=4", "cache_tokens=8192"]
    return ["model=hf", f"model.name={folder}", "model.dtype=float64", "port=0", *fixed]


def started(process: subprocess.Popen[str]) -> str:
    """The server's address, once it says it."""
    assert process.stdout and process.stderr
    line = process.stdout.readline()
    match = ADDRESS.search(line)
    assert match, line + process.stderr.read()
    return match[1]


def eventually_closing(client: Any) -> bool:
    """Whether /ready says that the server ends, once the signal has come."""
    end = time.monotonic() + 10
    while (answer := client.get("/ready")).status_code == 200 and time.monotonic() < end:
        time.sleep(0.01)
    return bool(answer.status_code == 503)


def health(connection: http.client.HTTPConnection) -> int:
    """The status of /health, over a connection that is not opened again."""
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    connection.auto_open = 0
    return answer.status


def test_it_serves_and_drains(processes: Processes, settings: list[str], tmp_path: Path) -> None:
    """Tokens are those of the decoder on one rank; what runs when the signal comes is finished."""
    model, tokenizer = lp.load(settings[1].partition("=")[2], dtype="float64")
    plain = lp.PlainDecoder(model)
    process = processes.start(
        processes.torchrun(2, APP, *settings), {"LP_RUN_DIR": str(tmp_path / "run"), "LP_API_KEY": "k"}
    )
    url = started(process)
    idle = http.client.HTTPConnection(url.removeprefix("http://"))  # as a client keeps one
    idle_since = time.monotonic()
    assert health(idle) == 200
    with httpx.Client(base_url=url, timeout=60, headers={"Authorization": "Bearer k"}) as client:
        prompts = ["def f(", "class A:\n", "x = ["]
        texts = [""] * len(prompts)

        def complete(index: int) -> None:
            asked = {"prompt": prompts[index], "max_tokens": 30, "temperature": 0.8, "seed": index}
            asked |= {"stop": ["never to be found"], "presence_penalty": 0.5}
            answer = client.post("/v1/completions", json=asked)
            texts[index] = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text

        threads = [threading.Thread(target=complete, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, prompt in enumerate(prompts):
            ids = tokenizer(prompt)["input_ids"]
            sampling = lp.SamplingParams(temperature=0.8, seed=index)
            alone = plain.generate(ids, 30, sampling, logits_processor=[CountPenalty(len(ids), 0.5, 0.0)])
            assert texts[index] == tokenizer.decode(alone.tokens, skip_special_tokens=True)
        with pytest.raises(httpx.TimeoutException):
            client.post("/v1/completions", json={**LONG, "stream": False}, timeout=0.05)  # leaves at once
        time.sleep(max(IDLE_S - (time.monotonic() - idle_since), 0))
        assert health(idle) == 200
        with client.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            assert eventually_closing(client)
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and "about to end" in refused.json()["error"]["message"]
            rest = [line for line in lines if line.startswith("data: {")]
    assert process.wait(30) == 0, process.stderr.read() if process.stderr else ""
    events = [json.loads(line[6:]) for line in [first, *rest]]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    ids = tokenizer(LONG["prompt"])["input_ids"]
    alone = plain.generate(ids, 600, lp.SamplingParams(temperature=0.8, seed=3)).tokens
    assert text == tokenizer.decode(alone, skip_special_tokens=True)
    assert processes.wait_for_end() == []


@pytest.mark.slow  # two launches of two ranks
@pytest.mark.parametrize("keeps_tokens", [False, True])
def test_a_rank_that_dies_ends_the_server(
    processes: Processes, settings: list[str], tmp_path: Path, keeps_tokens: bool
) -> None:
    """The client and /health are told; the ranks start again, report the request, and may go on where it was."""
    asked = LONG | {"max_tokens": 1900, "ignore_eos": True}
    variables = {"LP_RUN_DIR": str(tmp_path), "MAX_RESTARTS": "1"}
    folder = tmp_path / ("kept" if keeps_tokens else "unfinished")
    journal = [f"journal={folder}"] if keeps_tokens else []
    process = processes.start(processes.torchrun(2, APP, *settings, *journal), variables)
    url = started(process)
    with httpx.Client(base_url=url, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = (line for line in answer.iter_lines() if line)
            first = json.loads(next(lines)[6:])
            assert len([*folder.glob("*.jsonl")]) == 1
            (victim,) = [each for each in processes.alive() if is_rank(each, "1")]
            victim.kill()
            *_, last = lines
        assert "rank 1" in json.loads(last[6:])["error"]["message"]
        health = http.get("/health")
        assert health.status_code == 503 and "rank 1" in health.json()["error"]["message"]
    with httpx.Client(base_url=started(process), timeout=60) as http:
        assert http.get("/health").json() == {"status": "ok"}
        again = http.post("/v1/completions", json=asked | {"stream": False}).json()
        assert [*folder.glob("*.jsonl")] == []
        process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and process.stderr
    said = [line for line in process.stderr if line.startswith("unfinished before the restart")]
    assert len(said) == 1 and first["id"] in said[0] and "texts 1, seed 3" in said[0]
    assert ("tokens" in said[0]) == keeps_tokens
    loaded = lp.load(settings[1].removeprefix("model.name="), dtype="float64")
    ids, sampling = loaded.tokenizer(LONG["prompt"])["input_ids"], lp.SamplingParams(temperature=0.8, seed=3)
    alone = lp.PlainDecoder(loaded.model).generate(ids, 1900, sampling, eos_token_id=()).tokens
    assert again["choices"][0]["text"] == loaded.tokenizer.decode(alone, skip_special_tokens=True)
    assert again["usage"]["completion_tokens"] == 1900
    assert processes.wait_for_end() == []


def is_rank(process: Any, rank: str) -> bool:
    """Whether it is this rank's Python, not what starts it."""
    return process.environ().get("RANK") == rank and "launch.cli" in process.cmdline()


@pytest.mark.slow  # what can go wrong here is a restart
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_asked_to_end_while_it_starts(
    processes: Processes, settings: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    """It does: ranks that end by a signal while they import or load are not started again."""
    variables = {"LP_RUN_DIR": str(tmp_path), "MAX_RESTARTS": "1"}
    process = processes.start(processes.torchrun(2, APP, *settings), variables)
    end = time.monotonic() + 60
    while not any(is_rank(each, "1") for each in processes.alive()) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(30) in (0, 128 + number)
    assert process.stdout and process.stdout.read() == ""
    assert processes.wait_for_end() == []
