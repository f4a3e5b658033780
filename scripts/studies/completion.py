"""Completing a package's own code: S, speed and exact match, with a corpus of its other files and without.

    python scripts/tables.py completion rich==15.0.0 httpx==0.28.1 networkx==3.6.1 --model MODEL --positions 12

Packages come from pip; a folder is taken as it is. A quarter of the .py files is held out, and the corpus is made of
the others. The cursor is at the end of a line of a held-out file, drawn by a seed. The model sees what the file has
before it (prefix); or pieces of other files first, as an editor's `input_extra` (neighbours); or, if it has tokens for
it, what the file has behind it, too (gap). Exact match is of the line that comes next. All texts of a row must be
equal. The interval of 95 % of a ratio is a bootstrap over positions.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import lp
from launch.serve.fim import FimPrompts, fim_format
from lp.draft.pool.model_ngrams import write_file
from lp.errors import UserError
from lp.models.loader import vocabulary_size

from .corpus import WITH, WITHOUT, ratio_interval
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
    total,
)
from .parts.held_out import BEFORE, BEHIND, FEWEST, Tree
from .parts.neighbours import neighbours
from .parts.packages import fetch_package

PREFIX, NEIGHBOURS, GAP = "prefix", "neighbours", "gap"
PIECES = 3  # of other files in a prompt


@dataclass(frozen=True)
class Cursor:
    """A place in a file of a package.

    Attributes:
        package: the package's requirement.
        path: the file's.
        before, behind: what the file has there, without the line feed between them.
    """

    package: str
    path: str
    before: str
    behind: str

    @property
    def line(self) -> str:
        """The next line that has something."""
        return first_line(self.behind)


def first_line(text: str) -> str:
    """The first line that has something, without the spaces around it."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


@dataclass(kw_only=True)
class Completion(TextStudy):
    """Completes code of packages, with a corpus of each package's other files and without."""

    packages: list[str] = option(help="as pip takes them, or folders")
    prompts: list[str] = option([PREFIX, NEIGHBOURS], choices=[PREFIX, NEIGHBOURS, GAP])
    positions: int = option(12, "of a package")
    seed: int = option(0, "of the draw of files that are held out, and of the positions")
    temperatures: list[float] = option([0.0, 0.2])
    budget: int = option(48, "most tokens a step")
    max_new_tokens: int = option(48)
    SHARED = (*TextStudy.SHARED, "positions", "seed", "budget")

    @cached_property
    def folder(self) -> Path:
        """Where packages and corpora are, until the study ends."""
        return Path(self.stack.enter_context(tempfile.TemporaryDirectory()))

    @cached_property
    def trees(self) -> dict[str, Tree]:
        """Each package's files, divided."""
        folders = {
            name: Path(name) if Path(name).is_dir() else fetch_package(name, self.folder) for name in self.packages
        }
        return {name: Tree.divided(folder, 0, self.seed) for name, folder in folders.items()}

    @cached_property
    def cursors(self) -> list[Cursor]:
        """The places, package by package."""
        found = []
        for package, tree in self.trees.items():
            drawn = random.Random(f"{package} {self.seed}")
            files = [file for file in tree.held_out if 0 < file.text.find("\n") < FEWEST]  # else no line is before it
            if not files:
                raise UserError(f"{package!r} has no files of several lines to hold out; give another package")
            for _ in range(self.positions):
                file = drawn.choice(files)
                at = file.text.rfind("\n", 0, drawn.randint(FEWEST, len(file.text) - BEHIND))
                found.append(Cursor(package, file.path, file.text[:at], file.text[at + 1 :]))
        return found

    def rows(self) -> Iterable[Row]:
        for kind in self.prompts:
            for temperature in self.temperatures:
                for index, cursor in enumerate(self.cursors):
                    key = {"package": cursor.package, "prompt": kind, "temperature": temperature, "index": index}
                    yield Row(key, cursor)

    def methods(self) -> Mapping[str, Method]:
        return {WITHOUT: lambda row: self.completed(row, ""), WITH: lambda row: self.completed(row, row.item.package)}

    def check(self, row: Row, results: list[Result]) -> None:
        if len({result["text"] for result in results}) > 1:
            raise RuntimeError(f"texts of {row.key} differ")

    def completed(self, row: Row, corpus: str) -> Result:
        """One completion, with the corpus of a package or, by the empty name, without one."""
        cursor: Cursor = row.item
        ids = self.prompt_of(cursor, row.key["prompt"])
        sampling = sampling_at(row.key["temperature"])
        output = self.decoder(corpus).generate(ids, self.max_new_tokens, sampling, sequence=row.key["index"])
        text = self.loaded.tokenizer.decode(output.tokens, skip_special_tokens=True)
        exact = bool(cursor.line) and first_line(text) == cursor.line
        figures = {"exact": exact, "prompt_tokens": len(ids), "seconds": output.decode_s}
        return counts(output) | figures

    def prompt_of(self, cursor: Cursor, kind: str) -> list[int]:
        """The tokens of a request.

        Raises:
            UserError: the model has no tokens for a gap.
        """
        before = cursor.before[-BEFORE:]
        pieces = neighbours(before, self.trees[cursor.package].files, PIECES) if kind != PREFIX else []
        if kind == GAP:
            format = fim_format(self.loaded.tokenizer, None)
            if format is None:
                raise UserError(f"{self.model} has no tokens for a gap; give --prompts {PREFIX} {NEIGHBOURS}")
            prompts = FimPrompts(self.loaded.tokenizer, format)
            return prompts.prompt(before, cursor.behind[:BEFORE], None, pieces)[0]
        above = "".join(f"# {piece.name}\n{piece.text}\n\n" for piece in pieces)
        return self.ids(f"{above}# {cursor.path}\n{before}" if above else before)

    @cached_property
    def decoder(self) -> Callable[[str], lp.Decoder]:
        """Makes the decoder with a package's corpus, or without one, at its first call with this name."""

        @cache
        def made(package: str) -> lp.Decoder:
            corpora = [self.corpus_of(package)] if package else []
            return lp.LookaheadDecoder(self.loaded.model, budget_config(self.budget, corpora=corpora))

        return made

    def corpus_of(self, package: str) -> str:
        """The file of the corpus of what is not held out."""
        path = self.folder / f"corpus-{self.packages.index(package)}"
        write_file(self.trees[package].corpus(self.loaded.tokenizer, vocabulary_size(self.loaded.model)), path)
        return str(path)

    def tables(self, results: list[Result]) -> Iterable[Table]:
        heads = ("prompt", "T", "files of", "cursors", "prompt tokens", "exact match", "S without", "S with the corpus")
        lines = []
        for (kind, temperature), of in grouped(results, "prompt", "temperature").items():
            parts = {**grouped(of, "package"), **({"all": of} if len(self.packages) > 1 else {})}
            for package, these in parts.items():
                by = grouped(these, "method")
                low, high = ratio_interval(by[WITH], by[WITHOUT])
                texts = by[WITHOUT]
                speeds = [f"{total(by[each], 'tokens') / total(by[each], 'seconds'):.1f}" for each in (WITHOUT, WITH)]
                lines.append(
                    (
                        kind,
                        f"{temperature:g}",
                        Path(package).name,
                        str(len(texts)),
                        f"{total(texts, 'prompt_tokens') / len(texts):.0f}",
                        f"{total(texts, 'exact') / len(texts):.0%}",
                        *(f"{compression(by[each]):.2f} at {step_tokens(by[each]):.0f}" for each in (WITHOUT, WITH)),
                        f"{compression(by[WITH]) / compression(by[WITHOUT]):.3f} [{low:.3f}, {high:.3f}]",
                        " and ".join(speeds),
                    )
                )
        yield Table((*heads, "ratio of S", "tokens/s without and with"), lines)
