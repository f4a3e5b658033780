"""The prompts that a config asks for: the user's own, or those of a task."""

from __future__ import annotations

from pathlib import Path

from lp.errors import UserError

from ..data.hub import load_hub
from ..data.prompts import Fields, Prompt, check_whole, load_builtin, load_jsonl, read_text
from .arguments import closest
from .schema import Tasked


def read_prompts(config: Tasked) -> list[Prompt]:
    """The prompts of a run: the config's prompt, its prompt_file, or the first prompts of its task.

    Raises:
        ValueError: an empty prompt, or a file that is missing or malformed.
    """
    if config.prompt is not None:
        return [_not_empty(Prompt(task_id="prompt", text=config.prompt), "write one, as in prompt='import os'")]
    if config.prompt_file is not None:
        text = read_text(config.prompt_file, "prompt_file")
        return [_not_empty(Prompt(task_id=Path(config.prompt_file).name, text=text), "put a text into the prompt_file")]
    task = config.task
    if task.path is not None and not Path(task.path).is_file():
        remedy = "set LP_DATA to its folder, or give task.path=..."
        hub = f", or task.path=null to take {task.hub} from the hub" if task.hub is not None else ""
        raise UserError(f"task {task.name} has no file {task.path}; {remedy}{hub}")
    limit = config.limit if task.ids is None else None
    if task.path is not None:
        fields = Fields(prompt=task.prompt, reference=task.reference, task_id=task.id)
        prompts = load_jsonl(task.path, limit, fields)
    elif task.hub is not None:
        prompts = load_hub(task.hub, task.subset, task.split, task.prompt, task.reference, task.id, limit)
    else:
        prompts = load_builtin(limit)
    return prompts if task.ids is None else _by_id(prompts, task.ids)[: config.limit]


def _by_id(prompts: list[Prompt], ids: list[str]) -> list[Prompt]:
    if not ids:
        raise UserError("task.ids is [], which leaves no prompt; name at least one, or task.ids=null for all")
    by_id = {prompt.task_id: prompt for prompt in prompts}
    for task_id in ids:
        if task_id not in by_id:
            raise UserError(f"task.ids has {task_id!r}, which the task does not{closest(task_id, by_id)}")
    return [by_id[task_id] for task_id in ids]


def _not_empty(prompt: Prompt, remedy: str) -> Prompt:
    if not prompt.text:
        raise UserError(f"the prompt is empty; {remedy}")
    check_whole(prompt.text, "the prompt has half a character")
    return prompt
