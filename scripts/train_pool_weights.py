"""Learn the weights that the pool's mixture begins with, on texts of several models, and write them into the package.

    python scripts/train_pool_weights.py --model demo --model FOLDER --task data/humaneval.jsonl:100:164 \\
      --chat data/mtbench.jsonl:60:80 --ballots ballots

1. Every model continues every prompt at two temperatures, with a shape of steps drawn for each text. For every token
   that it writes, the votes and the token that came are kept: once with the model's n-grams, where it has some, and
   once without. They do not depend on the weights. Files of --ballots hold them, so that a run that was ended goes on.
2. The weights are those of the least mean log loss of all tokens, each model counting alike, plus a ridge that draws
   them to the ones that are shipped.
   With --tree these are the weights of corpora alone: prompts are of held-out files of a source tree, the votes those
   of a corpus of its other files, and the other weights stay as they are.
3. For each model, the loss of its tokens is printed: under the shipped weights, under the new ones, and under weights
   learned on the other models alone.

They are weights of features, none of which depends on a vocabulary, and hold no token of any text. Prompts that a table
is measured on must not be among them.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track
from safetensors.numpy import load_file, save_file

import lp
from launch.data.prompts import load_builtin, load_jsonl
from lp.draft.pool.corpus import Corpus
from lp.draft.pool.factory import _shipped_weights
from lp.draft.pool.mixture import FEATURES, LEVELS, TOGETHER_0, predict
from lp.draft.pool.model_ngrams import AUTO, read_file
from lp.draft.pool.ngram_pool import NGramPool
from lp.draft.pool.tables import fill_context, new_tables
from lp.draft.source import DraftSource, StepSamples
from lp.engine.request import Request
from lp.models.loader import load, vocabulary_size

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.studies.parts.held_out import Tree

TEMPERATURES = (0.0, 0.8)
SHAPES = ((7, 5, 7), (8, 2, 42))  # W, N, G
LONGEST_PROMPT = 512  # tokens, the last of a prompt


class Ballots(NamedTuple):
    """What was voted for at some tokens, and which token came.

    n: tokens; v: votes of all of them.
    """

    votes: np.ndarray  # int64 (v, 2): index of the candidate, its feature; the last candidate is "none of them"
    counts: np.ndarray  # int64 (n,): votes of each token
    candidates: np.ndarray  # int64 (n,): "none of them" included
    came: np.ndarray  # int64 (n,): index of the candidate that came

    @classmethod
    def joined(cls, several: Sequence[Ballots]) -> Ballots:
        """The ballots of all of them in one."""
        return cls(*(np.concatenate(each) for each in zip(*several, strict=True)))


class RecordingPool(NGramPool):
    """A pool that keeps the votes for every token that comes, with model n-grams and corpora, and with neither."""

    def keep(self, without: NGramPool) -> RecordingPool:
        """Begin to keep them.

        Args:
            without: a pool of the same call that has no model n-grams and no corpora.
        """
        own = without._predictor._replace(last_step=self._predictor.last_step)
        more = self._predictor.model_ngrams.num_logits or self._predictor.num_corpora
        self._voters = [own, self._predictor] if more else [own]
        self.kept: list[list[Ballots]] = [[] for _ in self._voters]
        return self

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        self._catch_up(text, len(text) - num_new)
        tokens = np.array(text, np.int64)
        for end in range(len(text) - num_new, len(text)):
            for predictor, kept in zip(self._voters, self.kept, strict=True):
                known = fill_context(predictor.context, tokens, 0, end)
                choices, num_votes = predict(self._tables, predictor, known, end)
                votes = np.array(predictor.votes[: 2 * num_votes]).reshape(-1, 2)
                found = np.flatnonzero(np.asarray(predictor.tokens[:choices]) == text[end])
                came = int(found[0]) if len(found) else choices
                kept.append(Ballots(votes, *(np.array([each]) for each in (num_votes, choices + 1, came))))
        super().observe(text, num_new, samples)


class Recorder(lp.LookaheadDecoder):
    """A decoder whose pools keep their votes."""

    model_ngrams: np.ndarray | None = None
    corpus_files: Sequence[np.ndarray] = ()
    pool: RecordingPool

    def source(self, request: Request) -> DraftSource:
        """A pool that keeps its votes, of this call."""
        shipped = _shipped_weights()
        sampler = request.sampler

        def pool(kind: type[NGramPool], ngrams: np.ndarray | None, corpora: Sequence[np.ndarray] = ()) -> NGramPool:
            tables = new_tables(
                self.config.ablation.num_logits, self.config.pool_mib, shipped["weights"], 1 + shipped["squares"]
            )
            temperature = sampler.processors.temperature
            known = [*map(Corpus.of, corpora)]
            return kind(self.config, request.prompt, sampler.noise_key, tables, ngrams, temperature, known)

        recording = pool(RecordingPool, self.model_ngrams, self.corpus_files)
        assert isinstance(recording, RecordingPool)
        self.pool = recording.keep(pool(NGramPool, None))
        return self.pool


class TrainingPrompt(NamedTuple):
    """A prompt that weights are learned on; `is_chat`: it is a message to a model that has a chat template."""

    text: str
    is_chat: bool = False

    def ids(self, tokenizer: Any) -> list[int]:
        """Its tokens, the last LONGEST_PROMPT of them."""
        text = self.text
        if self.is_chat and tokenizer.chat_template:
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"][-LONGEST_PROMPT:])
        return list(tokenizer(text)["input_ids"][-LONGEST_PROMPT:])


def prompts(task: str, is_chat: bool = False) -> list[TrainingPrompt]:
    """Prompts of FILE:FIRST:END, from FIRST on."""
    path, first, end = task.rsplit(":", 2)
    return [TrainingPrompt(prompt.text, is_chat) for prompt in load_jsonl(Path(path), int(end))[int(first) :]]


def record(
    name: str,
    ngrams: str,
    texts: Sequence[TrainingPrompt],
    max_new_tokens: int,
    most: int,
    folder: Path,
    tree: Tree | None = None,
) -> Ballots:
    """The ballots of what a model writes, one file a text.

    Args:
        name: the model, as `lp.load` takes it.
        ngrams: the file of its n-grams, as pool.model_ngrams.
        texts: prompts.
        max_new_tokens: most tokens of a text.
        most: texts, at most: drawn from all prompts and temperatures.
        folder: where the files are, and go.
        tree: whose files are a corpus.
    """
    loaded = load(name, "float32", "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    jobs = [(*job, rng.choice(SHAPES)) for job in product(texts, TEMPERATURES)]
    rng.shuffle(jobs)
    Recorder.model_ngrams = read_file(ngrams, loaded.model.config._name_or_path, vocabulary_size(loaded.model))
    Recorder.corpus_files = [tree.corpus(loaded.tokenizer, vocabulary_size(loaded.model))] if tree else []
    decoders = {
        (w, n, g): Recorder(loaded.model, lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g))
        for w, n, g in SHAPES
    }
    found = []
    for index, (text, temperature, shape) in enumerate(track(jobs[:most], name)):
        path = folder / f"{index}.safetensors"
        if not path.exists():
            sampling = lp.SamplingParams(temperature=temperature, seed=index) if temperature else None
            decoders[shape].generate(text.ids(loaded.tokenizer), max_new_tokens, sampling)
            kept = Ballots.joined([ballot for each in decoders[shape].pool.kept for ballot in each])
            save_file(kept._asdict(), path)
        arrays = load_file(path)
        found.append(Ballots(*(arrays[name] for name in Ballots._fields)))
    return Ballots.joined(found)


class Loss:
    """Mean log loss of tokens as a function of the weights.

    Args:
        ballots: the votes for the tokens, and which tokens came.
    """

    def __init__(self, ballots: Ballots) -> None:
        self.count = len(ballots.came)
        first = np.cumsum(ballots.candidates) - ballots.candidates  # of each token's candidates
        self._candidate = torch.from_numpy(np.repeat(first, ballots.counts) + ballots.votes[:, 0])  # by vote
        self._feature = torch.from_numpy(np.ascontiguousarray(ballots.votes[:, 1]))
        self._token = torch.from_numpy(np.repeat(np.arange(self.count), ballots.candidates))  # by candidate
        self._came = torch.from_numpy(first + ballots.came)

    def log_probs(self, weights: torch.Tensor) -> torch.Tensor:
        """Log probability of every candidate of every token."""
        scores = torch.zeros(len(self._token), dtype=torch.float64).index_add(
            0, self._candidate, weights[self._feature]
        )
        top = torch.full((self.count,), -torch.inf, dtype=torch.float64)
        top = top.scatter_reduce(0, self._token, scores.detach(), "amax")
        scores = scores - top[self._token]
        total = torch.zeros(self.count, dtype=torch.float64).index_add(0, self._token, scores.exp())
        return scores - total.log()[self._token]

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        return -self.log_probs(weights)[self._came].mean()

    def squares(self, weights: torch.Tensor) -> np.ndarray:
        """Sum of squared gradients of each feature's votes, as the pool sums them up."""
        gradients = -self.log_probs(weights).exp()
        gradients[self._came] += 1
        of_votes = gradients[self._candidate].square()
        return torch.zeros(FEATURES, dtype=torch.float64).index_add(0, self._feature, of_votes).numpy()


def fit(losses: Sequence[Loss], start: np.ndarray, ridge: float, fixed: np.ndarray | None = None) -> np.ndarray:
    """The weights of the least mean of these losses.

    Args:
        losses: one for each model's tokens.
        start: the weights that the ridge draws them to.
        ridge: how much: half of it, over the mean tokens of a model, times the squared distance is added to the loss.
        fixed: bool (FEATURES,), weights that stay as they are; None: none.
    """
    at = torch.from_numpy(start)
    weights = at.clone().requires_grad_()
    tokens = sum(loss.count for loss in losses) / len(losses)
    steps = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        steps.zero_grad()
        each = [loss(weights) for loss in losses]
        value = torch.stack(each).mean() + ridge / 2 / tokens * (weights - at).square().sum()
        value.backward()
        if fixed is not None:
            assert weights.grad is not None
            weights.grad[torch.from_numpy(fixed)] = 0
        return value

    steps.step(closure)
    return weights.detach().numpy()


def of_no_corpus() -> np.ndarray:
    """Bool (FEATURES,): the features that have nothing to do with a corpus, whose weights are learned without one."""
    found = np.ones(FEATURES, bool)
    found[TOGETHER_0 + math.prod(LEVELS[1:]) :] = False  # a corpus is the first kind: its level 0 is the first block
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="demo, a folder or a hub name; several")
    parser.add_argument("--model-ngrams", action="append", default=[], help="of each model, as pool.model_ngrams")
    parser.add_argument("--task", action="append", default=[], help="FILE:FIRST:END, prompts of a JSONL file")
    parser.add_argument("--chat", action="append", default=[], help="the same, of messages to a chat model")
    parser.add_argument("--tree", type=Path, help="a source tree: learn the weights of corpora, on this one alone")
    parser.add_argument("--ballots", type=Path, required=True, help="folder of what was recorded, a folder a model")
    parser.add_argument("--texts", type=int, default=100, help="of each model, at most")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--ridge", type=float, default=5.0, help="how much weights are drawn to the shipped ones (5)")
    parser.add_argument("--threads", type=int, default=1)
    output = Path(lp.__file__).parent / "draft/pool/weights.safetensors"
    parser.add_argument("--output", type=Path, default=output)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tree = Tree.divided(args.tree, args.texts) if args.tree else None
    texts = [TrainingPrompt(text) for text in (tree.prompts if tree else [each.text for each in load_builtin(None)])]
    texts += [prompt for task in args.task for prompt in prompts(task)]
    texts += [prompt for task in args.chat for prompt in prompts(task, is_chat=True)]
    ngrams = args.model_ngrams or [AUTO] * len(args.model)
    losses = [
        Loss(record(name, file, texts, args.max_new_tokens, args.texts, args.ballots / str(number), tree))
        for number, (name, file) in enumerate(zip(args.model, ngrams, strict=True))
    ]
    shipped = _shipped_weights()["weights"]
    fixed = of_no_corpus() if tree else ~of_no_corpus()
    weights = fit(losses, shipped, args.ridge, fixed)
    for number, (name, loss) in enumerate(zip(args.model, losses, strict=True)):
        others = losses[:number] + losses[number + 1 :]
        of_others = fit(others, shipped, args.ridge, fixed) if others else shipped
        before, now, without = (float(loss(torch.from_numpy(each))) for each in (shipped, weights, of_others))
        print(f"{name}: {loss.count} tokens, loss {before:.4f} -> {now:.4f}; learned on the others alone {without:.4f}")
    squares = np.mean([loss.squares(torch.from_numpy(weights)) for loss in losses], axis=0)
    kept = np.where(fixed, _shipped_weights()["squares"], squares)
    save_file({"weights": weights, "squares": kept}, args.output)
    print(f"{np.count_nonzero(weights)} of {FEATURES} weights learned; {args.output}")


if __name__ == "__main__":
    main()
