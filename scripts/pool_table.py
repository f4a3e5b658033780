"""S, rows and host time of the pool, its ablations and its peers, on texts that scripts/texts.py wrote: docs/pool.md.

    python scripts/pool_table.py texts.jsonl results.jsonl --study equal_rows
    python scripts/pool_table.py texts.jsonl results.jsonl --study ablation --limit 20 --max-new-tokens 128 \
        --tasks humaneval mtbench

One line of results a text and method, written as it is measured; what is there already is not measured again, so a
run may be interrupted, and two may share the work by --part. Each result says whether the tokens equal the text's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import lp
from launch.bench.replay import Text, load_texts
from lp.models.loader import load

PAPER = {"window_size": 7, "ngram_size": 5, "guess_set_size": 7}
KEY = ("method", "task", "index", "temperature", "max_new_tokens")
Make = Callable[[Any], lp.Decoder]


def ours(rows: int, window: int | None = None, ngram: int = 2, **switches: Any) -> Make:
    """The pool with so many rows a step at most, `window` x (`ngram` - 1) of them the window's."""
    w = rows // 6 if window is None else window
    guesses = (rows - max(w * (ngram - 1), 1)) // (ngram - 1)
    config = lp.LookaheadConfig(window_size=w, ngram_size=ngram, guess_set_size=guesses, **switches)
    return lambda model: lp.LookaheadDecoder(model, config)


def paper(**switches: Any) -> Make:
    return lambda model: lp.LookaheadDecoder(model, lp.PaperConfig(**(PAPER | switches)))


def recycling(rows: int) -> Make:
    return lambda model: lp.LookaheadDecoder(model, lp.RecyclingConfig(nodes=rows - 1))


def equal_rows(rows: int) -> dict[str, Make]:
    """The pool and token recycling with the rows of the paper's method."""
    return {"lookahead_paper": paper(), f"lookahead {rows}": ours(rows), f"token_recycling {rows}": recycling(rows)}


def scaling(rows: int) -> dict[str, Make]:
    """S by rows."""
    return {f"lookahead {count}": ours(count) for count in (25, 100, 50, 200, 400)}


def ablation(rows: int) -> dict[str, Make]:
    """Every idea off, and other windows."""
    off = ["prompt_ngrams", "prompt_logits", "output_ngrams", "window_ngrams", "position_guesses"]
    off += ["renoise", "learn", "window_noise"]
    made = {f"all, {rows} rows": ours(rows)}
    made |= {f"without {name}": ours(rows, **{name: False}) for name in off}
    made["without text n-grams"] = ours(rows, prompt_ngrams=False, output_ngrams=False)
    made["without recycled logits"] = ours(rows, num_logits=0)
    made |= {f"K = {k}": ours(rows, num_logits=k) for k in (4, 32)}
    made |= {f"depth {depth}": ours(rows, draft_depth=depth) for depth in (4, 12)}
    made |= {f"W = {w}, N = {n}": ours(rows, w, n) for w, n in ((0, 2), (16, 2), (8, 3), (7, 5))}
    return made | {"lookahead_paper": paper(), "lookahead_paper, no text": paper(prompt_ngrams=False)}


STUDIES = {"equal_rows": equal_rows, "scaling": scaling, "ablation": ablation}


def measure(decoder: lp.Decoder, text: Text, name: str, tokens: int) -> dict[str, Any]:
    """One text by one method."""
    sampling = lp.SamplingParams(temperature=text.temperature, seed=0) if text.temperature else None
    output = decoder.generate(text.prompt, tokens, sampling, sequence=text.index)
    steps = output.step_stats
    return {
        "method": name,
        "task": text.task,
        "index": text.index,
        "temperature": text.temperature,
        "max_new_tokens": tokens,
        "tokens": len(output.tokens),
        "steps": output.steps,
        "slots": sum(step.num_tokens for step in steps),
        "host_us": 1e6 * statistics.median(step.host_s for step in steps),
        "equal": output.tokens == text.tokens[:tokens],
    }


def table(results: list[dict[str, Any]], names: list[str]) -> None:
    """S @ rows a step by task and temperature, a line a method."""
    groups: dict[tuple[str, float], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        groups[result["task"], result["temperature"]][result["method"]].append(result)
    heads = sorted(groups)
    print("| method | " + " | ".join(f"{task}, T = {t:g}" for task, t in heads) + " | host, us |")
    print("|---" * (len(heads) + 2) + "|")
    for name in names:
        cells, host = [], []
        for head in heads:
            mine = groups[head][name]
            tokens, steps, slots = (sum(result[key] for result in mine) for key in ("tokens", "steps", "slots"))
            cells.append(f"{tokens / steps:.2f} @{slots / steps:.0f}" if mine else "")
            host += [result["host_us"] for result in mine]
        print(f"| {name} | " + " | ".join(cells) + f" | {statistics.median(host) if host else 0:.0f} |")
    parted = sum(not result["equal"] for result in results)
    print(f"\n{len(results)} results, {parted} of them with other tokens than plain decoding's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("results", type=Path, help="JSONL to extend")
    parser.add_argument("--study", choices=sorted(STUDIES), default="equal_rows")
    parser.add_argument("--rows", type=int, default=46, help="rows a step at most, the last generated token's included")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.8])
    parser.add_argument("--methods", nargs="+", help="names of the study's; all without it")
    parser.add_argument("--limit", type=int, default=80, help="texts of a task and temperature")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--part", default="0/1", help="I/N: take every Nth text from the Ith on")
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    torch.set_num_threads(1)
    methods = STUDIES[args.study](args.rows)
    names = args.methods or list(methods)
    texts = [
        text
        for text in load_texts(args.texts)
        if text.index < args.limit
        and text.temperature in args.temperatures
        and text.task in (args.tasks or [text.task])
    ]
    lines = args.results.read_text(encoding="utf-8").splitlines() if args.results.exists() else []
    done = {
        (r["method"], r["task"], r["index"], r["temperature"], r["max_new_tokens"]): r for r in map(json.loads, lines)
    }
    part, parts = map(int, args.part.split("/"))
    model = load(args.model, "float32").model
    decoders = {name: methods[name](model) for name in names}
    for text in track(texts[part::parts], "texts", disable=not sys.stderr.isatty()):
        for name, decoder in decoders.items():
            key = (name, *text.key, args.max_new_tokens)
            if key not in done:
                done[key] = measure(decoder, text, name, args.max_new_tokens)
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[key]) + "\n")
    keys = {(name, *text.key, args.max_new_tokens) for name in names for text in texts}
    table([result for key, result in done.items() if key in keys], names)


if __name__ == "__main__":
    main()
