"""`pytest -p tests.support.ledger --ledger FILE`: leaves out tests that have passed by FILE, and adds those that pass.

So that a run of many minutes goes on where it was stopped. `scripts/versions.sh` has a FILE for each environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ledger", type=Path, required=True, metavar="FILE", help="what has passed, a test a line")


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)  # of pytest-xdist's workers, one of which may start late
    config.pluginmanager.register(_Ledger(config.option.ledger, None if given is None else given["done"]))


class _Ledger:
    """Leaves out what is done, and writes down what passes or is skipped.

    Args:
        path: the ledger's file, a line for each test that passed or was skipped.
        done: tests of the file when the run began; None: this process reads the file, and is the one that writes it.
    """

    def __init__(self, path: Path, done: list[str] | None) -> None:
        self.path = path
        self.writes = done is None
        lines = path.read_text(encoding="utf-8").splitlines() if done is None and path.exists() else []
        self.done = [line.partition(" ")[2] for line in lines] if done is None else done
        self.outcomes: dict[str, str] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of pytest-xdist what is done: every worker must leave out the same tests."""
        node.workerinput["done"] = self.done

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = {*self.done}
        left_out = [item for item in items if item.nodeid in done]
        items[:] = [item for item in items if item.nodeid not in done]
        config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.writes:
            return
        name = report.nodeid.partition("@")[0]  # pytest-xdist appends the group
        worst = {"passed": 0, "skipped": 1, "failed": 2}
        self.outcomes[name] = max(report.outcome, self.outcomes.get(name, "passed"), key=worst.__getitem__)
        if report.when == "teardown" and (outcome := self.outcomes.pop(name)) != "failed":
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{outcome} {name}\n")
