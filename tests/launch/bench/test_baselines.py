"""transformers' `generate` behind our interface: the tokens of plain decoding, in the steps that it took."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import lp
from launch.bench.baselines import BASELINES, BaselineOptions, hf_generate, register_baseline
from launch.bench.baselines.hf_generate import HFGenerateDecoder, load_draft, missing_release
from launch.bench.baselines.weights import with_shared_weights
from lp.parallel.context import ParallelContext
from tests.support.tiny_models import plain_greedy, tiny_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 1, 4, 1, 5, 9]
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"static": True},
    "prompt_lookup": {"prompt_lookup": 5},
    "draft": {"draft": None},  # a copy of the model, so that every draft is right
    "bad_draft": {"draft": 1},  # another one, so that hardly any is
}


def _decoder(model: PreTrainedModel, kind: str) -> HFGenerateDecoder:
    options = KINDS[kind]
    if options and kind != "static" and (reason := missing_release(BaselineOptions())):
        pytest.skip(reason)
    drafts = {"draft": tiny_model(seed=1) if options.get("draft") else copy.deepcopy(model)}
    return HFGenerateDecoder(model, **(drafts if "draft" in options else options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_tokens_are_plain_ones(arch: str, kind: str) -> None:
    """A baseline that says something else, or says it in steps it did not take, is no baseline."""
    model = tiny_model(arch)
    seen: list[int] = []
    output = _decoder(model, kind).generate(IDS, 24, on_tokens=lambda tokens, step: seen.extend(tokens))
    assert output.tokens == plain_greedy(model, IDS, 24) == seen
    assert output.finish_reason == "length" and output.prefill_s > 0 and output.decode_s > 0
    accepted = [step.accepted for step in output.step_stats]
    assert sum(accepted) + output.steps == 24 and all(s.accepted < s.num_tokens for s in output.step_stats)
    assert output.steps == 24 if kind in ("dynamic", "static") else kind == "bad_draft" or output.steps < 24


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_tokens_are_plain_ones(kind: str) -> None:
    """Sampling by another noise than plain decoding's would compare texts, where speed alone is to differ."""
    model, sampling = tiny_model(), lp.SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=5)
    expected = lp.AutoregressiveDecoder(model).generate(IDS, 20, sampling).tokens
    output = _decoder(model, kind).generate(IDS, 20, sampling)
    assert output.tokens == expected
    drafted = max(step.num_draft for step in output.step_stats)
    assert drafted == 0 if kind in ("dynamic", "static") else drafted > 0, "a processor must not rule drafts out"
    assert kind != "draft" or output.steps < 20


@pytest.mark.parametrize("kind", KINDS)
def test_ends_where_plain_decoding_ends(kind: str) -> None:
    """Drafts may run past EOS within a step; the model's own settings must not creep in."""
    model = tiny_model()
    plain = plain_greedy(model, IDS, 30)
    eos = plain[12]
    expected = lp.AutoregressiveDecoder(model).generate(IDS, 30, eos_token_id=eos)
    model.generation_config = GenerationConfig(repetition_penalty=1.7, eos_token_id=plain[3], do_sample=True)
    output = _decoder(model, kind).generate(IDS, 30, eos_token_id=eos)
    assert (output.tokens, output.finish_reason) == (expected.tokens, "eos")
    assert _decoder(model, kind).generate(IDS, 30, eos_token_id=()).tokens == plain


def test_a_prompt_of_one_token_and_a_boundary() -> None:
    """Nothing to prefill; and rotary frequencies that need the whole prompt at once."""
    model = tiny_model()
    assert HFGenerateDecoder(model).generate([7], 5).tokens == plain_greedy(model, [7], 5)
    long = tiny_model("llama_longrope")
    ids = [1 + i * i % 50 for i in range(60)]
    assert HFGenerateDecoder(long).generate(ids, 5).tokens == plain_greedy(long, ids, 5)


def test_refusals() -> None:
    """Each names what is missing and the way out."""
    model, alone, options = tiny_model(), ParallelContext(), BaselineOptions()
    for name in ("deepspeed_tp", "transformers_tp"):
        with pytest.raises(ValueError, match="there is one; launch with NPROC=2"):
            BASELINES[name].build(model, alone, options)
    with pytest.raises(ValueError, match="needs a draft model; give draft="):
        BASELINES["hf_assisted"].build(model, alone, options)
    with pytest.raises(ValueError, match="give one of the same family"):
        load_draft("demo", model)
    if torch.cuda.device_count() < 2:
        with pytest.raises(ValueError, match=f"torch sees {torch.cuda.device_count()}: leave it out here"):
            BASELINES["accelerate_pp"].build(model, alone, options)


def test_two_baselines_of_one_name_are_refused() -> None:
    """The second would be measured under the name of the first."""
    before = dict(BASELINES)
    with pytest.raises(ValueError, match="'hf_generate' is registered already"):
        register_baseline("hf_generate")(BASELINES["hf_static"].build)
    assert before == BASELINES


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_pipeline_gives_plain_tokens() -> None:
    pytest.importorskip("accelerate")
    model = tiny_model(dtype=torch.float32).cuda()
    decoder = BASELINES["accelerate_pp"].build(model, ParallelContext(), BaselineOptions())
    assert decoder.generate(IDS, 16).tokens == lp.AutoregressiveDecoder(model).generate(IDS, 16).tokens


@pytest.mark.parametrize("arch", ["llama", "gemma3"])  # gemma3 ties its head to its embeddings
def test_a_copy_shares_weights_and_nothing_else(arch: str) -> None:
    """A second copy of a model that fills half a GPU does not fit; one whose modules are shared splits the original."""
    model = tiny_model(arch)
    expected = plain_greedy(model, IDS, 12)
    shared = with_shared_weights(model)
    assert [one.data_ptr() for one in shared.parameters()] == [one.data_ptr() for one in model.parameters()]
    assert not {*map(id, shared.parameters())} & {*map(id, model.parameters())}
    assert not {*map(id, shared.modules())} & {*map(id, model.modules())} and shared.config is not model.config
    assert plain_greedy(shared, IDS, 12) == expected
    for parameter in shared.parameters():
        parameter.data = parameter.data[..., :1].clone()  # as one that splits it
    assert plain_greedy(model, IDS, 12) == expected


def test_drafts_of_an_earlier_release_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stop at tokens that it has not accepted."""
    options = BaselineOptions(draft="demo")
    assert BASELINES["hf_assisted"].missing(options) == missing_release(options)
    monkeypatch.setattr(hf_generate.tf, "__version__", "5.17.0")
    for name in ("hf_assisted", "hf_prompt_lookup"):
        assert "needs transformers 5.18 or newer, and 5.17.0 is installed" in str(BASELINES[name].missing(options))
