"""S with a corpus of a repository and without, at equal step tokens, on files that the corpus has not.

    python scripts/tables.py corpus FOLDER --model MODEL --positions 20 --max-new-tokens 48
    python scripts/tables.py corpus FOLDER --cost --positions 20     # what a corpus that never matches costs

A quarter of the folder's .py files is held out, and the corpus is made of the others. A text goes on at a position of a
held-out file, drawn by a seed, from what the file has before it. The interval of 95 % of a ratio is a bootstrap over
positions. With --cost steps with a corpus of tokens that no text has take turns with those without one, and their
seconds of the thread are compared.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import geometric_mean

import numpy as np

import lp
from lp.draft.pool.corpus_file import IndexedFile, Listing, new_file
from lp.draft.pool.model_ngrams import write_file
from lp.models.loader import vocabulary_size

from .first_contact import interval, token_times
from .harness import Method, Result, Row, Table, TextStudy, budget_config, compression, grouped, option, step_tokens
from .parts.held_out import Tree

WITHOUT, WITH, COST = "without", "with", "cost"


@dataclass(kw_only=True)
class Corpora(TextStudy):
    """Decodes texts at positions of held-out files with a corpus of the other files, and without."""

    folder: Path = option(help="a source tree")
    positions: int = option(20)
    seed: int = option(0, "of the draw of files that are held out, and of the positions")
    temperatures: list[float] = option([0.0, 0.2])
    budget: int = option(48, "most tokens a step")
    max_new_tokens: int = option(48)
    cost: bool = option(False, "compare seconds beside a corpus that never matches")
    SHARED = (*TextStudy.SHARED, "positions", "seed", "budget", "cost")

    @cached_property
    def tree(self) -> Tree:
        """The files, divided, and the positions."""
        return Tree.divided(self.folder, self.positions, self.seed)

    def shared(self) -> Result:
        return super().shared() | {"folder": self.folder.name}

    def rows(self) -> Iterable[Row]:
        for temperature in self.temperatures:
            for index, prompt in enumerate(self.tree.prompts):
                yield Row({"temperature": temperature, "index": index}, prompt)

    def methods(self) -> Mapping[str, Method]:
        if self.cost:
            return {COST: self.seconds_beside}
        return {
            WITHOUT: self.decodes(lambda model: lp.LookaheadDecoder(model, budget_config(self.budget))),
            WITH: self.decodes(lambda model: lp.LookaheadDecoder(model, self.config(self.corpus))),
        }

    def config(self, corpus: str) -> lp.LookaheadConfig:
        """A fixed budget as without it, with a corpus."""
        return budget_config(self.budget, corpora=[corpus])

    @cached_property
    def corpus(self) -> str:
        """The file of the corpus of what is not held out."""
        return self._written("tree", self.tree.corpus(self.loaded.tokenizer, vocabulary_size(self.loaded.model)))

    @cached_property
    def elsewhere(self) -> str:
        """The file of a corpus that has every token of the vocabulary, and runs that no text has."""
        size = vocabulary_size(self.loaded.model)
        tokens = np.array(random.Random(0).choices(range(size), k=1 << 20), np.int32)
        return self._written("else", new_file(size, [tokens], Listing("", 0, [IndexedFile("", 0, 0, len(tokens))])))

    def _written(self, name: str, array: np.ndarray) -> str:
        path = Path(self.stack.enter_context(tempfile.TemporaryDirectory()), name)
        write_file(array, path)
        return str(path)

    @cached_property
    def pair(self) -> dict[str, lp.Decoder]:
        """Decoders of the default config without a corpus and beside one that never matches, warm."""
        beside = lp.LookaheadDecoder(self.loaded.model, lp.LookaheadConfig(corpora=[self.elsewhere]))
        decoders: dict[str, lp.Decoder] = {WITHOUT: lp.LookaheadDecoder(self.loaded.model), WITH: beside}
        for decoder in decoders.values():
            decoder.generate([1, 2, 3], 4)
        return decoders

    def seconds_beside(self, row: Row) -> Result:
        """The ratio of a text's seconds beside a corpus that never matches to those without one."""
        order = sorted(self.pair, reverse=bool(row.key["index"] % 2))
        curves = token_times({name: self.pair[name] for name in order}, self.ids(row.item), self.max_new_tokens)
        return {"ratio": curves[WITH][-1] / curves[WITHOUT][-1]}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        if self.cost:
            ratios = [result["ratio"] for result in results]
            low, high = interval(ratios)
            heads = ("texts", "seconds beside a corpus that never matches over those without one")
            yield Table(heads, [(str(len(ratios)), f"{geometric_mean(ratios):.4f} [{low:.4f}, {high:.4f}]")])
            return
        lines = []
        for temperature, of in grouped(results, "temperature").items():
            by = grouped(of, "method")
            low, high = ratio_interval(by[WITH], by[WITHOUT])
            lines.append(
                (
                    f"{temperature:g}",
                    str(len(by[WITH])),
                    *(f"{compression(by[name]):.2f} at {step_tokens(by[name]):.0f}" for name in (WITHOUT, WITH)),
                    f"{compression(by[WITH]) / compression(by[WITHOUT]):.3f} [{low:.3f}, {high:.3f}]",
                )
            )
        columns = ("T", "positions", "S without, at step tokens", "S with the corpus", "ratio")
        tokens = cache(lambda: sum(len(self.ids(text)) for text in self.tree.texts))
        yield Table(columns, lines, note=f"Corpus: {len(self.tree.texts)} files, {tokens():,} tokens.")


def ratio_interval(upper: Sequence[Result], lower: Sequence[Result]) -> tuple[float, float]:
    """The interval of 95 % of the ratio of both S, by bootstrap over texts."""
    drawn = random.Random(0)
    lower_by = {result["index"]: result for result in lower}
    pairs = [(result, lower_by[result["index"]]) for result in upper if result["index"] in lower_by]
    ratios = []
    for _ in range(2000):
        chosen = drawn.choices(pairs, k=len(pairs))
        above, below = ([pair[side] for pair in chosen] for side in (0, 1))
        ratios.append(compression(above) / compression(below))
    ratios.sort()
    return ratios[50], ratios[-51]
