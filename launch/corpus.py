"""`lp corpus build|watch FOLDER --model MODEL -o FILE`: make a corpus of a folder's files, for the pool.

Where the end of a text comes in these files too, the pool drafts what followed there (pool.corpora=[FILE]). What
.gitignore names is left out, and so are binary files. Built again, files that have not changed are not read. With
`watch` it stays as the files are while they are edited. The corpus holds the files' text: keep it where they may be.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lp.commands import install_command
from lp.digest import chain_digest
from lp.draft.pool.corpus_file import IndexedFile, Listing, contents_of, delta_path, mapped, new_file
from lp.draft.pool.model_ngrams import write_file
from lp.errors import UserError
from lp.models.loader import load_tokenizer
from lp.optional import is_installed
from lp.waits import waiting

from .data.kept_corpus import KeptCorpus
from .data.source_files import SourceFile, check_folder, source_files, text_of

MOST_KIB = 1024


@dataclass
class LeftOut:
    """How many files a corpus has no tokens of, and why."""

    binary: int = 0
    large: int = 0
    vanished: int = 0

    def __str__(self) -> str:
        named = {"binary": self.binary, "too large": self.large, "gone or not readable": self.vanished}
        return ", ".join(f"{count} {why}" for why, count in named.items() if count) or "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lp corpus` to its parser."""
    commands = parser.add_subparsers(required=True, metavar="build|watch")
    for name, action, what in (
        ("build", build, "make a corpus of a folder's files"),
        ("watch", watch, "make it, and keep it as the files are while they change, until Ctrl-C"),
    ):
        command = commands.add_parser(name, help=what)
        command.set_defaults(action=action)
        command.add_argument("folder", metavar="FOLDER", type=Path, help="whose files are read, and those below it")
        command.add_argument(
            "--model", required=True, help="whose tokenizer it is for: a folder, a name on the hub, or demo"
        )
        command.add_argument("-o", "--output", required=True, type=Path, help="the file")
        command.add_argument(
            "--most-kib", type=int, default=MOST_KIB, help=f"of a file; larger ones are left out ({MOST_KIB})"
        )


def run(args: argparse.Namespace) -> None:
    """Make a corpus, and keep it if that is asked for.

    Raises:
        UserError: no such folder or model, or nowhere to write: before anything is read.
    """
    if args.most_kib < 1:
        raise UserError(f"--most-kib is {args.most_kib}; it must be 1 at least")
    if not os.access(args.output.absolute().parent, os.W_OK | os.X_OK):
        folder = str(args.output.parent)
        raise UserError(f"no file can be written to the folder {folder!r}; give another path with -o")
    check_folder(args.folder)
    with waiting(f"loading the tokenizer of {args.model}"):
        tokenizer, vocabulary_size = load_tokenizer(args.model)
    args.action(TextReader(args.folder, tokenizer, args.most_kib << 10), args.output, vocabulary_size)


def watch(reader: TextReader, path: Path, vocabulary_size: int) -> None:
    """Build the corpus, and keep it as the files are, until Ctrl-C.

    Raises:
        UserError: watchfiles is missing.
    """
    if not is_installed("watchfiles"):
        raise UserError(f"lp corpus watch needs watchfiles; install the extra: {install_command('watch')}")
    from .data.watched_folder import WatchedFolder

    build(reader, path, vocabulary_size)
    watched = WatchedFolder(reader.folder, own_files(reader.folder, path))
    KeptCorpus(watched, reader.tokens, path, vocabulary_size).keep()


def build(reader: TextReader, path: Path, vocabulary_size: int) -> None:
    """Read the files, sort their places, and write the corpus; nothing is written where nothing has changed."""
    is_own = own_files(reader.folder, path)
    files = [file for file in source_files(reader.folder) if not is_own(file.path)]
    listing = Listing(str(reader.folder.resolve()), reader.digest, [])
    before = known_texts(path, listing)
    texts, reused = [], 0
    with waiting("reading files", len(files), "files") as wait:
        for file in files:
            wait.done += 1
            key = (file.path, file.size, file.modified_ns)
            tokens = before.get(key)
            reused += tokens is not None
            if tokens is None:
                tokens = reader.tokens(file)
            if tokens is not None:
                texts.append(tokens)
                listing.files.append(IndexedFile(*key, len(tokens)))
    total = sum(map(len, texts))
    if not total:
        where = str(reader.folder)
        raise UserError(f"{where!r} has no text to read (left out: {reader.left_out}); give another folder")
    if reused == len(texts) == len(before) and mapped(path)[1] == vocabulary_size:
        print(f"{path}: as it was, {total:,} tokens of {len(texts):,} files")
    else:
        with waiting(f"sorting {total:,} tokens"):
            corpus = new_file(vocabulary_size, texts, listing)
        write_file(corpus, path)
        print(
            f"{path}: {total:,} tokens of {len(texts):,} files, {reused:,} of which have not changed; "
            f"left out: {reader.left_out}; {corpus.nbytes / 2**20:.1f} MiB"
        )
    delta_path(path).unlink(missing_ok=True)  # whatever it had is in the corpus now


class TextReader:
    """Reads the texts of a folder's files, as tokens.

    Args:
        folder: where the files lie.
        tokenizer: makes tokens of them.
        most_bytes: size of the largest file that is read.

    Attributes:
        digest: stands for how the tokenizer cuts texts.
        left_out: counts files that there are no tokens of.
    """

    def __init__(self, folder: Path, tokenizer: Any, most_bytes: int) -> None:
        self.folder = folder
        self.digest = tokenizer_digest(tokenizer)
        self.left_out = LeftOut()
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes

    def tokens(self, file: SourceFile) -> np.ndarray | None:
        """A file's tokens, int32; None for one that is too large, binary, or gone by now."""
        if file.size > self._most_bytes:
            self.left_out.large += 1
            return None
        try:
            text = text_of(self.folder / file.path)
        except OSError:
            self.left_out.vanished += 1
            return None
        if text is None:
            self.left_out.binary += 1
            return None
        return np.array(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)


def tokenizer_digest(tokenizer: Any) -> int:
    """A digest of how a tokenizer cuts texts."""
    if getattr(tokenizer, "is_fast", False):
        told = tokenizer.backend_tokenizer.to_str()
    else:
        told = f"{type(tokenizer).__name__} {sorted(tokenizer.get_vocab().items())}"
    return chain_digest(0, np.frombuffer(told.encode(), np.uint8))


def known_texts(path: Path, listing: Listing) -> dict[tuple[str, int, int], np.ndarray]:
    """Tokens by path, size and time of the files that the corpus in a file has of this folder and this tokenizer.

    Raises:
        UserError: the file is something else, which must not be lost.
    """
    if not path.exists():
        return {}
    found = contents_of(mapped(path))
    if found is None or (found[0].folder, found[0].tokenizer) != (listing.folder, listing.tokenizer):
        return {}
    return {(file.path, file.size, file.modified_ns): text for file, text in zip(found[0].files, found[1], strict=True)}


def own_files(folder: Path, path: Path) -> Callable[[str], bool]:
    """Says of a file in a folder whether it is the corpus in `path`, its delta, or what is being written of them."""
    own = re.escape(os.path.relpath(path.resolve(), folder.resolve()))
    pattern = re.compile(own + r"(\.delta)?(\.\d+\.part)?")
    return lambda name: pattern.fullmatch(name) is not None
