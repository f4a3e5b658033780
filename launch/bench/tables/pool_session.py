"""S by number of past requests whose outputs the pool remembers (pool.scope=session): a table of docs/pool.md.

    python scripts/pool_session.py texts.jsonl --task humaneval --past 0 1 10 60 --rows 48

The texts are those of scripts/texts.py. The last 20 of a task are measured, each behind the same past requests, which
are the first ones of the task: what a measured text leaves in the pool is thrown away again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from rich.progress import track

import lp
from launch.bench.replay import Text, load_texts
from lp.models.loader import Loaded, load

MEASURED = 20


def run(decoder: lp.Decoder, text: Text) -> lp.GenerationOutput:
    sampling = lp.SamplingParams(temperature=text.temperature, seed=0) if text.temperature else None
    return decoder.generate(text.prompt, len(text.tokens), sampling, sequence=text.index)


def session(loaded: Loaded, rows: int, mib: int, file: Path) -> lp.LookaheadDecoder:
    window = rows // 6
    config = lp.LookaheadConfig(
        window_size=window,
        ngram_size=2,
        guess_set_size=rows - window,
        pool_scope=lp.PoolScope.SESSION,
        pool_mib=mib,
        pool_file=str(file),
    )
    return lp.LookaheadDecoder(loaded.model, config)


def compression(loaded: Loaded, past: list[Text], measured: list[Text], rows: int, mib: int) -> float:
    """S of the measured texts, each with a pool that remembers the past ones."""
    tokens = steps = 0
    with tempfile.TemporaryDirectory() as folder:
        kept, copy = Path(folder, "kept"), Path(folder, "copy")
        decoder = session(loaded, rows, mib, kept)
        for text in past:
            run(decoder, text)
        for text in measured:
            if past:
                shutil.copy(kept, copy)
            output = run(session(loaded, rows, mib, copy), text)
            copy.unlink()
            tokens, steps = tokens + len(output.tokens), steps + output.steps
    return tokens / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--task", default="humaneval")
    parser.add_argument("--past", type=int, nargs="+", default=[0, 1, 10, 60])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.8])
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(args.model, "float32")
    found: dict[str, dict[int, float]] = {}
    for temperature in track(args.temperatures, "temperatures", disable=not sys.stderr.isatty()):
        texts = [text for text in load_texts(args.texts) if (text.task, text.temperature) == (args.task, temperature)]
        earlier, measured = texts[:-MEASURED], texts[-MEASURED:]
        found[f"T = {temperature:g}"] = {
            count: compression(loaded, earlier[:count], measured, args.rows, args.mib) for count in args.past
        }
    print(f"| past requests | {' | '.join(map(str, args.past))} |\n|---|{'---|' * len(args.past)}")
    for name, by_count in found.items():
        print(f"| {name} | {' | '.join(f'{s:.2f}' for s in by_count.values())} |")
    print(json.dumps({"task": args.task, "rows": args.rows, "S": found}))


if __name__ == "__main__":
    main()
