"""Prompts: the dozen written for this project, and JSONL files of tasks."""

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
    """A text to continue, and what is known of it.

    Args:
        task_id: names it in tables and files.
        text: the prompt itself.
        reference: a known continuation, where the task has one.
        source: where it comes from.
        fields: all that its record of a data set has, its tests among them.
    """

    task_id: str
    text: str
    reference: str | None = None
    source: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)


def load_builtin(limit: int | None = None) -> list[Prompt]:
    """The prompts that come with the package; only the first `limit` ones."""
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
    """What the records of a data set call the parts of a prompt.

    Args:
        prompt, reference, task_id: a field, or a template of fields, as in "Sum up: {article}"; without a task_id, the
            record's number.
    """

    prompt: str
    reference: str | None = None
    task_id: str | None = None

    def read(self, record: Mapping[str, Any], number: str, source: str | None) -> Prompt:
        """Make a prompt of a data set's record.

        Raises:
            ValueError: it lacks a field.
        """
        return Prompt(
            task_id=filled(self.task_id, record) if self.task_id else number,
            text=filled(self.prompt, record),
            reference=filled(self.reference, record) if self.reference else None,
            source=source,
            fields=record,
        )


def filled(template: str, record: Mapping[str, Any]) -> str:
    """A field by its name, or a template with the fields it names.

    Raises:
        ValueError: the record does not have one of them.
    """
    try:
        return template.format_map(record) if "{" in template else str(record[template])
    except (KeyError, IndexError) as error:
        raise UserError(f"the data set has no {error} that {template!r} asks for; its fields are {[*record]}") from None


def load_jsonl(path: str | Path, limit: int | None = None, fields: Fields | None = None) -> list[Prompt]:
    """Read one prompt a line: {"task_id": ..., "prompt": ..., "reference": ..., "source": ...}, the last two optional.

    Args:
        path: the file; blank lines are skipped.
        limit: read only so many prompts, the first ones; None reads all.
        fields: names that the data set gives its fields, so that its file can be read as it was published.

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
    """The text of a file, newlines as they are.

    Raises:
        ValueError: it does not exist, may not be read, or is not UTF-8; `name` is what the message calls it.
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
    """Refuse half of a surrogate pair, which is no text that a tokenizer takes.

    Raises:
        ValueError: `what` it is, and the remedy.
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
