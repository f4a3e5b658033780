"""tests/gpu on the simulated device: what fails there for a reason of its own would be found first on a GPU."""

from __future__ import annotations

import pytest
import torch

import lp
from lp.config import Capture
from tests.gpu import parity, test_graph, test_nccl
from tests.support.simulated_cuda import SimulatedCuda, run_on_gpus
from tests.support.tiny_models import tiny_model

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
    model = parity.model_of("GQA", 64, torch.float32, layers=2)
    test_graph._check(model, attention, torch.float32, Capture.GRAPH, PREFIXES, names, figures.__setitem__)
    assert "error" in figures


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_captured_text(attention: str, on_the_simulated_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_graph, "GPU_DRY_RUN", True)  # float32
    test_graph.test_captured_text_is_that_of_plain_decoding(attention, lambda name, value: None)


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_a_layer_of_some_width(attention: str, on_the_simulated_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "GPU_DRY_RUN", True)  # of a sixteenth of the width
    figures: dict[str, object] = {}
    test_graph.test_a_layer_of_real_width_is_as_near(attention, torch.float32, figures.__setitem__)
    assert "error" in figures


def test_texts_of_an_engine(on_the_simulated_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    test_graph.test_texts_of_an_engine_are_those_of_plain_decoding(torch.float32, monkeypatch, lambda name, value: None)


def test_a_replica_of_captured_steps(gpu: SimulatedCuda) -> None:
    whole = tiny_model(sharpness=2.0)

    def body(context: lp.ParallelContext, own: SimulatedCuda) -> bool:
        test_nccl.decodes_as_the_whole_model(context, whole)
        return True

    assert run_on_gpus(2, body, tp=True) == [True, True]
