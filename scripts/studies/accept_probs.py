"""How well the pool predicts acceptance: predicted and accepted share, by decile: docs/experiments/pool.md.

    python scripts/tables.py accept_probs texts.jsonl --limit 10 --num-tokens 48

Of every draft token whose parent was accepted: the probability that the pool gave it, and whether it was accepted.
The texts are those of `tables.py texts`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lp
from launch.bench.summary import markdown
from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree
from lp.engine.request import Request
from lp.sampling.top_logits import TopLogits

from ._common import add_model_arguments, budget_config, load_model, progress, sampling_at
from .parts.replay import load_texts

BINS = 10
Outcome = tuple[float, bool]  # predicted probability given that the parent is accepted; whether it was accepted


class RecordingSource(DraftSource):
    """Passes everything on to a source, and records what became of its draft tokens.

    Args:
        source: proposes.
        outcomes: one is appended for every draft token whose parent was accepted.
    """

    def __init__(self, source: DraftSource, outcomes: list[Outcome]) -> None:
        self.source = source
        self.outcomes = outcomes
        self.num_logits = source.num_logits
        self.tree = DraftTree()

    def propose(self, *args: Any) -> DraftTree:
        self.tree = self.source.propose(*args)
        return self.tree

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        self.source.begin(prompt, top_logits)

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        tree = self.tree
        new = text[len(text) - num_new :]
        depths = {-1: 0}  # of the accepted nodes
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            depth = depths.get(parent)
            if depth is not None and depth < len(new):
                above = tree.accept_probs[parent] if parent >= 0 else 1.0
                self.outcomes.append((tree.accept_probs[node] / above, token == new[depth]))
                if token == new[depth]:
                    depths[node] = depth + 1
        self.source.observe(text, num_new, samples)


class RecordingDecoder(lp.LookaheadDecoder):
    """A decoder whose pool is recorded."""

    outcomes: list[Outcome]

    def source(self, request: Request) -> DraftSource:
        """The pool, recorded."""
        return RecordingSource(super().source(request), self.outcomes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", type=Path)
    parser.add_argument("--limit", type=int, default=10, help="texts of a task and temperature")
    parser.add_argument("--num-tokens", type=int, default=48, help="most tokens a step")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    decoder = RecordingDecoder(load_model(args).model, budget_config(args.num_tokens))
    texts = [text for text in load_texts(args.texts) if text.index < args.limit]
    results: dict[str, list[tuple[int, float, float]]] = {}
    for temperature in sorted({text.temperature for text in texts}):
        decoder.outcomes = []
        for text in progress([text for text in texts if text.temperature == temperature], f"T = {temperature:g}"):
            decoder.generate(text.prompt, args.max_new_tokens, sampling_at(temperature), sequence=text.index)
        results[f"T = {temperature:g}"] = deciles(decoder.outcomes)
    for name, lines in results.items():
        cells = [(str(count), f"{predicted:.3f}", f"{share:.3f}") for count, predicted, share in lines]
        print(f"{name}\n\n{markdown(('draft tokens', 'predicted', 'accepted'), cells)}")
    print(json.dumps({"num_tokens": args.num_tokens, "texts": len(texts), "accept_probs": results}))


def deciles(outcomes: list[Outcome]) -> list[tuple[int, float, float]]:
    """(count, mean prediction, share accepted) of every tenth of the predictions that has any."""
    predicted, accepted = np.array(outcomes).T
    bins = np.minimum((predicted * BINS).astype(int), BINS - 1)
    return [
        (int((bins == b).sum()), float(predicted[bins == b].mean()), float(accepted[bins == b].mean()))
        for b in range(BINS)
        if (bins == b).any()
    ]
