"""How often rounding makes lookahead and plain decoding differ, by dtype: docs/exactness.md.

    python scripts/tables.py exactness --task data/humaneval.jsonl --limit 40

A step of many tokens runs other kernels than a step of one, which add in another order; where the two best logits tie
within rounding, either may win. Every first difference is listed with the float64 model's gap of its two best logits.
The built-in prompts come first, then those of --task.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

import lp
from lp.models.loader import load

from ..compare import first_difference, logit_gap
from ..prompts import Prompt, load_builtin, load_jsonl
from ..summary import markdown
from ._common import PAPER, add_prompt_arguments

DTYPES = ("float64", "float32", "float16", "bfloat16")


def compare(name: str, dtype: str, prompts: list[Prompt], max_new_tokens: int) -> dict[str, Any]:
    """Lookahead against transformers' own greedy text, prompt by prompt."""
    loaded = load(name, dtype)
    exact = load(name, "float64").model
    decoder = lp.LookaheadDecoder(loaded.model, lp.LookaheadConfig(**PAPER))
    differing = []
    compared = 0
    for prompt in prompts:
        ids = loaded.tokenizer(prompt.text)["input_ids"]
        batch = torch.tensor([ids])
        mask = torch.ones_like(batch)
        plain = loaded.model.generate(batch, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
        expected = plain[0, len(ids) :].tolist()
        at = first_difference(decoder.generate(ids, max_new_tokens).tokens, expected)
        compared += len(expected) if at is None else at + 1
        if at is not None:
            gap = logit_gap(exact, [*ids, *expected[:at]])
            differing.append({"prompt": prompt.task_id, "position": at, "gap": round(gap, 6)})
    return {"dtype": dtype, "prompts": len(prompts), "tokens": compared, "differing": differing}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo")
    add_prompt_arguments(parser)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--threads", type=int, default=1)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    prompts = load_builtin() + (load_jsonl(args.task, args.limit) if args.task else [])
    results = [compare(args.model, dtype, prompts, args.max_new_tokens) for dtype in args.dtypes]
    lines = []
    for result in results:
        differing = result["differing"]
        often = f"{result['tokens'] // len(differing):,}" if differing else "-"
        largest = max((item["gap"] for item in differing), default="-")
        lines.append(
            (result["dtype"], str(len(prompts)), f"{result['tokens']:,}", str(len(differing)), often, str(largest))
        )
    heads = ("dtype", "prompts", "tokens compared", "prompts that differ", "one in ... tokens")
    print(markdown((*heads, "largest float64 gap there"), lines))
    print(json.dumps({"model": args.model, "max_new_tokens": args.max_new_tokens, "results": results}))
