"""How often rounding makes lookahead and plain decoding differ, by dtype: docs/experiments/exactness.md.

    python scripts/tables.py exactness --task data/humaneval.jsonl --limit 8 --max-new-tokens 128
    python scripts/tables.py exactness --model FOLDER --builtin 8 --reference plain --temperatures 0,0.8
    python scripts/tables.py exactness --model FOLDER --builtin 8 --reference plain --exact tokens bitwise

A step of many tokens runs other kernels than a step of one, which add in another order; where the two best scores tie
within rounding, either may win. Every first difference is listed with the float64 model's gap of its two best scores.
The built-in prompts come first, then those of --task. Against plain decoding logits are compared, too, bit for bit:
with `--exact bitwise` none may differ.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

import lp
from launch.bench.compare import Prediction, first_difference
from launch.bench.summary import markdown
from launch.data.prompts import Prompt, load_builtin, load_jsonl
from lp.models.loader import load
from lp.waits import waiting

from ._common import PAPER, add_prompt_arguments, by_commas, sampling_at

DTYPES = ("float64", "float32", "float16", "bfloat16")
REFERENCES = ("generate", "plain")


Plain = Callable[[list[int], lp.SamplingParams | None], lp.GenerationOutput]


def compare(args: argparse.Namespace, dtype: str, exact: str, prompts: list[Prompt]) -> dict[str, Any]:
    """Lookahead against plain decoding, text by text."""
    loaded = load(args.model, dtype)
    wide = load(args.model, "float64").model
    decoder = lp.LookaheadDecoder(loaded.model, lp.LookaheadConfig(**PAPER), attention=args.attention, exact=exact)
    plain = plain_text(args, loaded.model, exact)
    differing = []
    compared = other_bits = 0
    texts = [(prompt, temperature) for temperature in args.temperatures for prompt in prompts]
    with waiting(f"comparing in {dtype}, exact={exact}", len(texts), "texts") as wait:
        for prompt, temperature in texts:
            ids = loaded.tokenizer(prompt.text)["input_ids"]
            sampling = sampling_at(temperature)
            expected = plain(ids, sampling)
            found = decoder.generate(ids, args.max_new_tokens, sampling, output_logits=args.reference == "plain")
            at = first_difference(found.tokens, expected.tokens)
            compared += len(expected.tokens) if at is None else at + 1
            if found.logits is not None and expected.logits is not None:
                other_bits += not torch.equal(found.logits, expected.logits)
            if at is not None:
                gap = Prediction.behind(wide, [*ids, *expected.tokens[:at]], sampling).gap()
                where = {"prompt": prompt.task_id, "temperature": temperature, "position": at}
                differing.append({**where, "gap": None if gap is None else round(gap, 6)})
            wait.done += 1
    counts = {"texts": len(texts), "tokens": compared, "differing": differing}
    return {"dtype": dtype, "exact": exact, **counts, "other_logits": other_bits if args.reference == "plain" else None}


def plain_text(args: argparse.Namespace, model: Any, exact: str) -> Plain:
    """Plain decoding of a text: transformers' own, or one token a step on the engine of lookahead."""
    if args.reference == "plain":
        decoder = lp.PlainDecoder(model, attention=args.attention, exact=exact)
        return lambda ids, sampling: decoder.generate(ids, args.max_new_tokens, sampling, output_logits=True)
    if exact == lp.Exact.BITWISE:
        raise lp.UserError("exact is 'bitwise', which promises plain decoding's own bits; take --reference plain")

    def generated(ids: list[int], sampling: lp.SamplingParams | None) -> lp.GenerationOutput:
        if sampling is not None:
            raise lp.UserError("transformers' generate draws other noise; take --temperatures 0, or --reference plain")
        batch = torch.tensor([ids])
        mask = torch.ones_like(batch)
        text = model.generate(batch, attention_mask=mask, max_new_tokens=args.max_new_tokens, do_sample=False)
        return lp.GenerationOutput(text[0, len(ids) :].tolist(), "", [])

    return generated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo")
    add_prompt_arguments(parser)
    parser.add_argument("--builtin", type=int, help="so many of the built-in prompts; all without it")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--reference", default="generate", choices=REFERENCES, help="whose texts are the right ones")
    parser.add_argument("--temperatures", type=by_commas(float), default=[0.0])
    parser.add_argument("--exact", nargs="+", default=["tokens"], choices=("tokens", "bitwise"), help="the modes")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--threads", type=int, default=1)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    prompts = load_builtin(args.builtin) + (load_jsonl(args.task, args.limit) if args.task else [])
    results = [compare(args, dtype, exact, prompts) for dtype in args.dtypes for exact in args.exact]
    lines = []
    for result in results:
        differing = result["differing"]
        often = f"{result['tokens'] // len(differing):,}" if differing else "-"
        largest = max((item["gap"] for item in differing if item["gap"] is not None), default="-")
        parted = f"{len(differing)} of {result['texts']}"
        bits = "-" if result["other_logits"] is None else str(result["other_logits"])
        lines.append((result["dtype"], result["exact"], parted, bits, f"{result['tokens']:,}", often, str(largest)))
    heads = ("dtype", "exact", "texts that part", "other logits", "tokens", "one in ... tokens", "largest gap there")
    print(markdown(heads, lines))
    asked = {"model": args.model, "reference": args.reference, "attention": args.attention}
    print(json.dumps({**asked, "max_new_tokens": args.max_new_tokens, "results": results}))
