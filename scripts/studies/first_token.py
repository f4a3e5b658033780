"""Time to the first token of a prompt that begins like an earlier one, and the same anew: docs/experiments/batches.md.

python scripts/tables.py first_token --prompt-tokens 1500 --seen 1450

Prompts are drawn tokens, since their time does not depend on which they are. Both ways in turn, in one engine.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from statistics import median

import lp
from lp.models.loader import vocabulary_size

from ._common import add_model_arguments, load_model, median_and_range


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--seen", type=int, default=1450, help="first tokens that the earlier prompt has too")
    parser.add_argument("--rounds", type=int, default=5)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    loaded = load_model(args)
    engine = lp.Engine(lp.LookaheadDecoder(loaded.model))
    drawn = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(vocabulary_size(loaded.model)) for _ in range(count)]

    pairs = []
    for _ in range(args.rounds):
        shared = tokens(args.seen)
        earlier, prompt = (shared + tokens(args.prompt_tokens - args.seen) for _ in range(2))
        first_token_s(engine, earlier)
        reused = first_token_s(engine, prompt)
        engine.clear_prefixes()
        pairs.append((reused, first_token_s(engine, prompt)))
    reused_s, anew_s = (median(times) for times in zip(*pairs, strict=True))
    ratios = [reused / anew for reused, anew in pairs]
    print(
        f"{args.model}, {args.dtype}, {args.threads} thread(s): {args.prompt_tokens} tokens, {args.seen} of them seen: "
        f"{1e3 * reused_s:.0f} ms to the first token, {1e3 * anew_s:.0f} ms anew; "
        f"median ratio {median_and_range(ratios, 3)}"
    )
    print(
        json.dumps(
            {"model": args.model, "reused_s": reused_s, "anew_s": anew_s, "ratio": median(ratios), "pairs": pairs}
        )
    )


def first_token_s(engine: lp.Engine, prompt: list[int]) -> float:
    """Seconds until the first token of the text, which ends behind it."""
    start = time.perf_counter()
    engine.submit(prompt, 1)
    engine.run()
    return time.perf_counter() - start
