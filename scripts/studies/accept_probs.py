"""How well the pool predicts acceptance: predicted probability against accepted share, by decile.

    python scripts/tables.py accept_probs texts.jsonl --limit 10 --num-tokens 48

Of every draft token whose parent was accepted: the probability that the pool gave it, and whether it was accepted.
Shares of few tokens are off by chance: "noise" is two standard errors of a share whose probabilities are right, and a
line that is further off is marked. The texts are those of `tables.py texts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import lp
from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree
from lp.engine.request import Request
from lp.sampling.top_logits import TopLogits

from .harness import Method, Result, Row, Table, TextStudy, budget_config, grouped, option
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
    """A decoder that records what became of its pool's draft tokens."""

    outcomes: list[Outcome]

    def source(self, request: Request) -> DraftSource:
        """Make the request's pool, and record what becomes of its draft tokens."""
        return RecordingSource(super().source(request), self.outcomes)


class Decile(NamedTuple):
    """The draft tokens whose predictions are in one tenth of 0 to 1.

    Attributes:
        tokens: how many.
        predicted: their mean prediction.
        accepted: the share of them that was accepted.
        noise: two standard errors of that share, if the predictions are right.
    """

    tokens: int
    predicted: float
    accepted: float
    noise: float

    @property
    def is_off(self) -> bool:
        """Whether chance alone hardly explains the difference."""
        return abs(self.accepted - self.predicted) > self.noise

    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        off = " *" if self.is_off else ""
        return str(self.tokens), f"{self.predicted:.3f}", f"{self.accepted:.3f}{off}", f"{self.noise:.3f}"


def deciles(outcomes: list[Outcome]) -> list[Decile]:
    """Every tenth of the predictions that has any, the least likely first."""
    predicted, accepted = np.array(outcomes).T
    bins = np.minimum((predicted * BINS).astype(int), BINS - 1)
    found = []
    for b in np.unique(bins):
        own = predicted[bins == b]
        noise = 2 * np.sqrt((own * (1 - own)).sum()) / len(own)
        found.append(Decile(len(own), float(own.mean()), float(accepted[bins == b].mean()), float(noise)))
    return found


@dataclass(kw_only=True)
class AcceptProbs(TextStudy):
    """Compares predicted with actual acceptance over the draft tokens of all texts."""

    texts: Path = option(help="JSONL of tables.py texts")
    limit: int = option(10, "texts of a task and temperature")
    num_tokens: int = option(48, "most tokens a step")
    SHARED = (*TextStudy.SHARED, "num_tokens")

    def rows(self) -> Iterable[Row]:
        return [text.row for text in load_texts(self.texts) if text.index < self.limit]

    def methods(self) -> Mapping[str, Method]:
        outcomes: list[Outcome] = []

        def build(model: Any) -> lp.Decoder:
            decoder = RecordingDecoder(model, budget_config(self.num_tokens))
            decoder.outcomes = outcomes
            return decoder

        def recorded(output: lp.GenerationOutput, row: Row) -> Result:
            of_text = {"outcomes": [*outcomes]}
            outcomes.clear()
            return of_text

        return {"": self.decodes(build, result=recorded)}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        for temperature, of in sorted(grouped(results, "temperature").items()):
            found = deciles([each for result in of for each in result["outcomes"]])
            lines = [decile.cells() for decile in found]
            yield Table(("draft tokens", "predicted", "accepted", "noise"), lines, f"T = {temperature:g}")
