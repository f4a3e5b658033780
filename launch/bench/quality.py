"""Quality of a text: its perplexity under the model, how much it repeats itself, ROUGE against a reference.

L: tokens of prompt and text, V: vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lp.errors import UserError
from lp.optional import is_installed

from .compare import Difference

ROUGE = ("rouge1", "rouge2", "rougeL")
DISTINCT = (1, 2, 3, 4)


@torch.inference_mode()
def perplexity(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """The text's perplexity behind its prompt, by one forward pass: e to the mean negative log-likelihood of a token.

    Args:
        model: a causal LM.
        prompt: its tokens, at least one.
        tokens: the text's tokens, at least one.
    """
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)  # (1, L)
    logits = model(ids[:, :-1], use_cache=False, logits_to_keep=len(tokens)).logits[0].float()  # (tokens, V)
    losses = torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="none")
    return math.exp(float(losses.double().mean()))


def distinct(tokens: Sequence[int], n: int) -> float | None:
    """Different n-grams among all of the text's; None where it has none."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def check_rouge(references: Iterable[str | None]) -> None:
    """Refuse references that nothing here can compare a text with.

    Raises:
        ValueError: rouge-score is not installed.
    """
    if any(references) and not is_installed("rouge_score"):
        raise UserError("ROUGE needs the package rouge-score; pip install rouge-score")


def rouge(text: str, reference: str) -> dict[str, float]:
    """F-measures with stemming, as the summarisation papers report them.

    Raises:
        ValueError: rouge-score is not installed.
    """
    check_rouge([reference])
    from rouge_score.rouge_scorer import RougeScorer

    scores = RougeScorer(list(ROUGE), use_stemmer=True).score(reference, text)
    return {name: scores[name].fmeasure for name in ROUGE}


def assess(
    model: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    text: str,
    reference: str | None,
    difference: Difference | None,
) -> dict[str, Any]:
    """All figures of one method's text.

    Args:
        model: the one that wrote it.
        prompt: its tokens.
        tokens, text: the method's.
        reference: the task's, if it has one.
        difference: the first from plain decoding's text, if there is any.
    """
    return {
        "perplexity": perplexity(model, prompt, tokens),
        "distinct": {str(n): distinct(tokens, n) for n in DISTINCT},
        "rouge": rouge(text, reference) if reference else None,
        "differs_at": difference.position if difference else None,
        "near_tie": difference.near_tie if difference else None,
    }
