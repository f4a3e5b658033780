"""docs/design/architecture.md holds: layers, no import circles, optional packages, nothing of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

LAYERS = [
    {
        "lp.errors",
        "lp.digest",
        "lp.compile_cache",
        "lp.file_locks",
        "lp.kernel_launch",
        "lp.optional",
        "lp.to_device",
        "lp.waits",
        "lp.commands",
    },
    {"lp.checks", "lp.compiled", "lp.removed_keys"},
    {"lp.config"},
    {"lp.sampling"},
    {"lp.draft"},
    {"lp.parallel"},
    {"lp.attention"},
    {"lp.models"},
    {"lp.budget"},
    {"lp.engine"},
    {"lp.integrations"},
    {"lp"},  # lp/__init__.py: the public names
    {"lp.compile_functions"},
    {"launch"},  # launch/__init__.py: the name of the package
    {"launch.apps", "launch.data", "launch.text"},
    {"launch.config"},
    {"launch.running"},
    {"launch.bench"},
    {"launch.torchrun", "launch.sweep"},
    {"launch.nodes", "launch.keys"},
    {"launch.help"},
    {"launch.cli"},  # which imports an app by its name when it starts
    {
        "launch.benchmark",
        "launch.chat",
        "launch.corpus",
        "launch.doctor",
        "launch.generate",
        "launch.ngrams",
        "launch.profile",
        "launch.scaling",
        "launch.serve",
        "launch.tune",
    },
    {"launch.batch"},  # which answers requests as launch.serve does
    {"lp.__main__"},
    {"tests"},  # from here on, what an installed lp lacks
    {"scripts"},
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
# What only these parts may import, and scripts, which nothing imports but tests.
KEEPERS = {
    "hydra": "launch",
    "omegaconf": "launch",
    "deepspeed": "launch.bench.baselines",
    "accelerate": "launch.bench.baselines",
    "ray": "launch.serve.ray",
    "lm_eval": "launch.batch.lm_eval",
}
FORBIDDEN = {"lp.draft": ["transformers", "torch.distributed"]}
# Fragments that are glued to a line above them, or to another docstring; and those that go on from their own name,
# which only a test's may, since its name is a sentence.
DOCSTRING_FRAGMENT = re.compile(r"(The same|As above|Of|That|L\.)(?!\w)|\S*$")
NAME_FRAGMENT = re.compile(r"(As|At|And|By|Behind|For|From|In|Into|Not|On|Those|To|Whose|With|Without)\b")
ENTRY_FRAGMENT = re.compile(r"(?i:of|as|that|those|in|from|among|likewise|for|on|to|behind|before|so many|so long)\b")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """The layer that a module belongs to; None outside the project."""
    parts = module.split(".")
    if parts[0] in ("lp", "launch"):
        return ".".join(parts[:2])
    return parts[0] if parts[0] in ("scripts", "tests") else None


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it, and every dotted name under torch.

    `from a import b` gives `a.b` where that is a module of ours, else both `a` and `a.b`.
    """
    package = module_of(path).split(".")[: None if path.name == "__init__.py" else -1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])] if node.level else None
            source = ".".join(base) if base else str(node.module)
            for alias in node.names:
                name = f"{source}.{alias.name}"
                file = ROOT / name.replace(".", "/")
                if file.is_dir() or file.with_suffix(".py").exists():
                    yield name
                else:
                    yield from (source, name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}"


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def breaches(path: Path) -> list[str]:
    """What a file imports against the layers, in words."""
    part = part_of(module_of(path))
    found = []
    for name in sorted(set(imports(path))):
        target = part_of(name)
        # `from lp import a_name` gives lp.a_name as well, which is no part: there the import of lp itself counts.
        if part in RANK and target in RANK and target != part and RANK[target] >= RANK[part]:
            found.append(f"{part} imports {name}, which is no lower layer")
        for package, keeper in KEEPERS.items():
            if under(name, package) and not under(module_of(path), keeper) and part != "scripts":
                found.append(f"{module_of(path)} imports {name}, which belongs in {keeper} alone")
        found += [f"{part} imports {name}" for package in FORBIDDEN.get(part or "", []) if under(name, package)]
    return found


@pytest.mark.parametrize("path", python_files("lp", "launch", "scripts"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_lower_layers(path: Path) -> None:
    """A layer that imports a higher one, or a package that belongs elsewhere, ends the division of the house."""
    part = part_of(module_of(path))
    assert part is None or part in RANK, f"{part} has no layer: add it to LAYERS, and to docs/design/architecture.md"
    assert not breaches(path)


@pytest.mark.parametrize(
    ("module", "line", "is_breach"),
    [
        ("lp/config.py", "from lp.draft.window import LookaheadWindow", True),
        ("lp/draft/window.py", "from lp.config import LookaheadConfig", False),
        ("lp/draft/window.py", "from . import pool", False),
        ("lp/draft/window.py", "from ..models import runner", True),
        ("lp/draft/window.py", "from lp import models", True),
        ("lp/draft/window.py", "from lp import LookaheadDecoder", True),
        ("lp/draft/window.py", "def f():\n    import transformers.cache_utils", True),
        ("lp/draft/window.py", "from torch import distributed", True),
        ("lp/draft/window.py", "import torch\ntorch.distributed.barrier()", True),
        ("lp/models/runner.py", "import torch.distributed as dist", False),
        ("lp/models/runner.py", "from omegaconf import DictConfig", True),
        ("launch/bench/report.py", "import accelerate", True),
        ("launch/bench/baselines/accelerate_pp.py", "from accelerate import Accelerator", False),
        ("launch/generate.py", "import hydra, lp", False),
        ("launch/tune.py", "from scripts.studies import main", True),
        ("launch/tune.py", "from .bench import terminal", False),
        ("launch/tune.py", "from .cli import start", False),
        ("launch/tune.py", "from .scaling import fastest", True),
        ("launch/serve/server.py", "from ..chat.history import History", True),
        ("launch/bench/terminal.py", "from ..scaling import fastest", True),
        ("launch/bench/terminal.py", "from launch import tune", True),
        ("launch/running/session.py", "def f():\n    from ..bench.terminal import show_sweep", True),
        ("launch/data/prompts.py", "from ..config.schema import Tasked", True),
        ("launch/config/schema.py", "from ..data import prompts", False),
        ("launch/config/schema.py", "import launch.running.errors", True),
        ("lp/config.py", "from tests import tiny_models", True),
        ("scripts/studies/tp.py", "from launch.bench import table_text", False),
        ("scripts/studies/probe.py", "from tests import tiny_models", False),
    ],
)
def test_a_breach_of_the_layers_is_seen(
    module: str, line: str, is_breach: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above must not pass because it looks past an import."""
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(line)
    for part in ("lp/models", "lp/draft", "launch/bench", "launch/data"):
        (tmp_path / part).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert bool(breaches(path)) == is_breach


def test_the_import_graph_has_no_circle() -> None:
    """Modules that import each other can't be read one after the other, and break when one is imported first."""
    modules = {module_of(path): path for path in python_files("lp", "launch")}
    graph = {
        module: {name for name in imports(path) if name in modules and name != module}
        for module, path in modules.items()
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' -> '.join(error.args[1])}")


def fragments(path: Path) -> list[str]:
    """Docstrings of a file, and entries of their Args and Attributes, that do not stand alone: with their lines."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        section = ""
        is_test = getattr(node, "name", "").startswith("test_")
        for i, line in enumerate((ast.get_docstring(node) or "").splitlines()):
            if line and not line.startswith(" "):
                section = line
            entry = re.match(r" {4}\*{0,2}\w+(?:, \*{0,2}\w+)*: (.*)", line)
            glued = entry and section in ("Args:", "Attributes:") and ENTRY_FRAGMENT.match(entry[1])
            starts = (DOCSTRING_FRAGMENT,) if is_test else (DOCSTRING_FRAGMENT, NAME_FRAGMENT)
            if glued or (i == 0 and any(start.match(line) for start in starts)):
                found.append(f"{path.name}:{node.body[0].lineno + i}: {line.strip()}")
    return found


def test_docstrings_stand_alone() -> None:
    """A line such as "runner: of the model" says nothing to a reader of that line, as in an editor's hint."""
    files = python_files("lp", "launch", "scripts", "tests")
    assert not [fragment for path in files for fragment in fragments(path)]


@pytest.mark.parametrize(
    ("source", "is_fragment"),
    [
        ('def f():\n    """Of every node."""', True),
        ('def f():\n    """The same of one group."""', True),
        ('def f():\n    """L."""', True),
        ('class A:\n    """Those of every sequence."""', True),
        ('def f():\n    """On rank 0; the others wait."""', True),
        ('def f(runner):\n    """Take a step.\n\n    Args:\n        runner: of the model.\n    """', True),
        ('class A:\n    """A step.\n\n    Attributes:\n        k, v: as in attention.\n    """', True),
        ('def f(runner):\n    """Take a step.\n\n    Args:\n        runner: runs the model.\n    """', False),
        ('def f():\n    """Sampled token of every node, int64 (T,)."""', False),
        ('def test_f():\n    """On rank 0 alone the file is written."""', False),  # a test's name begins the sentence
        ('def test_f():\n    """The same of Mamba-2."""', True),
    ],
)
def test_a_fragment_is_seen(source: str, is_fragment: bool, tmp_path: Path) -> None:
    """The check above must not pass because it looks past a docstring."""
    path = tmp_path / "planted.py"
    path.write_text(source)
    assert bool(fragments(path)) == is_fragment


def test_launch_has_no_twins_by_name() -> None:
    """Two modules of one name: whoever looks for the session, the report or the errors opens the wrong one."""
    names = [path.stem for path in python_files("launch") if not path.stem.startswith("__")]
    assert sorted(set(names)) == sorted(names)


def test_packages_have_an_init() -> None:
    """A folder without __init__.py is left out of an installed lp."""
    folders = {path.parent for path in python_files("lp", "launch")}
    assert not [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()]


def test_import_needs_no_optional_package() -> None:
    """`import lp` must work where only the hard requirements are installed, and without Hydra."""
    blocked = ["deepspeed", "flash_attn", "accelerate", "arctic_inference", "datasets", "hydra", "omegaconf", "peft"]
    blocked += ["triton"]
    # None in sys.modules: an import fails, and a library that only asks whether the package is there hears no.
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked})); import lp, lp.attention.flash; print(*lp.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "LookaheadDecoder" in done.stdout


def test_tracked_files_name_no_machine_and_no_registry() -> None:
    """A path or package index of the machine it was written on breaks a clone elsewhere."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git clone")
    # Put together here, or this file would be its own find.
    folders = "|".join(["work", "root", "home"])
    hosts = "|".join(["pypi" + r"\.", "python" + "hosted", r"download\." + "pytorch", "index" + "-url"])
    pattern = re.compile(rf"(?<![\w.-])/(?:{folders})/|{hosts}")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        except (UnicodeDecodeError, FileNotFoundError):  # weights and pictures; deleted, not yet committed
            continue
        found += [f"{name}:{i}: {match[0]}" for i, line in enumerate(lines, 1) if (match := pattern.search(line))]
    assert not found
