"""What a model writes on some tasks by plain decoding, as a file that other tables replay without the model.

    python scripts/tables.py texts texts.jsonl --task data/humaneval.jsonl data/gsm8k.jsonl --limit 40

Writes one object a line: task, index, temperature, prompt (ids), tokens (ids). What the file has already is skipped, so
that an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import lp
from launch.data.prompts import load_jsonl
from lp.models.loader import Loaded

from ._common import add_model_arguments, load_model, progress, sampling_at
from .parts.replay import Text, load_texts

Job = tuple[str, int, str, float]  # task, index, prompt, temperature


def known(path: Path) -> set[tuple[str, int, float]]:
    """Keys of the texts in the file; a line that an interrupt cut is taken out."""
    if not path.exists():
        return set()
    whole = path.read_bytes().rpartition(b"\n")
    path.write_bytes(whole[0] + whole[1])
    return {text.key for text in load_texts(path)}


def jobs(tasks: list[Path], limit: int | None, temperatures: list[float]) -> Iterator[Job]:
    """All texts that are asked for."""
    for task in tasks:
        for index, prompt in enumerate(load_jsonl(task, limit)):
            for temperature in temperatures:
                yield task.stem, index, prompt.text, temperature


def write(loaded: Loaded, job: Job, max_new_tokens: int) -> Text:
    """One text; the index of the prompt is its sequence, so that noise differs."""
    task, index, prompt, temperature = job
    ids = list(loaded.tokenizer(prompt)["input_ids"])
    decoder = lp.AutoregressiveDecoder(loaded.model)
    output = decoder.generate(ids, max_new_tokens, sampling_at(temperature), sequence=index)
    return Text(task=task, index=index, temperature=temperature, prompt=ids, tokens=output.tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="the JSONL to write, or to go on with")
    parser.add_argument("--task", type=Path, nargs="+", required=True, help="JSONL of prompts")
    parser.add_argument("--limit", type=int, help="first prompts of every task")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.8], help="0 is greedy")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    done = known(args.path)
    left = [job for job in jobs(args.task, args.limit, args.temperatures) if (job[0], job[1], job[3]) not in done]
    loaded = load_model(args)
    with args.path.open("a", encoding="utf-8") as file:
        for job in progress(left, "texts"):
            try:
                text = write(loaded, job, args.max_new_tokens)
            except ValueError as error:  # a prompt that fills the context
                print(f"{job[0]} {job[1]} left out: {error}", file=sys.stderr)
                continue
            file.write(text.line())
            file.flush()
