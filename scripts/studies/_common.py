"""What the tables share: the options of models and prompts, and files of results that an interrupted run resumes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from rich.progress import track

import lp
from launch.data.prompts import Prompt, load_builtin, load_jsonl
from lp.models.loader import Loaded, load

T = TypeVar("T")
PAPER: dict[str, Any] = {"window_size": 7, "ngram_size": 5, "guess_set_size": 7}  # of studies of one shape


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that `load_model` reads."""
    parser.add_argument("--model", default="demo", help="folder, hub name or demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)


def load_model(args: argparse.Namespace) -> Loaded:
    """The model of these options, on this many threads."""
    torch.set_num_threads(args.threads)
    return load(args.model, args.dtype)


def add_prompt_arguments(parser: argparse.ArgumentParser, limit: int | None = None, max_new_tokens: int = 256) -> None:
    """Options that `load_prompts` reads, and the length of the answers."""
    parser.add_argument("--task", type=Path, help="JSONL of prompts; the built-in ones without it")
    parser.add_argument("--limit", type=int, default=limit, help="first prompts of the task")
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)


def load_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts of these options."""
    return load_jsonl(args.task, args.limit) if args.task else load_builtin(args.limit)


def by_commas(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """The type of an option that takes several values."""

    def several(text: str) -> list[T]:
        return [kind(each) for each in text.split(",")]

    several.__name__ = f"list of {kind.__name__}"  # for argparse's errors
    return several


def sampling_at(temperature: float) -> lp.SamplingParams | None:
    """Coupled sampling with seed 0; None, which is greedy, at temperature 0."""
    return lp.SamplingParams(temperature=temperature, seed=0) if temperature else None


def budget_config(num_tokens: int, **changes: Any) -> lp.LookaheadConfig:
    """A fixed budget of this many step tokens: N = 2, a sixth of them window columns."""
    window = num_tokens // 6
    shape: dict[str, Any] = {"window_size": window, "ngram_size": 2, "guess_set_size": num_tokens - max(window, 1)}
    return lp.LookaheadConfig(**shape | changes)


def progress(items: Sequence[T], description: str) -> Iterable[T]:
    """The items, with a bar on a terminal."""
    return track(items, description, disable=not sys.stderr.isatty())


def median_and_range(values: Sequence[float], digits: int = 0, unit: str = "") -> str:
    """The median with the least and most, as "2.04 x (1.90 to 2.20)"; of one value, that it is one.

    Args:
        values: at least one, a measurement each.
        digits: behind the point.
        unit: written behind the number.
    """
    middle = f"{median(values):.{digits}f}"
    spread = f"{min(values):.{digits}f} to {max(values):.{digits}f}" if len(values) > 1 else "measured once"
    return f"{middle}{unit} ({spread})"


def read_results(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; none if there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def append_result(path: Path, result: Mapping[str, Any]) -> None:
    """Add one object to a JSONL file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
