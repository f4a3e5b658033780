"""Tokens a second of several ways to decode one text, in alternation, transformers' own among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lp.engine.output import GenerationOutput
from lp.waits import waiting

from .compare import alternate, warm_up


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed of a method.

    Args:
        tokens_per_s: of decoding, without the prefill.
        compression: S; 0 where there are no steps to count.
    """

    tokens_per_s: float
    compression: float


def speeds(methods: Mapping[str, Callable[[], GenerationOutput]], rounds: int) -> dict[str, Speed]:
    """Medians of `rounds` rounds after a warm-up.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile.
    """
    warm_up(methods)
    with waiting("comparing speeds in alternation", len(methods) * rounds, "runs") as wait:
        measured = alternate(methods, rounds, wait=wait)
    return {
        name: Speed(tokens_per_s=len(run.output.tokens) / run.decode_s, compression=run.output.compression)
        for name, run in measured.items()
    }


def transformers_greedy(model: PreTrainedModel, ids: Sequence[int], tokens: int) -> GenerationOutput:
    """`model.generate`, eager and greedy, with its own cache; the decode time is that beyond its first token.

    Args:
        ids: the prompt.
        tokens: to count, beside the first.
    """
    first_s = _generate(model, ids, 1)[1]
    new, all_s = _generate(model, ids, tokens + 1)
    return GenerationOutput(new[1:], "length", [], first_s, all_s - first_s)


def _generate(model: PreTrainedModel, ids: Sequence[int], tokens: int) -> tuple[list[int], float]:
    prompt = torch.tensor([list(ids)], device=model.device)
    start = time.perf_counter()
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=[],
    )
    return out[0, len(ids) :].tolist(), time.perf_counter() - start
