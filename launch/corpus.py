"""`lp corpus build|watch FOLDER --model MODEL -o FILE`: index a folder's files, so that the pool drafts from them.

Where the last generated tokens also occur in these files, the n-gram pool, from which lookahead decoding drafts, drafts
the tokens that follow there (pool.corpora=[FILE]). Files that .gitignore names and binary files are left out. A second
build reads only files that have changed. `watch` builds the corpus and keeps it up to date while the files are edited,
until Ctrl-C. The corpus holds the files' text: keep it where the files themselves may be.
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
    """Counts of the files that a corpus leaves out, by reason; as text "3 binary, 1 too large", or "none".

    Attributes:
        binary: files that are not UTF-8 text.
        large: files larger than --most-kib.
        vanished: files that were gone or not readable when their turn came.
    """

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
        command.add_argument(
            "folder", metavar="FOLDER", type=Path, help="folder whose files are read, with its subfolders"
        )
        command.add_argument(
            "--model", required=True, help="model whose tokenizer is used: a folder, a name on the hub, or demo"
        )
        command.add_argument("-o", "--output", required=True, type=Path, help="the corpus to write")
        command.add_argument(
            "--most-kib",
            type=int,
            default=MOST_KIB,
            help=f"largest size of a file in KiB; larger files are left out ({MOST_KIB})",
        )


def run(args: argparse.Namespace) -> None:
    """Build a corpus, and with `watch` keep it up to date until Ctrl-C.

    Args:
        args: the parsed options of `lp corpus`.

    Raises:
        UserError: no such folder or model, or no permission to write the file; found before any file is read.
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
    """Build the corpus of a folder, then update it whenever a file changes, until Ctrl-C.

    Args:
        reader: reads the folder's files as tokens.
        path: the corpus file.
        vocabulary_size: V, how many tokens the model knows.

    Raises:
        UserError: the package watchfiles is missing.
    """
    if not is_installed("watchfiles"):
        raise UserError(f"lp corpus watch needs watchfiles; install the extra: {install_command('watch')}")
    from .data.watched_folder import WatchedFolder

    build(reader, path, vocabulary_size)
    watched = WatchedFolder(reader.folder, own_files(reader.folder, path))
    KeptCorpus(watched, reader.tokens, path, vocabulary_size).keep()


def build(reader: TextReader, path: Path, vocabulary_size: int) -> None:
    """Write a folder's corpus to a file, and print how many files and tokens it has.

    Tokens of unchanged files come from the corpus that is already there; if no file has changed, nothing is written.

    Args:
        reader: reads the folder's files as tokens.
        path: the corpus file.
        vocabulary_size: V, how many tokens the model knows.

    Raises:
        UserError: the folder has no text, or `path` holds something that is no corpus or cannot be written.
    """
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
        try:
            write_file(corpus, path)
        except OSError as error:
            raise UserError(f"cannot write {str(path)!r} ({error.strerror}); give another path with -o") from error
        print(
            f"{path}: {total:,} tokens of {len(texts):,} files, {reused:,} of which have not changed; "
            f"left out: {reader.left_out}; {corpus.nbytes / 2**20:.1f} MiB"
        )
    delta_path(path).unlink(missing_ok=True)  # whatever it had is in the corpus now


class TextReader:
    """Reads source files as token ids, and counts the files that it leaves out.

    Args:
        folder: the folder in which the files lie.
        tokenizer: the model's HF tokenizer.
        most_bytes: size of the largest file that is read, in bytes.

    Attributes:
        digest: number that two tokenizers share only if they split every text alike; a corpus with another digest is
            stale.
        left_out: counts of the files that were left out, by reason.
    """

    def __init__(self, folder: Path, tokenizer: Any, most_bytes: int) -> None:
        self.folder = folder
        self.digest = tokenizer_digest(tokenizer)
        self.left_out = LeftOut()
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes

    def tokens(self, file: SourceFile) -> np.ndarray | None:
        """A file's token ids, int32 (L,), without special tokens; None for a file that is too large, binary or gone."""
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
    """A number that differs between tokenizers that split texts differently, by which a stale corpus is recognised."""
    if getattr(tokenizer, "is_fast", False):
        told = tokenizer.backend_tokenizer.to_str()
    else:
        told = f"{type(tokenizer).__name__} {sorted(tokenizer.get_vocab().items())}"
    return chain_digest(0, np.frombuffer(told.encode(), np.uint8))


def known_texts(path: Path, listing: Listing) -> dict[tuple[str, int, int], np.ndarray]:
    """Token ids that an existing corpus holds for its files, so that a new build need not read these files again.

    Args:
        path: the corpus file; it need not exist.
        listing: the new build's folder and tokenizer; a corpus made with others has nothing to reuse.

    Returns:
        Token ids, int32 (L,), by (path, size in bytes, modification time in ns) of the file.

    Raises:
        UserError: the file is no corpus, and building would overwrite it.
    """
    if not path.exists():
        return {}
    found = contents_of(mapped(path))
    if found is None or (found[0].folder, found[0].tokenizer) != (listing.folder, listing.tokenizer):
        return {}
    return {(file.path, file.size, file.modified_ns): text for file, text in zip(found[0].files, found[1], strict=True)}


def own_files(folder: Path, path: Path) -> Callable[[str], bool]:
    """Make a function that says whether a file is one of the corpus' own, which must not be indexed or watched.

    Args:
        folder: the folder that is indexed.
        path: the corpus file; its delta (FILE.delta) and unfinished writes (FILE.123.part) count too.

    Returns:
        A function that takes a path relative to `folder`.
    """
    own = re.escape(os.path.relpath(path.resolve(), folder.resolve()))
    pattern = re.compile(own + r"(\.delta)?(\.\d+\.part)?")
    return lambda name: pattern.fullmatch(name) is not None
