"""The architecture matrix: what lookahead gives on every tiny model, and the table of docs/reference/models.md."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

import lp
from lp.models.support import check_supported
from tests.support.tiny_models import MATRIX, drawn_text, plain_greedy, tiny_config, tiny_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
CASES = 40 if os.environ.get("LP_TEST_LONG") == "1" else 3
BACKENDS = ("sdpa", "eager", "flash")
EXACT, WRONG = "exact", "WRONG"
# The variant that a tiny model is, beyond the architecture's name.
VARIANTS = {
    "llama": "grouped-query attention",
    "llama_linear": "linear rotary scaling",
    "llama_llama3": "llama3 rotary scaling",
    "llama_yarn": "YaRN",
    "llama_dynamic": "dynamic NTK, across the boundary",
    "llama_longrope": "longrope, across the boundary",
    "mistral": "no sliding window",
    "mistral_sliding": "sliding window",
    "mixtral": "experts",
    "qwen2_sliding": "sliding and full layers",
    "qwen2_moe": "experts",
    "qwen3_moe": "experts",
    "gemma2": "soft-capping, sliding and full layers",
    "gemma3": "sliding and full layers",
    "gemma3n": "sliding and full layers, shared KV",
    "gemma4": "sliding and full layers, shared KV",
    "phi3": "no sliding window",
    "phi3_sliding": "sliding window",
    "phi3_longrope": "longrope, across the boundary",
    "cohere2": "sliding and full layers",
    "gpt2": "learned positions",
    "gpt_bigcode": "learned positions, multi-query",
    "opt": "learned positions with an offset",
    "olmo3": "sliding and full layers",
    "starcoder2": "sliding window",
    "falcon": "rotary",
    "gpt_oss": "experts, attention sinks, sliding and full layers",
    "deepseek_v2": "experts, MLA",
    "deepseek_v3": "experts, MLA",
    "falcon_alibi": "alibi",
    "mpt": "alibi",
    "mamba": "Mamba-1",
    "qwen3_next": "gated delta rule, experts",
    "qwen3_5": "gated delta rule",
    "qwen3_5_moe": "gated delta rule, experts",
    "olmo_hybrid": "gated delta rule",
    "bamba": "Mamba-2",
    "granitemoehybrid": "Mamba-2, experts",
    "nemotron_h": "Mamba-2, experts",
    "zamba2": "Mamba-2, shared attention",
    "falcon_h1": "Mamba-2 beside attention",
    "falcon_h1_norm": "Mamba-2 beside attention, with a norm",
    "mamba2": "Mamba-2 alone",
    "lfm2": "short convolutions",
    "lfm2_moe": "short convolutions, experts",
    "llama4": "chunks, layers without positions whose queries are scaled, experts",
    "gpt_neo": "local attention by cache slot",
    "roformer": "rotary positions by cache slot",
}


@dataclass(frozen=True)
class Case:
    """One drawn call.

    Attributes:
        ids: the prompt.
        new: tokens to generate.
        config: W, N, G.
    """

    ids: list[int]
    new: int
    config: lp.LookaheadConfig


def draw(seed: str) -> Case:
    """A prompt and a shape."""
    rng = random.Random(seed)
    ids = drawn_text(rng, rng.randint(1, 60))
    config = lp.LookaheadConfig(
        window_size=rng.randint(0, 10), ngram_size=rng.randint(2, 6), guess_set_size=rng.randint(1, 10)
    )
    return Case(ids, rng.randint(25, 50), config)


@cache
def verdict(arch: str, backend: str) -> str:
    """`exact`, the refusal, or `WRONG` and where.

    Greedy text is held against `generate`, and sampled text, with one backend, against the oracle of the same seed.
    """
    try:
        check_supported(tiny_config(arch))
        for number in range(CASES):
            case = draw(f"{arch}-{number}")
            model = _model(arch, number, backend)
            decoder = lp.LookaheadDecoder(model, case.config, attention=backend)
            if decoder.generate(case.ids, case.new).tokens != _plain(arch, number):
                return f"{WRONG}: greedy, case {number}"
    except ValueError as refusal:
        return str(refusal)
    return EXACT if backend != BACKENDS[-1] or _samples(decoder, case) else f"{WRONG}: sampled"


def _samples(decoder: lp.LookaheadDecoder, case: Case) -> bool:
    sampling = lp.SamplingParams(temperature=0.8, top_p=0.95, seed=3)
    plain = lp.AutoregressiveDecoder(decoder.model).generate(case.ids, case.new, sampling)
    return decoder.generate(case.ids, case.new, sampling).tokens == plain.tokens


@cache
def _plain(arch: str, number: int) -> list[int]:
    """`generate` under the model's own default attention, in a model that has seen no other text."""
    case = draw(f"{arch}-{number}")
    return plain_greedy(tiny_model(arch, seed=number), case.ids, case.new)


def _model(arch: str, seed: int, backend: str) -> PreTrainedModel:
    if backend == "flash":  # which transformers does not know before a decoder needs it
        return tiny_model(arch, seed=seed)
    try:
        return tiny_model(arch, seed=seed, attention=backend)
    except ValueError:  # transformers has no such attention for it: the decoder must refuse
        return tiny_model(arch, seed=seed)


def table() -> str:
    """The matrix in Markdown, one row an architecture."""
    rows = [(arch, [verdict(arch, backend) for backend in BACKENDS]) for arch in MATRIX]
    order = {WRONG: 2, "refused": 1}
    lines = []
    for arch, verdicts in rows:
        result = _result(verdicts)
        kind = tiny_config(arch).model_type
        why = "" if result == "exact" else [text for text in verdicts if text != EXACT][-1]
        lines.append((order.get(result, 0), f"| {kind} | {VARIANTS.get(arch, '')} | {result} | {why} |"))
    head = "| model type | tested with | result | why |\n|---|---|---|---|\n"
    return head + "\n".join(line for _, line in sorted(lines, key=lambda pair: pair[0])) + "\n"


def _result(verdicts: list[str]) -> str:
    if any(text.startswith(WRONG) for text in verdicts):
        return WRONG
    exact = [backend for backend, text in zip(BACKENDS, verdicts, strict=True) if text == EXACT]
    if len(exact) == len(BACKENDS):
        return "exact"
    return f"exact with {' and '.join(exact)} only" if exact else "refused"


def versions() -> str:
    """What the matrix depends on besides lp."""
    return f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"


def page() -> str:
    """docs/reference/models.md: its text as it stands, around a new table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- matrix -->\n")
    _, _, after = rest.partition("<!-- end -->\n")
    return f"{before}<!-- matrix -->\nRun with {versions()}.\n\n{table()}<!-- end -->\n{after}"
