"""lp batch as an app: requests of a file mean what they mean to the server, and an end of any kind loses none."""

from __future__ import annotations

import itertools
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

import lp
from lp.commands import install_command
from tests.conftest import LONG, Processes
from tests.support.apps import Ran, save_tiny_model
from tests.support.forked import Forked
from tests.support.image_folders import data_url, picture, save_image_model
from tests.support.image_models import generated
from tests.support.workers import app

for package in ("fastapi", "prometheus_client", "httpx"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")

import launch.serve.start_up  # noqa: E402
from launch.batch import batch  # noqa: E402
from launch.serve.engine_loop import EngineLoop  # noqa: E402

pytestmark = pytest.mark.xdist_group("batch")
FIXED = ["decoder=lookahead", "W=5", "N=3", "G=4", "cache_tokens=8192"]
KILLS = 8 if LONG else 1
REQUESTS = 14
WORDS = {"type": "text", "text": "what is it"}

BAD = {
    "input=": "input is missing; give input=...",
    "servers=[x]": "servers has 'x'; give addresses",
    "servers=[http://a,http://a]": "servers has http://a twice",
    "decoder=autoregressive": "take decoder=plain instead",
    "sampling.verifier=rejection": "use sampling.verifier=coupled",
    "max_sequences=0": "max_sequences is 0",
    "timeout_s=-1": "timeout_s is -1.0",
    "input=nowhere.jsonl": "cannot read nowhere.jsonl (No such file or directory)",
    "out=nowhere/out.jsonl": "cannot write nowhere/out.jsonl",
    "port=1": "unknown config key 'port'",
    "verbose=true": "unknown config key 'verbose'; known here: model",
    "a=1.jsonl": ", out, servers; a file with = in its name begins with ./",
    "a=f(1.jsonl": "cannot read the override 'a=f(1.jsonl'; quote",
}


def line(custom_id: str, url: str = "completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def read(path: Path) -> dict[str | None, Any]:
    """Answers by custom_id, each of which is there once."""
    records = [json.loads(each) for each in path.read_text().splitlines()]
    assert len({record["custom_id"] for record in records}) == len(records)
    return {record["custom_id"]: record for record in records}


@contextmanager
def engine_that_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the engine fail at its 40th step, and expect that the app ends with its error."""
    steps = itertools.count(1)
    step = lp.Engine.step

    def failing(engine: lp.Engine) -> bool:
        if next(steps) == 40:
            raise RuntimeError("the device has gone")
        return step(engine)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the device has gone"):
        patch.setattr(lp.Engine, "step", failing)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), context=1024)


@pytest.fixture(scope="module")
def settings(folder: Path) -> list[str]:
    return ["model=hf", f"model.name={folder}", "model.dtype=float64", *FIXED]


class Oracle:
    """What a decoder gives under the same seeds."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = lp.load(str(folder), dtype="float64")
        self.decoder = lp.PlainDecoder(self.model)

    def text(self, body: dict[str, Any], sequence: int = 0) -> str:
        sampling = None
        if body.get("temperature") != 0:
            sampling = lp.SamplingParams(temperature=body.get("temperature", 1.0), seed=body["seed"])
        ids = self.tokenizer(body["prompt"])["input_ids"]
        tokens = self.decoder.generate(ids, body["max_tokens"], sampling, sequence=sequence).tokens
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def mixed() -> list[dict[str, Any]]:
    """Completions of many lengths, sampled and greedy, one and several texts."""
    draw = random.Random(0)
    lines = []
    for index in range(REQUESTS):
        body = {"prompt": f"def f{index}(a, b):\n", "max_tokens": draw.randrange(1, 40), "seed": index}
        body |= {"temperature": 0} if index % 3 == 0 else {"temperature": 0.8} if index % 3 == 1 else {}
        lines.append(line(f"r{index}", **body, **({"n": 3} if index % 5 == 1 else {})))
    return lines


def check(lines: list[dict[str, Any]], found: dict[str | None, Any], oracle: Oracle) -> None:
    """Every request has its answer, which is the decoder's."""
    assert sorted(map(str, found)) == sorted(each["custom_id"] for each in lines)
    for each in lines:
        record = found[each["custom_id"]]
        response, body = record["response"], each["body"]
        assert response["status_code"] == 200 and record["error"] is None, record
        assert response["request_id"] == response["body"]["id"]
        texts = [choice["text"] for choice in response["body"]["choices"]]
        assert texts == [oracle.text(body, sequence) for sequence in range(body.get("n", 1))], each


@pytest.mark.parametrize("setting", BAD)
def test_bad_settings(setting: str, start_app: Callable[..., Ran], tmp_path: Path) -> None:
    """What is wrong is said before a model is loaded, and in one line."""
    path = write(tmp_path / "in.jsonl", [line("a", prompt="x")])
    given = {"input": f"input={path}", "out": f"out={tmp_path / 'out.jsonl'}"}
    given |= {} if setting == "input=" else {setting.partition("=")[0]: setting}
    if setting == "input=":
        del given["input"]
    ran = start_app(batch, "batch", "model=hf", "model.name=./none", *given.values())
    assert ran.code == 2 and BAD[setting] in ran.err and len(ran.err.splitlines()) == 1, ran.err


@pytest.mark.parametrize("setting", ["seed=3", "sampling.temperature=0.5", "max_new_tokens=7", "sampling=greedy"])
def test_settings_that_servers_would_not_see(setting: str, start_app: Callable[..., Ran], tmp_path: Path) -> None:
    """They were ignored: the answers would have been those of other settings than were asked for."""
    path = write(tmp_path / "in.jsonl", [line("a", prompt="x")])
    given = [f"input={path}", f"out={tmp_path / 'out.jsonl'}", "servers=[http://127.0.0.1:9]", setting]
    ran = start_app(batch, "batch", *given)
    name = setting.partition("=")[0]
    assert ran.code == 2 and f"with servers=[...] {name} would change nothing" in ran.err, ran.err
    assert not (tmp_path / "out.jsonl").exists()


def test_without_the_extra_it_says_which(start_app: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.serve.start_up, "is_installed", lambda package: package != "httpx")
    ran = start_app(batch, "batch", "input=a", "out=b")
    assert ran.code == 2 and f"lp batch needs httpx; install the extra: {install_command('serve')}" in ran.err


def test_answers_are_the_decoders(
    start_app: Callable[..., Ran], settings: list[str], tmp_path: Path, oracle: Oracle
) -> None:
    """In any order of lines; bad ones beside them have errors of their own, and a second run does nothing."""
    lines = mixed()
    bad = [
        "nonsense",
        line("prompt", prompt=1),
        line("model", prompt="x", model="other"),
        line("long", prompt="x " * 2000),
        {**line("get", prompt="x"), "method": "GET"},
    ]
    asked = {"prompt": "def g(a):\n", "max_tokens": 9, "temperature": 0.8, "seed": 5}
    response = {"input": asked["prompt"], "max_output_tokens": 9, "temperature": 0.8, "seed": 5}
    shuffled = [*lines, *bad, line("responses", "responses", **response)]
    random.Random(1).shuffle(shuffled)
    path, out = write(tmp_path / "in.jsonl", shuffled), tmp_path / "out.jsonl"
    ran = start_app(batch, "batch", f"input={path}", f"out={out}", "max_sequences=4", *settings)
    assert ran.code == 0, ran.err
    found = read(out)
    errors = {name: found.pop(name) for name in [None, "prompt", "model", "long", "get"]}
    answer = found.pop("responses")["response"]["body"]
    assert answer["output"][0]["content"][0]["text"] == oracle.text(asked) and answer["status"] == "incomplete"
    check(lines, found, oracle)
    assert errors[None]["response"] is None and errors[None]["error"]["code"] == "invalid_json_line"
    assert errors[None]["error"]["line"] == shuffled.index("nonsense") + 1
    assert errors["get"]["error"]["code"] == "invalid_method" and errors["get"]["response"] is None
    statuses = {name: error["response"]["status_code"] for name, error in errors.items() if error["response"]}
    assert statuses == {"prompt": 400, "model": 404, "long": 400}
    body = errors["long"]["response"]["body"]["error"]
    assert body["code"] == "context_length_exceeded" and body["type"] == "invalid_request_error"
    assert (
        f"{REQUESTS + 6} of {REQUESTS + 6} requests are answered in" in ran.out
        and "5 with an error" in ran.out
        and "S " in ran.out
    )
    generated = sum(record["response"]["body"]["usage"]["completion_tokens"] for record in found.values())
    assert f"{generated + 9:,} tokens" in ran.out, ran.out
    before = out.read_bytes()
    again = start_app(batch, "batch", f"input={path}", f"out={out}", "model=hf", "model.name=./none")
    assert again.code == 0 and out.read_bytes() == before, again.err
    assert f"{REQUESTS + 6} of them by an earlier run" in again.out


def test_images(start_app: Callable[..., Ran], tmp_path: Path) -> None:
    """Chats with images are what transformers answers; one that cannot be read is an error of its own request."""
    pytest.importorskip("PIL", reason="the package pillow is not installed")
    model, _ = lp.load(save_image_model(tmp_path / "llava"), dtype="float64")
    processor = AutoProcessor.from_pretrained(tmp_path / "llava")
    urls = {str(seed): data_url(picture(seed)) for seed in range(3)} | {"broken": data_url(b"no image")}
    chats = {name: [{"role": "user", "content": [{"type": "image", "url": url}, WORDS]}] for name, url in urls.items()}
    lines = []
    for name, url in urls.items():
        content = [{"type": "image_url", "image_url": {"url": url}}, WORDS]
        message = {"role": "user", "content": content}
        lines.append(line(name, "chat/completions", messages=[message], max_tokens=12, temperature=0))
    path, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    settings = ["model=hf", f"model.name={tmp_path / 'llava'}", "model.dtype=float64", *FIXED]
    ran = start_app(batch, "batch", f"input={path}", f"out={out}", *settings)
    assert ran.code == 0, ran.err
    found = read(out)
    assert found.pop("broken")["response"]["status_code"] == 400
    for name, record in found.items():
        inputs = processor.apply_chat_template(
            chats[name], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        expected = processor.decode(generated(model, inputs, 12), skip_special_tokens=True)
        assert record["response"]["body"]["choices"][0]["message"]["content"] == expected, name


def test_an_engine_that_fails_loses_no_request(
    start_app: Callable[..., Ran], settings: list[str], tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was at is no answer, not even an error; the same command goes on."""
    lines = mixed()
    path, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    asked = [f"input={path}", f"out={out}", "max_sequences=3", *settings]
    with engine_that_fails(monkeypatch):
        start_app(batch, "batch", *asked)
    first = read(out)
    assert 0 < len(first) < len(lines)
    check([each for each in lines if each["custom_id"] in first], first, oracle)
    assert start_app(batch, "batch", *asked).code == 0
    check(lines, read(out), oracle)


def test_the_engine_is_busy(start_app: Callable[..., Ran], settings: list[str], tmp_path: Path) -> None:
    """All of its places are taken, as long as there are requests: a place that waits for its next text is lost time."""
    lines = [line(f"r{index}", prompt="x", max_tokens=24, seed=index) for index in range(16)]
    path, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    running: list[int] = []
    run_step = lp.Engine.step

    def noted(engine: lp.Engine) -> bool:
        goes_on = run_step(engine)
        running.append(engine.running)
        return goes_on

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lp.Engine, "step", noted)
        assert start_app(batch, "batch", f"input={path}", f"out={out}", "max_sequences=4", *settings).code == 0
    middle = running[len(running) // 4 : len(running) // 2]
    assert max(running) == 4 and sum(middle) / len(middle) > 3, running


class Run:
    """lp batch as a process."""

    def __init__(self, processes: Processes, folder: Path, settings: list[str], lines: list[dict[str, Any]]) -> None:
        self.processes = processes
        self.path, self.out = write(folder / "in.jsonl", lines), folder / "out.jsonl"
        self.settings = ["max_sequences=3", f"hydra.run.dir={folder / 'run'}", *settings]

    def start(self) -> Any:
        command = [sys.executable, "-m", "launch.cli", "batch", str(self.path), str(self.out), *self.settings]
        return self.processes.start(command)

    def until(self, process: Any, answers: int) -> None:
        """Wait for so many answers, or the end."""
        end = time.monotonic() + 100
        while process.poll() is None and self.count() < answers and time.monotonic() < end:
            time.sleep(0.002)

    def count(self) -> int:
        return self.out.read_bytes().count(b"\n") if self.out.exists() else 0


def test_killed_at_drawn_moments_it_goes_on(
    processes: Processes, start_app: Callable[..., Ran], settings: list[str], tmp_path: Path, oracle: Oracle
) -> None:
    """SIGKILL between any two lines, or within one: each request has its answer once, and it is the decoder's."""
    lines = mixed()
    run = Run(processes, tmp_path, settings, lines)
    draw = random.Random(5)
    for kill in range(KILLS):
        process = run.start()
        run.until(process, run.count() + 1 + draw.randrange(max(len(lines) // KILLS, 1)))
        time.sleep(draw.random() * 0.05)
        process.kill()
        process.wait()
        assert processes.wait_for_end() == [] and run.out.exists(), kill
        if kill == 0:  # in the middle of a write, which is too short to be met
            with run.out.open("ab") as file:
                file.write(b'{"id":"batch_req_12')
    ran = start_app(batch, "batch", f"input={run.path}", f"out={run.out}", *run.settings)
    assert ran.code == 0 and f"{REQUESTS} of {REQUESTS} requests are answered" in ran.out, ran.err
    check(lines, read(run.out), oracle)


@pytest.mark.subset(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_texts_under_way(
    number: signal.Signals, processes: Processes, settings: list[str], tmp_path: Path, oracle: Oracle
) -> None:
    """Their texts are recorded, no others are begun, and the exit code says how it ended."""
    lines = [line(f"r{index}", prompt="x", max_tokens=200, seed=index) for index in range(12)]
    run = Run(processes, tmp_path, settings, lines)
    process = run.start()
    run.until(process, 1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 0), err
    found = read(run.out)
    assert f"{len(found)} of 12 requests are answered" in out and 1 < len(found) < 12
    check([each for each in lines if each["custom_id"] in found], found, oracle)


def test_ranks_share_the_texts(forked: Forked, settings: list[str], tmp_path: Path, oracle: Oracle) -> None:
    """Two ranks: the answers of one, an end of both, and one file."""
    lines = mixed()[:8]
    path, out = write(tmp_path / "in.jsonl", [*lines, "nonsense"]), tmp_path / "out.jsonl"
    asked = [str(path), str(out), "max_sequences=3", *settings]
    launch = forked.start(2, app.main, tmp_path, "batch", *asked, env={"LP_RUN_DIR": str(tmp_path / "run")})
    launch.check(200)
    assert launch.output().count("9 of 9 requests are answered") == 1, launch.output()
    found = read(out)
    assert found.pop(None)["error"]["code"] == "invalid_json_line"
    check(lines, found, oracle)


@pytest.mark.slow  # two launches of two ranks
def test_a_rank_that_dies_is_started_again(
    processes: Processes, settings: list[str], tmp_path: Path, oracle: Oracle
) -> None:
    """MAX_RESTARTS: the ranks that come after it do what is left."""
    lines = [line(f"r{index}", prompt="x", max_tokens=300, seed=index) for index in range(12)]
    path, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = processes.torchrun(2, "launch.batch", str(path), str(out), "max_sequences=3", *settings)
    process = processes.start(command, {"LP_RUN_DIR": str(tmp_path / "run"), "MAX_RESTARTS": "1"})
    end = time.monotonic() + 100
    while not (out.exists() and out.read_bytes()) and time.monotonic() < end:
        time.sleep(0.01)
    (victim,) = [each for each in processes.alive() if each.environ().get("RANK") == "1" and "batch" in each.cmdline()]
    victim.kill()
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0 and "12 of 12 requests are answered" in stdout, stderr
    check(lines, read(out), oracle)
    assert processes.wait_for_end() == []


def test_texts_of_many_requests_in_one_are_taken(
    start_app: Callable[..., Ran], settings: list[str], tmp_path: Path
) -> None:
    """A server refuses more texts than may wait; here nobody else waits."""
    path = write(tmp_path / "in.jsonl", [line("a", prompt=["x"] * 40, n=4, max_tokens=1, seed=1)])
    out = tmp_path / "out.jsonl"
    assert start_app(batch, "batch", f"input={path}", f"out={out}", *settings).code == 0
    assert len(read(out)["a"]["response"]["body"]["choices"]) == 160


def test_a_journal_keeps_what_texts_had(
    start_app: Callable[..., Ran], settings: list[str], tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long texts go on behind the tokens that they had when the engine failed."""
    lines = [line("a", prompt="x", max_tokens=400, temperature=0)]
    path, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    asked = [f"input={path}", f"out={out}", f"journal={tmp_path / 'kept'}", *settings]
    begin = EngineLoop._begin
    resumed: list[int] = []

    def noted(loop: EngineLoop, number: int, text: Any) -> None:
        resumed.append(len(text.spec.resumed))
        begin(loop, number, text)

    monkeypatch.setattr(EngineLoop, "_begin", noted)
    with engine_that_fails(monkeypatch):
        start_app(batch, "batch", *asked)
    assert start_app(batch, "batch", *asked).code == 0
    assert resumed[0] == 0 and resumed[1] > 5
    check(lines, read(out), oracle)


@pytest.mark.slow  # three processes of their own
def test_two_servers_of_which_one_is_killed(
    processes: Processes, settings: list[str], tmp_path: Path, oracle: Oracle
) -> None:
    """Real ones: what the killed one had is asked of the other, and it is used again once it is back."""
    import socket

    import httpx

    def free_port() -> int:
        with socket.create_server(("127.0.0.1", 0)) as found:
            return int(found.getsockname()[1])

    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]

    def start(port: int) -> Any:
        command = [sys.executable, "-m", "launch.cli", "serve", f"port={port}", "max_sequences=2", *settings]
        with (tmp_path / "servers").open("a") as file:
            return processes.start(command, {"LP_API_KEY": "k"}, stdout=file, stderr=file)

    def answered(url: str) -> float:
        try:
            text = httpx.get(f"{url}/metrics", timeout=5).text
        except httpx.HTTPError:
            return -1
        counts = [each for each in text.splitlines() if each.startswith('lp_requests_total{path="/v1/completions"')]
        return sum(float(each.rpartition(" ")[2]) for each in counts)

    def until(true: Callable[[], bool], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not true() and time.monotonic() < end:
            time.sleep(0.05)
        assert true()

    servers = [start(port) for port in ports]
    until(lambda: all(answered(url) >= 0 for url in urls))
    lines = [line(f"r{index}", prompt=f"x{index}", max_tokens=300, seed=index) for index in range(60)]
    path, out = write(tmp_path / "in.jsonl", [*lines, line("bad", prompt=3)]), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "launch.cli", "batch", str(path), str(out), f"servers=[{','.join(urls)}]"]
    process = processes.start(command, {"LP_API_KEY": "k"})
    until(lambda: out.exists() and out.read_bytes().count(b"\n") > 4 and answered(urls[0]) > 1)
    servers[0].kill()
    servers[0].wait()
    start(ports[0])
    stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 0 and "61 of 61 requests are answered" in stdout, stderr
    found = read(out)
    assert found.pop("bad")["response"]["status_code"] == 400
    check(lines, found, oracle)
