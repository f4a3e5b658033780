"""How often rounding lets lookahead and plain decoding part, by dtype: the table of docs/exactness.md.

    python scripts/exactness.py --task data/humaneval.jsonl --limit 40

A step of many rows runs other kernels than a step of one, which add in another order; where the two best logits tie
within rounding, either may win. Every first difference is listed with the float64 model's gap of its two best logits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import lp
from launch.bench.compare import first_difference, logit_gap
from launch.bench.prompts import Prompt, load_builtin, load_jsonl
from lp.models.loader import load

DTYPES = ("float64", "float32", "bfloat16")


def compare(name: str, dtype: str, prompts: list[Prompt], max_new_tokens: int) -> dict[str, object]:
    """Lookahead against transformers' own greedy text, prompt by prompt."""
    loaded, exact = load(name, dtype), load(name, "float64").model
    decoder = lp.LookaheadDecoder(loaded.model, lp.LookaheadConfig(window_size=7, ngram_size=5, guess_set_size=7))
    differing, compared = [], 0
    for prompt in prompts:
        ids = loaded.tokenizer(prompt.text)["input_ids"]
        batch = torch.tensor([ids])
        mask = torch.ones_like(batch)
        plain = loaded.model.generate(batch, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
        expected, tokens = plain[0, len(ids) :].tolist(), decoder.generate(ids, max_new_tokens).tokens
        at = first_difference(tokens, expected)
        compared += len(expected) if at is None else at + 1
        if at is not None:
            gap = logit_gap(exact, [*ids, *expected[:at]])
            differing.append({"prompt": prompt.task_id, "position": at, "gap": round(gap, 6)})
    return {"dtype": dtype, "prompts": len(prompts), "tokens": compared, "differing": differing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--task", type=Path, help="JSONL of prompts, after the built-in ones")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompts = load_builtin() + (load_jsonl(args.task, args.limit) if args.task else [])
    results = [compare(args.model, dtype, prompts, args.max_new_tokens) for dtype in args.dtypes]
    print("| dtype | prompts | tokens compared | prompts that part | one in ... tokens | largest float64 gap there |")
    print("|---|---|---|---|---|---|")
    for result in results:
        parted = result["differing"]
        assert isinstance(parted, list) and isinstance(result["tokens"], int)
        often = f"{result['tokens'] // len(parted):,}" if parted else "-"
        largest = max((item["gap"] for item in parted), default="-")
        print(f"| {result['dtype']} | {len(prompts)} | {result['tokens']:,} | {len(parted)} | {often} | {largest} |")
    print(json.dumps({"model": args.model, "max_new_tokens": args.max_new_tokens, "results": results}))


if __name__ == "__main__":
    main()
