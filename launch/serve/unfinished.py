"""Files that note requests until they end, so that a restarted server can report them and go on with their texts.

    {"id": "cmpl-1f0c", "began": 1790000000, "texts": 2, "seed": 7, "key": "9e2b..."}    a request
    {"text": 1, "t": [312, 9]}                    a step's tokens of one of its texts, where the server keeps tokens

A request with kept tokens goes on behind them when a client sends the same again, seed included. Until then its file
stays. Files that are a day old are deleted when a server starts, and when it takes a request.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any, NamedTuple

from lp.checks import env_int
from lp.digest import chain_digest, text_digest
from lp.errors import UserError
from lp.file_locks import lock

from .spec import TextSpec

START, BEHIND_NAME = b'{"id":"', b'","began":'  # of a file's first line
BEGAN = re.compile(BEHIND_NAME + rb"[0-9]+[,}]")
KEPT_S = 24 * 3600  # that tokens wait for a client who asks again


class UnfinishedRequest:
    """The file that notes a request until it ends.

    Args:
        path: file to make; None keeps nothing, as does a file that is there already.
        facts: data of the first line, such as {"id": "cmpl-1f0c", "began": 1790000000}.
        keeps_tokens: whether `add` writes tokens.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any], keeps_tokens: bool) -> None:
        self._path = path
        try:
            self._adds = path is not None and _append(path, facts, os.O_CREAT | os.O_EXCL) and keeps_tokens
        except FileExistsError:
            self._path, self._adds = None, False

    @property
    def has_tokens(self) -> bool:
        """Whether the file keeps tokens and has all that were added; False for good once a write has failed."""
        return self._adds

    def add(self, text: int, tokens: Sequence[int]) -> None:
        """Write a decode step's tokens.

        Args:
            text: index of the text among those of the request.
            tokens: token ids that the step added.
        """
        if self._adds and tokens:
            assert self._path is not None
            self._adds = _append(self._path, {"text": text, "t": [*tokens]})

    def end(self) -> None:
        """Delete the file: the request has ended, or its client has left."""
        self._adds = False
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


class _Left(NamedTuple):
    """A request of a server before this one."""

    path: Path
    tokens: dict[int, list[int]]  # by text
    written: float  # when its file was, in seconds since 1970

    @property
    def is_old(self) -> bool:
        return time() - self.written >= KEPT_S


class UnfinishedRequests:
    """A folder with a file for each request that has not ended, from which a restarted server goes on.

    Args:
        folder: a folder that no other server uses; None keeps nothing.
        model: see `resumed_model` in opening.py; with it, files have the tokens of texts. None keeps no tokens. Prompts
            are never written.
        setting: name of the setting that gives the folder, for error messages.

    Attributes:
        earlier: first lines of the requests that earlier servers left unfinished, oldest first, each with the number of
            kept "tokens" where there are any.

    Raises:
        ValueError: the folder can't be made or read, or has files of something else.
    """

    def __init__(self, folder: Path | None, model: str | None = None, setting: str = "LP_RUN_DIR") -> None:
        self._folder = folder
        self._model = model
        self._next = 0
        self._left: dict[str, list[_Left]] = {}  # by key; the same may come twice
        self.earlier: list[dict[str, Any]] = []
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
            found = [(path, *_read(path)) for path in paths]  # all, before one is deleted
            for path, facts, tokens in found:
                self._next = int(path.stem) + 1
                self._take(path, facts, tokens)
        except (OSError, ValueError) as error:
            raise _unfit(folder, error, setting) from None

    def key(self, specs: Sequence[TextSpec]) -> str:
        """A digest of everything that a request's texts depend on, by which a repeated request is recognized.

        Args:
            specs: the texts of the request.

        Returns:
            16 hexadecimal digits; empty where no tokens are kept.
        """
        if self._model is None or not all(spec.resumable for spec in specs):
            return ""
        prompts = {id(spec.prompt): spec.prompt for spec in specs}  # long, and that of n choices is the same list
        digests = {place: chain_digest(0, prompt) for place, prompt in prompts.items()}
        same: dict[str, Any] = {
            "prediction": [],
            "corpora": None,
            "images": text_digest(specs[0].images.text) if specs[0].images else None,
        }
        texts = [replace(spec, images=None).as_data() | {"prompt": digests[id(spec.prompt)]} | same for spec in specs]
        return f"{text_digest(json.dumps([self._model, *texts])):016x}"

    def begin(self, name: str, key: str, **facts: Any) -> UnfinishedRequest:
        """Make the file of a request that the server has accepted.

        Args:
            name: the request's id, as its answer has it.
            key: see `key`; tokens are kept unless it is empty.
            **facts: more fields of the first line.
        """
        path = None if self._folder is None else self._folder / f"{self._next}.jsonl"
        self._next += 1
        known = {"key": key} if key else {}
        return UnfinishedRequest(path, {"id": name, "began": int(time()), **facts, **known}, bool(key))

    def resumed(self, specs: Sequence[TextSpec], key: str) -> list[TextSpec]:
        """The texts of a request, with the tokens of an unfinished request of this key as their first, if there is one.

        Args:
            specs: the texts of the request.
            key: see `key`.
        """
        self._forget_old()
        if key not in self._left:
            return [*specs]
        tokens = self._left[key][0].tokens
        # The last token comes again, and with it what may have ended the text.
        return [replace(spec, resumed=tokens.get(index, [])[:-1]) for index, spec in enumerate(specs)]

    def taken(self, key: str) -> None:
        """Delete the earlier server's file with this key: the file of the new request has its tokens now."""
        if key in self._left:
            self._forget(key, self._left[key][0])

    def _take(self, path: Path, facts: dict[str, Any], tokens: dict[int, list[int]]) -> None:
        key = facts.pop("key", "")
        left = _Left(path, tokens, path.stat().st_mtime)
        if tokens and key and not left.is_old:
            self._left.setdefault(key, []).append(left)
            facts["tokens"] = sum(map(len, tokens.values()))
        else:
            path.unlink()
        self.earlier.append(facts)

    def _forget_old(self) -> None:
        for key, same in [*self._left.items()]:
            for left in [*same]:
                if left.is_old:
                    self._forget(key, left)

    def _forget(self, key: str, left: _Left) -> None:
        with contextlib.suppress(OSError):
            left.path.unlink()
        self._left[key].remove(left)
        if not self._left[key]:
            del self._left[key]


@contextlib.contextmanager
def only_server(folder: Path, setting: str) -> Iterator[None]:
    """Make a folder for unfinished requests and lock it: other servers would delete its files.

    Args:
        folder: the folder.
        setting: name of the setting that gives it, for error messages.

    Raises:
        ValueError: the folder can't be made, or another server has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unfit(folder, error, setting) from None
    try:
        if not lock(handle):
            message = f"{folder} has the requests of a server that runs; end it, or set {setting} to another folder"
            raise UserError(message)
        yield
    finally:
        os.close(handle)


def unfinished_folder() -> Path | None:
    """The folder for notes of unfinished requests within LP_RUN_DIR; None unless torchrun restarts failed ranks."""
    run = os.environ.get("LP_RUN_DIR")
    return Path(run) / "unfinished" if run and env_int("TORCHELASTIC_MAX_RESTARTS", 0) else None


def _unfit(folder: Path, error: Exception, setting: str) -> UserError:
    return UserError(f"{folder} can't keep unfinished requests ({error}); set {setting} to another folder")


def _append(path: Path, line: dict[str, Any], flags: int = 0) -> bool:
    """Whether all of a line was written: a full disk must not cost the text.

    Args:
        path: a file that exists, as one that has been deleted must not come again.
        line: what to add, as a line of JSON.
        flags: more of `os.open`.

    Raises:
        FileExistsError: it was to be made, and is there.
    """
    data = json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def opener(name: str, _: int) -> int:
        return os.open(name, os.O_WRONLY | os.O_APPEND | flags, 0o600)  # no other user may read it

    try:
        with open(path, "ab", buffering=0, opener=opener) as file:
            return file.write(data) == len(data)
    except FileExistsError:
        raise
    except OSError:
        return False


def _read(path: Path) -> tuple[dict[str, Any], dict[int, list[int]]]:
    """The facts of a request, and its tokens by text, as far as whole lines have them.

    Raises:
        ValueError: it is the file of something else.
    """
    data = path.read_bytes()
    if not _begins_request(data):
        raise UserError(f"{path.name} is no request's")
    facts: dict[str, Any] = {"id": "unknown"}  # the machine, or its disk, ended in the middle of the writing
    tokens: dict[int, list[int]] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        first, *lines = map(json.loads, data.split(b"\n")[:-1])
        if isinstance(first.get("key", ""), str):
            facts = first
            for line in lines:
                tokens.setdefault(int(line["text"]), []).extend(map(int, line["t"]))
    return facts, tokens


def _begins_request(data: bytes) -> bool:
    """Whether the first line is that of a request's file; without a line end, it may be the beginning of one."""
    line, line_end, _ = data.partition(b"\n")
    _, quote, behind = line[len(START) :].partition(b'"')
    start, behind_name = line[: len(START)], quote + behind
    if line_end:
        return start == START and BEGAN.match(behind_name) is not None
    return START.startswith(start) and BEHIND_NAME.startswith(behind_name[: len(BEHIND_NAME)])
