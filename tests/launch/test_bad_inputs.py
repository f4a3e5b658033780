"""Bad prompt files, model folders, journals, pools and environments: exit code 2, and one line that says what to do.

Bad settings are in test_user_errors.py.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lp.parallel.rendezvous import check_backend, choose_backend, device_id
from tests.support.apps import CONTEXT, Ran
from tests.support.read_only import read_only

Launch = Callable[..., Ran]
LIMIT_S = 60  # no bad input may hang


def refused(launch: Launch, *overrides: str) -> str:
    """Start an app that must end with exit code 2; the one line with which it refuses."""
    started = time.monotonic()
    ran = launch(*overrides)
    assert time.monotonic() - started < LIMIT_S
    assert ran.code == 2, ran
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1 and "Traceback" not in ran.err, ran.err
    return ran.err


GOOD = '{"prompt": "x = 1"}\n'
TASKS: dict[str, tuple[bytes, str]] = {
    "a broken line": ((GOOD * 2 + '{"prompt": "x\n').encode(), "line 3 is not JSON (Unterminated string"),
    "a trailing comma": (b'{"prompt": "x",}\n', "line 1 is not JSON"),
    "a list": ((GOOD + "[1, 2]\n").encode(), "line 2 is not a JSON object but list; write one object a line"),
    "a list behind a blank line": (b"\n[1, 2]\n", "line 2 is not a JSON object but list"),
    "a number": (b"7\n", "line 1 is not a JSON object but int"),
    "a missing field": ((GOOD + '{"text": "x"}\n').encode(), "line 2 has no text under 'prompt'; give it a string"),
    "a prompt that is a number": (b'{"prompt": 7}\n', "line 1 has no text under 'prompt'"),
    "a prompt that is null": (b'{"prompt": null}\n', "line 1 has no text under 'prompt'"),
    "an empty prompt": (b'{"prompt": ""}\n', "line 1 has no text under 'prompt'; give it a string that is not empty"),
    "half a character": (b'{"prompt": "a\\ud800"}\n', "line 1 has half a character under 'prompt'"),
    "an empty file": (b"", "holds no prompt; it needs at least one line"),
    "blank lines": (b"\n \n\n", "holds no prompt"),
    "not UTF-8": (GOOD.encode() + b'{"prompt": "\xe9"}\n', "is not UTF-8 (byte 32); save it as UTF-8"),
    "UTF-16": (GOOD.encode("utf-16"), "is not UTF-8 (byte 0)"),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD.encode(), "line 1 is not JSON (Unexpected UTF-8 BOM"),
    "binary": (bytes(range(1, 128)), "line 1 is not JSON"),
    "too deep": (b"[" * 100_000 + b"\n", "line 1 is not JSON (too deep"),
    "a number too long": (b'{"prompt": "x", "task_id": ' + b"9" * 5000 + b"}\n", "line 1 is not JSON"),
}


@pytest.mark.parametrize("kind", TASKS)
def test_a_bad_task_file(launch_generate: Launch, tmp_path: Path, kind: str) -> None:
    """A bad line of a thousand is named by its number, before anything is generated."""
    content, message = TASKS[kind]
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(content)
    assert f"{file}" in (said := refused(launch_generate, f"task.path={file}")) and message in said
    assert file.read_bytes() == content


PROMPTS: dict[str, tuple[bytes | None, str]] = {
    "not UTF-8": (b"def f(\xff", "is not UTF-8 (byte 6); save it as UTF-8"),
    "empty": (b"", "the prompt is empty; put a text into the prompt_file"),
    "a folder": (None, "does not exist or is not a file"),
    "1 MB": (b"x = 1\n" * 170_000, f"tokens, the model's context {CONTEXT}; leave room"),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_bad_prompt_file(launch_generate: Launch, tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    content, message = PROMPTS[kind]
    file = tmp_path / "prompt.py"
    file.mkdir() if content is None else file.write_bytes(content)
    said = refused(launch_generate, "model=hf", f"model.name={tiny_folder}", f"prompt_file={file}")
    assert message in said


def test_half_a_character_on_the_command_line(launch_generate: Launch) -> None:
    """What a shell passes that is not UTF-8, Python has as half characters, which no tokenizer takes."""
    assert "the prompt has half a character" in refused(launch_generate, "prompt='a\udcff'")


def _config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _of_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# The loader's own refusals are in test_loader.py.
MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no bytes": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors is damaged or incomplete"),
    "wrong shapes": (lambda f: _config(f, intermediate_size=48), "use the config that belongs to these weights"),
    "NaN": (_of_nan, "gives logits that are NaN or infinite; load it with dtype="),
    "code of its own": (
        lambda f: _config(f, model_type="own", auto_map={"AutoConfig": "own.Own"}),
        "model.trust_remote_code=true runs that code",
    ),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "cannot load the tokenizer"),
    "context of one": (lambda f: _config(f, max_position_embeddings=1), "the model's context 1; leave room"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_bad_model_folder(launch_generate: Launch, tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    """A download that was cut off or mixed up: the bad file or tensor is named before anything is generated."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    spoil, message = MODELS[kind]
    spoil(folder)
    assert message in refused(launch_generate, "model=hf", f"model.name={folder}", "prompt='x = 1'", "compare=false")


FILES: dict[str, tuple[list[str], str | None, str]] = {
    "a journal in no folder": (
        ["journal={}/none/j"],
        None,
        "cannot be written (No such file or directory); give a path",
    ),
    "a journal that is a folder": (["journal={}"], None, "cannot be written (Is a directory)"),
    "a journal of something else": (["journal={}/file"], "hello\n", "is no journal of lp; give another path"),
    "a pool in no folder": (["pool.scope=session", "pool.file={}/none/p"], None, "there is no folder"),
    "a pool of something else": (
        ["pool.scope=session", "pool.file={}/file"],
        "hello\n",
        "can't be read as safetensors",
    ),
    "a pool without a session": (["pool.file={}/file"], None, "add pool_scope=session"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_bad_file_to_keep(launch_generate: Launch, tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    """Said before a text is generated, and what the file holds is left alone."""
    overrides, content, message = FILES[kind]
    if content is not None:
        (tmp_path / "file").write_text(content)
    asked = ["model=hf", f"model.name={tiny_folder}", "max_new_tokens=4", "compare=false"]
    assert message in refused(launch_generate, *asked, *(override.format(tmp_path) for override in overrides))
    assert content is None or (tmp_path / "file").read_text() == content


def test_a_run_folder_that_cannot_be_made(launch_generate: Launch, tmp_path: Path) -> None:
    """A folder of another user, or of a disk that is read only, is the most usual of wrong paths."""
    (tmp_path / "file").touch()
    said = refused(launch_generate, f"hydra.run.dir={tmp_path}/file/runs")
    assert f"cannot write {tmp_path}/file/runs (Not a directory); give a folder that can be made" in said


def test_a_working_folder_that_is_read_only(launch_generate: Launch, tmp_path: Path) -> None:
    """It was told to write elsewhere, and not by which key: the folder is one that Hydra makes unasked."""
    with read_only(tmp_path, after=0):
        said = refused(launch_generate, f"hydra.run.dir={tmp_path}/runs")
    assert f"cannot write {tmp_path}/runs (Read-only file system); give a folder that can be made" in said
    assert "hydra.run.dir=/tmp/run" in said and "hydra.sweep.dir=" in said


@pytest.fixture
def used_port() -> Iterator[int]:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


RANKS = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{}"}
ENVIRONMENTS: dict[str, tuple[dict[str, str], list[str], str]] = {
    "WORLD_SIZE alone": ({"WORLD_SIZE": "2"}, [], "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set; launch with"),
    "WORLD_SIZE and RANK": ({"WORLD_SIZE": "2", "RANK": "1"}, [], "LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"),
    "WORLD_SIZE=two": ({"WORLD_SIZE": "two"}, [], "WORLD_SIZE is 'two'; it must be an integer >= 1; launch with"),
    "WORLD_SIZE=0": ({"WORLD_SIZE": "0"}, [], "WORLD_SIZE is 0; it must be an integer >= 1"),
    "WORLD_SIZE=-2": ({"WORLD_SIZE": "-2"}, [], "WORLD_SIZE is '-2'; it must be an integer >= 1"),
    "RANK too large": (RANKS | {"RANK": "2"}, [], "RANK is 2; it must be an integer in [0, 1]"),
    "RANK=first": (RANKS | {"RANK": "first"}, [], "RANK is 'first'; it must be an integer in [0, 1]"),
    "port in use": (RANKS, ["parallel.timeout_s=2"], "cannot join the others at 127.0.0.1:{} within 2 s"),
    "port=http": (RANKS | {"MASTER_PORT": "http"}, [], "cannot join the others at 127.0.0.1:http"),
    "nobody there": (RANKS | {"MASTER_PORT": "1", "RANK": "1"}, ["parallel.timeout_s=1"], "start every rank"),
    "no such host": (RANKS | {"MASTER_ADDR": "a.invalid"}, ["parallel.timeout_s=1"], "cannot join the others at a.inv"),
    "no time": (RANKS, ["parallel.timeout_s=0"], "timeout_s is 0.0; it must be a number in [1, 86400]; try 120"),
    "time without end": (RANKS, ["parallel.timeout_s=inf"], "timeout_s is inf; it must be a number in"),
    "backend": (RANKS, ["parallel.backend=mpi"], "backend is 'mpi'; it must be 'auto', 'nccl' or 'gloo'"),
    "no GPU": (RANKS, ["model.device=cpu", "parallel.backend=nccl"], "has no GPU or torch no NCCL; use backend=gloo"),
    "restarts": (
        {"TORCHELASTIC_MAX_RESTARTS": "many", "LP_RUN_DIR": "x"},
        [],
        "TORCHELASTIC_MAX_RESTARTS is 'many'; it must be an integer >= 0",
    ),
}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_a_bad_environment(
    launch_generate: Launch, tmp_path: Path, used_port: int, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What a launcher set wrongly must not hang the ranks that came, nor end in a traceback."""
    environment, overrides, message = ENVIRONMENTS[kind]
    monkeypatch.chdir(tmp_path)  # of ranks but the first, which name it, and of a run folder
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(used_port))
    monkeypatch.setattr("launch.running.once.RANK_0_FIRST_S", 0)
    ran = launch_generate(*overrides)
    said = ran.err.splitlines()[-1]
    assert ran.code == 2 and "Traceback" not in ran.err, ran.err
    assert "error: " in said and message.format(used_port) in said


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes one rank a GPU and says so late, with a traceback; "auto" takes gloo."""
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    with pytest.raises(ValueError, match="4 ranks share 2 GPUs; start 2 ranks or use backend=gloo"):
        choose_backend("nccl", ["a", "b", "a", "b"])
    assert choose_backend("auto", ["a", "b", "a", "b"]) == "gloo" == choose_backend("auto", ["a", ""])
    assert choose_backend("auto", ["", ""]) == "gloo" == choose_backend("gloo", ["a", "b"])
    assert choose_backend("nccl", ["a", "b"]) == "nccl" == choose_backend("auto", ["a", "b"])
    with pytest.raises(ValueError, match="this rank has no GPU"):
        check_backend("nccl", torch.device("cpu"))


def test_one_visible_gpu_a_process_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm shows every process one GPU, which each calls cuda:0: two of them are two GPUs, as their UUIDs say."""
    uuids = iter(["one", "two"])
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=next(uuids)))
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    devices = [device_id(torch.device("cuda:0")) for _ in range(2)]
    assert choose_backend("nccl", devices) == "nccl" == choose_backend("auto", devices)
    assert device_id(torch.device("cpu")) == ""


def test_a_full_disk_is_one_line(
    launch_generate: Launch, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The text is in the journal all the same, for the run that is started again with room."""
    asked = ["model=hf", f"model.name={tiny_folder}", "max_new_tokens=24", "limit=1", "compare=false"]
    asked += [f"journal={tmp_path / 'journal'}", "output=json"]
    with open("/dev/full", "w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        ran = launch_generate(*asked)
    assert ran.code == 2
    assert ran.err.splitlines()[-1] == "error: cannot write (No space left on device); make room, or write elsewhere"
    again = json.loads(launch_generate(*asked).out)["prompts"][0]["shown"]
    assert (again["tokens"], again["resumed"], again["steps"]) == (24, 24, 0)


def test_a_disk_that_fills_up_costs_no_text(launch_generate: Launch, tiny_folder: Path) -> None:
    """The journal fails, the run does not."""
    asked = ["model=hf", f"model.name={tiny_folder}", "max_new_tokens=8", "limit=1", "compare=false", "output=json"]
    with pytest.warns(UserWarning, match="journal /dev/full is not written any more"):
        ran = launch_generate(*asked, "journal=/dev/full")
    assert ran.code == 0 and json.loads(ran.out)["prompts"][0]["shown"]["tokens"] == 8
