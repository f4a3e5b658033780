"""A source tree whose files are divided: some become a corpus, and texts go on at positions of the others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.data.source_files import source_files, text_of
from lp.draft.pool.corpus_file import IndexedFile, Listing, new_file
from lp.errors import UserError

HELD_OUT = 0.25  # of the files
BEFORE, BEHIND = 1600, 400  # most characters of a prompt, and those that its file has behind it at least
FEWEST = 600  # characters of a prompt


@dataclass(frozen=True, slots=True)
class SourceText:
    """A file's path in its tree, and its text."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree's files, divided.

    Attributes:
        files: the files that are to be a corpus.
        held_out: the other ones, where they are long enough for a position.
        prompts: what stands before each position in the other files.
        past: what stands before positions in the files that are to be a corpus, for completions that come before.
    """

    files: list[SourceText]
    held_out: list[SourceText]
    prompts: list[str]
    past: list[str]

    @classmethod
    def divided(cls, folder: Path, positions: int, seed: int = 0, ending: str = ".py", past: int = 0) -> Tree:
        """Divide the files of a folder; the seed draws which are held out, and the positions in them.

        Raises:
            UserError: the folder has no files that are long enough.
        """
        drawn = random.Random(seed)
        paths = [file.path for file in source_files(folder) if file.path.endswith(ending)]
        files = [SourceText(path, text) for path in paths if (text := text_of(folder / path))]
        drawn.shuffle(files)
        count = max(round(HELD_OUT * len(files)), 1)
        parts = files[:count], files[count:]
        held_out, others = ([file for file in part if len(file.text) >= FEWEST + BEHIND] for part in parts)
        if not held_out or (past and not others):
            raise UserError(f"{str(folder)!r} has no {ending} files of {FEWEST + BEHIND} characters to hold out")
        prompts = [_before_a_position(held_out, drawn) for _ in range(positions)]
        return cls(files[count:], held_out, prompts, [_before_a_position(others, drawn) for _ in range(past)])

    @property
    def texts(self) -> list[str]:
        """Contents of the files that are to be a corpus."""
        return [file.text for file in self.files]

    def corpus(self, tokenizer: Any, vocabulary_size: int) -> np.ndarray:
        """The corpus of the files that are not held out, as a file's array."""
        tokens = [
            np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)
            for text in self.texts
        ]
        files = [IndexedFile(str(index), 0, 0, len(text)) for index, text in enumerate(tokens)]
        return new_file(vocabulary_size, tokens, Listing("", 0, files))


def _before_a_position(files: Sequence[SourceText], drawn: random.Random) -> str:
    """What stands before a position that is drawn in one of these files."""
    text = drawn.choice(files).text
    at = drawn.randint(FEWEST, len(text) - BEHIND)
    return text[max(at - BEFORE, 0) : at]
