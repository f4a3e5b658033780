"""lp doctor: what it says of a machine and of a model, and that nothing on the way is a traceback."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from launch import ngrams
from launch.cli import run_tool
from launch.doctor import EXTRAS, _ngrams
from lp.commands import app_command, install_command
from lp.draft.pool.model_ngrams import FILE_NAME
from tests.support.tiny_models import tiny_model


def said(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, list[str]]:
    """What is printed, by its first word."""
    run_tool("doctor", list(args))
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        found.setdefault(line[:13].strip(), []).append(line[13:])
    return found


def test_the_machine_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug report begins with this, before any model is there."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("launch.doctor.is_installed", lambda name: name != "llguidance")
    found = said(capsys)
    assert found["torch"] == [torch.__version__] and found["threads"] == ["1 (OMP_NUM_THREADS=1)"]
    assert ("clone" in found["lp"][0] and "cores" in found["device"][0]) or "cuda:0" in found["device"][0]
    assert found["refused"] == [f"{EXTRAS['grammar'][1]}: llguidance missing; {install_command('grammar')}"]
    assert "failed" not in found and "attention" not in found


def test_what_is_broken_has_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked where something is broken: one check that fails must not take the others with it."""

    def broken() -> int:
        raise OSError("libcuda.so is damaged")

    monkeypatch.setattr("launch.doctor.torch.get_num_threads", broken)
    found = said(capsys)
    assert "threads: OSError: libcuda.so is damaged" in found["failed"]
    assert found["python"] and found["cache"]


def test_the_cache_is_the_folder_that_step_times_are_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative XDG_CACHE_HOME is ignored, as the specification has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert said(capsys)["cache"][0].startswith(str(Path("~/.cache/lp").expanduser()))


def test_a_model(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    found = said(capsys, str(tiny_folder), "--device", "cpu")
    assert "LlamaForCausalLM" in found["model"][0] and "a context of 256 tokens" in found["model"][0]
    assert found["attention"] == ["flash"] and found["layers"] == ["fused"] and found["exact"] == ["yes"]
    assert found["capture"] == ["no: the device is no GPU"]
    config = AutoConfig.from_pretrained(tiny_folder)
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * 1000
    sizes = [numbers * size / (1 << 20) for size in (4 * config.head_dim, config.head_dim + 4)]
    expected = "keys and values of 1,000 tokens: {:.1f} MiB, {:.1f} MiB with kv_dtype=int8".format(*sizes)
    assert found["memory"][0].endswith(f" MiB of weights; {expected}")
    assert found["n-grams"] == [f"none beside the model; {app_command('ngrams')} {tiny_folder}"]


@pytest.mark.parametrize("kind", ["folder", "file", "folder of a file", "hub"])
def test_how_to_get_ngrams(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that it names must be taken, and write where the doctor looks, and the pool."""
    pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my models"
    folder.mkdir()
    (folder / ("config.json" if kind == "folder" else "small.gguf")).touch()
    name = {"folder": str(folder), "file": str(folder / "small.gguf"), "hub": "someone/small"}.get(kind, str(folder))
    ((_, text),) = _ngrams(name)
    command, _, key = text.removeprefix(f"none beside the model; {app_command('ngrams')} ").partition(", then ")
    parser = argparse.ArgumentParser()
    ngrams.add_arguments(parser)
    path = ngrams.checked_path(parser.parse_args(shlex.split(command)))
    path.touch()
    if kind == "hub":
        assert key == f"pool.model_ngrams={path}"
    else:
        assert path == folder / FILE_NAME and not key and _ngrams(name) == [("n-grams", str(path))]


def test_why_layers_are_not_fused(capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path) -> None:
    """What makes steps slower than they could be is said by name, once, and what has a line of its own is no note."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    tiny_model("gpt2", vocab_size=vocabulary).save_pretrained(folder)
    found = said(capsys, str(folder), "--device", "cpu")
    assert found["layers"] == ["transformers' own, not fused"]
    assert len([note for note in found["note"] if re.match("layers run as they are: .*GPT2", note)]) == 1
    assert not any("attention is" in note for note in found["note"])


@pytest.mark.parametrize("kind", ["missing", "alibi", "damaged"])
def test_a_model_that_is_refused(
    kind: str, capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one line with the reason, and a code that scripts can ask for."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "model"
    if kind != "missing":
        folder.mkdir()
        for path in tiny_folder.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    if kind == "alibi":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "alibi": True}))
    if kind == "damaged":
        os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(SystemExit) as ended:
        run_tool("doctor", [str(folder), "--device", "cpu"])
    printed = capsys.readouterr()
    assert ended.value.code == 1 and "Traceback" not in printed.out + printed.err
    (line,) = (line for line in printed.out.splitlines() if line.startswith("REFUSED"))
    assert "alibi" in line if kind == "alibi" else str(folder) in line
