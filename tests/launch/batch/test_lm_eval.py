"""lm_eval's tasks by `lp batch`: the figures that lm_eval gets from the model itself."""

from __future__ import annotations

from typing import Any

import pytest

from lp.models.loader import DEMO_MODEL

lm_eval = pytest.importorskip("lm_eval", reason="the package lm_eval is not installed; pip install 'lm_eval[api]'")

from launch.batch.lm_eval import BatchModel, answered  # noqa: E402
from lp.errors import UserError  # noqa: E402
from tests.launch.serve.test_lm_eval import check_equal, evaluate, tasks  # noqa: E402, F401  (a fixture)


def test_lm_eval_measures_what_it_measures_of_the_model(tasks: list[Any]) -> None:  # noqa: F811
    """Every log probability, every text, every figure."""
    through = evaluate("lp-batch", {"pretrained": str(DEMO_MODEL), "device": "cpu", "max_sequences": 4}, tasks)
    own = evaluate("hf", {"pretrained": str(DEMO_MODEL), "dtype": "float32", "device": "cpu"}, tasks)
    check_equal(through, own)


def test_a_gpu_that_nobody_has_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm_eval's command says cuda:0 where no device is given: a machine without a GPU could not run the recipe."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device, asked in (("cuda:0", False), (None, False), ("cpu", True)):
        model = BatchModel(str(DEMO_MODEL), device=device)
        assert any(each.startswith("model.device=") for each in model._overrides) == asked


def test_a_refused_request_says_why() -> None:
    """An answer that is left out would be another request's."""
    with pytest.raises(UserError, match="a request of lm_eval was refused: max_tokens is -2"):
        answered([{"prompt": "a", "max_tokens": 1}, {"prompt": "a", "max_tokens": -2}], ["model=demo"])


def test_a_run_that_fails_says_so() -> None:
    with pytest.raises(RuntimeError, match="lp batch ended with the exit code"):
        answered([{"prompt": "a"}], ["model=hf", "model.name=no-such-folder"])
