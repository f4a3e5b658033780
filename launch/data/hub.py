"""Prompts from a data set of the Hugging Face hub, or a folder laid out as one, through the package `datasets`."""

from __future__ import annotations

from itertools import islice

from lp.errors import UserError

from .prompts import Fields, Prompt


def load_hub(
    name: str,
    subset: str | None,
    split: str,
    prompt: str,
    reference: str | None = None,
    task_id: str | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """The prompts in a split of a data set, in the order of its records.

    Args:
        name, subset, split: which part of which data set; a folder of JSONL files is one too.
        prompt, reference, task_id: a field, or a template of fields, as in "Sum up: {article}"; without a task_id, the
            record's number.
        limit: read only so many records, the first ones; None reads all.

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
    fields = Fields(prompt=prompt, reference=reference, task_id=task_id)
    return [fields.read(record, str(number), name) for number, record in enumerate(islice(records, limit))]
