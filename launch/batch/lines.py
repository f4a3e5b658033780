"""The file of requests: OpenAI's batch format, a JSON object a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x = ", "max_tokens": 8}}

It is read once for names and places, and a second time line by line as requests are sent: it may be larger than memory.
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
    """A line of the file that is no blank one.

    Attributes:
        number: the line's number, from 1.
        offset, size: where it is, in bytes.
        key: digest of what it asks for; the id of its answer.
        custom_id: the name that its author gave it; None where it has none.
    """

    number: int
    offset: int
    size: int
    key: str
    custom_id: str | None


class BadLine(Exception):
    """A line that is no request.

    Args:
        code: error code for programs, as OpenAI's batches have it.
        message: names the value and the remedy.
        param: the field at fault.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(eq=False)
class Request:
    """What a line asks for.

    Args:
        line: where it is.
        url: path of the endpoint.
        body: body of the request, as JSON.
        failures: servers that failed while they had it alone.
        most_together: requests that its server may have at a time, as servers failed that had more; 0: any number.
    """

    line: Line
    url: str
    body: bytes
    failures: int = field(default=0)
    most_together: int = field(default=0)


class Lines:
    """The requests of a file.

    Args:
        path: the file.

    Raises:
        ValueError: it cannot be read, or not twice, has no lines, or two with the same custom_id.
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
        """Read a line again.

        Raises:
            BadLine: it is no request.
            ValueError: the file has changed.
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
        """(number, offset, bytes) of every line that is no blank one."""
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
    """Refuse what can be read once alone, as a pipe.

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
    """The url and the body of a line.

    Raises:
        BadLine: it is no request.
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
