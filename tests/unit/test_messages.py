"""Messages name only what their reader has: an installed package has no scripts/, no docs/ and no torchrun.sh."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from launch.apps import APPS, TOOLS
from launch.keys import comments_of
from lp import commands
from lp.commands import app_command, install_command, module_command

ROOT = Path(__file__).resolve().parents[2]
OF_A_CLONE = re.compile(
    r"scripts/|docs/|torchrun\.sh|python -m launch|pip install '?\.|\blaunch\.(?:" + "|".join([*APPS, *TOOLS]) + r")\b"
)
# Where such a name is chosen by what is there, or the reader has come by it.
CHOSEN = {
    "lp/commands.py": "it chooses",
    "lp/draft/suffix.py": "in a clone alone",
    "launch/bench/origin.py": "in a clone alone",
    "launch/torchrun.py": "torchrun.sh runs it",
    "launch/bench/tables": "the tables of the docs, which are made in a clone",
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


def shows(key: str, text: str) -> bool:
    return key != "defaults" and bool(OF_A_CLONE.search(text))  # above which a file says what it is


def test_help_names_nothing_of_a_clone() -> None:
    """The comments of conf/ are what `--help` shows."""
    found = []
    for path in sorted((ROOT / "conf").glob("*.yaml")):
        found += [f"{path.name}, {key}: {text}" for key, text in comments_of(path).items() if shows(key, text)]
    assert not found


def test_commands_are_those_of_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert app_command("tune") == "bash torchrun.sh launch.tune" and (ROOT / "torchrun.sh").is_file()
    assert install_command("serve") == "pip install '.[serve]'"
    assert module_command("bench.tables") == "python -m launch.bench.tables"
    monkeypatch.setattr(commands, "CLONE", tmp_path)
    assert app_command("tune") == "lp tune"
    assert install_command("serve") == "pip install 'lp-runtime[serve]'"
    assert module_command("bench.tables") == "python -m lp.launch.bench.tables"
