"""launch.generate from its arguments to what it prints."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launch.generate
import lp
from launch.data.prompts import load_builtin
from launch.text.stream import STEP_COLOURS, Pen
from lp.models.loader import DEMO_MODEL
from tests.conftest import Processes, read_until
from tests.support.apps import Ran, save_tiny_model

SMALL = ("model=hf", "model.dtype=float64", "W=4", "N=3", "G=4", "max_new_tokens=40", "limit=2", "compare=true")
METHODS = ["lookahead_auto", "plain", "prompt_lookup"]


@pytest.fixture
def generate(launch_generate: Callable[..., Ran], tiny_folder: Path) -> Callable[..., Ran]:
    """launch.generate with a tiny model in float64, where no two kernels disagree on a token."""
    return lambda *overrides: launch_generate(*overrides, *_defaults(overrides), f"model.name={tiny_folder}")


def _defaults(overrides: tuple[str, ...]) -> list[str]:
    """SMALL without the keys that are given."""
    given = {override.split("=")[0] for override in overrides}
    return [default for default in SMALL if default.split("=")[0] not in given]


def _rows(out: str) -> dict[str, list[str]]:
    """The table's rows by method."""
    return {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()[:1] and line[:2] == "  "}


def test_text_alone_unless_it_is_asked_to_compare(launch_generate: Callable[..., Ran], tiny_folder: Path) -> None:
    """A minute of measuring, behind seconds of text, is not what a user of `lp generate TEXT` came for."""
    ran = launch_generate(*(default for default in SMALL if default != "compare=true"), f"model.name={tiny_folder}")
    assert ran.code == 0 and _rows(ran.out)["lookahead_auto"][-2:] == ["not", "compared"]
    assert "plain" not in _rows(ran.out)


@pytest.mark.parametrize("decoder", ["lookahead_auto", "autoregressive"])
def test_the_cache_that_is_asked_for(generate: Callable[..., Ran], tiny_folder: Path, decoder: str) -> None:
    """All methods and the oracle have it, so that their tokens are equal; those of the model's dtype are others."""
    asked = ["model.kv_dtype=fp8", f"decoder={decoder}", "output=json", "repeats=1"]
    found = json.loads(generate(*asked).out)["prompts"]
    assert all(len(prompt["methods"]) > 2 and prompt["differences"] == [] for prompt in found)
    loaded = lp.load(tiny_folder, dtype="float64")
    for kv_dtype, same in (("fp8", True), ("auto", False)):
        oracle = lp.AutoregressiveDecoder(loaded.model, kv_dtype=kv_dtype)
        prompts = [loaded.tokenizer(prompt.text)["input_ids"] for prompt in load_builtin()[:2]]
        texts = [loaded.tokenizer.decode(oracle.generate(ids, 40).tokens) for ids in prompts]
        assert (texts == [prompt["text"] for prompt in found]) == same
    ran = generate("model.kv_dtype=int4")
    assert ran.code == 2 and "kv_dtype is 'int4'; it must be one of auto, int8, fp8" in ran.err


def test_output_text_leaves_stdout_to_the_text(generate: Callable[..., Ran]) -> None:
    """`lp generate ... output=text > file.py` must give a file that is the text."""
    found = json.loads(generate("output=json", "compare=false").out)
    ran = generate("output=text")
    assert ran.out == "".join(f"{prompt['text']}\n" for prompt in found["prompts"])
    assert "=== builtin/" in ran.err and "float64, cpu" in ran.err and _rows(ran.err)["plain"][-1] == "equal"


def test_comparing_shows_text_and_a_table_that_says_equal(generate: Callable[..., Ran]) -> None:
    """What the README's first command prints."""
    ran = generate()
    assert ran.code == 0
    assert [f"=== {prompt.task_id} " in ran.out for prompt in load_builtin(3)] == [True, True, False]
    rows = _rows(ran.out[ran.out.index("2 prompts, greedy") :])
    assert [rows[method][0] for method in METHODS] == ["80"] * 3
    assert [rows[method][-1] for method in METHODS] == ["equal", "equal", "equal"]
    assert "float64, cpu, threads: 1, ranks: 1, attention: flash, W=4 N=3 G=4, median of 3 rounds" in ran.out
    assert re.search(r"least to most of 3 rounds: lookahead_auto [\d.]+-[\d.]+x, prompt_lookup ", ran.out)
    assert ran.err == ""
    assert "\x1b" not in ran.out and "\r" not in ran.out, "escape codes in a file or another program"


@pytest.mark.parametrize(("rank", "tokens"), [("0", 9), ("0", 0), ("1", 0)])
def test_nothing_is_left_behind(
    generate: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str, tokens: int
) -> None:
    """Hydra makes a folder for each run of each rank, and this app writes nothing into it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LP_RUN_DIR", raising=False)
    monkeypatch.setenv("RANK", rank)
    assert generate("limit=1", f"max_new_tokens={tokens}").code == (0 if tokens else 2)
    assert list(tmp_path.rglob("*")) == ([tmp_path / "outputs"] if rank == "0" else [])


def test_stream_false_shows_the_same_text(generate: Callable[..., Ran]) -> None:
    flags = ("stream=true", "stream=false")
    streamed, at_once = (generate(flag, "compare=false").out.split(" prompts, greedy")[0] for flag in flags)
    assert streamed == at_once


def test_compare_false_runs_one_method(generate: Callable[..., Ran]) -> None:
    rows = _rows(generate("compare=false").out)
    assert rows["lookahead_auto"][-2:] == ["not", "compared"]
    assert "plain" not in rows and "prompt_lookup" not in rows


def test_json_is_the_whole_of_stdout(generate: Callable[..., Ran]) -> None:
    """`| jq` gets one object; the text streams to stderr."""
    ran = generate("output=json", "repeats=2")
    found = json.loads(ran.out)
    assert ran.out.count("\n") == 1
    assert found["equal"] is True and found["interrupted"] is False and found["method"] == "lookahead_auto"
    assert (found["W"], found["N"], found["G"], found["threads"], found["repeats"]) == (4, 3, 4, 1, 2)
    assert list(found["methods"]) == METHODS
    assert found["methods"]["plain"]["S"] == 1.0 < found["methods"]["lookahead_auto"]["S"]
    for row in found["methods"].values():
        assert row["prompts"] == 2 and row["tokens"] == 80 and row["equal"] is True
        assert row["S"] == pytest.approx(row["tokens"] / row["steps"])
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["decode_s"])
    for prompt in found["prompts"]:
        assert list(prompt["methods"]) == METHODS and prompt["differences"] == []
        assert prompt["text"] in ran.err


@pytest.mark.filterwarnings("ignore:tokens may differ")
def test_a_model_that_is_not_exact_is_labelled(generate: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning scrolls away; a table that says "equal" by luck must not look like a promise."""
    label = "activations are quantised, so tokens may differ"
    short = ("max_new_tokens=4", "limit=1")
    assert label not in generate(*short).out
    monkeypatch.setattr("lp.models.runner.inexact_quantisation", lambda model: "it rounds")
    assert label in generate(*short).out
    assert json.loads(generate(*short, "output=json").out)["exact"] is False


@pytest.mark.parametrize("decoder", [*METHODS, "autoregressive", "lookahead_paper", "token_recycling"])
def test_every_decoder_can_be_the_chosen_one(generate: Callable[..., Ran], decoder: str) -> None:
    """The group must reach the decoder, and what it says be the reference's."""
    found = json.loads(generate("output=json", f"decoder={decoder}", "limit=1").out)
    assert found["method"] == decoder == next(iter(found["methods"]))
    assert {*found["methods"]} == {decoder, *METHODS} and found["equal"] is True
    assert found["methods"][decoder]["equal"] is True and found["methods"][decoder]["tokens"] == 40


def test_keys_of_the_decoder_reach_it(generate: Callable[..., Ran]) -> None:
    """W, N and G are keys of the app, and fields of the decoder's config."""
    found = json.loads(generate("output=json", "W=2", "compare=false", "attention=eager").out)
    assert (found["W"], found["N"]) == (2, 3)
    plain = json.loads(generate("output=json", "decoder=autoregressive", "compare=false").out)
    assert "threads" in plain and "W" not in plain


def test_a_prompt_a_file_and_a_task(generate: Callable[..., Ran], tmp_path: Path) -> None:
    file, task = tmp_path / "code.py", tmp_path / "tasks.jsonl"
    file.write_text("import os\n")
    task.write_text('{"task_id": "t/0", "prompt": "x"}\n{"task_id": "t/1", "prompt": "y"}\n')
    assert "=== prompt (" in generate("prompt='\"def f(x):\"'", "compare=false").out
    assert "=== code.py (" in generate(f"prompt_file={file}", "compare=false").out
    ran = generate("task=humaneval", f"task.path={task}", "limit=null", "compare=false")
    assert "=== t/0 (" in ran.out and "=== t/1 (" in ran.out


def test_a_sweep_runs_every_job(generate: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LP_RUN_DIR", str(tmp_path))
    ran = generate("--multirun", "W=2,3", "limit=1", "compare=false")
    assert ran.code == 0 and "W=2 N=3" in ran.out and "W=3 N=3" in ran.out


@pytest.mark.usefixtures("wrong_prompt_lookup")
def test_a_difference_is_shown_with_its_gap(generate: Callable[..., Ran]) -> None:
    """A wrong token must not hide in a table of speeds."""
    ran = generate("limit=1")
    assert ran.code == 0
    assert "prompt_lookup differs from plain decoding at new token 5 (" in ran.out and "NOT a near-tie" in ran.out
    assert _rows(ran.out)["prompt_lookup"][-5:] == ["differs", "on", "1", "of", "1"]
    found = json.loads(generate("output=json", "limit=1").out)
    assert found["equal"] is False and found["methods"]["lookahead_auto"]["equal"] is True
    (difference,) = found["prompts"][0]["differences"]
    assert difference["position"] == 5 and difference["gap"] > 0 and difference["near_tie"] is False


def test_an_error_on_a_later_prompt_keeps_what_finished(
    generate: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of measuring must not be lost to what comes last."""
    show, shown = launch.generate.show, list[str]()

    def failing(*asked: Any) -> Any:
        shown.append("")
        if len(shown) == 2:
            lp.LookaheadConfig(window_size=-1)
        return show(*asked)

    monkeypatch.setattr(launch.generate, "show", failing)
    ran = generate()
    assert ran.code == 2 and "1 prompt, greedy" in ran.out and ran.err.startswith("error: window_size (W) is -1")


def test_ctrl_c_on_a_terminal_keeps_text_and_figures(processes: Processes, tmp_path: Path) -> None:
    """One start for all that needs a real terminal: colours, their legend, and Ctrl-C."""
    folder = save_tiny_model(tmp_path, context=8192)
    master, slave = pty.openpty()
    overrides = ["model=hf", f"model.name={folder}", "W=4", "N=3", "G=4", "max_new_tokens=7000", "limit=2"]
    overrides += ["decoder=lookahead"]  # a busy machine's step times may leave the adaptive one nothing to colour
    command = [sys.executable, "-m", "launch.generate", *overrides]
    process = processes.start(command, {"TERM": "xterm", "NO_COLOR": ""}, stdout=slave, stderr=slave)
    os.close(slave)
    seen = read_until(master, lambda text: len(text.partition("=== ")[2]) > 2000)
    process.send_signal(signal.SIGINT)
    seen += read_until(master, lambda text: False)
    assert process.wait(30) == 130
    assert "tokens that came in one step" in seen and "Traceback" not in seen
    text = seen.partition("=== ")[2]
    assert any(code in text for code in STEP_COLOURS.values())
    assert _rows(text)["lookahead"][-1] == "interrupted" and "plain" not in _rows(text)


@pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(), reason="the demo model's weights are absent")
def test_the_demo_model_by_default(launch_generate: Callable[..., Ran]) -> None:
    """Several built-in prompts, equal tokens, fewer steps."""
    found = json.loads(launch_generate("output=json", "compare=true", "max_new_tokens=16", "task=showcase").out)
    assert found["model"] == "demo" and len(found["prompts"]) == 4
    assert found["prompts"][0]["task_id"] == "builtin/07_vector_operators"  # the order of conf/task/showcase.yaml
    assert found["methods"]["lookahead_auto"]["S"] > 1.0
    assert all(d["near_tie"] for prompt in found["prompts"] for d in prompt["differences"])


@pytest.mark.parametrize("where", ["in a text", "between texts"])
def test_sigterm_ends_the_run_in_order(
    generate: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Asked to end, it ends: what was generated is shown and marked, and the code is not that of a failure."""
    owner, name, wanted = (Pen, "step", 3) if where == "in a text" else (launch.generate, "_head", 2)
    honest, calls = getattr(owner, name), 0

    def terminated(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == wanted:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(*args, **kwargs)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(owner, name, terminated)
    ran = generate("limit=3", "max_new_tokens=40", "compare=false", "output=json")
    found = json.loads(ran.out)
    assert ran.code == 0 and found["interrupted"] and len(found["prompts"]) == 1
    tokens = found["prompts"][0]["shown"]["tokens"]
    assert 0 < tokens < 40 if where == "in a text" else tokens == 40
    assert signal.getsignal(signal.SIGTERM) is before


def test_prompts_without_room_are_left_out(generate: Callable[..., Ran], tmp_path: Path) -> None:
    """One text too long must not keep those behind it from being shown."""
    task = tmp_path / "t.jsonl"
    task.write_text("".join(json.dumps({"prompt": "x = 1\n" * times}) + "\n" for times in (500, 1, 2)))
    ran = generate("task=humaneval", f"task.path={task}", "limit=3", "output=json")
    assert ran.code == 0 and "1 of 3 prompts left out" in ran.err
    assert len(json.loads(ran.out)["prompts"]) == 2


def test_a_json_schema(launch_generate: Callable[..., Ran], tmp_path: Path) -> None:
    """Every method follows it, and the texts are equal."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}')
    ran = launch_generate(
        "output=json", "compare=true", f"json_schema={schema}", "limit=1", "max_new_tokens=48"
    )  # the demo model
    found = json.loads(ran.out)
    assert found["equal"] is True and list(json.loads(found["prompts"][0]["text"])) == ["ok"]
