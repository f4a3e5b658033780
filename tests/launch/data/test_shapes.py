"""Shapes of published models: the right sizes, scaled down where asked, and refused where they do not fit."""

from __future__ import annotations

import pytest
import torch

from launch.data.shapes import SHAPES, build_shape, check_memory, shape_config, sketch, weight_bytes

CPU = torch.device("cpu")
# Parameters that the checkpoints' own metadata states.
PUBLISHED = {
    "codellama_7b": 6738546688,
    "codellama_13b": 13016028160,
    "codellama_34b": 33743970304,
    "llama2_7b": 6738415616,
    "llama2_13b": 13015864320,
    "llama2_70b": 68976648192,
    "llama3_8b": 8030261248,
    "qwen2_5_coder_7b": 7615616512,
    "qwen2_5_coder_32b": 32763876352,
}


def test_every_shape_has_the_published_number_of_parameters() -> None:
    """One wrong width, and every figure measured is of another model."""
    assert {name: weight_bytes(sketch(shape_config(name), "bfloat16")) / 2 for name in SHAPES} == PUBLISHED


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("divide", [2, 4])
def test_a_shape_scaled_down_keeps_its_heads_dimension(name: str, divide: int) -> None:
    """Attention kernels differ by head dimension and by query heads a KV head."""
    whole, small = shape_config(name), shape_config(name, layers=2, divide=divide)
    assert small.num_hidden_layers == 2
    assert small.hidden_size * divide == whole.hidden_size
    assert small.hidden_size // small.num_attention_heads == whole.hidden_size // whole.num_attention_heads == 128
    assert small.num_attention_heads % small.num_key_value_heads == 0


def test_a_shape_is_built_with_weights_that_run() -> None:
    """Weights left as the allocator found them may be infinite, and a rotary table that stayed on `meta` has none."""
    model = build_shape(shape_config("qwen2_5_coder_7b", layers=2, divide=14), "float32", CPU)
    with torch.inference_mode():
        logits = model(torch.arange(40)[None]).logits
    assert logits.isfinite().all() and logits.std() > 0.01
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id is None


BAD = {
    "codellama_8b": "model.name is 'codellama_8b'; the shapes are codellama_7b, ",
    "codellama_7b layers=0": r"shape.layers is 0; it must be an integer in \[1, 32\]",
    "codellama_7b layers=33": "shape.layers is 33",
    "codellama_7b divide=0": "shape.divide is 0",
    "codellama_7b divide=3": "shape.divide is 3; it must divide the 32 heads",
}


@pytest.mark.parametrize("bad", BAD)
def test_an_impossible_shape_is_refused(bad: str) -> None:
    name, *settings = bad.split(" ")
    scale = {key: int(value) for key, value in (setting.split("=") for setting in settings)}
    with pytest.raises(ValueError, match=BAD[bad]):
        shape_config(name, **scale)


def test_too_little_memory_is_said_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would kill the process, or the GPU's allocator fail half-way."""
    monkeypatch.setattr("lp.models.memory.free_bytes", lambda device: 10**9)
    with pytest.raises(ValueError, match=r"too little memory on cpu: 12\.6 GiB needed, 953\.7 MiB free"):
        build_shape(shape_config("codellama_7b"), "bfloat16", CPU)
    check_memory(10**9, CPU)
