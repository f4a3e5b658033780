"""Prompts to decode: twelve that come with the package, and JSONL files of tasks such as HumanEval."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from lp.errors import UserError

BUILTIN = Path(__file__).parent / "builtin"  # one unfinished piece of Python a file; shown in the order of the names


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A text that a model is to continue, with its name and, for tasks that are graded, its reference and tests.

    Args:
        task_id: name of the prompt in tables and record files, as in "HumanEval/0".
        text: the prompt itself.
        reference: a known good continuation; None where the task has none.
        source: origin of the prompt, such as a data set's name; None if it is not known.
        fields: the prompt's whole record in its data set, which may hold its tests; empty for a prompt without a
            record.
    """

    task_id: str
    text: str
    reference: str | None = None
    source: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)


def load_builtin(limit: int | None = None) -> list[Prompt]:
    """Read the prompts that come with the package, in the order of their names.

    Args:
        limit: read only the first `limit` prompts; None reads all.
    """
    # Editors end a file with a newline; a prompt ends with its last character, so that the model writes the newline.
    return [
        Prompt(
            task_id=f"builtin/{path.stem}",
            text=path.read_text(encoding="utf-8").removesuffix("\n"),
            source="written for lp",
        )
        for path in sorted(BUILTIN.glob("*.txt"))[:limit]
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """Names under which a data set's records hold the parts of a prompt, so that its file can be read as published.

    Each is the name of a field, or a template of fields, as in "Sum up: {article}".

    Args:
        prompt: field or template of the prompt's text.
        reference: field or template of a known continuation; None: prompts have no reference.
        task_id: field or template of the prompt's name; None takes the record's number.
    """

    prompt: str
    reference: str | None = None
    task_id: str | None = None

    def read(self, record: Mapping[str, Any], number: str, source: str | None) -> Prompt:
        """Make a prompt from one record of the data set.

        Args:
            record: the record's fields by name.
            number: the prompt's name where the data set has no field for it.
            source: the data set's name; None if it has none.

        Raises:
            ValueError: the record lacks a field.
        """
        return Prompt(
            task_id=filled(self.task_id, record) if self.task_id else number,
            text=filled(self.prompt, record),
            reference=filled(self.reference, record) if self.reference else None,
            source=source,
            fields=record,
        )


def filled(template: str, record: Mapping[str, Any]) -> str:
    """The value of a record's field, or a template filled with the record's fields.

    Args:
        template: a field's name, as in "article", or a template, as in "Sum up: {article}".
        record: the fields by name.

    Raises:
        ValueError: the record has no such field.
    """
    try:
        return template.format_map(record) if "{" in template else str(record[template])
    except (KeyError, IndexError) as error:
        raise UserError(f"the data set has no {error} that {template!r} asks for; its fields are {[*record]}") from None


def load_jsonl(path: str | Path, limit: int | None = None, fields: Fields | None = None) -> list[Prompt]:
    """Read prompts from a file with one JSON object per line, as in {"task_id": ..., "prompt": ...}.

    A line may also have "reference" and "source". Without "task_id", the prompt is named after the file and the line's
    number.

    Args:
        path: the file; blank lines are skipped.
        limit: read only the first `limit` prompts; None reads all.
        fields: the data set's own field names, for lines without "prompt"; None expects the names above.

    Raises:
        ValueError: no such file, no prompt in it, or a bad line, named by its number.
    """
    lines = enumerate(read_text(path).split("\n"), 1)
    records = ((number, line) for number, line in lines if line.strip())
    prompts = [_parse(line, f"{path}, line {number}", fields) for number, line in islice(records, limit)]
    if not prompts:
        raise UserError(f"{path} holds no prompt; it needs at least one line with the key 'prompt'")
    return prompts


def read_text(path: str | Path, name: str = "prompt file") -> str:
    """The content of a UTF-8 text file, with its line ends unchanged.

    Args:
        path: the file.
        name: the file's name in error messages, as in "prompt file".

    Raises:
        ValueError: the file does not exist, may not be read, or is not UTF-8.
    """
    if not Path(path).is_file():
        raise UserError(f"{name} {path} does not exist or is not a file; give the path of a text file")
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{name} {path} cannot be read: {error.strerror}; give a file that you may read") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} {path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def check_whole(text: str, what: str) -> None:
    """Refuse a text with half of a surrogate pair, as "\\ud83d" alone in JSON gives: no tokenizer takes it.

    Args:
        text: the text to check.
        what: begins the error message, as in "the prompt has half a character".

    Raises:
        ValueError: the text has such a half.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{what}; write it as UTF-8")


def _parse(line: str, where: str, fields: Fields | None) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number may be too long, brackets too deep
        reason = getattr(error, "msg", "too deep or too long")
        raise UserError(f"{where} is not JSON ({reason}); write one object a line") from None
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object but {type(record).__name__}; write one object a line")
    if fields and "prompt" not in record and fields.prompt != "prompt":
        return fields.read(record, where, None)
    text = record.get("prompt")
    if not isinstance(text, str) or not text:
        raise UserError(f"{where} has no text under 'prompt'; give it a string that is not empty")
    check_whole(text, f"{where} has half a character under 'prompt'")
    task_id = str(record.get("task_id", where))
    reference, source = record.get("reference"), record.get("source")
    return Prompt(task_id=task_id, text=text, reference=reference, source=source, fields=record)
