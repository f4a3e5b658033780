"""The decode loop on a simulated GPU gives the tokens of plain decoding on the CPU, with and without captured steps.

It raises where a GPU would: tensors of two devices in one operation, a host tensor in a collective, waiting in a
capture. What a graph baked in, or memory that nothing has written, changes a token.
"""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel, RepetitionPenaltyLogitsProcessor

import lp
from lp.attention import flash_cuda
from lp.budget.step_times import StepTimes
from lp.config import Capture
from lp.models.graph_recorder import GraphRecorder
from lp.models.runner import ModelRunner
from lp.parallel.context import ParallelContext
from lp.sampling.penalties import CountPenalty
from tests.conftest import some_of
from tests.support.simulated_cuda import SimulatedCuda, run_on_gpus
from tests.support.tiny_models import MATRIX, drawn_text, plain_greedy, tiny_model

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
FEW = lp.LookaheadConfig(window_size=2, ngram_size=3, guess_set_size=2)  # of few shapes, each captured once
NEW = 16
# They take no tree mask.
REFUSED = {"bloom", "falcon_alibi", "roformer", "rwkv", "gpt_neo", "mpt", "t5", "mamba"}
# Their rotary frequencies change with the length, so that `auto` does not try to capture them.
SHIFTING = {"llama_dynamic", "llama_longrope", "phi3_longrope"}
# Their forward pass waits for the GPU: plain experts ask which are used, Falcon's rotary asks whether to scale.
WAITING = {
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "falcon",
    "qwen3_next", "qwen3_5_moe", "granitemoehybrid", "nemotron_h", "lfm2_moe",
}  # fmt: skip


def on_gpu(model: PreTrainedModel, index: int = 0) -> Any:
    """A copy of a model on a simulated GPU."""
    return copy.deepcopy(model).to(f"cuda:{index}")


def prompts(seed: str) -> list[list[int]]:
    """Two prompts of different lengths: what a graph baked in with the first is wrong in the second."""
    rng = random.Random(seed)
    return [drawn_text(rng, 9), drawn_text(rng, 30)]


@pytest.mark.subset(5)
@pytest.mark.parametrize("arch", some_of([arch for arch in MATRIX if arch not in REFUSED], 12))
def test_an_architecture_on_a_gpu(arch: str, gpu: SimulatedCuda) -> None:
    """What a model does with a cache, a mask or a position that the CPU forgives and a GPU does not."""
    model = tiny_model(arch)
    texts = prompts(arch)
    expected = [plain_greedy(model, ids, NEW) for ids in texts]
    moved = on_gpu(model)
    decoder = lp.LookaheadDecoder(moved, FEW, capture="off")
    assert decoder.generate(texts[1], NEW, eos_token_id=()).tokens == expected[1]
    decoder = lp.LookaheadDecoder(moved, FEW, capture="auto")
    assert [decoder.generate(ids, NEW, eos_token_id=()).tokens for ids in texts] == expected
    captured = decoder.runner.captured is not None
    assert captured == (arch not in SHIFTING | WAITING), f"captured: {captured}; sort {arch} into the right set"
    assert torch.cuda.current_stream() is gpu.default_stream, "a capture left its stream the current one"


SAMPLING: dict[str, lp.SamplingParams] = {
    "coupled": lp.SamplingParams(temperature=0.8, seed=3),
    "top-k": lp.SamplingParams(temperature=0.9, top_k=20, seed=4),
    "top-p": lp.SamplingParams(temperature=0.9, top_p=0.8, seed=5),
    "min-p and typical": lp.SamplingParams(min_p=0.02, typical_p=0.9, seed=6),
    "repetition penalty": lp.SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=7),
}


@pytest.mark.subset(3)
@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("how", SAMPLING)
def test_sampled_text_on_a_gpu(how: str, capture: str, gpu: SimulatedCuda) -> None:
    """Noise, warpers and penalties make tensors of their own; one on the host is found when it meets the scores."""
    model = tiny_model()
    plain = lp.AutoregressiveDecoder(model)
    decoder = lp.LookaheadDecoder(on_gpu(model), CONFIG, capture=capture)
    for ids in prompts(how):
        assert decoder.generate(ids, NEW, SAMPLING[how]).tokens == plain.generate(ids, NEW, SAMPLING[how]).tokens


@pytest.mark.subset(1)
@pytest.mark.parametrize("capture", ["off", "graph"])
def test_rejection_on_a_gpu(capture: str, gpu: SimulatedCuda) -> None:
    """Draws are the host's, probabilities the GPU's: the same draws as on the CPU give the same tokens."""
    model = tiny_model()
    sampling = lp.SamplingParams(temperature=0.8, seed=8, verifier=lp.Verifier.REJECTION)
    on_cpu = lp.LookaheadDecoder(model, CONFIG)
    decoder = lp.LookaheadDecoder(on_gpu(model), CONFIG, capture=capture)
    for ids in prompts("rejection"):
        assert decoder.generate(ids, NEW, sampling).tokens == on_cpu.generate(ids, NEW, sampling).tokens


@pytest.mark.parametrize("capture", ["off", "graph"])
def test_what_a_call_may_ask_for_on_a_gpu(capture: str, gpu: SimulatedCuda) -> None:
    """Processors of the caller, scores that are returned and criteria that see the text each bring tensors along."""
    model = tiny_model()
    ids = prompts("asked")[1]
    processors: list[LogitsProcessor] = [RepetitionPenaltyLogitsProcessor(1.2)]
    seen: list[torch.device] = []

    def criterion(input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        seen.append(input_ids.device)
        return False

    plain = lp.AutoregressiveDecoder(model).generate(ids, NEW, logits_processor=processors, output_scores=True)
    output = lp.LookaheadDecoder(on_gpu(model), CONFIG, capture=capture).generate(
        ids,
        NEW,
        logits_processor=processors,
        output_scores=True,
        output_logits=True,
        stopping_criteria=[criterion],
    )
    assert output.tokens == plain.tokens
    assert output.scores is not None and plain.scores is not None and output.logits is not None
    assert torch.allclose(output.scores.cpu(), plain.scores) and not output.logits.isnan().any()
    assert {device.type for device in seen} == {"cuda"}, "transformers' criteria see the text on the model's device"


def test_plain_decoding_on_a_gpu(gpu: SimulatedCuda) -> None:
    """The oracle of tests on real GPUs, and what speeds are compared with there."""
    model = tiny_model()
    ids = prompts("plain")[1]
    for sampling in (None, SAMPLING["top-p"]):
        plain = lp.AutoregressiveDecoder(model).generate(ids, NEW, sampling)
        assert lp.AutoregressiveDecoder(on_gpu(model)).generate(ids, NEW, sampling).tokens == plain.tokens
        decoder = lp.PlainDecoder(on_gpu(model))
        assert decoder.runner.captured, "as lookahead is"
        assert decoder.generate(ids, NEW, sampling).tokens == plain.tokens


TIMES = StepTimes((1, 8, 16, 32, 64), (1e-3, 1.1e-3, 1.2e-3, 1.6e-3, 2.5e-3), 1e-3)
SLOW = StepTimes((1, 8, 16), (1e-3, 8e-3, 16e-3), 1e-3)  # nothing pays: plain steps


@pytest.mark.parametrize("arch", some_of(["qwen3_5", "lfm2", "mamba2"], 2))
def test_captured_steps_of_many_sizes_over_recurrent_states(arch: str, gpu: SimulatedCuda) -> None:
    """Each graph keeps what recurrent layers saw in memory of its own: states must go on from that of the last step."""
    model = tiny_model(arch)
    config = lp.LookaheadConfig(adaptive=True, window_size=4, ngram_size=3, guess_set_size=6)
    times = StepTimes((1, 8, 64), (0.01, 0.011, 0.03), 0.01)
    decoder = lp.LookaheadDecoder(on_gpu(model), config, capture="auto", step_times=times)
    ids = prompts(arch)[1]
    output = decoder.generate(ids, 40, eos_token_id=())
    sizes = [step.num_tokens for step in output.step_stats]
    assert decoder.runner.captured and min(sizes) <= 8 < max(sizes), "of two graphs"
    assert output.tokens == plain_greedy(model, ids, 40)


@pytest.mark.subset(2)
@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("times", [TIMES, SLOW], ids=["rows are cheap", "rows are dear"])
def test_adaptive_steps_on_a_gpu(times: StepTimes, capture: str, gpu: SimulatedCuda) -> None:
    """Steps of many sizes, padded ones and plain ones among them, each with a graph of its own."""
    model = tiny_model()
    decoder = lp.LookaheadDecoder(on_gpu(model), lp.LookaheadConfig(), capture=capture, step_times=times)
    for ids in prompts("adaptive"):
        for sampling in (None, SAMPLING["coupled"]):
            plain = lp.AutoregressiveDecoder(model).generate(ids, 2 * NEW, sampling).tokens
            assert decoder.generate(ids, 2 * NEW, sampling).tokens == plain


@pytest.mark.subset(2)
@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("kernel", ["triton", "paged", "varlen"])
def test_flash_attention_on_a_gpu(
    kernel: str, capture: str, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's own kernels: a length that is data, grouped heads, a prefix of nothing; rounded as bfloat16 is."""
    use_kernel(kernel, monkeypatch)
    model = tiny_model(hidden_size=64, dtype=torch.bfloat16, sharpness=5.0)
    decoder = lp.LookaheadDecoder(on_gpu(model), CONFIG, capture=capture)
    assert decoder.runner.attention == "flash"
    for ids in [[5], *prompts("flash")]:
        assert decoder.generate(ids, NEW).tokens == lp.AutoregressiveDecoder(model).generate(ids, NEW).tokens


def use_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention tries this kernel alone."""
    if name == "triton":
        pytest.importorskip("triton", reason="its kernels need Triton")
    monkeypatch.setattr(flash_cuda, "KERNELS", {name: flash_cuda.KERNELS[name]})
    monkeypatch.setattr(flash_cuda, "_first_fit", functools.cache(flash_cuda._first_fit.__wrapped__))  # tried anew


@pytest.mark.skipif(not flash_cuda.TRITON, reason="float32 on a GPU needs Triton's kernel")
def test_sinks_on_a_gpu(gpu: SimulatedCuda) -> None:
    """Full layers by the kernel, sliding ones under a mask over all keys: alone, and several texts in one step."""
    model = tiny_model("gpt_oss", dtype=torch.float32)
    texts = prompts("sinks")
    expected = [lp.AutoregressiveDecoder(model).generate(ids, NEW).tokens for ids in texts]
    decoder = lp.LookaheadDecoder(on_gpu(model), CONFIG)
    assert decoder.attention == "flash"
    assert [decoder.generate(ids, NEW).tokens for ids in texts] == expected
    assert [output.tokens for output in decoder.generate_batch(texts, NEW)] == expected


def test_a_kernel_that_is_wrong_on_this_gpu_is_not_used(
    gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that drops a split, or whose compiler is missing: the next is taken, with a warning that says why."""
    paged = flash_cuda.KERNELS["paged"]

    def short(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> torch.Tensor:
        k = k.clone()
        k[:, :, 128:256] = 0
        return paged(q, k, *rest)

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no C compiler")

    shape = flash_cuda.Shape(torch.device("cuda", 0), torch.bfloat16, 4, 2, 64, 64, has_sinks=False)
    monkeypatch.setattr(flash_cuda, "TRITON", True)
    monkeypatch.setattr(flash_cuda, "KERNELS", {"triton": broken, "paged": short, "varlen": paged})
    assert flash_cuda._first_fit.__wrapped__(shape) == "varlen"
    with_sinks = shape._replace(has_sinks=True)
    assert flash_cuda._first_fit.__wrapped__(with_sinks) == "varlen"
    assert "RuntimeError: no C compiler" in caplog.text and "paged (its results are off by 0." in caplog.text
    monkeypatch.setattr(flash_cuda, "KERNELS", {"paged": short})
    with pytest.raises(ValueError, match=r"head dimension 64 .* choose attention=sdpa"):
        flash_cuda._first_fit.__wrapped__(shape)


def test_a_dtype_that_no_kernel_takes(gpu: SimulatedCuda) -> None:
    """`auto` says that it takes another backend, and why."""
    with pytest.warns(UserWarning, match=r"attention is sdpa: .* on a GPU, and this model is torch.float64"):
        assert lp.LookaheadDecoder(on_gpu(tiny_model()), CONFIG).runner.attention == "sdpa"


RANK_CASES: dict[str, tuple[dict[str, Any], lp.SamplingParams | None]] = {
    "recompute": ({}, None),
    "broadcast": ({"ablation": lp.Ablation(kv_sync=lp.KVSync.BROADCAST)}, None),
    "sampled": ({}, SAMPLING["top-p"]),
    "adaptive": ({"adaptive": True}, SAMPLING["coupled"]),
}


@pytest.mark.subset(2)
@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("case", RANK_CASES)
def test_ranks_with_a_gpu_each(case: str, capture: str, gpu: SimulatedCuda) -> None:
    """NCCL refuses host tensors, and tensors of another rank's GPU; messages between steps stay on the host."""
    fields, sampling = RANK_CASES[case]
    config = lp.LookaheadConfig(**{"window_size": 4, "ngram_size": 3, "guess_set_size": 6} | fields)
    model = tiny_model()
    texts = prompts(case)
    expected = [lp.AutoregressiveDecoder(model).generate(ids, NEW, sampling).tokens for ids in texts]
    models = [on_gpu(model, rank) for rank in range(2)]

    def body(context: ParallelContext, own: SimulatedCuda) -> list[list[int]]:
        times = TIMES if config.adaptive else None
        decoder = lp.LookaheadDecoder(models[context.rank], config, context, capture=capture, step_times=times)
        tokens = [decoder.generate(ids, NEW, sampling).tokens for ids in texts]
        assert context.share_text("done" if context.is_main else None) == "done"
        return tokens

    assert run_on_gpus(2, body) == [expected, expected]


def test_ranks_learn_step_times_on_gpus(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One layer is timed on every rank, and rank 0's seconds are broadcast; captured steps then correct them."""
    from lp.engine.step_timing import KnownStepTimes

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lp.engine.lookahead.KnownStepTimes", KnownStepTimes)
    model = tiny_model()
    models = [on_gpu(model, rank) for rank in range(2)]
    config = lp.LookaheadConfig(window_size=2, ngram_size=2, guess_set_size=2, adaptive=True)

    def body(context: ParallelContext, own: SimulatedCuda) -> list[StepTimes | None]:
        decoder = lp.LookaheadDecoder(models[context.rank], config, context)
        before = decoder.step_times
        for _ in range(2):
            decoder.generate([1, 2, 3], 12)
        return [before, decoder.step_times]

    first, second = run_on_gpus(2, body)
    assert first == second and first[0] != first[1]


def test_captured_steps_back_to_back(gpu: SimulatedCuda) -> None:
    """The host is ahead of the device where no message is read, and refills a pinned block before it was copied."""
    model = on_gpu(tiny_model())
    runner = ModelRunner(model, "sdpa", Capture.GRAPH, probe=False)
    uncaptured = ModelRunner(model, "sdpa", Capture.OFF, probe=False)
    text = drawn_text(random.Random(5), 20)
    chain = np.tri(3, dtype=bool)
    with torch.inference_mode():
        logits = []
        for each in (runner, uncaptured):
            cache = each.new_cache(64)
            each.prefill(text, cache, 512)
            steps = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
            logits.append([each.forward(step, [20, 21, 22], chain, cache, [0, 1, 2]).clone() for step in steps])
    assert runner.captured is not None
    for captured, expected in zip(*logits, strict=True):
        torch.testing.assert_close(captured.cpu(), expected.cpu())


def test_a_step_is_captured_after_accepted_drafts(gpu: SimulatedCuda) -> None:
    """Its warm-up writes KV behind the prefix, where accepted tokens lie that the next step was to move."""
    model = on_gpu(tiny_model())
    runner = ModelRunner(model, "sdpa", Capture.GRAPH, probe=False)
    uncaptured = ModelRunner(model, "sdpa", Capture.OFF, probe=False)
    text = drawn_text(random.Random(5), 20)
    tree = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=bool)
    larger = 20  # tokens of a step that is captured only now
    with torch.inference_mode():
        logits = []
        for each in (runner, uncaptured):
            cache = each.new_cache(128)
            each.prefill(text, cache, 512)
            each.forward([9, 2, 6, 5], [20, 21, 21, 22], tree, cache, [0, 1, 2, 3])
            cache.commit([0, 2, 3])
            positions = [cache.length + index for index in range(larger)]
            last = each.forward([*range(larger)], positions, np.tri(larger, dtype=bool), cache, [*range(larger)])
            logits.append(last.clone())
    assert runner.captured is not None and len(runner.captured._steps) == 2
    torch.testing.assert_close(logits[0].cpu(), logits[1].cpu())


def test_captured_collectives_end_with_their_context(gpu: SimulatedCuda) -> None:
    """NCCL waits for graphs that hold its collectives before it ends a group: the process would hang at its end."""

    def body(context: ParallelContext, _: SimulatedCuda) -> bool:
        recorder = GraphRecorder(context.device, True, context.replica)
        values = torch.ones(4, device=context.device)
        replay = recorder.record(lambda: context.replica.all_reduce(values))
        replay()
        context.replica.close()
        try:
            replay()
        except RuntimeError:  # as of a graph that was freed, though `replay` still refers to it
            return True
        return False

    assert run_on_gpus(2, body, tp=True) == [True, True]


def test_decoders_of_other_spans_share_no_noise(gpu: SimulatedCuda) -> None:
    """Steps that are capped alike have messages of one size; noise that lies elsewhere would be another text."""
    model = tiny_model()
    on_gpu = copy.deepcopy(model).to("cuda")
    ids, sampling = drawn_text(random.Random(1), 25), lp.SamplingParams(temperature=0.9, seed=4)
    expected = lp.AutoregressiveDecoder(model).generate(ids, 40, sampling, eos_token_id=()).tokens
    spans = []
    for window, ngram, guesses in ((5, 3, 6), (8, 4, 8), (5, 3, 6)):
        config = lp.LookaheadConfig(window_size=window, ngram_size=ngram, guess_set_size=guesses, adaptive=True)
        decoder = lp.LookaheadDecoder(on_gpu, config, capture="graph", step_times=lp.StepTimes.constant(0.01, 16))
        spans.append(decoder.span)
        assert decoder.generate(ids, 40, sampling, eos_token_id=()).tokens == expected
    assert spans[0] < spans[1]


def test_a_penalty_counts_from_the_first_generated_token_on(gpu: SimulatedCuda) -> None:
    """It is strong enough to forbid every token that came, and what a repeated token is like decides each next one."""
    model = tiny_model(sharpness=0.3)
    decoder = lp.LookaheadDecoder(copy.deepcopy(model).to("cuda"), CONFIG, capture="graph")
    alone = lp.AutoregressiveDecoder(model)
    for case in range(6):
        ids = drawn_text(random.Random(case), 3 + case)
        penalty = [CountPenalty(len(ids), 40.0, 0.0)]
        found = decoder.generate(ids, 12, logits_processor=penalty, eos_token_id=()).tokens
        assert found == alone.generate(ids, 12, logits_processor=penalty, eos_token_id=()).tokens
        assert len({*found}) == len(found)


def test_a_model_is_loaded_where_it_runs_fastest(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's first program, on a machine with a GPU, ran on the CPU and did not say so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert lp.load("demo").model.device.type == "cuda"
    assert lp.load("demo", device="cpu").model.device.type == "cpu"
