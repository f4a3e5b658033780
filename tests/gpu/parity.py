"""What the parity tests of backends and captured steps share: a device, models in two precisions, steps of all layouts.

L: cached tokens, T: step tokens, H: query heads, D: head dimension.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lp.config import Capture
from lp.draft.layout import StepLayout
from lp.models.runner import ModelRunner
from tests.conftest import GPU_DRY_RUN
from tests.support.layouts import chains, layout_of, row_0, visible_of

DEVICE = torch.device("cpu" if GPU_DRY_RUN else "cuda")
VOCABULARY = 97
PREFIXES = (0, 1, 17, 600) if GPU_DRY_RUN else (0, 1, 17, 512, 8192)
HEAD_DIMS = (80,) if GPU_DRY_RUN else (64, 80, 96, 128)
HEADS = {"MHA": (4, 4), "GQA": (8, 2)}
DTYPES = (torch.float32, torch.bfloat16) if GPU_DRY_RUN else (torch.float32, torch.bfloat16, torch.float16)
# Of a token's attention output, relative to its size. Queries, keys and values are rounded to the dtype once, half an
# ulp each, and so are probabilities and the result: measured 0.6 eps on a CPU. In float32 sums of thousands of terms
# count instead, in whatever order a kernel adds them: measured 3 eps; TF32 would be 4000. A token that sees one key too
# many, or too few, is off by 0.14.
TOLERANCE = {
    dtype: factor * torch.finfo(dtype).eps
    for dtype, factor in ((torch.float32, 50), (torch.bfloat16, 2), (torch.float16, 2))
}


@lru_cache(maxsize=1)
def layouts() -> dict[str, StepLayout]:
    """Steps of all kinds, from one token to a paper's."""
    paper = (15, 5, chains(15, 4)) if not GPU_DRY_RUN else (5, 4, chains(4, 3))
    return {
        "one token": layout_of(0, 2, []),
        "drafts alone": layout_of(0, 2, [*chains(3, 4), [1000, 1001, 7]]),
        "window alone": layout_of(6, 4, []),
        "level 0 and drafts": layout_of(16, 2, [row_0(3), *chains(4, 11)]),
        "the paper's": layout_of(*paper),
    }


def model_of(kind: str, head_dim: int, dtype: torch.dtype, layers: int = 1) -> PreTrainedModel:
    """A random Llama on the device, its attention sharp enough that a row seen wrongly shows."""
    heads, kv_heads = HEADS[kind]
    return _llama(dtype, 64, 96, layers, heads, kv_heads, head_dim)


def layer_of_7b(dtype: torch.dtype) -> PreTrainedModel:
    """One layer of the width of a 7B's; of a sixteenth of it in a dry run."""
    part = 16 if GPU_DRY_RUN or DEVICE.type == "cpu" else 1
    heads = 32 // part
    return _llama(dtype, 4096 // part, 11008 // part, 1, heads, heads, 128)


def _llama(
    dtype: torch.dtype, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(32 / hidden**0.5)  # queries and keys are of one size, whatever the width
    return model.to(dtype).to(DEVICE)


@dataclass
class FirstAttention:
    """The output of a model's first attention, as a hook sees it: (T, H x D)."""

    model: PreTrainedModel
    output: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(self._store)

    def _store(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.output = args[0][0].detach().clone()


def text(length: int) -> list[int]:
    """Token ids of a prefix of this length: the same for every test, with few repeats."""
    return [(7 * i + i * i) % VOCABULARY for i in range(length)]


@torch.inference_mode()
def attended(model: PreTrainedModel, attention: str, flip: bool = False) -> dict[tuple[int, str], torch.Tensor]:
    """What the first attention gives for every prefix and layout, by way of a runner: (T, H x D) each.

    Args:
        flip: let the last token see what it must not, or not see what it should.
    """
    runner = ModelRunner(model, attention, Capture.OFF, probe=False, fused=False)
    first, found = FirstAttention(model), {}
    cache = runner.new_cache(max(PREFIXES) + max(layout.num_nodes for layout in layouts().values()))
    runner.prefill(text(max(PREFIXES)), cache, 512)
    for prefix in PREFIXES:
        cache.length = prefix
        for name, layout in layouts().items():
            visible = visible_of(layout)
            if flip and layout.num_nodes > 2:
                visible[-1, 1] = not visible[-1, 1]
            positions = [prefix + at - layout.positions[0] for at in layout.positions]
            tokens = [token % VOCABULARY for token in layout.tokens]
            runner.forward(tokens, positions, visible, cache, range(len(tokens)))
            assert first.output is not None and len(first.output) == len(tokens)
            found[prefix, name] = first.output
    return found


@lru_cache(maxsize=4)
def reference(kind: str, head_dim: int, dtype: torch.dtype, flip: bool = False) -> dict[tuple[int, str], torch.Tensor]:
    """The oracle of `attended`: the same rounded weights in float64, with transformers' eager attention."""
    return attended(copy.deepcopy(model_of(kind, head_dim, dtype)).double(), "eager", flip)


def worst(output: dict[tuple[int, str], torch.Tensor], expected: dict[tuple[int, str], torch.Tensor]) -> float:
    """The largest relative error of any token over all prefixes and layouts, for a test to hold to its tolerance."""
    assert output.keys() == expected.keys()
    errors = [(output[case].double() - expected[case]).norm(dim=1) / expected[case].norm(dim=1) for case in expected]
    return float(torch.cat(errors).max())
