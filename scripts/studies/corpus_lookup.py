"""What a corpus costs the host in a step: growing a draft tree with one and without.

    python scripts/tables.py corpus_lookup FOLDER --model MODEL --tokens 10000000

The corpus is of drawn tokens, a part of them copied runs, so that it has none of the folder's files for long. Trees
grow behind stretches of these files, and behind stretches of the corpus itself. Seconds are this thread's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from lp.draft.pool.corpus import Corpus
from lp.draft.pool.corpus_file import IndexedFile, Listing, new_file
from lp.draft.pool.factory import fresh_tables
from lp.draft.pool.ngram_pool import NGramPool
from lp.errors import UserError
from lp.models.loader import vocabulary_size
from lp.sampling.top_logits import TopLogits

from .harness import Method, ModelStudy, Result, Row, Table, budget_config, grouped, option, values
from .parts.held_out import Tree

TEXT = 400  # tokens that a tree grows behind
RUN = 500  # tokens of a copied run, of which there is one for each 4 * RUN
GROWN = 5  # times that a tree grows; the fastest counts
HAS, HAS_NOT = "has the text", "has it not"


@dataclass(kw_only=True)
class CorpusLookup(ModelStudy):
    """Grows draft trees behind texts, with a corpus and without."""

    folder: Path = option(help="a source tree")
    tokens: int = option(10_000_000, "of the corpus")
    texts: int = option(60, "of each kind")
    budget: int = option(48, "tokens of a tree")

    @cached_property
    def corpus(self) -> np.ndarray:
        """The corpus' file, in memory."""
        size, drawn = vocabulary_size(self.loaded.model), np.random.default_rng(0)
        tokens = (drawn.zipf(1.2, self.tokens) % size).astype(np.int32)
        for _ in range(self.tokens // (4 * RUN)):
            source, target = drawn.integers(0, max(self.tokens - RUN, 1), 2)
            tokens[target : target + RUN] = tokens[source : source + RUN]
        self.drawn = tokens
        return new_file(size, [tokens], Listing("", 0, [IndexedFile("", 0, 0, len(tokens))]))

    def rows(self) -> Iterator[Row]:
        rng = random.Random(0)
        files = [self.ids(text) for text in Tree.divided(self.folder, 0).texts]
        files = [ids for ids in files if len(ids) >= TEXT]
        if not files or self.tokens < TEXT:
            raise UserError(f"{self.folder} has no file of {TEXT} tokens, or the corpus fewer; give others")
        for index in range(self.texts):
            ids = rng.choice(files)
            first = rng.randrange(len(ids) - TEXT + 1)
            yield Row({"corpus": HAS_NOT, "index": index}, ids[first : first + TEXT])
            first = rng.randrange(self.tokens - TEXT + 1)
            assert len(self.corpus)
            yield Row({"corpus": HAS, "index": index}, self.drawn[first : first + TEXT].tolist())

    def methods(self) -> Mapping[str, Method]:
        return {"": self.grown}

    def grown(self, row: Row) -> Result:
        """Seconds of a tree behind a text, without the corpus and with it, in turn which comes first."""
        size, config = vocabulary_size(self.loaded.model), budget_config(self.budget, window_size=0)
        drawn, shape = np.random.default_rng(row.key["index"]), (TEXT, config.ablation.num_logits)
        logits = -np.sort(-drawn.normal(3, 2, shape).astype(np.float32))
        top = TopLogits(drawn.integers(0, size, shape, np.int32), logits)
        taken: dict[str, float | int] = {}
        for corpora in ([], [self.corpus]) if row.key["index"] % 2 else ([self.corpus], []):
            tables = fresh_tables(config, size, 4)
            pool = NGramPool(config, row.item, None, tables, corpora=[*map(Corpus.of, corpora)])
            pool.begin(row.item, top)
            name = "with_s" if corpora else "without_s"
            taken["tokens with" if corpora else "tokens without"] = len(pool.propose(row.item, self.budget).tokens)
            taken[name] = min(_seconds(pool, row.item, self.budget) for _ in range(GROWN))
        return {**taken, "more_s": taken["with_s"] - taken["without_s"]}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines = []
        for corpus, of in grouped(results, "corpus").items():
            us = [f"{1e6 * median(values(of, name)):.0f}" for name in ("without_s", "with_s", "more_s")]
            tokens = [f"{median(values(of, f'tokens {each}')):.0f}" for each in ("without", "with")]
            lines.append((corpus, str(len(of)), *tokens, *us))
        heads = ("the corpus", "texts", "tokens without", "tokens with", "us without", "us with", "us more")
        yield Table(heads, lines, note=f"{self.tokens:,} tokens, medians.")


def _seconds(pool: NGramPool, text: list[int], budget: int) -> float:
    began = time.thread_time()
    pool.propose(text, budget)
    return time.thread_time() - began
