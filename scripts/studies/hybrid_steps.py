"""Time of a step of models with recurrent layers, against the same model with attention alone.

python scripts/tables.py hybrid_steps --num-tokens 48 --hidden 512 --layers 8 --threads 1

Weights are random. Three of four layers are recurrent; the other model has attention in all of them. They take a step
of the same tree in turn. Shares are of the time that torch's profiler sees in operations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PretrainedConfig

from lp.config import Capture
from lp.draft.layout import ancestors
from lp.models.runner import ModelRunner

from .harness import Method, Result, Row, Study, Table, grouped, option, seconds_of, values

SOLVE = "aten::linalg_solve_triangular"
PRODUCTS = "aten::mm"  # of weights: those of attention, states and trees are batched
VOCABULARY, HEAD_DIM = 2048, 64
HYBRID, ATTENTION = "hybrid", "attention alone"
ConfigOf = Callable[["HybridSteps", list[str]], PretrainedConfig]


def _sizes(study: HybridSteps) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": study.hidden, "intermediate_size": 3 * study.hidden}
    heads = {
        "num_attention_heads": study.hidden // HEAD_DIM,
        "num_key_value_heads": max(study.hidden // HEAD_DIM // 4, 1),
    }
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return sizes | heads | tokens | {"num_hidden_layers": study.layers, "tie_word_embeddings": True}


def _qwen3_5(study: HybridSteps, kinds: list[str]) -> PretrainedConfig:
    heads = study.hidden // HEAD_DIM
    return transformers.Qwen3_5TextConfig(
        **_sizes(study),
        head_dim=HEAD_DIM,
        linear_num_value_heads=heads,
        linear_num_key_heads=max(heads // 2, 1),
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        layer_types=["linear_attention" if kind == "recurrent" else "full_attention" for kind in kinds],
    )


def _granitemoehybrid(study: HybridSteps, kinds: list[str]) -> PretrainedConfig:
    return transformers.GraniteMoeHybridConfig(
        **_sizes(study),
        num_local_experts=0,
        shared_intermediate_size=3 * study.hidden,
        mamba_n_heads=2 * study.hidden // HEAD_DIM,
        mamba_d_head=HEAD_DIM,
        mamba_d_state=64,
        mamba_n_groups=1,
        position_embedding_type="rope",
        layer_types=["mamba" if kind == "recurrent" else "attention" for kind in kinds],
    )


def _lfm2(study: HybridSteps, kinds: list[str]) -> PretrainedConfig:
    return transformers.Lfm2Config(
        **_sizes(study), layer_types=["conv" if kind == "recurrent" else "full_attention" for kind in kinds]
    )


CONFIGS: dict[str, ConfigOf] = {
    "qwen3_5, gated delta rule": _qwen3_5,
    "granitemoehybrid, Mamba-2": _granitemoehybrid,
    "lfm2, short convolutions": _lfm2,
}


@dataclass(kw_only=True)
class HybridSteps(Study):
    """Times a step of each architecture with recurrent layers, and of the same one with attention alone."""

    num_tokens: int = option(48, "step tokens")
    prefix: int = option(256, "cached tokens")
    hidden: int = option(512)
    layers: int = option(8, "a multiple of 4")
    threads: int = option(1)
    rounds: int = option(40)
    SHARED = ("num_tokens", "prefix", "hidden", "layers", "threads")
    WARM_UP = 2

    def rows(self) -> Iterable[Row]:
        return [Row({"model": name}, config_of) for name, config_of in CONFIGS.items()]

    def methods(self) -> Mapping[str, Method]:
        torch.set_num_threads(self.threads)
        prepared = lru_cache(maxsize=2)(self.prepared)

        def way(attention_alone: bool) -> Method:
            def method(row: Row) -> Result:
                step, about = prepared(row.item, attention_alone)
                with torch.inference_mode():
                    return {"seconds": seconds_of(step)} | about

            return method

        return {HYBRID: way(False), ATTENTION: way(True)}

    def prepared(self, config_of: ConfigOf, attention_alone: bool) -> tuple[Callable[[], torch.Tensor], Result]:
        """Make a model's step of a drawn tree behind a prefix; the result has parameters and two operations' shares."""
        kinds = ["attention" if attention_alone or layer % 4 == 3 else "recurrent" for layer in range(self.layers)]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(self, kinds)).eval()
        runner = ModelRunner(model, capture=Capture.OFF)
        cache = runner.new_cache(self.prefix + self.num_tokens)
        with torch.inference_mode():
            runner.prefill(range(self.prefix), cache, 512)
        rng = random.Random(0)
        visible = ancestors([-1, *(rng.randrange(max(0, node - 6), node) for node in range(1, self.num_tokens))])
        positions = self.prefix + visible.sum(1) - 1
        tokens = [*range(self.num_tokens)]

        def step() -> torch.Tensor:
            return runner.forward(tokens, positions, visible, cache, tokens, capture=False)

        shares = _shares(step)
        about = {"parameters": sum(each.numel() for each in model.parameters())}
        return step, about | {"solve": shares.get(SOLVE, 0.0), "products": shares[PRODUCTS]}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines = []
        for name, of in grouped(results, "model").items():
            hybrid, attention = (grouped(of, "method")[method] for method in (HYBRID, ATTENTION))
            millions = [f"{each[0]['parameters'] / 1e6:.1f}" for each in (hybrid, attention)]
            hybrid_s, attention_s = (median(values(each)) for each in (hybrid, attention))
            times = [f"{1e3 * each:.1f}" for each in (hybrid_s, attention_s)]
            shares = (f"{hybrid[0]['solve']:.1%}", f"{hybrid[0]['products']:.0%}")
            lines.append((name, *millions, *times, f"{hybrid_s / attention_s:.2f}", *shares))
        columns = ("model", "parameters, M", "attention alone, M", "step, ms", "attention alone, ms", "ratio")
        yield Table((*columns, "the triangular solve", "products with weights"), lines)


@torch.inference_mode()
def _shares(step: Callable[[], torch.Tensor]) -> dict[str, float]:
    """The share of each operation in a step, the operations within it included."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(5):
            step()
    operations = profiled.key_averages()
    total = sum(each.self_cpu_time_total for each in operations)
    return {each.key: each.cpu_time_total / total for each in operations}
