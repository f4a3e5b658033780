"""S and step tokens of variants of the decoder on the same prompts.

    python scripts/tables.py ablations warmup --task data/humaneval.jsonl --limit 40
    python scripts/tables.py ablations branches --task data/humaneval.jsonl --limit 20
    python scripts/tables.py ablations sampling --task data/humaneval.jsonl --limit 20 --max-new-tokens 128

All variants give the same greedy text, and the same sampled text for one seed (coupled): only the steps differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import lp

from .harness import PAPER, Method, PromptStudy, Result, Row, Table, compression, grouped, option, step_tokens, total

Variant = tuple[Any, lp.SamplingParams | None]  # the decoder's config, and how it samples
LATE: dict[str, Any] = {"warmup_steps": PAPER["ngram_size"] - 1}


def lookahead(draft_depth: int | None = 192, **switches: Any) -> Variant:
    return lp.LookaheadConfig(**PAPER, draft_depth=draft_depth, ablation=lp.Ablation(**switches)), None


def paper(**policy: Any) -> Variant:
    return lp.PaperConfig(**PAPER | policy), None


def warmup() -> dict[str, Variant]:
    """A filled window and the text's n-grams against the reference code's start."""
    no_text: dict[str, Any] = {"prompt_ngrams": False, "output_ngrams": False}
    return {
        "N-1 warm-up steps, no prompt n-grams": lookahead(prompt_ngrams=False, **LATE),
        "N-1 warm-up steps, no text n-grams at all": lookahead(**no_text, **LATE),
        "no warm-up, no prompt n-grams": lookahead(prompt_ngrams=False),
        "no warm-up, no text n-grams at all": lookahead(**no_text),
        "lookahead (prompt and output n-grams)": lookahead(),
        "lookahead, drafts N-1 deep as in the paper": lookahead(draft_depth=None),
        "prompt lookup, 10 tokens": (lp.PromptLookupConfig(), None),
    }


def branches() -> dict[str, Variant]:
    """The paper's decoder without each of its branches, and with the switches of the reference code."""
    no_text: dict[str, Any] = {"prompt_ngrams": False}
    return {
        "both branches, text n-grams": paper(),
        "both branches, no text n-grams": paper(**no_text),
        "both branches, text n-grams, N-1 warm-up steps": paper(**LATE),
        "both branches, no text n-grams, N-1 warm-up steps": paper(**no_text, **LATE),
        "W=1, text n-grams": paper(window_size=1),
        "W=1, no text n-grams": paper(window_size=1, **no_text),
        "G=1, text n-grams": paper(guess_set_size=1),
        "G=1, no text n-grams": paper(guess_set_size=1, **no_text),
        "verification alone (W=0), text n-grams": paper(window_size=0),
        "window alone (G=0): nothing is verified": paper(guess_set_size=0),
        "prompt lookup, 10 tokens": (lp.PromptLookupConfig(), None),
    }


def sampling() -> dict[str, Variant]:
    """Temperatures, top-p and verifiers, with the window under the sampler's noise and without."""
    policies: dict[str, dict[str, Any]] = {
        "greedy window": {"window_noise": False},
        "all guesses greedy": {"window_noise": False, "renoise": False},
        "no top-k logits": {"num_logits": 0},
        "no top-k logits, greedy window": {"num_logits": 0, "window_noise": False},
    }
    variants = {"greedy": lookahead()}
    for temperature in (0.3, 0.8):
        drawn = partial(lp.SamplingParams, temperature=temperature, seed=0)
        for top_p in (1.0, 0.95):
            for verifier in lp.Verifier:
                name = f"{verifier}, T={temperature}, top-p {top_p}"
                variants[name] = (lookahead()[0], drawn(top_p=top_p, verifier=verifier))
        for policy, switches in policies.items():
            variants[f"coupled, T={temperature}, top-p 1.0, {policy}"] = (lookahead(**switches)[0], drawn())
    return variants


STUDIES = {"branches": branches, "sampling": sampling, "warmup": warmup}


@dataclass(kw_only=True)
class Ablations(PromptStudy):
    """Compares S and step tokens of variants of the decoder on prompts."""

    study: str = option(choices=[*STUDIES])

    def rows(self) -> Iterable[Row]:
        return self.prompt_rows(study=self.study)

    def methods(self) -> Mapping[str, Method]:
        return {
            name: self.decodes(partial(lp.LookaheadDecoder, config=config), sampling)
            for name, (config, sampling) in STUDIES[self.study]().items()
        }

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines = [
            (
                name,
                f"{compression(of):.3f}",
                f"{step_tokens(of):.1f}",
                str(total(of, "tokens")),
                str(total(of, "steps")),
            )
            for name, of in grouped(results, "method").items()
        ]
        yield Table(("variant", "S", "tokens a step", "tokens", "steps"), lines)
