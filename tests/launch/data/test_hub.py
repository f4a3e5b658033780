"""Prompts of a data set: fields, templates, and errors that say what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launch.data.hub import load_hub
from launch.data.prompts import Prompt

RECORDS = [{"article": f"text {i} {{brace}}", "turns": [f"first {i}", "second"], "gold": i} for i in range(4)]


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the package, which notes what it is asked for."""
    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, subset, split))
        if name == "missing":
            raise FileNotFoundError("no such thing\nmore")
        return RECORDS

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_fields_and_templates(datasets: list[Any]) -> None:
    """Braces of the text itself are no fields; numbers become text."""
    found = load_hub("set", "3.0", "validation", "Sum up: {article}!", "gold", None, 2)
    assert datasets == [("set", "3.0", "validation")]
    assert found == [
        Prompt(task_id=str(i), text=f"Sum up: text {i} {{brace}}!", reference=str(i), source="set") for i in range(2)
    ]
    assert [p.task_id for p in load_hub("set", None, "test", "{turns[0]}", None, "n/{gold}")] == [
        f"n/{i}" for i in range(4)
    ]


def test_errors_name_the_remedy(datasets: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no 'nothing' that 'nothing' asks for; its fields are \['article'"):
        load_hub("set", None, "test", "nothing")
    with pytest.raises(ValueError, match=r"cannot load the data set 'missing': no such thing; or give task.path"):
        load_hub("missing", None, "test", "article")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the package datasets; pip install"):
        load_hub("set", None, "test", "article")


def test_the_package_itself(tmp_path: Path) -> None:
    """A folder of JSONL files is a data set too, which needs no network."""
    pytest.importorskip("datasets")
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    found = load_hub(str(tmp_path), None, "test", "{turns[0]}", "gold", limit=3)
    assert [prompt.text for prompt in found] == ["first 0", "first 1", "first 2"]
