"""The server's API key and the hub's token: in no answer, no log line, no record and no file of a run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import lp
from launch.bench.runs import ModelCache
from launch.benchmark import benchmark
from launch.cli import main
from launch.config.schema import ServeConfig
from launch.serve import serve
from tests.support.apps import Ran
from tests.support.serving import serving

SECRET = "sk-do-not-tell-4711"


@pytest.mark.parametrize("wrong", ["port=70000", "hostt=x", "max_waiting=x", "decoder=autoregressive"])
def test_an_error_of_another_setting(
    wrong: str, start_app: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that is printed whole, or its command line, ends up in the logs of whatever started the server."""
    monkeypatch.setattr("launch.serve.start_up.is_installed", lambda package: True)
    ran = start_app(serve, "serve", "port=0", f"api_key={SECRET}", wrong)
    assert ran.code == 2 and ran.err and SECRET not in ran.out + ran.err
    assert SECRET not in repr(ServeConfig(api_key=SECRET))


@pytest.mark.parametrize(
    "given",
    [
        f"api_key={SECRET}(", f"api_key={SECRET},x", f"+api_key={SECRET})", f"++api_key=a,{SECRET}",
        f"api_key=[{SECRET}]", f"api_key={{{SECRET}:1}}", f"api_key=${{{SECRET}}}", f"api_key@x={SECRET}",
        f"api_key ={SECRET}(", f"~api_key:{SECRET}", f"LP_API_KEY={SECRET}(", f"apikey={SECRET},",
    ],
)  # fmt: skip
def test_a_key_that_cannot_be_read(given: str, start_app: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's messages show the override, and with it the key; a key with a bracket or a comma is none to Hydra."""
    monkeypatch.setattr("launch.serve.start_up.is_installed", lambda package: True)
    ran = start_app(serve, "serve", "port=0", given)
    assert ran.code == 2 and "LP_API_KEY" in ran.err and SECRET not in ran.out + ran.err


def test_a_key_given_as_an_option(capfd: pytest.CaptureFixture[str]) -> None:
    """The spelling of other servers: argparse's message shows the options that it does not know."""
    for option in (f"--api-key={SECRET}", f"--api_key={SECRET}"):
        with pytest.raises(SystemExit) as ended:
            main(["serve", "port=0", option])
        said = "".join(capfd.readouterr())
        assert ended.value.code == 2 and "LP_API_KEY" in said and SECRET not in said


@pytest.mark.parametrize("option", [["--config-dir", "."], ["--cfg", "job"], ["-m"]])
def test_a_key_behind_an_option(option: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Where an override stands before an option, argparse refuses those behind it, and shows them."""
    with pytest.raises(SystemExit):
        main(["serve", "port=70000", *option, f"api_key={SECRET}", "what=1"])
    said = "".join(capfd.readouterr())
    assert SECRET not in said and "'what'" in said, said


def test_an_option_between_a_key_and_other_overrides(capfd: pytest.CaptureFixture[str]) -> None:
    """The config is asked for by name, with its key; it must not be refused."""
    main(["serve", f"api_key={SECRET}", "--cfg", "job", "port=8001"])
    assert "port: 8001" in capfd.readouterr().out


def test_a_prompt_about_keys_has_a_prompt_s_remedy(launch_generate: Callable[..., Ran]) -> None:
    for prompt in ("prompt=def connect(api_key, host):", "prompt=api_key,host"):
        ran = launch_generate(prompt)
        assert ran.code == 2 and "--prompt TEXT" in ran.err and "LP_API_KEY" not in ran.err, ran.err


def test_prompts_and_texts_are_in_no_log_and_no_file(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Taken and refused, whole and streamed; a journal has token ids alone."""
    from launch.serve.unfinished import UnfinishedRequest, UnfinishedRequests

    monkeypatch.setattr(UnfinishedRequest, "end", lambda self: None)  # its files stay
    answers = []
    with (
        caplog.at_level(logging.DEBUG),
        serving(*lp.load("demo"), unfinished=UnfinishedRequests(tmp_path, "model")) as running,
    ):
        http = running.http()
        for more in ({}, {"stream": True}, {"max_tokens": 0}, {"model": SECRET}, {"logit_bias": {SECRET: 1}}):
            wanted = {"max_tokens": 12, "temperature": 0} | more
            answers.append(http.post("/v1/completions", json={"prompt": f"x = '{SECRET}'\n", **wanted}))
            messages = [{"role": "user", "content": SECRET}]
            answers.append(http.post("/v1/chat/completions", json={"messages": messages, **wanted}))
        answers.append(http.post("/tokenize", json={"content": SECRET, "with_pieces": True}))
        answers.append(http.post("/v1/completions", content=SECRET))
        text = answers[0].json()["choices"][0]["text"].strip()
    assert len(text) > 8 and {answer.status_code for answer in answers} == {200, 400, 404}
    logs = [record.getMessage() for record in caplog.records if not re.match("httpx|httpcore", record.name)]
    files = [path.read_text() for path in tmp_path.iterdir()]
    assert len(files) > 2
    for said in (*capfd.readouterr(), *logs, *files):
        assert SECRET not in said and text not in said


def test_what_a_server_answers_and_logs(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """With the key and without it, taken and refused."""
    right = {"Authorization": f"Bearer {SECRET}"}
    almost = {"Authorization": f"Bearer {SECRET[:-1]}"}
    said = ""
    with caplog.at_level(logging.DEBUG), serving(*lp.load("demo"), api_key=SECRET) as running:
        http = running.http()
        for header in ({}, almost, right):
            for path in ("/", "/health", "/metrics", "/props", "/v1/models", "/nowhere"):
                answer = http.get(path, headers=header)
                said += f"{answer.headers}{answer.text}"
            for body in ({"prompt": "x = ", "max_tokens": 2}, {"prompt": 1}, {"prompt": "x", "stream": True}):
                answer = http.post("/v1/completions", json=body, headers=header)
                said += f"{answer.headers}{answer.text}"
    server_logs = [record.getMessage() for record in caplog.records if not re.match("httpx|httpcore", record.name)]
    assert "invalid_api_key" in said
    for text in (said, *capfd.readouterr(), *server_logs):
        assert SECRET not in text and SECRET[:-1] not in text


def test_a_run_and_its_files(
    start_app: Callable[..., Ran], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are published, with the environment that they were taken in."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "LP_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    out = tmp_path / "out"
    ran = start_app(
        partial(benchmark, models=ModelCache()), "benchmark", "model=hf", f"model.name={tiny_folder}", f"out={out}",
        "task=builtin", "limit=1", "max_new_tokens=4", "methods=[lookahead]",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    files = [path for path in out.rglob("*") if path.is_file()]
    assert any(path.suffix == ".jsonl" for path in files)
    for text in (ran.out, ran.err, *(path.read_text(errors="replace") for path in files)):
        assert SECRET not in text
