"""What tests on a GPU do otherwise than all others."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def given_step_times() -> None:
    """Step times are measured on the device: that is a part of what is tested there."""
