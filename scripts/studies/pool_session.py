"""S by number of past requests whose outputs the pool remembers (pool.scope=session): docs/experiments/pool.md.

    python scripts/tables.py pool_session texts.jsonl --task humaneval --past 0 1 10 60 --num-tokens 48

The texts are those of `tables.py texts`. The last 20 of a task are measured, each behind the same past requests, which
are the first ones of the task: what a measured text leaves in the pool is thrown away again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import lp
from launch.bench.summary import markdown
from lp.models.loader import Loaded

from ._common import add_model_arguments, budget_config, load_model, progress, sampling_at
from .parts.replay import Text, load_texts

MEASURED = 20


def continue_text(decoder: lp.Decoder, text: Text) -> lp.GenerationOutput:
    return decoder.generate(text.prompt, len(text.tokens), sampling_at(text.temperature), sequence=text.index)


def session(loaded: Loaded, args: argparse.Namespace, file: Path) -> lp.LookaheadDecoder:
    scope = lp.PoolScope.SESSION
    config = budget_config(args.num_tokens, pool_scope=scope, pool_mib=args.mib, pool_file=str(file))
    return lp.LookaheadDecoder(loaded.model, config)


def compression(loaded: Loaded, past: list[Text], measured: list[Text], args: argparse.Namespace) -> float:
    """S of the measured texts, each with a pool that remembers the past ones."""
    tokens = 0
    steps = 0
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder, "pool")
        copy = Path(folder, "copy")
        decoder = session(loaded, args, pool)
        for text in past:
            continue_text(decoder, text)
        for text in measured:
            if past:
                shutil.copy(pool, copy)
            output = continue_text(session(loaded, args, copy), text)
            copy.unlink()
            tokens += len(output.tokens)
            steps += output.steps
    return tokens / steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", type=Path)
    parser.add_argument("--task", default="humaneval")
    parser.add_argument("--past", type=int, nargs="+", default=[0, 1, 10, 60])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.8])
    parser.add_argument("--num-tokens", type=int, default=48, help="most tokens a step")
    parser.add_argument("--mib", type=int, default=64, help="of the pool")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    loaded = load_model(args)
    results: dict[str, dict[int, float]] = {}
    for temperature in progress(args.temperatures, "temperatures"):
        texts = [text for text in load_texts(args.texts) if (text.task, text.temperature) == (args.task, temperature)]
        earlier, measured = texts[:-MEASURED], texts[-MEASURED:]
        by_count = {count: compression(loaded, earlier[:count], measured, args) for count in args.past}
        results[f"T = {temperature:g}"] = by_count
    lines = [[name, *(f"{s:.2f}" for s in by_count.values())] for name, by_count in results.items()]
    print(markdown(("past requests", *map(str, args.past)), lines))
    print(json.dumps({"task": args.task, "num_tokens": args.num_tokens, "S": results}))
