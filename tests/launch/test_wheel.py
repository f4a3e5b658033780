"""The wheel, which `pip install` puts on a machine that has no clone; the sdist, a clone without its history."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import lp
from tests.conftest import ROOT

pytestmark = pytest.mark.xdist_group("wheel")

# Where the files of a clone lie in an installed lp.
INSTALLED = {"lp": "lp", "launch": "lp/launch", "conf": "lp/conf"}
# README's Python, in which the model is one that needs no network. No numba: it would compile for a new folder.
SNIPPETS = """
import sys
import torch
import lp
from lp.models.loader import DEMO_MODEL

torch.set_num_threads(1)
names = {}
names["model"], names["tokenizer"] = lp.load("demo")
names["inputs"] = names["tokenizer"]("import os", return_tensors="pt")
for snippet in open(sys.argv[1]).read().split("\\f"):
    snippet = snippet.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(DEMO_MODEL))  # which is here
    exec(snippet.replace("max_new_tokens=256", "max_new_tokens=8"), names)
assert len(names["out"].tokens) <= 8
print(lp.__file__, lp.__version__)
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
    source = tmp_path_factory.mktemp("source")
    built = tmp_path_factory.mktemp("wheel")
    for name in tracked:
        if name.split("/")[0] in INSTALLED or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = [
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--disable-pip-version-check",
        "-w",
        str(built),
    ]
    done = subprocess.run([sys.executable, "-m", "pip", *build, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; its other packages are those that run this test."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    # A path that a .pth file names has its own .pth files unread: an editable lp of the tests stays unseen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index", "--no-compile"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *install, str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(command: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run in a folder that is no clone, with a home of its own."""
    env = {"NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1", "PATH": os.defpath, "HOME": str(cwd), **variables}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_the_wheel_has_every_file_of_the_packages(wheel: Path, tracked: list[str]) -> None:
    """Package data is listed by pattern: a file that no pattern fits is missed where it is read, not before."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    parts = [name.partition("/") for name in tracked]
    assert packed == {f"{INSTALLED[folder]}/{rest}" for folder, _, rest in parts if folder in INSTALLED}


def test_the_sdist_has_every_tracked_file(tracked: list[str], tmp_path: Path) -> None:
    """Whoever packages lp builds and tests it from there, and alone misses a folder that MANIFEST.in leaves out."""
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("checks.cpython-311.pyc", "compiled-0/checks.py311.nbi", "compiled-0/checks.py311.1.nbc"):
        file = tmp_path / "lp" / "__pycache__" / name  # as a clone has that was used
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    build = "import setuptools.build_meta as backend; print(backend.build_sdist('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    made = {name for name in packed if name in ("PKG-INFO", "setup.cfg") or name.split("/")[0].endswith(".egg-info")}
    assert packed - made == set(tracked)


def test_readme_runs_without_the_clone(environment: Path, tmp_path: Path) -> None:
    """Its snippets, in their order, as a reader pastes them."""
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert snippets
    (tmp_path / "snippets").write_text("\f".join(snippets), encoding="utf-8")
    done = run([str(environment / "bin" / "python"), "-c", SNIPPETS, "snippets"], tmp_path)
    assert done.returncode == 0, done.stderr
    file, version = done.stdout.split()
    assert file.startswith(str(environment)) and version == lp.__version__


@pytest.mark.slow  # README's commands above run the same package
def test_the_command_runs_without_the_clone(environment: Path, tmp_path: Path) -> None:
    """A text as it is, a sweep whose callback lies in lp.launch, and no need for torch before a job runs."""
    command = str(environment / "bin" / "lp")
    short = ["decoder=lookahead", "W=0", "G=8", "compare=false", "max_new_tokens=4,5", "-m"]
    done = run([command, "generate", "def f(a, b=2): # 日本", *short], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "def f(a, b=2): # 日本" in done.stdout and "lookahead" in done.stdout
    assert "job 1 of 2: " in done.stderr and "job 2 of 2: " in done.stderr
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not needed here')")
    for args, answer in (
        (["--version"], f"lp {lp.__version__}"),
        (["generate", "--cfg", "job"], "max_new_tokens: 64"),
    ):
        done = run([command, *args], tmp_path, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0 and answer in done.stdout, done.stderr
