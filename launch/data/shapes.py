"""Models with the shapes of published ones and random weights, for measuring speed without a download.

The sizes are those of each model's config.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lp.checks import check_int
from lp.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Fields that `divide` divides; the head dimension stays, so that the kernels of attention are the same.
_WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def _shape(
    model_type: str, sizes: tuple[int, int, int, int, int, int], context: int, theta: float, eps: float
) -> dict[str, Any]:
    """Fields of a transformers config.

    Args:
        model_type: transformers' name of the architecture, as in "llama".
        sizes: vocabulary, hidden, intermediate, query heads, KV heads, layers.
        context: most positions.
        theta: base of the rotary frequencies.
        eps: epsilon of RMSNorm.
    """
    fields: dict[str, Any] = dict(zip((*_WIDTHS, "num_hidden_layers"), sizes, strict=True))
    fields |= {"model_type": model_type, "max_position_embeddings": context, "rms_norm_eps": eps}
    fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "tie_word_embeddings": False}
    return fields | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


SHAPES: dict[str, dict[str, Any]] = {
    "codellama_7b": _shape("llama", (32016, 4096, 11008, 32, 32, 32), 16384, 1e6, 1e-5),
    "codellama_13b": _shape("llama", (32016, 5120, 13824, 40, 40, 40), 16384, 1e6, 1e-5),
    "codellama_34b": _shape("llama", (32000, 8192, 22016, 64, 8, 48), 16384, 1e6, 1e-5),
    "llama2_7b": _shape("llama", (32000, 4096, 11008, 32, 32, 32), 4096, 1e4, 1e-5),
    "llama2_13b": _shape("llama", (32000, 5120, 13824, 40, 40, 40), 4096, 1e4, 1e-5),
    "llama2_70b": _shape("llama", (32000, 8192, 28672, 64, 8, 80), 4096, 1e4, 1e-5),
    "llama3_8b": _shape("llama", (128256, 4096, 14336, 32, 8, 32), 8192, 5e5, 1e-5),
    "qwen2_5_coder_7b": _shape("qwen2", (152064, 3584, 18944, 28, 4, 28), 32768, 1e6, 1e-6),
    "qwen2_5_coder_32b": _shape("qwen2", (152064, 5120, 27648, 40, 8, 64), 32768, 1e6, 1e-6),
}


def shape_config(name: str, layers: int | None = None, divide: int = 1) -> Any:
    """transformers' config of a published model, whole or scaled down so that it fits a small machine.

    Args:
        name: a key of SHAPES, as in "codellama_7b".
        layers: decoder layers; None keeps all of the model's.
        divide: divisor of every width: vocabulary, hidden, intermediate, heads. The head dimension stays.

    Raises:
        ValueError: an unknown name, more layers than the model has, or a divisor that does not divide its heads.
    """
    if name not in SHAPES:
        raise UserError(f"model.name is {name!r}; the shapes are {', '.join(SHAPES)}")
    fields = dict(SHAPES[name])
    heads = fields["num_attention_heads"]
    if layers is not None:
        most = fields["num_hidden_layers"]
        fields["num_hidden_layers"] = check_int("shape.layers", layers, 1, most, "or null for all of them")
    divide = check_int("shape.divide", divide, 1, heads, "try 8, or 1 for the whole width")
    if heads % divide:
        raise UserError(f"shape.divide is {divide}; it must divide the {heads} heads of {name}; try a power of two")
    fields |= {width: max(fields[width] // divide, 1) for width in _WIDTHS}
    from transformers import AutoConfig  # here and below: it takes seconds, which the list of shapes must not

    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def sketch(config: Any, dtype: str) -> PreTrainedModel:
    """Build a model on torch's meta device, without memory for weights, to learn how much memory the real one takes.

    Args:
        config: transformers' config, from `shape_config`.
        dtype: dtype of the weights by name, as in "bfloat16".

    Raises:
        ValueError: an unknown dtype.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from lp.models.loader import DTYPES

    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; it must be one of {list(DTYPES)}: a shape has no checkpoint to ask")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])


def build_shape(config: Any, dtype: str, device: torch.device) -> PreTrainedModel:
    """Build a causal LM with random weights, which transformers' own initialisation draws directly on the device.

    Args:
        config: transformers' config, from `shape_config`.
        dtype: dtype of the weights by name, as in "bfloat16"; not "auto".
        device: where the weights are made.

    Raises:
        ValueError: an unknown dtype, or too little free memory on the device.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from lp.models.loader import DTYPES

    check_memory(weight_bytes(sketch(config, dtype)), device)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    model.generation_config = GenerationConfig(do_sample=False)
    return model.eval().requires_grad_(False)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters of a model; a sketch's count too, although they take no memory."""
    return sum(parameter.nbytes for parameter in model.parameters())


def check_memory(needed: int, device: torch.device) -> None:
    """Refuse to allocate more bytes on a device than are free, before an allocation fails halfway.

    Args:
        needed: bytes to be allocated.
        device: where they are allocated; a device that does not report its free memory is not checked.

    Raises:
        ValueError: names the bytes needed and those free.
    """
    from lp.models.memory import format_bytes, free_bytes

    free = free_bytes(device)
    if free is not None and needed > free:
        raise UserError(
            f"too little memory on {device}: {format_bytes(needed)} needed, {format_bytes(free)} free; take a smaller "
            "model or prefix, or scale the shape down with shape.layers=... or shape.divide=..."
        )
