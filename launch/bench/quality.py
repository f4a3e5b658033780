"""Quality of a generated text: perplexity under the model, repetition, and ROUGE against a reference.

L: tokens of prompt and generated text, V: vocabulary.
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
    """The model's perplexity on a generated text: e to the mean negative log-likelihood of its tokens. Lower is better.

    Args:
        model: a causal LM, which runs one forward pass.
        prompt: token ids of the prompt, at least one.
        tokens: token ids of the generated text, at least one.
    """
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)  # (1, L)
    logits = model(ids[:, :-1], use_cache=False, logits_to_keep=len(tokens)).logits[0].float()  # (tokens, V)
    losses = torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="none")
    return math.exp(float(losses.double().mean()))


def distinct(tokens: Sequence[int], n: int) -> float | None:
    """Number of different n-grams in a text, divided by the number of all its n-grams; 1.0 means no repetition.

    None for a text of less than n tokens.

    Args:
        tokens: token ids of the text.
        n: tokens of an n-gram.
    """
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def check_rouge(references: Iterable[str | None]) -> None:
    """Refuse to compute ROUGE if the package rouge-score is missing, before a model is loaded.

    Args:
        references: reference texts of the prompts; None for a prompt without a reference.

    Raises:
        ValueError: there is a reference, and rouge-score is not installed.
    """
    if any(references) and not is_installed("rouge_score"):
        raise UserError("ROUGE needs the package rouge-score; pip install rouge-score")


def rouge(text: str, reference: str) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L of a text as F-measures from 0 to 1 with stemming, as in papers on summarisation.

    Args:
        text: the generated text.
        reference: the text to compare it with.

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
    """Compute all quality figures of the text that one method generated, for its record.

    Args:
        model: the causal LM that generated the text.
        prompt: token ids of the prompt.
        tokens: token ids of the generated text.
        text: the generated text as a string.
        reference: a reference text; None where the task has none.
        difference: first difference from plain decoding's text; None for equal texts.

    Returns:
        Figures by name: "perplexity"; "distinct", a dict by n; "rouge", a dict or None; "differs_at", the index of the
        first token that differs; and "near_tie", whether rounding explains that difference.
    """
    return {
        "perplexity": perplexity(model, prompt, tokens),
        "distinct": {str(n): distinct(tokens, n) for n in DISTINCT},
        "rouge": rouge(text, reference) if reference else None,
        "differs_at": difference.position if difference else None,
        "near_tie": difference.near_tie if difference else None,
    }
