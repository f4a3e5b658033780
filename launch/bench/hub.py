"""Prompts from a data set of the Hugging Face hub, or a folder laid out as one, through the package `datasets`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from lp.errors import UserError

from .prompts import Prompt


def load_hub(
    name: str,
    subset: str | None,
    split: str,
    prompt: str,
    reference: str | None = None,
    task_id: str | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """The records of a split, in their order.

    Args:
        name, subset, split: of the data set; a folder of JSONL files is one too.
        prompt, reference, task_id: a field, or a template of fields, as in "Sum up: {article}"; without a task_id, the
            record's number.
        limit: of prompts, the first ones; None is all.

    Raises:
        ValueError: no `datasets`, no such data set, or a field that it does not have.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        remedy = "pip install datasets, or give task.path=<JSONL file>, or set LP_DATA to its folder"
        raise UserError(f"the data set {name!r} needs the package datasets; {remedy}") from None
    try:
        records = load_dataset(name, subset, split=split)
    except Exception as error:  # nothing of ours runs in there, and each release raises something else
        reason = str(error).strip().split("\n")[0]
        remedy = "or give task.path=<JSONL file>"
        raise UserError(f"cannot load the data set {name!r}: {reason}; {remedy}") from error
    return [
        Prompt(
            reference=_filled(reference, record) if reference else None,
            task_id=_filled(task_id, record) if task_id else str(number),
            text=_filled(prompt, record),
            source=name,
        )
        for number, record in enumerate(islice(records, limit))
    ]


def _filled(template: str, record: Mapping[str, Any]) -> str:
    """A field by its name, or a template with the fields it names."""
    try:
        return template.format_map(record) if "{" in template else str(record[template])
    except (KeyError, IndexError) as error:
        raise UserError(f"the data set has no {error} that {template!r} asks for; its fields are {[*record]}") from None
