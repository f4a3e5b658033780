"""S and step tokens of variants of the decoder on the same prompts: docs/experiments/ablations.md.

    python scripts/tables.py ablations warmup --task data/humaneval.jsonl --limit 40
    python scripts/tables.py ablations branches --task data/humaneval.jsonl --limit 20
    python scripts/tables.py ablations sampling --task data/humaneval.jsonl --limit 20 --max-new-tokens 128

All variants give the same greedy text, and the same sampled text for one seed (coupled): only the steps differ. Prints
a Markdown table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import lp
from launch.bench.summary import markdown
from lp.models.loader import Loaded

from ._common import PAPER, add_model_arguments, add_prompt_arguments, load_model, load_prompts, progress


@dataclass(frozen=True)
class Variant:
    """A decoder to measure, and how it samples."""

    name: str
    build: Callable[[Loaded], lp.Decoder]
    sampling: lp.SamplingParams | None = None


@dataclass
class Total:
    """Sums over the prompts of one variant."""

    name: str
    tokens: int = 0
    steps: int = 0
    step_tokens: int = 0

    def add(self, output: lp.GenerationOutput) -> None:
        self.tokens += len(output.tokens)
        self.steps += output.steps
        self.step_tokens += sum(step.num_tokens for step in output.step_stats)

    @property
    def compression(self) -> float:
        return self.tokens / self.steps

    @property
    def tokens_a_step(self) -> float:
        return self.step_tokens / self.steps


def _lookahead(draft_depth: int | None = 192, **switches: Any) -> Callable[[Loaded], lp.Decoder]:
    config = lp.LookaheadConfig(**PAPER, draft_depth=draft_depth, ablation=lp.Ablation(**switches))
    return lambda loaded: lp.LookaheadDecoder(loaded.model, config)


def warmup() -> list[Variant]:
    """A filled window and the text's n-grams against the reference code's start."""
    late = {"warmup_steps": PAPER["ngram_size"] - 1}
    no_text = {"prompt_ngrams": False, "output_ngrams": False}
    return [
        Variant("N-1 warm-up steps, no prompt n-grams", _lookahead(prompt_ngrams=False, **late)),
        Variant("N-1 warm-up steps, no text n-grams at all", _lookahead(**no_text, **late)),
        Variant("no warm-up, no prompt n-grams", _lookahead(prompt_ngrams=False)),
        Variant("no warm-up, no text n-grams at all", _lookahead(**no_text)),
        Variant("lookahead (prompt and output n-grams)", _lookahead()),
        Variant("lookahead, drafts N-1 deep as in the paper", _lookahead(draft_depth=None)),
        Variant("prompt lookup, 10 tokens", _prompt_lookup),
    ]


def _paper(**policy: object) -> Callable[[Loaded], lp.Decoder]:
    return lambda loaded: lp.LookaheadDecoder(loaded.model, lp.PaperConfig(**PAPER | policy))


def branches() -> list[Variant]:
    """The paper's decoder without each of its branches, and with the switches of the reference code."""
    no_text: dict[str, object] = {"prompt_ngrams": False}
    late: dict[str, object] = {"warmup_steps": PAPER["ngram_size"] - 1}
    policies: dict[str, dict[str, object]] = {
        "both branches, text n-grams": {},
        "both branches, no text n-grams": no_text,
        "both branches, text n-grams, N-1 warm-up steps": late,
        "both branches, no text n-grams, N-1 warm-up steps": no_text | late,
        "W=1, text n-grams": {"window_size": 1},
        "W=1, no text n-grams": {"window_size": 1} | no_text,
        "G=1, text n-grams": {"guess_set_size": 1},
        "G=1, no text n-grams": {"guess_set_size": 1} | no_text,
        "verification alone (W=0), text n-grams": {"window_size": 0},
        "window alone (G=0): nothing is verified": {"guess_set_size": 0},
    }
    variants = [Variant(name, _paper(**policy)) for name, policy in policies.items()]
    return [*variants, Variant("prompt lookup, 10 tokens", _prompt_lookup)]


def _prompt_lookup(loaded: Loaded) -> lp.Decoder:
    return lp.LookaheadDecoder(loaded.model, lp.PromptLookupConfig())


def sampling() -> list[Variant]:
    """Temperatures, top-p and verifiers, with the window under the sampler's noise and without."""
    variants = [Variant("greedy", _lookahead())]
    for temperature in (0.3, 0.8):
        for top_p in (1.0, 0.95):
            for verifier in lp.Verifier:
                params = lp.SamplingParams(temperature=temperature, top_p=top_p, seed=0, verifier=verifier)
                variants.append(Variant(f"{verifier}, T={temperature}, top-p {top_p}", _lookahead(), params))
        params = lp.SamplingParams(temperature=temperature, seed=0)
        policies: dict[str, dict[str, Any]] = {
            "greedy window": {"window_noise": False},
            "all guesses greedy": {"window_noise": False, "renoise": False},
            "no top-k logits": {"num_logits": 0},
            "no top-k logits, greedy window": {"num_logits": 0, "window_noise": False},
        }
        for name, policy in policies.items():
            variants.append(Variant(f"coupled, T={temperature}, top-p 1.0, {name}", _lookahead(**policy), params))
    return variants


STUDIES = {"warmup": warmup, "branches": branches, "sampling": sampling}


def measure(loaded: Loaded, variants: list[Variant], prompts: list[str], max_new_tokens: int) -> list[Total]:
    """Run every variant on every prompt; the index of the prompt is its sequence, so that noise differs."""
    decoders = [variant.build(loaded) for variant in variants]
    totals = [Total(variant.name) for variant in variants]
    for index, prompt in enumerate(progress(prompts, "prompts")):
        ids = loaded.tokenizer(prompt)["input_ids"]
        for total, decoder, variant in zip(totals, decoders, variants, strict=True):
            total.add(decoder.generate(ids, max_new_tokens, variant.sampling, sequence=index))
    return totals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", choices=sorted(STUDIES))
    add_model_arguments(parser)
    add_prompt_arguments(parser)


def run(args: argparse.Namespace) -> None:
    loaded = load_model(args)
    prompts = load_prompts(args)
    totals = measure(loaded, STUDIES[args.study](), [prompt.text for prompt in prompts], args.max_new_tokens)
    task = args.task.name if args.task else "built-in"
    lengths = f"{len(prompts)} prompts x {args.max_new_tokens} new tokens"
    setting = f"{args.model} model, {args.dtype}, {task}, {lengths}, W=7 N=5 G=7"
    print(f"{setting}; torch {torch.__version__}, transformers {transformers.__version__}\n")
    lines = [
        (total.name, f"{total.compression:.3f}", f"{total.tokens_a_step:.1f}", str(total.tokens), str(total.steps))
        for total in totals
    ]
    print(markdown(("variant", "S", "tokens a step", "tokens", "steps"), lines))
    figures = {
        total.name: {"S": total.compression, "tokens_a_step": total.tokens_a_step, "tokens": total.tokens}
        for total in totals
    }
    print(json.dumps({"study": args.study, "setting": setting, "variants": figures}))
