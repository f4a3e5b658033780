"""llama.cpp behind our interface: what it lacks is found early, and its tokens and steps are what it took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lp
from launch.bench.baselines import BASELINES, BaselineOptions
from launch.bench.baselines import llama_cpp as peer
from launch.bench.to_gguf import interleaved, tensors_of, write_gguf
from lp.commands import install_command
from tests.support.tiny_models import plain_greedy, tiny_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 1, 4, 1, 5, 9]
NAMES = ["llama_cpp", "llama_cpp_prompt_lookup"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named_with_its_remedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found late, it costs the run that was measured until then."""
    missing = BASELINES[name].missing
    monkeypatch.setattr(peer, "is_installed", lambda package: False)
    assert install_command("llama-cpp") in str(missing(BaselineOptions(gguf=__file__)))
    monkeypatch.setattr(peer, "is_installed", lambda package: True)
    assert "give gguf=FILE" in str(missing(BaselineOptions()))
    assert "absent.gguf is none" in str(missing(BaselineOptions(gguf=str(tmp_path / "absent.gguf"))))
    assert "sampling=greedy" in str(missing(BaselineOptions(gguf=__file__, greedy=False)))
    assert missing(BaselineOptions(gguf=__file__)) is None
    with pytest.raises(ValueError, match="give gguf=FILE"):
        BASELINES[name].build(tiny_model(), lp.ParallelContext(), BaselineOptions())


def test_rotary_pairs_come_to_lie_side_by_side() -> None:
    """Elsewhere the model runs and writes nonsense."""
    heads, head_dim = 2, 4
    rows = torch.arange(heads * head_dim)[:, None]
    assert interleaved(rows, heads)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_other_models_are_not_converted() -> None:
    """Without their biases they would write other text."""
    with pytest.raises(ValueError, match=r"a qwen2 model; .* use llama.cpp's own"):
        tensors_of(tiny_model("qwen2"))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_steps(name: str, tmp_path: Path) -> None:
    """A peer that says something else, or says it in steps it did not take, is no comparison."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    model = tiny_model("llama")
    path = str(tmp_path / "tiny.gguf")
    write_gguf(model, path)
    decoder = BASELINES[name].build(model, lp.ParallelContext(), BaselineOptions(gguf=path, num_tokens=5))
    seen: list[int] = []
    plain = plain_greedy(model, IDS, 24)
    for _ in range(2):  # the second one on the context of the first
        seen.clear()
        output = decoder.generate(IDS, 24, on_tokens=lambda tokens, step: seen.extend(tokens), eos_token_id=())
        assert output.tokens == plain == seen
        accepted = sum(step.accepted for step in output.step_stats)
        assert output.finish_reason == "length" and accepted + output.steps == 24
        assert (accepted > 0) == (name != "llama_cpp"), "the text repeats itself"
    eos = plain[12]
    expected = lp.AutoregressiveDecoder(model).generate(IDS, 24, eos_token_id=eos)
    output = decoder.generate(IDS, 24, eos_token_id=eos)
    assert (output.tokens, output.finish_reason) == (expected.tokens, "eos")
    assert decoder.generate([7], 5, eos_token_id=()).tokens == plain_greedy(model, [7], 5)
    with pytest.raises(ValueError, match="take greedy decoding"):
        decoder.generate(IDS, 5, lp.SamplingParams(temperature=0.7))
    with pytest.raises(ValueError, match="of this very model"):
        BASELINES[name].build(
            tiny_model("llama", vocab_size=77), lp.ParallelContext(), BaselineOptions(gguf=path)
        ).generate([1, 2], 2)
