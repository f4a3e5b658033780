"""Methods side by side: the order of the runs, medians, and where tokens part."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lp
from launch.bench.alternation import alternate
from launch.bench.compare import MARGIN, WIDTHS, Prediction, differences, first_difference
from lp.config import KVDtype
from lp.engine.interrupts import Interrupted
from lp.engine.output import GenerationOutput
from tests.support.tiny_models import BOUNDARY, drawn_text, tiny_model


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

    def interrupted() -> GenerationOutput:
        raise Interrupted(GenerationOutput([1], "interrupted", []), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        alternate({"a": interrupted}, 1)


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
    assert Prediction.after(model, [1, 2, 3, 4]).gap() == pytest.approx(float(best[0] - best[1]), abs=1e-6)
    tokens = {"plain": [4, 5, 6], "same": [4, 5, 6], "early": [4, 9], "short": [4]}
    found = differences(model, [1, 2, 3], tokens, tokens["plain"])
    assert [(d.method, d.position, d.token, d.plain_token) for d in found] == [
        ("early", 1, 9, 5),
        ("short", 1, None, 5),
    ]
    assert found[0].gap == pytest.approx(float(best[0] - best[1]), abs=1e-6) and not found[0].near_tie


def test_equal_logits_are_a_near_tie(model: LlamaForCausalLM) -> None:
    """A difference there is no fault of the decoder."""
    torch.nn.init.zeros_(model.lm_head.weight)
    (found,) = differences(model, [1], {"plain": [0], "other": [1]}, [0])
    assert found.gap == 0.0 and found.near_tie


@pytest.mark.parametrize("width", WIDTHS)
def test_what_counts_as_a_tie_is_asked_of_the_model(
    model: LlamaForCausalLM, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constant fitted on a small model calls the rounding of a trained one a wrong token, or a wrong token a tie."""
    prefix = [1 + index % 40 for index in range(80)]
    exact = Prediction.after(model.double(), prefix)
    assert 0 < exact.near_tie < 1e-13
    forward = LlamaForCausalLM.forward

    def rounding(self: LlamaForCausalLM, input_ids: torch.Tensor, **how: Any) -> Any:
        output = forward(self, input_ids, **how)
        if input_ids.shape[1] == width:
            output.logits[..., 3] += 0.01  # what another kernel does
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", rounding)
    assert Prediction.after(model, prefix).near_tie == pytest.approx(MARGIN * 0.01)


def test_a_tie_of_a_coarse_dtype_is_no_less_than_its_rounding(model: LlamaForCausalLM) -> None:
    """All passes may round a logit alike, and another kernel the other way."""
    prediction = Prediction.after(model.bfloat16(), [1, 2])
    assert prediction.near_tie >= MARGIN * 2**-7 * float(prediction.logits.abs().max())


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_scores_are_those_of_the_cache(kv_dtype: str) -> None:
    """By scores over keys and values that are not rounded, a wrong token might be excused, and a near-tie be none."""
    model, prefix = tiny_model(), drawn_text(random.Random(3), 30)
    plain = lp.AutoregressiveDecoder(model, kv_dtype=kv_dtype).generate(prefix, 1, output_logits=True).logits[0]
    found = Prediction.after(model, prefix, kv_dtype=KVDtype(kv_dtype))
    assert (found.logits - plain).abs().max() < 1e-9 and found.near_tie < 1e-5
    assert (Prediction.after(model, prefix).logits - plain).abs().max() > 1e-4


@pytest.mark.parametrize("arch", ["bamba", "llama_dynamic", "llama_longrope"])
@pytest.mark.parametrize("length", [12, BOUNDARY + 1, BOUNDARY + 6, BOUNDARY + 40])
def test_what_another_pass_means_otherwise_is_not_rounding(arch: str, length: int) -> None:
    """Other rotary frequencies before a boundary, or positions that a model counts anew, would excuse wrong tokens."""
    prediction = Prediction.after(tiny_model(arch), drawn_text(random.Random(3), length))
    assert prediction.near_tie < 1e-5 * float(prediction.logits.std())  # recurrent states are float32


SAMPLED = [
    lp.SamplingParams(seed=3),
    lp.SamplingParams(seed=4, temperature=0.3, top_k=5, top_p=0.9),
    lp.SamplingParams(seed=5, temperature=1.7, min_p=0.01, typical_p=0.9, repetition_penalty=1.3),
]


@pytest.mark.parametrize("sampling", SAMPLED)
def test_a_choice_is_that_of_plain_decoding(model: LlamaForCausalLM, sampling: lp.SamplingParams) -> None:
    """A gap computed from other scores than the decoder's would call a bug a near-tie."""
    model = model.double()
    tokens = lp.AutoregressiveDecoder(model).generate([1, 2, 3], 20, sampling, eos_token_id=()).tokens
    for at, token in enumerate(tokens):
        prediction = Prediction.after(model, [1, 2, 3, *tokens[:at]], sampling)
        assert int(prediction.scores(prediction.logits).argmax()) == token


def _prediction(probabilities: list[float], **sampling: float) -> Prediction:
    logits = torch.tensor(probabilities, dtype=torch.float64).log()
    return Prediction(prefix=[1], logits=logits, near_tie=1e-4, sampling=lp.SamplingParams(seed=0, **sampling))  # type: ignore[arg-type]


def test_a_near_tie_is_one_of_scores(model: LlamaForCausalLM) -> None:
    """Two close logits explain nothing where the noise keeps them apart, nor far ones where it does not."""
    noise = (_prediction([0.5, 0.5])).scores(torch.zeros(2, dtype=torch.float64))
    drawn, other = int(noise.argmax()), int(noise.argmin())
    assert not _prediction([0.5, 0.5]).may_be(other, drawn)
    logits = -noise  # the noise makes up for it
    assert Prediction.after(model, [1]).gap() > 0 and abs(float(logits[0] - logits[1])) > 0.01
    tied = Prediction(prefix=[1], logits=logits, near_tie=1e-4, sampling=lp.SamplingParams(seed=0))
    assert tied.may_be(0, 1) and tied.may_be(1, 0)
    assert tied.gap() == pytest.approx(0.0, abs=1e-12)


def test_the_edge_of_a_warper_is_a_near_tie() -> None:
    """Top-p drops a token whose share is a rounding error too small: with it goes a choice that was no close call."""
    best_noise = int(_prediction([1 / 3] * 3).scores(torch.zeros(3, dtype=torch.float64)).argmax())
    last, first = best_noise, (best_noise + 1) % 3
    probabilities = [0.0] * 3
    probabilities[first], probabilities[3 - first - last], probabilities[last] = 0.4, 0.35, 0.25
    edge, inside = _prediction(probabilities, top_p=0.75 - 1e-6), _prediction(probabilities, top_p=0.7)
    chosen = int(inside.scores(inside.logits).argmax())
    assert chosen != last and edge.may_be(last, chosen) and not inside.may_be(last, chosen)


def test_a_single_token_left_has_no_gap() -> None:
    """JSON has no infinity."""
    assert _prediction([0.9, 0.1], top_k=1).gap() is None


def test_rejection_promises_no_equal_tokens(model: LlamaForCausalLM) -> None:
    """Equal in distribution is what it is held to elsewhere."""
    sampling = lp.SamplingParams(seed=0, verifier="rejection")  # type: ignore[arg-type]
    assert differences(model, [1], {"plain": [0], "other": [1]}, [0], sampling) == []
