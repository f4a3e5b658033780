"""Errors as OpenAI's clients expect them: a JSON object with message, type, param and code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lp.errors import UserError

SHOWN = 80  # characters of a value in a message
UNIONS = ("prompt", "content")  # fields of several types, each of which has an error of its own
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded", 503: "service_unavailable"}


class FieldError(UserError):
    """Raised by the validators of request bodies: a field is not supported, or fields contradict each other.

    The client gets a response with status 400, which `of_validation` makes.

    Args:
        param: name of the body's field that is at fault, such as "best_of".
        message: the text for the client, with the value, the limit and the remedy.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ApiError(Exception):
    """Raised by an endpoint to answer a request with an error in OpenAI's form.

    Args:
        status: HTTP status of the response, such as 400.
        message: the text for the client, with the value, the limit and the remedy.
        param: name of the body's field that is at fault; None if no single field is.
        code: error code for programs, such as "invalid_api_key"; None: the usual code of the status, if it has one
            (CODES).
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or CODES.get(status)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """JSON body of the response: {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Turn pydantic's errors about a request's body into one error of status 400 that names the field and its value.

    Args:
        errors: the errors as `RequestValidationError.errors()` gives them, one or more. Only the first one is reported.
            If its field takes several types, the message says what is wrong for each of them.
    """
    first = errors[0]
    path = [part for part in first["loc"] if part != "body"]
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', message)}")
    if not path and kind != "value_error":
        return ApiError(400, "the body is no JSON object; send one, with the header Content-Type: application/json")
    param = str(path[0]) if path else None
    field = _dotted(path)
    if kind == "missing":
        return ApiError(400, f"{field} is missing; give it", param)
    unions = [place for place, part in enumerate(path) if part in UNIONS]
    if unions:  # behind it are the types that it could be
        field = _dotted(path[: unions[0] + 1])
        if refused := [error["msg"] for error in errors if error["type"] == "value_error"]:  # it says more
            kind, message = "value_error", refused[0]
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        if param is None:
            return ApiError(400, message, getattr(first.get("ctx", {}).get("error"), "param", None))
        named = re.search(rf"\b{re.escape(param)}\b", message)
        return ApiError(400, message if named else f"{field}: {message}", param)
    if unions:
        message = " or ".join(dict.fromkeys(error["msg"][0].lower() + error["msg"][1:] for error in errors[:3]))
        return ApiError(400, f"{field} has a wrong type: {message}", param)
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    return ApiError(400, f"{field} is {shown}; {message[0].lower()}{message[1:]}", param)


def _dotted(path: Sequence[object]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
