"""Are the pool's chances true? Predicted chance against accepted share, by decile: a table of docs/pool.md.

    python scripts/reliability.py texts.jsonl --limit 10 --rows 48

Of every candidate whose parent turned out true, the chance that the pool gave it there, and whether it was accepted.
The texts are those of scripts/texts.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

import lp
from launch.bench.replay import load_texts
from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree
from lp.engine.request import Request
from lp.models.loader import load
from lp.sampling.top_logits import TopLogits

BINS = 10


class Recorder:
    """A source that notes what became of its proposals.

    Args:
        source: it speaks for.
        noted: (chance given that the parent is true, accepted) of every candidate whose parent was.
    """

    def __init__(self, source: DraftSource, noted: list[tuple[float, bool]]) -> None:
        self.source, self.noted, self.num_logits = source, noted, source.num_logits
        self.tree = DraftTree()

    def propose(self, *asked: Any) -> DraftTree:
        self.tree = self.source.propose(*asked)
        return self.tree

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        self.source.begin(prompt, top_logits)

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        tree, truth = self.tree, text[len(text) - num_new :]
        depths = {-1: 0}  # of the nodes that are true
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            depth = depths.get(parent)
            if depth is not None and depth < len(truth):
                above = tree.accept_probs[parent] if parent >= 0 else 1.0
                self.noted.append((tree.accept_probs[node] / above, token == truth[depth]))
                if token == truth[depth]:
                    depths[node] = depth + 1
        self.source.observe(text, num_new, samples)


class Recording(lp.LookaheadDecoder):
    """A decoder whose pool is recorded."""

    noted: list[tuple[float, bool]]

    def source(self, request: Request) -> DraftSource:
        """The pool, watched."""
        return Recorder(super().source(request), self.noted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--limit", type=int, default=10, help="texts of a task and temperature")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    torch.set_num_threads(1)
    window = args.rows // 6
    config = lp.LookaheadConfig(window_size=window, ngram_size=2, guess_set_size=args.rows - window)
    decoder = Recording(load(args.model, "float32").model, config)
    texts = [text for text in load_texts(args.texts) if text.index < args.limit]
    found: dict[str, list[tuple[int, float, float]]] = {}
    for temperature in sorted({text.temperature for text in texts}):
        decoder.noted = []
        mine = [text for text in texts if text.temperature == temperature]
        for text in track(mine, f"T = {temperature:g}", disable=not sys.stderr.isatty()):
            sampling = lp.SamplingParams(temperature=temperature, seed=0) if temperature else None
            decoder.generate(text.prompt, args.max_new_tokens, sampling, sequence=text.index)
        accept_probs, accepted = np.array(decoder.noted).T
        bins = np.minimum((accept_probs * BINS).astype(int), BINS - 1)
        found[f"T = {temperature:g}"] = [
            (int((bins == b).sum()), float(accept_probs[bins == b].mean()), float(accepted[bins == b].mean()))
            for b in range(BINS)
            if (bins == b).any()
        ]
    for name, lines in found.items():
        print(f"{name}\n\n| candidates | predicted | accepted |\n|---|---|---|")
        for count, predicted, share in lines:
            print(f"| {count} | {predicted:.3f} | {share:.3f} |")
        print()
    print(json.dumps({"rows": args.rows, "texts": len(texts), "reliability": found}))


if __name__ == "__main__":
    main()
