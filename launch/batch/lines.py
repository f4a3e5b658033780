"""The file of requests, in OpenAI's batch format: one JSON object a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x = ", "max_tokens": 8}}

The file is read once to find its lines. Each line is read again when it is sent, so that the file may be larger than
memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lp.errors import UserError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
SHOWN = 80  # characters of a value in a message
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """Where a request is in the input file, and its ids; kept for every line that is not blank.

    Attributes:
        number: the line's number, from 1.
        offset: number of bytes before the line.
        size: number of bytes in the line.
        key: digest of the request, such as "batch_req_5c1f...", which is the id of its answer.
        custom_id: the name that the request's author gave it; None if the line has none.
    """

    number: int
    offset: int
    size: int
    key: str
    custom_id: str | None


class BadLine(Exception):
    """An error that becomes a request's answer, as its line is not valid or servers failed on it; the batch continues.

    Args:
        code: error code for programs, as in OpenAI's batches, such as "invalid_url".
        message: the text of the error, with the value and the remedy.
        param: the field at fault; None: the whole line is.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(eq=False)
class Request:
    """A request that was read and checked, with what is known about servers that failed while they had it.

    Args:
        line: the request's line in the input file.
        url: path of the endpoint, such as "/v1/completions".
        body: body of the HTTP request, JSON.
        failures: how many times a server failed while it had only this request.
        most_together: most requests, including this one, that the next server may have at a time. It is lowered to find
            out which request makes servers fail; 0: no limit.
    """

    line: Line
    url: str
    body: bytes
    failures: int = field(default=0)
    most_together: int = field(default=0)


class Lines:
    """An index of the input file: for each request a `Line` with its place, from which `request` reads it later.

    Args:
        path: the input file.

    Attributes:
        lines: one entry for each request, in the order of the file.

    Raises:
        ValueError: the file cannot be read, cannot be read twice (a pipe), has no lines, or has two with one custom_id.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        _check_kind(path)
        seen: dict[str, int] = {}
        for number, offset, data in self._read():
            line = _line(number, offset, data)
            if line.custom_id is not None:
                first = seen.setdefault(line.custom_id, number)
                if first != number:
                    name = line.custom_id[:SHOWN]
                    message = f"{path} has custom_id {name!r} in lines {first} and {number}; give each line its own"
                    raise UserError(message)
            self.lines.append(line)
        if not self.lines:
            raise UserError(f"{path} has no requests; write one JSON object a line")

    def request(self, line: Line) -> Request:
        """Read a request from its line in the file again, and check it.

        Args:
            line: an element of `lines`.

        Raises:
            BadLine: the line is no valid request.
            ValueError: the file has changed since it was indexed.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(line.offset)
                data = file.read(line.size)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        if _line(line.number, line.offset, data) != line:
            raise UserError(f"line {line.number} of {self.path} has changed meanwhile; start again")
        return Request(line, *_parsed(data))

    def _read(self) -> Iterator[tuple[int, int, bytes]]:
        """(number, offset in bytes, content) of every line that is not blank."""
        offset = 0
        try:
            with open(self.path, "rb") as file:
                for number, data in enumerate(file, 1):
                    if data.removeprefix(BYTE_ORDER_MARK).strip():
                        yield number, offset, data
                    offset += len(data)
        except OSError as error:
            raise _unreadable(self.path, error) from None


def _check_kind(path: Path) -> None:
    """Refuse a file that can be read only once, such as a pipe.

    Raises:
        ValueError: it is such a file, or cannot be found.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"input is {path}, which is no file on a disk; write its lines to one, which is read twice")


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path} ({error.strerror}); give a file of requests, one JSON object a line")


def _line(number: int, offset: int, data: bytes) -> Line:
    try:
        content = _object(data)
    except BadLine:
        content = {}
    name = content.get("custom_id")
    custom_id = name if isinstance(name, str) and name else None
    asked: Any = data.decode("latin-1").strip()  # what has no name is told apart by its place
    if custom_id is not None:
        asked = [content.get(key) for key in ("method", "url", "body")]
    told = json.dumps([custom_id if custom_id is not None else number, asked], sort_keys=True)
    key = f"batch_req_{hashlib.blake2b(told.encode(), digest_size=12).hexdigest()}"
    return Line(number, offset, len(data), key, custom_id)


def _object(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data.removeprefix(BYTE_ORDER_MARK))
    except (ValueError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"the line is no JSON ({error}); write one object a line") from None
    if not isinstance(content, dict):
        raise BadLine("invalid_json_line", "the line is no JSON object; write one a line")
    return content


def _parsed(data: bytes) -> tuple[str, bytes]:
    """The endpoint's path and the body of a line.

    Raises:
        BadLine: the line is no valid request.
    """
    content = _object(data)
    name = content.get("custom_id")
    if not isinstance(name, str) or not name:
        raise BadLine("missing_required_parameter", f"custom_id is {_shown(name)}; give a text", "custom_id")
    if (method := content.get("method")) != "POST":
        raise BadLine("invalid_method", f"method is {_shown(method)}; it must be POST", "method")
    url = content.get("url")
    if not isinstance(url, str) or url not in URLS:
        raise BadLine("invalid_url", f"url is {_shown(url)}; it must be one of {', '.join(URLS)}", "url")
    body = content.get("body")
    if not isinstance(body, dict):
        raise BadLine("missing_required_parameter", f"body is {_shown(body)}; give an object", "body")
    if body.get("stream"):
        raise BadLine("invalid_request", "stream is given; answers of a batch come whole: leave it out", "body.stream")
    return url, json.dumps(body).encode()


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
