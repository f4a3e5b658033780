"""Measure a model's bigrams, and write them beside it, where the pool finds them (docs/pool.md).

    python scripts/build_bigrams.py --model /models/CodeLlama-7b-hf
    python scripts/build_bigrams.py --model codellama/CodeLlama-7b-hf --output codellama.npy

The apps are given a file that is not beside the model as `pool.bigrams=codellama.npy`.

What a model says behind a token depends on what came before: the mean over a few texts that may come before anything
serves better than none. A GPU takes seconds; a CPU as long as for a prompt of V tokens a text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lp.draft.pool.bigrams import FILE_NAME, write_bigrams
from lp.models.bigrams import BATCH, NUM_LOGITS, measure_bigrams
from lp.models.loader import DEMO_MODEL, load

TEXTS = (
    "\n",
    "def f(x):\n    ",
    "Write a function that returns the sum of all the numbers in a list.\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder or hub name")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-logits", type=int, default=NUM_LOGITS, help="of a token; 8 bytes each")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--output", type=Path, help=f"{FILE_NAME} in the model's folder without it")
    args = parser.parse_args()
    folder = DEMO_MODEL if args.model == "demo" else Path(args.model)
    if args.output is None and not folder.is_dir():
        parser.error(f"{args.model!r} is no folder; say with --output where to write, and give it as pool.bigrams")
    loaded = load(args.model, args.dtype)
    contexts = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    packed = measure_bigrams(loaded.model.to(args.device), contexts, args.num_logits, args.batch)
    path = args.output or folder / FILE_NAME
    write_bigrams(packed, path)
    print(f"{path}: {packed.shape[1]} logits behind each of {len(packed)} tokens, {packed.nbytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
