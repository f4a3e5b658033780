"""Read prompts from a data set on the Hugging Face hub, or a folder laid out like one, by the package `datasets`."""

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
    """Read the prompts in one split of a data set, in the order of its records.

    Args:
        name: the data set's name on the hub, or a folder of JSONL files.
        subset: name of its configuration, as in "main"; None for a data set without configurations.
        split: name of the split, as in "test".
        prompt: field with the prompt's text, or a template of fields, as in "Sum up: {article}".
        reference: field or template of a known continuation; None: prompts have no reference.
        task_id: field or template of the prompt's name; None takes the record's number, from 0.
        limit: read only the first `limit` records; None reads all.

    Raises:
        ValueError: `datasets` is not installed, there is no such data set, or it lacks a field.
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
