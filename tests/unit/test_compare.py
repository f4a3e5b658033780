"""Methods side by side: the order of the runs, medians, and where tokens part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lp.bench.compare import alternate, differences, first_difference, logit_gap
from lp.decoding.base import GenerationOutput


def _recorder(calls: list[str], name: str, times_s: list[float]) -> Callable[[], GenerationOutput]:
    def generate() -> GenerationOutput:
        calls.append(name)
        return GenerationOutput([1], "length", [], decode_s=times_s.pop(0))

    return generate


def test_methods_alternate_and_each_round_begins_with_another() -> None:
    """A machine that warms up or slows down must not favour one method."""
    calls: list[str] = []
    methods = {name: _recorder(calls, name, [3.0, 1.0, 2.0]) for name in "abc"}
    measured = alternate(methods, 3)
    assert "".join(calls) == "abcbcacab"
    assert {name: result.decode_s for name, result in measured.items()} == {"a": 2.0, "b": 2.0, "c": 2.0}


def test_an_interrupted_run_is_not_measured() -> None:
    """Half a run would show up as a slow or short one."""
    with pytest.raises(KeyboardInterrupt):
        alternate({"a": lambda: GenerationOutput([1], "interrupted", [])}, 1)


@pytest.mark.parametrize(
    ("tokens", "plain", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 3], 1), ([1, 3], [1], 1), ([], [], None)],
)
def test_first_difference(tokens: list[int], plain: list[int], at: int | None) -> None:
    """A text that ends too early differs too."""
    assert first_difference(tokens, plain) == at


@pytest.fixture
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


def test_gap_is_that_of_the_common_prefix(model: LlamaForCausalLM) -> None:
    with torch.inference_mode():
        best = model(torch.tensor([[1, 2, 3, 4]])).logits[0, -1].topk(2).values
    assert logit_gap(model, [1, 2, 3, 4]) == pytest.approx(float(best[0] - best[1]), abs=1e-6)
    tokens = {"plain": [4, 5, 6], "same": [4, 5, 6], "early": [4, 9], "short": [4]}
    found = differences(model, [1, 2, 3], tokens, "plain")
    assert [(d.method, d.position, d.token, d.plain_token) for d in found] == [
        ("early", 1, 9, 5),
        ("short", 1, None, 5),
    ]
    assert found[0].gap == pytest.approx(float(best[0] - best[1]), abs=1e-6) and not found[0].near_tie


def test_equal_logits_are_a_near_tie(model: LlamaForCausalLM) -> None:
    """A difference there is no fault of the decoder."""
    torch.nn.init.zeros_(model.lm_head.weight)
    (found,) = differences(model, [1], {"plain": [0], "other": [1]}, "plain")
    assert found.gap == 0.0 and found.near_tie
