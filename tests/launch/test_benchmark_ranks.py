"""`lp benchmark` on two ranks that divide a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.bench.records import load_records
from launch.bench.totals import totals
from tests.support.apps import save_tiny_model, tiny_settings
from tests.support.forked import Forked
from tests.support.workers import app


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_settings(save_tiny_model(tmp_path_factory.mktemp("model"), context=1024))


def test_methods_of_ranks_that_divide_a_model_are_compared(forked: Forked, settings: list[str], tmp_path: Path) -> None:
    """Rank 0 compared alone, by a model of which it has a part: the job ended by its time-out."""
    asked = [*settings, "W=2", "parallel.tp=2", "methods=[lookahead,plain]", "parallel.timeout_s=30", f"out={tmp_path}"]
    launch = forked.start(2, app.main, tmp_path, "benchmark", *asked, env={"LP_RUN_DIR": str(tmp_path / "run")})
    launch.check(240)
    assert [(each.method, each.differing) for each in totals(load_records(tmp_path))] == [
        ("lookahead", 0),
        ("plain", 0),
    ]
