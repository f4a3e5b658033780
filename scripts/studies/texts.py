"""What a model writes on some tasks by plain decoding, as a file that other tables replay without the model.

    python scripts/tables.py texts texts.jsonl --task data/humaneval.jsonl data/gsm8k.jsonl --limit 40 --chat gsm8k

Writes one object a line: task, index, temperature, prompt (ids), tokens (ids). What the file has already is skipped, so
that an interrupted run goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import lp
from launch.text.chat_tokens import chat_tokens

from .harness import Method, Result, Row, Table, TextStudy, grouped, option, task_rows


@dataclass(kw_only=True)
class Texts(TextStudy):
    """Decodes each prompt plainly, and writes the text down for other tables."""

    results: Path = option(help="the JSONL to write, or to go on with")
    task: list[Path] = option([], "JSONL of prompts")
    limit: int | None = option(None, "first prompts of every task")
    temperatures: list[float] = option([0.0, 0.3, 0.8], "0 is greedy")
    chat: list[str] = option([], "tasks whose prompts are messages, for the model's chat template if it has one")
    SHARED = ()

    def rows(self) -> Iterable[Row]:
        return task_rows(self.task, self.limit, self.temperatures, "--task")

    def methods(self) -> Mapping[str, Method]:
        write = self.decodes(lp.AutoregressiveDecoder, result=lambda output, row: {"tokens": output.tokens})

        def text(row: Row) -> Result | None:
            ids = self.prompt_ids(row)
            try:
                return {"prompt": ids} | (write(Row(row.key, ids)) or {})
            except ValueError as error:
                print(f"{row.key['task']} {row.key['index']} left out: {error}", file=sys.stderr)
                return None  # a prompt that fills the context

        return {"": text}

    def prompt_ids(self, row: Row) -> list[int]:
        """Token ids of a row's prompt, as a message of the user where its task is a chat."""
        tokenizer = self.loaded.tokenizer
        if row.key["task"] in self.chat and tokenizer.chat_template:
            return list(chat_tokens(tokenizer, [{"role": "user", "content": row.item}]))
        return self.ids(row.item)

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines = [
            (task, f"{temperature:g}", str(len(of)), str(sum(len(each["tokens"]) for each in of)))
            for (task, temperature), of in grouped(results, "task", "temperature").items()
        ]
        yield Table(("task", "T", "texts", "tokens"), lines)
