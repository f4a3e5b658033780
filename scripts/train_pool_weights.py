"""Learn the weights that the pool's mixture begins with, and write them into the package.

    python scripts/train_pool_weights.py --task data/humaneval.jsonl:100:124 --task data/mtbench.jsonl:60:80

    python scripts/train_pool_weights.py --only-model-ngrams --task ...     # the others stay as they are

Every prompt is continued at a temperature drawn for it, with a window or none, and the weights pass from text to text.
They are learned weights of features, and hold no token of any text. Prompts that a table is measured on
must not be among them.
"""

from __future__ import annotations

import argparse
import random
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from safetensors.numpy import save_file

import lp
from launch.data.prompts import load_builtin, load_jsonl
from lp.draft.pool import ngram_pool
from lp.draft.pool.factory import _shipped_weights
from lp.draft.pool.mixture import FEATURES, MODEL_0
from lp.draft.pool.model_ngrams import AUTO, read_file
from lp.draft.pool.tables import new_tables
from lp.draft.source import DraftSource
from lp.engine.request import Request
from lp.models.loader import load, vocabulary_size

TEMPERATURES = (0.0, 0.3, 0.8, 1.0)
UNMOVED = 1e30  # a sum of squared gradients, of weights that stay
SHAPES = ((0, 2, 49), (8, 2, 42), (8, 3, 17), (32, 2, 120))  # W, N, G


class Learner(lp.LookaheadDecoder):
    """A decoder for learning: its pools are new for every text, and go on learning the same weights."""

    weights = np.zeros(FEATURES)
    squares = np.ones(FEATURES)
    model_ngrams: np.ndarray | None = None

    def source(self, request: Request) -> DraftSource:
        """A pool that goes on learning the shared weights."""
        tables = new_tables(self.config.ablation.num_logits, self.config.pool_mib, self.weights, self.squares)
        tables = tables._replace(weights=self.weights, squares=self.squares)
        sampler = request.sampler
        model_ngrams, temperature = self.model_ngrams, sampler.processors.temperature
        return ngram_pool.NGramPool(self.config, request.prompt, sampler.noise_key, tables, model_ngrams, temperature)


def prompts(tasks: list[str]) -> list[str]:
    """The built-in prompts and, of every FILE:FIRST:END, those from FIRST on."""
    texts = [prompt.text for prompt in load_builtin(None)]
    for task in tasks:
        path, first, end = task.rsplit(":", 2)
        texts += [prompt.text for prompt in load_jsonl(Path(path), int(end))[int(first) :]]
    return texts


def take_the_shipped(weights: np.ndarray, squares: np.ndarray) -> None:
    """Take the weights that are shipped, in place, but for those of model n-grams."""
    for name, values in (("weights", weights), ("squares", squares)):
        values[:MODEL_0] = _shipped_weights()[name][:MODEL_0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--task", action="append", default=[], help="FILE:FIRST:END, prompts of a JSONL file")
    parser.add_argument(
        "--only-model-ngrams", action="store_true", help="learn the weights of the model's n-grams, which it must have"
    )
    parser.add_argument("--model-ngrams", default=AUTO, help="their file, as pool.model_ngrams")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(ngram_pool.__file__).with_name("weights.safetensors"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load(args.model, "float32")
    if args.only_model_ngrams:
        Learner.model_ngrams = read_file(
            args.model_ngrams, loaded.model.config._name_or_path, vocabulary_size(loaded.model)
        )
        take_the_shipped(Learner.weights, Learner.squares)
        Learner.squares[:MODEL_0] += UNMOVED
    rng = random.Random(0)
    decoders = [
        Learner(loaded.model, lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g)) for w, n, g in SHAPES
    ]
    jobs = list(product(prompts(args.task), TEMPERATURES))
    rng.shuffle(jobs)
    for index, (text, temperature) in enumerate(track(jobs, "texts")):
        ids = loaded.tokenizer(text)["input_ids"][-1536:]
        sampling = lp.SamplingParams(temperature=temperature, seed=index) if temperature else None
        rng.choice(decoders).generate(ids, args.max_new_tokens, sampling)
    if args.only_model_ngrams:
        take_the_shipped(Learner.weights, Learner.squares)
    save_file({"weights": Learner.weights, "squares": Learner.squares}, args.output)
    print(f"{len(jobs)} texts; {np.count_nonzero(Learner.weights)} of {FEATURES} weights learned; {args.output}")


if __name__ == "__main__":
    main()
