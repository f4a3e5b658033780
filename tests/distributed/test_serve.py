"""launch.serve as a user starts it, on two ranks: the tokens of one rank, and an end as asked."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

import lp
from lp.sampling.penalties import CountPenalty
from tests.conftest import Processes
from tests.unit.conftest import save_tiny_model

for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")
httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")

APP = "launch.serve"
LONG = {"prompt": "import os\n", "max_tokens": 150, "temperature": 0.8, "seed": 3, "stream": True}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)
    fixed = ["decoder=lookahead", "W=5", "N=3", "G=4", "cache_tokens=8192"]
    return ["model=hf", f"model.name={folder}", "model.dtype=float64", "port=0", *fixed]


def started(process: subprocess.Popen[str]) -> str:
    """The server's address, once it says it."""
    assert process.stdout and process.stderr
    line = process.stdout.readline()
    match = re.search(r" on (http://[\d.]+:\d+); Ctrl-C ends it", line)
    assert match, line + process.stderr.read()
    return match[1]


def text_of(answer: Any) -> str:
    events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_it_serves_and_drains(processes: Processes, settings: list[str], tmp_path: Path) -> None:
    """Tokens are those of the decoder on one rank; what runs when the signal comes is finished."""
    model, tokenizer = lp.load(settings[1].partition("=")[2], dtype="float64")
    plain = lp.PlainDecoder(model)
    process = processes.start(
        processes.torchrun(2, APP, *settings), {"LP_RUN_DIR": str(tmp_path / "run"), "LP_API_KEY": "k"}
    )
    url = started(process)
    with httpx.Client(base_url=url, timeout=60, headers={"Authorization": "Bearer k"}) as http:
        prompts = ["def f(", "class A:\n", "x = ["]
        texts = [""] * len(prompts)

        def complete(index: int) -> None:
            asked = {"prompt": prompts[index], "max_tokens": 30, "temperature": 0.8, "seed": index}
            asked |= {"stop": ["never to be found"], "presence_penalty": 0.5}
            answer = http.post("/v1/completions", json=asked)
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
            http.post("/v1/completions", json={**LONG, "stream": False}, timeout=0.05)  # leaves at once
        with http.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line.startswith("data: {")]
    assert process.wait(30) == 130, process.stderr.read() if process.stderr else ""
    events = [json.loads(line[6:]) for line in [first, *rest]]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    ids = tokenizer(LONG["prompt"])["input_ids"]
    alone = plain.generate(ids, 150, lp.SamplingParams(temperature=0.8, seed=3)).tokens
    assert text == tokenizer.decode(alone, skip_special_tokens=True)
    assert processes.wait_for_end() == []
