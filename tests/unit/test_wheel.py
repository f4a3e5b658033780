"""The wheel: what `pip install` puts on a machine that has no clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = ("lp", "launch")
# A decoder with the default config reads the pool's weights at its first step. No numba: it would compile for a new
# folder. -I and another folder leave the wheel the only place to find lp in; a clone installed as editable comes later.
DECODE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, transformers as tf
import lp
from launch.bench.prompts import load_builtin
from lp.models.loader import load

torch.set_num_threads(1)
demo = load("demo", "float32")
decoder = lp.LookaheadDecoder(demo.model, lp.LookaheadConfig(guess_set_size=8))
ids = demo.tokenizer(load_builtin(1)[0].text)["input_ids"][:40]
assert len(decoder.generate(ids, 4).tokens) == 4
ours = {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "lp"}
assert all(file.startswith(sys.argv[1]) for file in ours.values()), ours
"""


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Every file that a clone has, by its path from the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git clone")
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tracked files: neither a former build nor a cache of this clone can get in."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked:
        if name.split("/")[0] in PACKAGES or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-w", str(made)]
    built = subprocess.run([sys.executable, "-m", "pip", *build, str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(made.glob("*.whl"))


def test_the_wheel_has_every_file_of_the_packages(wheel: Path, tracked: list[str]) -> None:
    """Package data is listed by pattern: a file that no pattern fits is missed where it is read, not before."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == {name for name in tracked if name.split("/")[0] in PACKAGES}


def test_the_wheel_decodes_without_the_clone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    command = [sys.executable, "-I", "-c", DECODE, str(tmp_path / "unpacked")]
    env = {"NUMBA_DISABLE_JIT": "1", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
