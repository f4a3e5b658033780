"""`lp ngrams MODEL`: measure which tokens a model writes after contexts of 1 to 3 tokens, and store them for the pool.

It needs no data: the model writes texts, and the file has the likeliest next tokens after their last 1, 2 and 3 tokens.
The n-gram pool, from which lookahead decoding drafts, finds the file in the model's folder (pool.model_ngrams=auto); a
file elsewhere is given as pool.model_ngrams=PATH. A run that was ended continues where it stopped when it is started
again.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from pathlib import Path

import torch

from lp.draft.pool.model_ngrams import FILE_NAME, FULL, new_file, rows_of, write_file
from lp.errors import UserError
from lp.models.loader import load, model_source, vocabulary_size
from lp.models.ngrams import BATCH, NUM_LOGITS, measure_ngrams
from lp.waits import waiting

from .running.weights_bar import tensors_counted

BEGINNINGS = (
    "\n",
    "def f(x):\n    ",
    "Write a function that returns the sum of all the numbers in a list.\n",
)
# A GPU needs minutes for 300,000 tokens and the whole vocabulary behind three beginnings. A CPU core needs ten minutes
# for the counts below with a model of 135 M parameters:
CPU_TOKENS, CPU_BEGINNINGS = 16_384, 1
GPU_TOKENS = 300_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lp ngrams` to its parser."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a name on the hub, or demo")
    parser.add_argument("--dtype", default="float32", help="dtype of the weights (float32)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1")
    parser.add_argument(
        "--tokens", type=int, help=f"tokens that the model writes ({GPU_TOKENS:,} on a GPU, {CPU_TOKENS:,} on a CPU)"
    )
    parser.add_argument(
        "--beginnings",
        type=int,
        choices=range(1, len(BEGINNINGS) + 1),
        help=f"beginnings after which every token is tried ({len(BEGINNINGS)} on a GPU, {CPU_BEGINNINGS} on a CPU)",
    )
    parser.add_argument(
        "--mib", type=float, default=64, help="most MiB of the file; the least frequent contexts are dropped (64)"
    )
    parser.add_argument(
        "--num-logits",
        type=int,
        default=NUM_LOGITS,
        help="likeliest next tokens kept for each context, 8 bytes each (8)",
    )
    parser.add_argument("--batch", type=int, default=BATCH, help="texts that are written at a time (64)")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--output", type=Path, help=f"the file; without it {FILE_NAME} in the model's folder")


def run(args: argparse.Namespace) -> None:
    """Measure a model's n-grams and write them to the file that the n-gram pool drafts from.

    Args:
        args: the parsed options of `lp ngrams`.

    Raises:
        UserError: an option out of range, or no permission to write; found before anything is measured.
    """
    path = checked_path(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with waiting(f"loading {args.model}") as wait, tensors_counted(wait):
        loaded = load(args.model, args.dtype, args.device)
    on_cpu = loaded.model.device.type == "cpu"
    tokens = (CPU_TOKENS if on_cpu else GPU_TOKENS) if args.tokens is None else args.tokens
    count = args.beginnings or (CPU_BEGINNINGS if on_cpu else len(BEGINNINGS))
    vocabulary, rows = vocabulary_size(loaded.model), rows_of(args.mib, args.num_logits)
    left = int(rows * FULL) - vocabulary
    if left < 0:
        raise UserError(f"--mib {args.mib:g} has no room for a vocabulary of {vocabulary}; give it more")
    beginnings = [loaded.tokenizer(text)["input_ids"] for text in BEGINNINGS[:count]]
    part = path.with_name(f"{path.name}.part")
    if not sys.stderr.isatty():
        print(
            f"{vocabulary * count + tokens:,} tokens; interrupted, it continues from {part}",
            file=sys.stderr,
        )
    contexts = measure_ngrams(
        loaded.model, beginnings, tokens, max(left // 2, 1), args.num_logits, args.batch, folder=part
    )
    file, placed = new_file(vocabulary, rows, contexts)
    write_file(file, path)
    shutil.rmtree(part, ignore_errors=True)
    print(f"{path}: {args.num_logits} logits after each of {placed:,} contexts, {file.nbytes / 2**20:.1f} MiB")


def checked_path(args: argparse.Namespace) -> Path:
    """Check the options of `lp ngrams` before minutes of measuring, and return the path of the file to write.

    Args:
        args: the parsed options; without --output the file goes into the model's folder.

    Raises:
        UserError: no folder that can be written to, or an option out of range.
    """
    folder = Path(model_source(args.model).place)  # or a name on the hub
    if args.output is None and not folder.is_dir():
        raise UserError(
            f"{args.model!r} is no folder; say with --output where to write, and give that as pool.model_ngrams"
        )
    path: Path = args.output or folder / FILE_NAME
    if not os.access(path.parent, os.W_OK | os.X_OK):  # not after minutes of measuring
        raise UserError(f"no file can be written to the folder {str(path.parent)!r}; give another path with --output")
    if min(args.num_logits, args.batch) < 1 or not math.isfinite(args.mib):
        raise UserError(
            f"--num-logits is {args.num_logits} and --batch {args.batch}; both must be 1 at least, and --mib a number"
        )
    if args.threads is not None and args.threads < 1:
        raise UserError(f"--threads is {args.threads}; it must be 1 at least")
    if args.tokens is not None and args.tokens < 0:
        raise UserError(f"--tokens is {args.tokens}; it must be 0 at least")
    return path
