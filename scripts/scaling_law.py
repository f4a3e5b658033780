"""The paper's scaling figure: S against log2 of a step's rows for N = 3..8, with the analytic model fitted, and ours.

    python scripts/scaling_law.py results.jsonl figure.png --task data/humaneval.jsonl --limit 4

The paper's method runs with W = G (lookahead_paper), ours without a window at the same rows. Each line of the file is
one setting on all prompts; what it has is not run again. S does not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.progress import track

import lp
from launch.bench.acceptance import AcceptanceModel, Observed
from launch.bench.prompts import load_builtin, load_jsonl
from lp.models.loader import load

OURS = 0  # in place of N


def settings(ngrams: list[int], widths: list[int], rows: list[int]) -> list[tuple[int, int]]:
    """(N, W) of the paper's method, then (0, G) of ours."""
    return [(n, width) for n in ngrams for width in widths] + [(OURS, budget) for budget in rows]


def run(model: Any, setting: tuple[int, int], prompts: list[list[int]], new: int, temperature: float) -> dict[str, Any]:
    """S and rows of one setting over all prompts."""
    n, size = setting
    if n == OURS:
        ours = lp.LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=size)
        decoder = lp.LookaheadDecoder(model, ours)
    else:
        paper = lp.PaperConfig(window_size=size, ngram_size=n, guess_set_size=size)
        decoder = lp.LookaheadDecoder(model, paper)
    sampling = lp.SamplingParams(temperature=temperature, seed=0) if temperature else None
    outputs = [decoder.generate(ids, new, sampling, sequence=i) for i, ids in enumerate(prompts)]
    steps = sum(output.steps for output in outputs)
    slots = sum(step.num_tokens for output in outputs for step in output.step_stats)
    tokens = sum(len(output.tokens) for output in outputs)
    return {"N": n, "size": size, "S": tokens / steps, "rows": slots / steps}


def plot(results: list[dict[str, Any]], path: Path, title: str) -> None:
    """Points as measured, lines of the model, a colour an N."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, n in enumerate(sorted({r["N"] for r in results} - {OURS})):
        mine = sorted((r for r in results if r["N"] == n), key=lambda r: r["rows"])
        model = AcceptanceModel.fitted(_seen(mine))
        rows = [r["rows"] for r in mine]
        axes.plot(rows, [r["S"] for r in mine], "o", color=f"C{place}")
        line = [model.compression(r["size"], n - 1) for r in mine]
        axes.plot(rows, line, color=f"C{place}", label=f"N={n}: alpha {model.alpha:.2f}, f {model.f:.1f}")
    ours = sorted((r for r in results if r["N"] == OURS), key=lambda r: r["rows"])
    axes.plot([r["rows"] for r in ours], [r["S"] for r in ours], "k*-", label="the pool, no window")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="rows of a step", ylabel="S, tokens a step", title=title)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _seen(results: list[dict[str, Any]]) -> list[Observed]:
    return [Observed(candidates=r["size"], depth=r["N"] - 1, compression=r["S"]) for r in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSONL to write, or to go on with")
    parser.add_argument("figure", type=Path)
    parser.add_argument("--task", type=Path, help="JSONL of prompts; the built-in ones without it")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ngrams", type=int, nargs="+", default=[3, 4, 5, 6, 7, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="W = G")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128, 256], help="of ours")
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(args.model, "float32")
    texts = load_jsonl(args.task, args.limit) if args.task else load_builtin(args.limit)
    prompts = [list(loaded.tokenizer(prompt.text)["input_ids"]) for prompt in texts]
    lines = args.results.read_text(encoding="utf-8").splitlines() if args.results.exists() else []
    asked = {"model": args.model, "task": str(args.task), "prompts": len(prompts)}
    asked |= {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    results = [r for r in map(json.loads, lines) if asked.items() <= r.items()]
    done = {(r["N"], r["size"]) for r in results}
    wanted = [s for s in settings(args.ngrams, args.widths, args.rows) if s not in done]
    for setting in track(wanted, "settings", disable=not sys.stderr.isatty()):
        results.append(run(loaded.model, setting, prompts, args.max_new_tokens, args.temperature) | asked)
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(results[-1]) + "\n")
    plot(results, args.figure, f"{args.model}, {len(prompts)} prompts, T = {args.temperature:g}")
    paper = _seen([r for r in results if r["N"] != OURS])
    model = AcceptanceModel.fitted(paper)
    print(f"all N: alpha {model.alpha:.3f}, f {model.f:.2f}, error of log S {model.error(paper):.3f}")
    for r in sorted(results, key=lambda r: (r["N"], r["rows"])):
        name = f"N={r['N']} W=G={r['size']}" if r["N"] else f"ours G={r['size']}"
        print(f"{name:16} rows {r['rows']:6.1f} S {r['S']:.2f}")


if __name__ == "__main__":
    main()
