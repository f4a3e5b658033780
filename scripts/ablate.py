"""S and rows a step of variants of the decoder on the same prompts: the tables of docs/ablations.md.

    python scripts/ablate.py warmup --task data/humaneval.jsonl --limit 40
    python scripts/ablate.py sampling --task data/humaneval.jsonl --limit 20 --max-new-tokens 128

Greedy text is one for all variants, and so is sampled text of one seed (coupled): only the steps differ. A study
prints a Markdown table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from rich.progress import track

import lp
from launch.bench.prompts import load_builtin, load_jsonl
from lp.models.loader import Loaded, load

PAPER = {"window_size": 7, "ngram_size": 5, "guess_set_size": 7}
Variant = tuple[str, Callable[[Loaded], lp.Decoder], lp.SamplingParams | None]


@dataclass
class Row:
    """Sums over the prompts of one variant."""

    name: str
    tokens: int = 0
    steps: int = 0
    slots: int = 0

    def add(self, output: lp.GenerationOutput) -> None:
        self.tokens += len(output.tokens)
        self.steps += output.steps
        self.slots += sum(step.num_tokens for step in output.step_stats)

    @property
    def compression(self) -> float:
        return self.tokens / self.steps

    @property
    def rows(self) -> float:
        return self.slots / self.steps


def _lookahead(**policy: object) -> Callable[[Loaded], lp.Decoder]:
    return lambda loaded: lp.LookaheadDecoder(loaded.model, lp.LookaheadConfig(**PAPER | policy))  # type: ignore[arg-type]


def warmup() -> list[Variant]:
    """A filled window and the text's n-grams against the reference code's start."""
    late: dict[str, object] = {"warmup_steps": PAPER["ngram_size"] - 1}
    no_text: dict[str, object] = {"prompt_ngrams": False, "output_ngrams": False}
    return [
        ("N-1 warm-up steps, no prompt n-grams", _lookahead(prompt_ngrams=False, **late), None),
        ("N-1 warm-up steps, no text n-grams at all", _lookahead(**no_text, **late), None),
        ("no warm-up, no prompt n-grams", _lookahead(prompt_ngrams=False), None),
        ("no warm-up, no text n-grams at all", _lookahead(**no_text), None),
        ("lookahead (prompt and output n-grams)", _lookahead(), None),
        ("lookahead, candidates N-1 deep as in the paper", _lookahead(draft_depth=None), None),
        ("prompt lookup, 10 tokens", lambda loaded: lp.LookaheadDecoder(loaded.model, lp.PromptLookupConfig()), None),
    ]


def sampling() -> list[Variant]:
    """Temperatures, top-p and verifiers, with the window under the sampler's noise and without."""
    made: list[Variant] = [("greedy", _lookahead(), None)]
    for temperature in (0.3, 0.8):
        for top_p in (1.0, 0.95):
            for verifier in lp.Verifier:
                params = lp.SamplingParams(temperature=temperature, top_p=top_p, seed=0, verifier=verifier)
                made.append((f"{verifier}, T={temperature}, top-p {top_p}", _lookahead(), params))
        params, name = lp.SamplingParams(temperature=temperature, seed=0), f"coupled, T={temperature}, top-p 1.0"
        made.append((f"{name}, greedy window", _lookahead(window_noise=False), params))
        made.append((f"{name}, all guesses greedy", _lookahead(window_noise=False, renoise=False), params))
        bare = _lookahead(num_logits=0), _lookahead(num_logits=0, window_noise=False)
        made.append((f"{name}, no recycled logits", bare[0], params))
        made.append((f"{name}, no recycled logits, greedy window", bare[1], params))
    return made


STUDIES = {"warmup": warmup, "sampling": sampling}


def measure(loaded: Loaded, variants: list[Variant], prompts: list[str], max_new_tokens: int) -> list[Row]:
    """Run every variant on every prompt; the index of the prompt is its sequence, so that noise differs."""
    decoders = [make(loaded) for _, make, _ in variants]
    rows = [Row(name) for name, _, _ in variants]
    for index, prompt in enumerate(track(prompts, "prompts", disable=not sys.stderr.isatty())):
        ids = loaded.tokenizer(prompt)["input_ids"]
        for row, decoder, (_, _, params) in zip(rows, decoders, variants, strict=True):
            row.add(decoder.generate(ids, max_new_tokens, params, sequence=index))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--task", type=Path, help="JSONL of prompts; the built-in ones without it")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load(args.model, args.dtype)
    prompts = load_jsonl(args.task, args.limit) if args.task else load_builtin(args.limit)
    rows = measure(loaded, STUDIES[args.study](), [prompt.text for prompt in prompts], args.max_new_tokens)
    task = args.task.name if args.task else "built-in"
    asked = f"{len(prompts)} prompts x {args.max_new_tokens} new tokens"
    setting = f"{args.model} model, {args.dtype}, {task}, {asked}, W=7 N=5 G=7"
    print(f"{setting}; torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| variant | S | rows a step | tokens | steps |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.name} | {row.compression:.3f} | {row.rows:.1f} | {row.tokens} | {row.steps} |")
    figures = {row.name: {"S": row.compression, "rows": row.rows, "tokens": row.tokens} for row in rows}
    print(json.dumps({"study": args.study, "setting": setting, "variants": figures}))


if __name__ == "__main__":
    main()
