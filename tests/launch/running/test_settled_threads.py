"""The number of threads of an app: the faster one beside what else runs, unless the user says."""

from __future__ import annotations

import pytest
import torch

from launch.running import threads
from launch.running.threads import fastest, settle_threads
from tests.support.tiny_models import tiny_model


@pytest.fixture
def set_to(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of threads that were set; torch has two of its own, and the products' seconds are by number."""
    taken: list[int] = [2]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: taken[-1])
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    return taken


@pytest.mark.parametrize(("two", "taken"), [(4.0, 1), (0.5, 2), (1.05, 2)])
def test_the_faster_number_is_taken(two: float, taken: int, set_to: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads on two busy cores were up to 3.9 times slower than one."""
    monkeypatch.setattr(threads, "_seconds", lambda work, repeats: two if set_to[-1] == 2 else 1.0)
    line = settle_threads(tiny_model())
    assert set_to[-1] == taken and bool(line) == (taken == 1)
    assert not line or line == "threads: 1, which now takes 0.25 of the time of 2; OMP_NUM_THREADS=2 takes 2"


def test_what_the_user_set_stays(set_to: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial would go against what was asked for."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert settle_threads(tiny_model()) == "" and set_to == [2]


def test_a_model_without_plain_layers(set_to: list[int]) -> None:
    """A quantised one has none to try; nothing is divided by zero."""
    assert settle_threads(torch.nn.Embedding(4, 4)) == "" and set_to == [2]
    assert fastest({8: 1.0, 4: 0.95, 1: 3.0}, 8) == 8 and fastest({8: 1.0, 4: 0.8, 1: 3.0}, 8) == 4
