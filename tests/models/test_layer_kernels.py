"""A layer's kernels: their values in Triton's interpreter, that they compile for GPUs there are, and who takes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lp
from lp.attention.base import StepView
from lp.config import Capture
from lp.models import fused, kernel_choice
from lp.models.kernel_choice import NAMES, NO_KERNELS, LayerKernels
from lp.models.runner import runner_of
from tests.support.compiled_kernels import compiled, spilled_bytes
from tests.support.interpreted_kernels import interpreted
from tests.support.simulated_cuda import SimulatedCuda, operators
from tests.support.tiny_models import tiny_model

triton = pytest.importorskip("triton", reason="a layer's kernels need Triton")

from lp.models import layer_kernels  # noqa: E402  (it needs Triton)
from tests.support.layer_kernel_cases import CASES, DTYPES  # noqa: E402

pytestmark = pytest.mark.xdist_group("layer kernels")
TOLERANCE = 8.0  # eps; the interpreter cuts bfloat16 off where it should round


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """How far each case is off, by its name."""
    found: dict[str, float] = interpreted("tests.support.layer_kernel_cases")
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs_operation(name: str, dtype: torch.dtype, errors: dict[str, float]) -> None:
    assert errors[f"{name} {dtype}"] <= TOLERANCE


COMPILED: dict[str, tuple[Any, dict[str, Any], dict[str, str], dict[str, int]]] = {
    "normalize": (
        layer_kernels._norm_kernel,
        {"E": 4096, "BE": 4096, "ROUNDED": True, "OFFSET": False},
        {"eps": "fp32"},
        {"num_warps": 8},
    ),
    "rotate_and_store": (
        layer_kernels._rotate_kernel,
        {"H": 32, "G": 8, "D": 128, "BD": 128, "BH": 8},
        {"slots_base": "*i64"},
        {"num_warps": 4},
    ),
    "silu_times": (layer_kernels._silu_kernel, {"BF": 1024}, {}, {"num_warps": 4}),
    "move_slots": (
        layer_kernels._move_kernel,
        {"G": 8, "D": 128, "BD": 128, "M": 64},
        {"sources_base": "*i64", "targets_base": "*i64"},
        {"num_warps": 1},
    ),
}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_without_spills(name: str, capability: int) -> None:
    kernel, constants, types, options = COMPILED[name]
    binary = compiled(kernel, constants, types, "bf16", capability, options)
    assert spilled_bytes(binary, capability) == 0
    assert binary.metadata.shared <= 4096, "bytes of shared memory: more would leave SMs half empty"


@pytest.fixture
def fused_model(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model that is fused on the simulated device, for which its kernels have not been tried yet."""
    monkeypatch.setattr(fused, "is_mergeable", lambda linears: True)
    monkeypatch.setattr(fused, "laid_out", lambda parameters: [each.data for each in parameters])
    monkeypatch.setattr(kernel_choice, "_passed", {})
    return tiny_model().float().to("cuda")


def taken(model: PreTrainedModel) -> set[str]:
    captured = runner_of(model, capture=Capture.GRAPH).captured
    assert captured is not None
    return {name for name in NAMES if getattr(captured.kernels, name) is not None}


def test_text_is_that_of_plain_decoding(fused_model: PreTrainedModel) -> None:
    """Commits whose moves are the next step's, padding, and prefixes of many lengths."""
    config = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    out = lp.LookaheadDecoder(fused_model, config, capture=Capture.GRAPH).generate(prompt, 40)
    assert taken(fused_model) == set(NAMES)
    assert out.compression > 1.2, "nothing was moved"
    assert out.tokens == lp.AutoregressiveDecoder(tiny_model().float()).generate(prompt, 40).tokens


def test_steps_with_the_bits_of_prompts_take_no_kernel_that_rounds(fused_model: PreTrainedModel) -> None:
    """A prompt's passes run torch's operations: with exact=bitwise a token's KV must not depend on who computed it."""
    runner = lp.PlainDecoder(fused_model, capture=Capture.GRAPH, exact="bitwise").runner
    assert runner.fused and runner.captured is not None
    kernels = runner.captured.kernels
    assert kernels.move_slots is not None and kernels == LayerKernels(move_slots=kernels.move_slots)
    assert runner.network.kernels == kernels  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", [0.3, torch.nan])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_kernel_is_not_taken(
    name: str,
    fault: float,
    fused_model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right: Callable[..., Any] = operators.KERNELS[name]

    def wrong(*args: Any) -> Any:
        out = right(*args)
        (out if out is not None else args[0]).view(-1)[-1] += fault
        return out

    monkeypatch.setitem(operators.KERNELS, name, wrong)
    assert taken(fused_model) == {*NAMES} - {name}
    assert f"without the kernel {name}: its results are off by" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_that_does_not_run_is_not_taken(
    name: str, fused_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setitem(operators.KERNELS, name, fails)
    assert taken(fused_model) == {*NAMES} - {name}
    assert f"without the kernel {name}: RuntimeError: no compiler" in caplog.text


def test_a_trial_that_failed_is_made_again(fused_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may have lacked, or another thread been capturing."""
    right: Callable[..., Any] = operators.KERNELS["silu_times"]

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setitem(operators.KERNELS, "silu_times", full)
    assert taken(fused_model) == {*NAMES} - {"silu_times"}
    monkeypatch.setitem(operators.KERNELS, "silu_times", right)
    assert taken(tiny_model().float().to("cuda")) == {*NAMES}


def test_a_triton_that_can_not_be_imported(fused_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lp.models.layer_kernels", None)
    monkeypatch.delattr(sys.modules["lp.models"], "layer_kernels")
    assert taken(fused_model) == set()


def test_a_hook_of_the_activation_is_called(fused_model: PreTrainedModel) -> None:
    """Captured steps must give the text of the model as it is."""
    plain = tiny_model().float()
    for model in (plain, fused_model):
        for layer in model.model.layers:
            layer.mlp.act_fn.register_forward_hook(lambda module, args, out: 3 * out)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    out = lp.LookaheadDecoder(fused_model, capture=Capture.GRAPH).generate(prompt, 24)
    assert "silu_times" in taken(fused_model)
    assert out.tokens == lp.AutoregressiveDecoder(plain).generate(prompt, 24).tokens


def test_a_first_pass_that_was_cut(fused_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves layers without buffers; the next text takes them, by torch's operations."""
    decoder = lp.LookaheadDecoder(fused_model, capture=Capture.GRAPH)
    second = fused_model.model.layers[1].self_attn
    cut = []
    forward = fused._Layer._attention

    def attention(layer: Any, *args: Any) -> Any:
        if layer.attention.layer_idx == second.layer_idx and not cut:
            cut.append(True)
            raise KeyboardInterrupt
        return forward(layer, *args)

    monkeypatch.setattr(fused._Layer, "_attention", attention)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate([3], 4)
    expected = lp.AutoregressiveDecoder(tiny_model().float()).generate([3], 12).tokens
    assert decoder.generate([3], 12).tokens == expected


def test_a_slow_kernel_is_not_taken(fused_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(kernel_choice, "_seconds", lambda operation: next(seconds))
    assert taken(fused_model) == {"normalize", "silu_times"}


def test_memory_of_weights_before_merging_is_given_back(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's local memory is the driver's: it gets none of what torch keeps."""
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    monkeypatch.setattr(fused, "is_mergeable", lambda linears: True)
    monkeypatch.setattr(fused, "laid_out", lambda parameters: [each.data for each in parameters])
    assert fused.fuse(tiny_model().float().to("cuda")) is not None
    assert given_back == [True]


def test_other_devices_have_none() -> None:
    captured = runner_of(tiny_model().float(), capture=Capture.COMPILE).captured
    assert captured is not None and captured.kernels is NO_KERNELS


def test_launches_of_a_layer(fused_model: PreTrainedModel, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, product, rotation, attention, product, norm, product, activation, product: 9.

    On a GPU attention over many keys is two kernels, and a product that cuBLAS splits.
    """
    monkeypatch.setattr(fused, "laid_out", lambda parameters: [torch.cat([each.data for each in parameters])])
    runner = runner_of(fused_model, capture=Capture.OFF)
    captured = runner_of(fused_model, capture=Capture.GRAPH).captured
    assert captured is not None and runner.fused
    assert launches_of_step(captured, 2, gpu) - launches_of_step(captured, 1, gpu) == 9


def launches_of_step(captured: Any, layers: int, gpu: SimulatedCuda) -> int:
    """How many kernels a step of 16 tokens starts in the first layers."""
    network = captured.model
    every = network._layers
    network._layers = every[:layers]
    try:
        cache = captured.empty_cache(64)
        slots = torch.arange(16, device="cuda")
        visible = torch.eye(16, dtype=torch.bool, device="cuda")
        positions = torch.arange(16, device="cuda")
        with torch.inference_mode(), cache.writing_to(slots):
            for _ in range(2):  # layers take their buffers in the first pass
                view = StepView(visible, positions, cache.capacity, slots, None, captured.masks.dtype)
                mask = captured.masks.build(view)
                before = gpu.events.total("launch")
                network(
                    input_ids=positions[None],
                    position_ids=positions[None],
                    attention_mask=mask,
                    use_cache=True,
                    logits_to_keep=positions,
                    past_key_values=cache,
                    **captured.masks.backend.forward_arguments(slots),
                )
        return gpu.events.total("launch") - before
    finally:
        network._layers = every
