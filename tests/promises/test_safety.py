"""What a checkpoint, a prompt file or another rank sends is data: it runs no code and names no file."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import AutoConfig

import lp
from lp.models.loader import load
from tests.conftest import ROOT
from tests.support.apps import Ran
from tests.support.tiny_models import tiny_model

# They pickle; that no other call of that kind is made, tests/support/launches.py counts.
OBJECT_COLLECTIVES = {name for name in dir(dist) if "_object" in name}
RUNS_TEXT = {"launch/bench/pass_at_1/limited.py": ["exec"]}  # programs that models write, in a process with limits
CARRIERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}  # whose data may hold code
ARCHIVES = {"zipfile", "tarfile"}  # whose names may lead out of a folder
UNPACKERS = {
    *("torch.save", "torch.load", "torch.jit.load", "torch.hub.load", "np.load", "numpy.load"),
    "shutil.unpack_archive",
}


def unsafe(source: str) -> Iterator[str]:
    """Names in a piece of code that bring in pickles, unpack archives or run text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in CARRIERS | ARCHIVES)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (name for name in names if name in UNPACKERS or name.split(".")[-1] in OBJECT_COLLECTIVES)
            if (node.module or "").split(".")[0] in CARRIERS | ARCHIVES:
                yield str(node.module)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in UNPACKERS or node.attr in OBJECT_COLLECTIVES:
                yield name
        elif isinstance(node, ast.Name) and node.id in ("eval", "exec", "__import__"):
            yield node.id


def test_no_pickle_or_archive_in_the_code() -> None:
    """One object collective or torch.load is enough to run what another machine sent, one archive to write anywhere."""
    files = [path for folder in ("lp", "launch") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): [*unsafe(path.read_text())] for path in files}
    assert {path: names for path, names in found.items() if names} == RUNS_TEXT


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "from torch import load",
        "from numpy import load as read",
        "import tarfile",
        "from zipfile import ZipFile",
        "shutil.unpack_archive(path)",
        "from torch.distributed import gather_object",
        "torch.save(x, path)",
        "dist.all_gather_object(a, b)",
        "dist.broadcast_object_list([x])",
        "eval(text)",
    ],
)
def test_a_pickle_in_the_code_is_seen(line: str) -> None:
    """The check above must not pass because it looks past one."""
    assert [*unsafe(line)] and not [*unsafe("model.eval()\nexecute(x)")]


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_pickled_weights_are_not_read(tiny_folder: Path, tmp_path: Path) -> None:
    """A .bin file runs whatever it likes; beside safetensors it is not looked at."""
    marker, folder = tmp_path / "ran", tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump({"weights": Trap(marker)}, file)
    load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle, which is not read"):
        load(folder)
    assert not marker.exists()


def test_code_of_a_checkpoint_runs_only_when_asked(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask at the keyboard; a job of several ranks has none."""
    marker, folder = tmp_path / "ran", tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    code = f"import pathlib\nfrom transformers import LlamaConfig\npathlib.Path({str(marker)!r}).touch()\n"
    (folder / "own.py").write_text(code + "class Own(LlamaConfig):\n    model_type = 'own'\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    )
    with pytest.raises(ValueError, match="trust_remote_code=true runs that code, if you trust it"):
        load(folder)
    assert not marker.exists()
    with pytest.raises(ValueError, match="cannot load"):  # it has a config alone
        load(folder, trust_remote_code=True)
    assert marker.exists(), "the test would not have noticed"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_config_names_no_kernel_of_the_hub(key: str, tiny_folder: Path, tmp_path: Path) -> None:
    """With the package kernels, transformers fetches such a repository and runs it, whatever trust_remote_code says."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: "someone/kernel"}))
    with pytest.raises(ValueError, match="asks for the attention 'someone/kernel', which is code from the hub"):
        load(folder)
    assert load(folder, attn_implementation="sdpa").model.config._attn_implementation == "sdpa"
    parts = AutoConfig.for_model("gemma3").to_dict() | {key: {"vision_config": "someone/kernel"}}
    (folder / "config.json").write_text(json.dumps(parts))
    with pytest.raises(ValueError, match="asks for the attention 'someone/kernel', which is code from the hub"):
        load(folder)


def test_task_ids_name_no_file(
    launch_generate: Callable[..., Ran], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt file from elsewhere must not choose where a run writes."""
    outside = tmp_path / "outside"
    outside.mkdir()
    inside = outside / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    ids = ["../../escaped", str(tmp_path / "absolute"), "a/b", "..", "nul\0", "~/home", "x" * 5000]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"task_id": id_, "prompt": "x = 1"}) + "\n" for id_ in ids))
    before = {*tmp_path.rglob("*")}
    asked = ["model=hf", f"model.name={tiny_folder}", f"task.path={tasks}", "max_new_tokens=2", "compare=false"]
    asked += ["journal=kept.jsonl", "pool.scope=session", "pool.file=pool.safetensors", "limit=null", "output=json"]
    ran = launch_generate(*asked)
    assert ran.code == 0 and [p["task_id"] for p in json.loads(ran.out)["prompts"]] == ids
    made = {path for path in {*tmp_path.rglob("*")} - before if "outputs" not in path.parts}
    assert made == {inside / "kept.jsonl", inside / "pool.safetensors"}


def test_a_pool_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it writes, or out of room: what past runs learned is still there."""
    file = tmp_path / "pool.safetensors"
    config = lp.LookaheadConfig(adaptive=False, pool_scope=lp.PoolScope.SESSION, pool_file=str(file), pool_mib=1)
    lp.LookaheadDecoder(tiny_model(), config).generate([1, 2, 3], 10)
    before = file.read_bytes()

    def half(arrays: Any, path: Path) -> None:
        Path(path).write_bytes(before[:1000])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lp.draft.pool.factory.save_file", half)
    with pytest.warns(UserWarning, match="was not written"):
        output = lp.LookaheadDecoder(tiny_model(), config).generate([1, 2, 3], 10)
    assert len(output.tokens) == 10 and file.read_bytes() == before
    assert [*tmp_path.iterdir()] == [file]
