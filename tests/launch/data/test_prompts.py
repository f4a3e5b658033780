"""Prompts: the built-in ones and JSONL files; bad ones are in test_bad_inputs.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from launch.data.prompts import Prompt, load_builtin, load_jsonl, read_text
from lp.models.loader import DEMO_MODEL


def test_builtin_prompts_are_a_dozen_of_varied_length() -> None:
    """A benchmark over prompts of one length would say little; one beyond the demo's context would fail."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    prompts = load_builtin()
    lengths = [len(tokenizer.encode(prompt.text).ids) for prompt in prompts]
    assert len({prompt.task_id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 12
    assert min(lengths) >= 60 and max(lengths) <= 400 and max(lengths) > 3 * min(lengths)


def test_builtin_prompts_end_inside_their_code() -> None:
    """The newline that editors add would make the model begin with an indentation it never saw begin a token."""
    assert not any(prompt.text.endswith("\n") for prompt in load_builtin())
    assert [prompt.task_id for prompt in load_builtin(3)] == [prompt.task_id for prompt in load_builtin()[:3]]


def test_jsonl_keeps_the_first_prompts_and_all_their_fields(tmp_path: Path) -> None:
    """A limit must not depend on blank lines, and a line separator inside a string must not split it."""
    records = [{"task_id": f"t/{i}", "prompt": f"x\u2028{i}", "reference": "y", "source": "s"} for i in range(4)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in records), encoding="utf-8")
    assert len(load_jsonl(path)) == 4
    assert load_jsonl(path, 2)[1] == Prompt(task_id="t/1", text="x\u20281", reference="y", source="s")


def test_jsonl_needs_only_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "x", "reference": null}\n')
    assert load_jsonl(path) == [Prompt(task_id=f"{path}, line 1", text="x")]


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, whom no permission stops."""
    file = tmp_path / "secret.py"
    file.write_text("x")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"prompt_file .*secret.py cannot be read: Permission denied"):
        read_text(file, "prompt_file")
