"""What tests on a simulated GPU share."""

import pytest


@pytest.fixture(autouse=True)
def quick_probes(known_findings: None) -> None:
    """The probe of a captured model takes ten times as long as a text."""
