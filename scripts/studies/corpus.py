"""S with a corpus of a repository, with a history, and without, at equal step tokens, on files that neither has.

    python scripts/tables.py corpus FOLDER --model MODEL --positions 20 --max-new-tokens 48
    python scripts/tables.py corpus FOLDER --model MODEL --past 100 --max-new-tokens 48
    python scripts/tables.py corpus FOLDER --cost --positions 20     # what a corpus that never matches costs

A quarter of the folder's .py files is held out, and the corpus is made of the others. A text goes on at a position of a
held-out file, drawn by a seed, from what the file has before it. With --past each text comes behind as many
completions at positions of the other files, which a history has, and a session's pool. The interval of 95 % of a ratio
is a bootstrap over positions. With --cost steps with a corpus of tokens that no text has take turns with those without
one, and their seconds of the thread are compared.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

import lp
from lp.draft.pool.corpus_file import IndexedFile, Listing, new_file
from lp.draft.pool.model_ngrams import write_file
from lp.models.loader import vocabulary_size

from .first_contact import interval, token_times
from .harness import (
    Method,
    Result,
    Row,
    Table,
    TextStudy,
    budget_config,
    compression,
    counts,
    grouped,
    option,
    sampling_at,
    step_tokens,
)
from .parts.held_out import Tree

WITHOUT, WITH, COST = "without", "with", "cost"
HISTORY, SESSION = "history", "session"
NAMES = {WITH: "the corpus", HISTORY: "a history", SESSION: "a session's pool"}


@dataclass(kw_only=True)
class Corpora(TextStudy):
    """Decodes texts at positions of held-out files with a corpus of the other files, and without."""

    folder: Path = option(help="a source tree")
    positions: int = option(20)
    seed: int = option(0, "of the draw of files that are held out, and of the positions")
    temperatures: list[float] = option([0.0, 0.2])
    budget: int = option(48, "most tokens a step")
    max_new_tokens: int = option(48)
    past: int = option(0, "completions of other files that come before each text")
    cost: bool = option(False, "compare seconds beside a corpus that never matches")
    SHARED = (*TextStudy.SHARED, "positions", "seed", "budget", "past", "cost")

    @cached_property
    def tree(self) -> Tree:
        """The files, divided, and the positions."""
        return Tree.divided(self.folder, self.positions, self.seed, past=self.past)

    def shared(self) -> Result:
        return super().shared() | {"folder": self.folder.name}

    def rows(self) -> Iterable[Row]:
        for temperature in self.temperatures:
            for index, prompt in enumerate(self.tree.prompts):
                yield Row({"temperature": temperature, "index": index}, prompt)

    def methods(self) -> Mapping[str, Method]:
        if self.cost:
            return {COST: self.seconds_beside}
        without = self.decodes(lambda model: lp.LookaheadDecoder(model, budget_config(self.budget)))
        if self.past:
            return {WITHOUT: without} | {name: partial(self.behind_others, name) for name in (HISTORY, SESSION)}
        return {
            WITHOUT: without,
            WITH: self.decodes(lambda model: lp.LookaheadDecoder(model, self.config(self.corpus))),
        }

    def behind_others(self, name: str, row: Row) -> Result:
        """The text behind past completions alone: what it leaves itself is thrown away."""
        temperature = row.key["temperature"]
        with tempfile.TemporaryDirectory() as folder:
            file = shutil.copy(self.remembered(name, temperature), folder)
            decoder = self.remembering(name, Path(file))
            return counts(self.completed(decoder, row.item, temperature, row.key["index"]))

    def remembered(self, name: str, temperature: float) -> Path:
        """The file of what the past completions have left."""
        if (name, temperature) not in self.files:
            file = Path(self.stack.enter_context(tempfile.TemporaryDirectory()), name)
            decoder = self.remembering(name, file)
            for index, prompt in enumerate(self.tree.past, self.positions):
                self.completed(decoder, prompt, temperature, index)
            self.files[name, temperature] = file
        return self.files[name, temperature]

    @cached_property
    def files(self) -> dict[tuple[str, float], Path]:
        """What `remembered` has made."""
        return {}

    def remembering(self, name: str, file: Path) -> lp.LookaheadDecoder:
        """A decoder with a history, or a session's pool, in a file."""
        kept: dict[str, dict[str, Any]] = {
            HISTORY: {"history": str(file)},
            SESSION: {"pool_scope": lp.PoolScope.SESSION, "pool_mib": 128, "pool_file": str(file)},
        }
        return lp.LookaheadDecoder(self.loaded.model, budget_config(self.budget, **kept[name]))

    def completed(self, decoder: lp.Decoder, prompt: str, temperature: float, index: int) -> lp.GenerationOutput:
        """What a decoder writes behind a prompt."""
        return decoder.generate(self.ids(prompt), self.max_new_tokens, sampling_at(temperature), sequence=index)

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
            for name in (each for each in NAMES if each in by):
                low, high = ratio_interval(by[name], by[WITHOUT])
                lines.append(
                    (
                        f"{temperature:g}",
                        str(len(by[name])),
                        NAMES[name],
                        *(f"{compression(by[each]):.2f} at {step_tokens(by[each]):.0f}" for each in (WITHOUT, name)),
                        f"{compression(by[name]) / compression(by[WITHOUT]):.3f} [{low:.3f}, {high:.3f}]",
                    )
                )
        columns = ("T", "positions", "with", "S without, at step tokens", "S with it", "ratio")
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
