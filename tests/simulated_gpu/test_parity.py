"""tests/gpu on the simulated device: what fails there for a reason of its own would be found first on a GPU."""

from __future__ import annotations

import pytest
import torch

from lp.config import Capture
from tests.gpu import parity, test_graph
from tests.support.simulated_cuda import SimulatedCuda

PREFIXES = (0, 1, 17, 60)


@pytest.fixture
def on_the_simulated_device(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(parity, "PREFIXES", PREFIXES)
    monkeypatch.setattr(test_graph, "GRAPH", Capture.GRAPH)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash"])
def test_captured_steps_back_to_back(attention: str, on_the_simulated_device: None) -> None:
    """A block of inputs that is filled again before the device has copied it, or a prefix that a step's padding has
    overwritten, gives other logits.
    """
    figures: dict[str, object] = {}
    names = list(parity.layouts())
    test_graph._check(attention, torch.float32, Capture.GRAPH, PREFIXES, names, figures.__setitem__)
    assert "error" in figures


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_captured_text(attention: str, on_the_simulated_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_graph, "GPU_DRY_RUN", True)  # float32
    test_graph.test_captured_text_is_that_of_plain_decoding(attention, lambda name, value: None)
