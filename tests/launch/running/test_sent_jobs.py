"""Jobs as Hydra's launchers send them to other processes and machines."""

from __future__ import annotations

from typing import Any

import pytest

from launch.running.hydra_app import _sent

cloudpickle = pytest.importorskip("cloudpickle", reason="no package that pickles jobs is installed")


def test_a_job_can_be_pickled() -> None:
    """experiment=joblib, slurm and ray: each launcher pickles the job, which held a generator that cannot be."""

    def task(config: Any) -> float | None:
        return float(config.W)

    assert callable(cloudpickle.loads(cloudpickle.dumps(_sent(task))))
