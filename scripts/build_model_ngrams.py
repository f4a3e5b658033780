"""Measure what a model writes behind contexts of 1 to 3 tokens, and store it beside the model for the pool.

    python scripts/build_model_ngrams.py --model FOLDER    # 300,000 tokens of its own texts; minutes on a GPU

Needs no data: the model writes texts, and the file has what it said there, by the last 1, 2 and 3 tokens. The pool
finds it there with pool.model_ngrams=auto; a file elsewhere is given as pool.model_ngrams=PATH.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from lp.draft.pool.model_ngrams import FILE_NAME, FULL, new_file, rows_of, write_file
from lp.models.loader import DEMO_MODEL, load, vocabulary_size
from lp.models.ngrams import BATCH, NUM_LOGITS, measure_ngrams

BEGINNINGS = (
    "\n",
    "def f(x):\n    ",
    "Write a function that returns the sum of all the numbers in a list.\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder or hub name")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=300_000, help="that the model writes")
    parser.add_argument(
        "--mib", type=float, default=64, help="of the file, at most; the least frequent contexts make room"
    )
    parser.add_argument("--num-logits", type=int, default=NUM_LOGITS, help="of a context; 8 bytes each")
    parser.add_argument("--batch", type=int, default=BATCH, help="texts that are written at a time")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--output", type=Path, help=f"{FILE_NAME} in the model's folder without it")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = DEMO_MODEL if args.model == "demo" else Path(args.model)
    if args.output is None and not folder.is_dir():
        parser.error(f"{args.model!r} is no folder; say with --output where to write, and give it as pool.model_ngrams")
    path = args.output or folder / FILE_NAME
    if not os.access(path.parent, os.W_OK | os.X_OK):  # not after minutes of measuring
        parser.error(f"no file can be written to the folder {str(path.parent)!r}; give another path with --output")
    if min(args.num_logits, args.batch) < 1 or args.tokens < 0:
        parser.error("--num-logits and --batch are 1 at least, and --tokens is 0 at least")
    loaded = load(args.model, args.dtype)
    vocabulary, rows = vocabulary_size(loaded.model), rows_of(args.mib, args.num_logits)
    left = int(rows * FULL) - vocabulary
    if left < 0:
        parser.error(f"--mib {args.mib:g} has no room for a vocabulary of {vocabulary}; give it more")
    beginnings = [loaded.tokenizer(text)["input_ids"] for text in BEGINNINGS]
    contexts = measure_ngrams(
        loaded.model.to(args.device), beginnings, args.tokens, max(left // 2, 1), args.num_logits, args.batch
    )
    file, placed = new_file(vocabulary, rows, contexts)
    write_file(file, path)
    print(f"{path}: {args.num_logits} logits behind each of {placed} contexts, {file.nbytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
