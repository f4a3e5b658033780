"""Keeps a file for each request until it ends, so that a restarted server can report and continue unfinished ones.

    {"id": "cmpl-1f0c", "began": 1790000000, "texts": 2, "seed": 7, "key": "9e2b..."}    first line: the request
    {"text": 1, "t": [312, 9]}                    tokens that a decode step added to one of the request's texts

Token lines are only written if the server keeps tokens. If a client repeats an unfinished request after a restart, seed
included, its texts continue after these tokens. The file stays until the client repeats the request. Files that are a
day old are deleted when a server starts, and when it takes a request.
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
    """The file that is kept for one request until the request ends.

    Args:
        path: file to create; nothing is kept if it is None, or if the file exists already.
        facts: data of the file's first line, such as {"id": "cmpl-1f0c", "began": 1790000000}.
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
        """Append the tokens of one decode step to the file.

        Args:
            text: index of the text among those of the request, from 0.
            tokens: token ids that the step added to the text.
        """
        if self._adds and tokens:
            assert self._path is not None
            self._adds = _append(self._path, {"text": text, "t": [*tokens]})

    def end(self) -> None:
        """Delete the file, as the request has ended or its client has left."""
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
    """A folder with a file for each request that has not ended, from which a restarted server continues requests.

    Prompts are never written.

    Args:
        folder: a folder that no other server uses; None: nothing is kept.
        model: identifies the model and its defaults (`resumed_model`), so that tokens are only reused with the model
            that generated them. None: tokens are not kept.
        setting: name of the setting that gives the folder, for error messages.

    Attributes:
        earlier: first lines of the requests that earlier servers left unfinished, oldest first, each with the number of
            its kept "tokens" if there are any.

    Raises:
        ValueError: the folder can't be made or read, or has other files.
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
            specs: the texts that the request asks for.

        Returns:
            16 hexadecimal digits; "" if the request's tokens can't be kept.
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
        """Create the file for a request that the server has accepted.

        Args:
            name: the request's id, as its answer has it.
            key: the request's digest from `key`; if it is "", the file keeps no tokens.
            **facts: more fields for the first line.
        """
        path = None if self._folder is None else self._folder / f"{self._next}.jsonl"
        self._next += 1
        known = {"key": key} if key else {}
        return UnfinishedRequest(path, {"id": name, "began": int(time()), **facts, **known}, bool(key))

    def resumed(self, specs: Sequence[TextSpec], key: str) -> list[TextSpec]:
        """Give a request's texts the tokens that an earlier server generated, if it left the same request unfinished.

        Args:
            specs: the texts that the request asks for.
            key: the request's digest from `key`.

        Returns:
            The texts, each with the tokens that the earlier server generated for it as `resumed`. Each text's last
            token is left out, and generated again. If no tokens were kept for this request, `specs` unchanged.
        """
        self._forget_old()
        if key not in self._left:
            return [*specs]
        tokens = self._left[key][0].tokens
        # The last token comes again, and with it what may have ended the text.
        return [replace(spec, resumed=tokens.get(index, [])[:-1]) for index, spec in enumerate(specs)]

    def taken(self, key: str) -> None:
        """Delete the earlier server's file for a continued request, as the new request's file has its tokens now.

        Args:
            key: the request's digest from `key`.
        """
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
    """Create a folder for unfinished requests, and keep it locked while this context manager is open.

    The lock keeps out other servers, which would delete the files.

    Args:
        folder: the folder.
        setting: name of the setting that gives the folder, for error messages.

    Raises:
        ValueError: the folder can't be made, or another server has locked it.
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
    """The folder for unfinished requests inside LP_RUN_DIR; None unless torchrun restarts failed ranks."""
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
