""".github/workflows: what they run is there, they may read the repository alone, and no job runs without end."""

from __future__ import annotations

import copy
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONS = {"actions/checkout", "actions/setup-python"}  # GitHub's own
MAX_MINUTES = 90
MADE = ("dist/", "fresh/")  # by a step before
SUFFIXES = (".sh", ".py", ".txt", ".toml")

Workflow = dict[str, Any]


def workflow(path: Path) -> Workflow:
    return yaml.safe_load(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def variants(job: Workflow) -> Iterator[dict[str, str]]:
    """Every combination of a job's matrix, by name."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        yield dict(zip(matrix, values, strict=True))


def commands(job: Workflow) -> Iterator[list[str]]:
    """The words of every line that a job's steps run, in every variant of it."""
    for variant, step in itertools.product(variants(job), job["steps"]):
        text = step.get("run", "")
        for name, value in variant.items():
            text = text.replace("${{ matrix." + name + " }}", value)
        yield from (shlex.split(line) for line in text.splitlines())


def files(job: Workflow) -> Iterator[str]:
    """The files of the repository that a job names."""
    for step in job["steps"]:
        yield from step.get("with", {}).get("cache-dependency-path", "").split()
    for word in itertools.chain.from_iterable(commands(job)):
        is_file = "/" in word or word.endswith(SUFFIXES)
        if is_file and not word.startswith(("-", "$", *MADE)):
            yield word


def faults(workflow: Workflow) -> Iterator[str]:
    """What is wrong with a workflow, in words."""
    if workflow.get("permissions") != {"contents": "read"}:
        yield f"permissions are {workflow.get('permissions')}"
    for name, job in workflow["jobs"].items():
        if "permissions" in job:
            yield f"{name} has permissions of its own"
        if not 0 < job.get("timeout-minutes", 0) <= MAX_MINUTES:
            yield f"{name} may run for {job.get('timeout-minutes')} minutes"
        yield from (f"{name} names {file}, which is not there" for file in files(job) if not (ROOT / file).is_file())
        for step in (step for step in job["steps"] if "uses" in step):
            action, _, version = step["uses"].partition("@")
            if action not in ACTIONS or not re.fullmatch(r"v\d+", version):
                yield f"{name} uses {step['uses']}"
            if action == "actions/checkout" and step.get("with", {}).get("persist-credentials", True):
                yield f"{name} keeps the token of the checkout"
        for words in commands(job):
            if "${{" in words:
                yield f"{name} runs an expression: {' '.join(words)}"
            if words[:2] == ["bash", "scripts/versions.sh"] and words[2:] not in (["newest"], ["oldest"], ["pinned"]):
                yield f"scripts/versions.sh has no {words[2:]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_workflows_run_what_is_there(path: Path) -> None:
    """A script that was renamed would fail on the first push, where nobody waits for it."""
    found = workflow(path)
    assert list(itertools.chain.from_iterable(map(commands, found["jobs"].values())))
    assert not list(faults(found))


def first_job(workflow: Workflow) -> Workflow:
    return next(iter(workflow["jobs"].values()))  # type: ignore[no-any-return]


BREAK: dict[str, Callable[[Workflow], Any]] = {
    "a script that is not there": lambda w: first_job(w)["steps"].append({"run": "bash scripts/tests.sh"}),
    "a file of the second line": lambda w: first_job(w)["steps"].append({"run": "pip --version\npip -r pins.txt"}),
    "a file that is not there for the cache": lambda w: first_job(w)["steps"].append(
        {"uses": "actions/setup-python@v6", "with": {"cache-dependency-path": "constraints.txt\nsetup.py"}}
    ),
    "no limit of time": lambda w: first_job(w).pop("timeout-minutes"),
    "all permissions": lambda w: w.pop("permissions"),
    "more permissions": lambda w: w["permissions"].update(packages="write"),
    "permissions of a job": lambda w: first_job(w).update(permissions="write-all"),
    "anybody's action": lambda w: first_job(w)["steps"].append({"uses": "someone/action@v1"}),
    "an action of a branch": lambda w: first_job(w)["steps"].append({"uses": "actions/setup-python@main"}),
    "a token that stays": lambda w: first_job(w)["steps"][0].pop("with"),
    "a title that a shell would run": lambda w: first_job(w)["steps"].append({"run": "echo ${{ github.head_ref }}"}),
    "releases that there are not": lambda w: first_job(w)["steps"].append({"run": "bash scripts/versions.sh latest"}),
}


@pytest.mark.parametrize("fault", BREAK)
def test_a_broken_workflow_is_seen(fault: str) -> None:
    """The check above must not pass because it looks past a line: each fault, in every workflow."""
    for path in FILES:
        broken = copy.deepcopy(workflow(path))
        BREAK[fault](broken)
        assert list(faults(broken)), f"{fault} in {path.name}"


def test_ci_runs_what_ci_runs_here() -> None:
    """.ci/run and the workflow are two names of one thing, on the Python of the pins and on none that is too old."""
    test = workflow(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]
    (script,) = re.findall(r"/\.\./(\S+\.sh)", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    assert ["bash", script] in list(commands(test))
    pinned = re.search(r"on Python (3\.\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    least = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    versions = test["strategy"]["matrix"]["python"]
    assert pinned and pinned[1] in versions
    assert least and min(int(version.removeprefix("3.")) for version in versions) == int(least[1])
