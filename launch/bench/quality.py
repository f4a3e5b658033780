"""What a text is worth: its perplexity under the model, how much it repeats itself, ROUGE against a reference.

L: tokens of prompt and text, V: vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lp.errors import UserError

from .compare import Difference

ROUGE = ("rouge1", "rouge2", "rougeL")
DISTINCT = (1, 2, 3, 4)


@torch.inference_mode()
def perplexity(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Of the text behind its prompt, from one forward pass: e to the mean negative log-likelihood of a token.

    Args:
        model: a causal LM.
        prompt: its tokens, at least one.
        tokens: of the text, at least one.
    """
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)  # (1, L)
    logits = model(ids[:, :-1], use_cache=False, logits_to_keep=len(tokens)).logits[0].float()  # (tokens, V)
    losses = torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="none")
    return math.exp(float(losses.double().mean()))


def distinct(tokens: Sequence[int], n: int) -> float | None:
    """Different n-grams among all of the text's; None where it has none."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def rouge(text: str, reference: str) -> dict[str, float]:
    """F-measures with stemming, as the summarisation papers report them.

    Raises:
        ValueError: rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise UserError("ROUGE needs the package rouge-score; pip install rouge-score") from None
    scores = RougeScorer(list(ROUGE), use_stemmer=True).score(reference, text)
    return {name: scores[name].fmeasure for name in ROUGE}


def assess(
    model: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    text: str,
    reference: str | None,
    parted: Difference | None,
) -> dict[str, Any]:
    """All of it for one method's text.

    Args:
        model: the one that wrote it.
        prompt: its tokens.
        tokens, text: what was written.
        reference: the task's, if it has one.
        parted: where the text leaves plain decoding's; None if it does not.
    """
    return {
        "perplexity": perplexity(model, prompt, tokens),
        "distinct": {str(n): distinct(tokens, n) for n in DISTINCT},
        "rouge": rouge(text, reference) if reference else None,
        "parts_at": parted.position if parted else None,
        "near_tie": parted.near_tie if parted else None,
    }
