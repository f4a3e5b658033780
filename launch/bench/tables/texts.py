"""Let a model continue the prompts of some tasks by plain decoding, and keep the texts for replays without it.

    python scripts/texts.py texts.jsonl --task data/humaneval.jsonl data/gsm8k.jsonl --limit 40

Writes one object a line: task, index, temperature, prompt (ids), tokens (ids). What the file has already is skipped, so
that an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import track

import lp
from launch.bench.prompts import load_jsonl
from launch.bench.replay import Text, load_texts
from lp.models.loader import Loaded, load


def known(path: Path) -> set[tuple[str, int, float]]:
    """What the file has; a line that an interrupt cut is taken out."""
    if not path.exists():
        return set()
    whole = path.read_bytes().rpartition(b"\n")
    path.write_bytes(whole[0] + whole[1])
    return {text.key for text in load_texts(path)}


def jobs(tasks: list[Path], limit: int | None, temperatures: list[float]) -> Iterator[tuple[str, int, str, float]]:
    """Task, index, prompt and temperature of every text wanted."""
    for task in tasks:
        for index, prompt in enumerate(load_jsonl(task, limit)):
            for temperature in temperatures:
                yield task.stem, index, prompt.text, temperature


def write(loaded: Loaded, task: str, index: int, prompt: str, temperature: float, max_new_tokens: int) -> Text:
    """One text; the index of the prompt is its sequence, so that noise differs."""
    ids = list(loaded.tokenizer(prompt)["input_ids"])
    sampling = lp.SamplingParams(temperature=temperature, seed=0) if temperature else None
    output = lp.AutoregressiveDecoder(loaded.model).generate(ids, max_new_tokens, sampling, sequence=index)
    return Text(task=task, index=index, temperature=temperature, prompt=ids, tokens=output.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the JSONL to write, or to go on with")
    parser.add_argument("--task", type=Path, nargs="+", required=True, help="JSONL of prompts")
    parser.add_argument("--limit", type=int, help="first prompts of every task")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.8], help="0 is greedy")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    done = known(args.path)
    wanted = [job for job in jobs(args.task, args.limit, args.temperatures) if (job[0], job[1], job[3]) not in done]
    loaded = load(args.model, args.dtype)
    with args.path.open("a", encoding="utf-8") as file:
        for task, index, prompt, temperature in track(wanted, "texts", disable=not sys.stderr.isatty()):
            try:
                text = write(loaded, task, index, prompt, temperature, args.max_new_tokens)
            except ValueError as error:  # a prompt that fills the context
                print(f"{task} {index} left out: {error}", file=sys.stderr)
                continue
            file.write(text.line())
            file.flush()


if __name__ == "__main__":
    main()
