"""Messages name only what their reader has: an installed package has no scripts/, no docs/ and no torchrun.sh."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.apps import APPS, TOOLS
from launch.config.schema import register
from launch.keys import app_keys
from launch.running.hydra_app import register_resolvers
from lp import commands
from lp.commands import app_command, install_command, module_command
from tests.conftest import ROOT

OF_A_CLONE = re.compile(
    r"scripts/|docs/|torchrun\.sh|python -m launch|pip install '?\.|\blaunch\.(?:" + "|".join([*APPS, *TOOLS]) + r")\b"
)
# Where such a name is chosen by what is there, or the reader has come by it.
CHOSEN = {
    "lp/commands.py": "it chooses",
    "lp/draft/suffix.py": "in a clone alone",
    "launch/bench/origin.py": "in a clone alone",
    "launch/torchrun.py": "torchrun.sh runs it",
    "launch/bench/to_gguf.py": "its own usage",
}


def texts(path: Path) -> list[tuple[int, str]]:
    """Every string of a module that is no docstring, with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def test_no_message_names_what_only_a_clone_has() -> None:
    """A remedy that names a missing file is none."""
    found = []
    for path in (*sorted((ROOT / "lp").rglob("*.py")), *sorted((ROOT / "launch").rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        if not any(name.startswith(chosen) for chosen in CHOSEN):
            found += [f"{name}:{line}: {text[:80]!r}" for line, text in texts(path) if OF_A_CLONE.search(text)]
    assert not found


@pytest.mark.parametrize("app", APPS)
def test_help_names_nothing_of_a_clone(app: str) -> None:
    """The texts of keys are what `--help` shows."""
    register()
    register_resolvers()
    assert not [f"{key.name}: {key.text}" for key in app_keys(app) if OF_A_CLONE.search(key.text)]


@pytest.fixture
def no_lp(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell finds a command `lp`."""
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.mark.usefixtures("no_lp")
def test_commands_are_those_of_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert app_command("tune") == "bash torchrun.sh launch.tune" and (ROOT / "torchrun.sh").is_file()
    assert install_command("serve") == "pip install '.[serve]'"
    assert module_command("bench.report") == "python -m launch.bench.report"
    monkeypatch.setattr(commands, "CLONE", tmp_path)
    assert app_command("tune") == f"{shlex.quote(sys.executable)} -m lp tune"
    assert install_command("serve") == "pip install 'lp-runtime[serve]'"
    assert module_command("bench.report") == "python -m lp.launch.bench.report"


@pytest.mark.usefixtures("no_lp")
def test_commands_work_in_the_folder_that_the_user_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone is not always the current folder: `bash torchrun.sh` would be no file, and `.` another package."""
    clone = tmp_path / "my clone"
    (clone / "launch").mkdir(parents=True)
    (clone / "torchrun.sh").write_text('echo "$@"')
    (clone / "launch" / "__init__.py").touch()
    (clone / "launch" / "told.py").write_text("print('told')")
    monkeypatch.setattr(commands, "CLONE", clone)
    for folder in (tmp_path, clone):
        monkeypatch.chdir(folder)
        env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin:/bin"}
        command = f"{app_command('tune')} && {module_command('told')}"
        ran = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
        assert ran.stdout.split() == ["launch.tune", "told"], (command, ran.stderr)
        (target,) = shlex.split(install_command("serve"))[2:]
        assert Path(target.removesuffix("[serve]")).resolve() == clone


def test_the_command_lp_is_named_where_a_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works in every folder; that of another environment may be another release."""
    for folder in ("this", "another"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "lp").write_text("#!/bin/sh\n")
        (tmp_path / folder / "lp").chmod(0o755)
    monkeypatch.setattr(commands.sys, "executable", str(tmp_path / "this" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "this"))
    assert app_command("tune") == "lp tune"
    monkeypatch.setenv("PATH", str(tmp_path / "another"))
    assert app_command("tune") != "lp tune"
