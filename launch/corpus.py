"""`lp corpus build FOLDER --model MODEL -o FILE`: make a corpus of a folder's files, for the pool.

Where the end of a text comes in these files too, the pool drafts what followed there (pool.corpora=[FILE]). What
.gitignore names is left out, and so are binary files. Built again, files that have not changed are not read. The
corpus holds the files' text: keep it where they may be.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lp.digest import chain_digest
from lp.draft.pool.corpus_file import IndexedFile, Listing, contents_of, mapped, new_file
from lp.draft.pool.model_ngrams import write_file
from lp.errors import UserError
from lp.models.loader import load_tokenizer
from lp.waits import waiting

from .data.source_files import SourceFile, source_files, text_of

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
    commands = parser.add_subparsers(required=True, metavar="build")
    build = commands.add_parser("build", help="make a corpus of a folder's files")
    build.add_argument("folder", metavar="FOLDER", type=Path, help="whose files are read, and those below it")
    build.add_argument("--model", required=True, help="whose tokenizer it is for: a folder, a name on the hub, or demo")
    build.add_argument("-o", "--output", required=True, type=Path, help="the file")
    build.add_argument(
        "--most-kib", type=int, default=MOST_KIB, help=f"of a file; larger ones are left out ({MOST_KIB})"
    )


def run(args: argparse.Namespace) -> None:
    """Read the files, sort their places, and write the corpus; nothing is written where nothing has changed.

    Raises:
        UserError: no such folder or model, or nowhere to write: before anything is read.
    """
    path: Path = args.output
    if args.most_kib < 1:
        raise UserError(f"--most-kib is {args.most_kib}; it must be 1 at least")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise UserError(f"no file can be written to the folder {str(path.parent)!r}; give another path with -o")
    files = [file for file in source_files(args.folder) if not _is_same(args.folder / file.path, path)]
    with waiting(f"loading the tokenizer of {args.model}"):
        tokenizer, vocabulary_size = load_tokenizer(args.model)
    listing = Listing(str(args.folder.resolve()), tokenizer_digest(tokenizer), [])
    before = known_texts(path, listing)
    texts, left_out, reused = [], LeftOut(), 0
    with waiting("reading files", len(files), "files") as wait:
        for file in files:
            wait.done += 1
            if file.size > args.most_kib << 10:
                left_out.large += 1
                continue
            key = (file.path, file.size, file.modified_ns)
            tokens = before.get(key)
            reused += tokens is not None
            if tokens is None:
                tokens = tokens_of(args.folder, file, tokenizer, left_out)
            if tokens is not None:
                texts.append(tokens)
                listing.files.append(IndexedFile(*key, len(tokens)))
    total = sum(map(len, texts))
    if not total:
        raise UserError(f"{str(args.folder)!r} has no text to read (left out: {left_out}); give another folder")
    if reused == len(texts) == len(before) and mapped(path)[1] == vocabulary_size:
        print(f"{path}: as it was, {total:,} tokens of {len(texts):,} files")
        return
    with waiting(f"sorting {total:,} tokens"):
        corpus = new_file(vocabulary_size, texts, listing)
    write_file(corpus, path)
    print(
        f"{path}: {total:,} tokens of {len(texts):,} files, {reused:,} of which have not changed; "
        f"left out: {left_out}; {corpus.nbytes / 2**20:.1f} MiB"
    )


def tokens_of(folder: Path, file: SourceFile, tokenizer: Any, left_out: LeftOut) -> np.ndarray | None:
    """A file's tokens, int32; None for a binary file, or one that is gone by now."""
    try:
        text = text_of(folder / file.path)
    except OSError:
        left_out.vanished += 1
        return None
    if text is None:
        left_out.binary += 1
        return None
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)


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


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths are of the same file: the corpus may lie in its own folder."""
    return other.exists() and one.samefile(other)
