"""What scripts/versions.sh stands on: a run of the suite that goes on, and the lowest releases of pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.lowest_versions import lowest
from tests.conftest import Processes

TESTS = """
import pathlib, pytest
@pytest.mark.xdist_group("both")
@pytest.mark.parametrize("case", ["a", "b c"])
def test_passes(case): ...
def test_skipped(): pytest.skip("no reason")
def test_fails(): assert pathlib.Path("mended").exists()
@pytest.fixture
def ends_badly():
    yield
    assert pathlib.Path("mended").exists()
def test_whose_end_fails(ends_badly): ...
"""


@pytest.mark.subset(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_with_what_has_not_passed(workers: int, tmp_path: Path, processes: Processes) -> None:
    """A failure that counted as done would never be seen again; what passed would take its minutes again."""
    (tmp_path / "test_some.py").write_text(TESTS)
    ledger = tmp_path / "ledger"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.ledger",
        "--ledger",
        str(ledger),
        "-p",
        "no:cacheprovider",
    ]
    command += ["--rootdir", str(tmp_path), "-n", str(workers), "--dist", "loadgroup", "test_some.py"]

    def run() -> tuple[int, str, list[str]]:
        done = processes.run(command, cwd=tmp_path)
        return done.returncode, done.stdout.splitlines()[-1], sorted(ledger.read_text().splitlines())

    passed = [f"passed test_some.py::test_passes[{case}]" for case in ("a", "b c")]
    skipped = ["skipped test_some.py::test_skipped"]
    status, closing, lines = run()
    assert (status, lines) == (1, passed + skipped), closing
    (tmp_path / "mended").touch()
    status, closing, lines = run()
    mended = [f"passed test_some.py::{name}" for name in ("test_fails", "test_whose_end_fails")]
    assert (status, lines) == (0, sorted(passed + mended) + skipped), closing
    assert "2 passed" in closing
    status, closing, _ = run()
    assert status == 5, closing  # of pytest: nothing was run


def test_the_lowest_releases() -> None:
    """What has no lower bound is left to pip; an upper bound is no release to take."""
    assert lowest(["torch>=2.8", "numpy", "pytest>=8,<9.2", "hydra-core>=1.3,<1.4", "torch>=2.8"]) == [
        "hydra-core==1.3",
        "pytest==8",
        "torch==2.8",
    ]


# In place of an interpreter: it makes environments whose pip fails for the oldest releases, and whose tests all pass.
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-m pip install"*lowest.txt) echo "pip: no such releases" >&2; exit 1 ;;
  "-m pytest"*collect-only*no_such_test.py) exit 4 ;;
  "-m pytest"*collect-only*) ;;
  "-m pytest"*.py) exit 5 ;;
  "-m pytest"*) echo "$*" >"$(dirname "$0")/pytest" ;;
  *) ;;
esac
"""


def test_an_environment_that_cannot_be_made_leaves_the_others(tmp_path: Path, processes: Processes) -> None:
    """pip may find no releases that go together today: the suite on the others, of an hour, must not wait for that."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    env = {"PYTHON": str(python), "VERSIONS": str(tmp_path / "versions")}
    ran = processes.run(["bash", "scripts/versions.sh", "oldest", "pinned"], env)
    assert ran.returncode == 2 and "pip: no such releases" in ran.stderr, ran.stderr
    assert "versions: oldest: the environment could not be made" in ran.stderr
    assert "versions: pinned: 0 passed" in ran.stderr and ran.stderr.endswith("failed with: oldest\n")
    assert not (tmp_path / "versions" / "oldest" / "lp-recipe").exists(), "it would count as made"
    assert (tmp_path / "versions" / "pinned" / "lp-recipe").exists()
    pytest_was_given = (tmp_path / "versions" / "pinned" / "bin" / "pytest").read_text()
    assert " -c pyproject.toml " in pytest_was_given, "with environments elsewhere, it would find no settings"


def test_a_wrong_path_is_no_pass(tmp_path: Path, processes: Processes) -> None:
    """pytest-xdist ends alike where all tests have passed before, and where there are none at a path."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    env = {"PYTHON": str(python), "VERSIONS": str(tmp_path / "versions")}
    for path, status, said in (("done.py", 0, "none failed"), ("no_such_test.py", 2, "some FAILED")):
        ran = processes.run(["bash", "scripts/versions.sh", "pinned", "--", path], env)
        assert ran.returncode == status and said in ran.stderr, ran.stderr
