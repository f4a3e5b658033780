"""scripts/tables.py completion: its cursors, its prompts and its figures, on a small tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from lp.errors import UserError
from scripts.studies import completion
from scripts.studies.completion import GAP, NEIGHBOURS, PREFIX, Completion, first_line
from scripts.studies.parts.held_out import SourceText
from scripts.studies.parts.neighbours import LINES, neighbours
from scripts.studies.parts.packages import fetch_package

FILES = 8


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files that have much in common, each long enough to be held out."""
    for number in range(FILES):
        functions = (f"def read_{name}(path):\n    return open(path).read({number})\n\n" for name in range(40))
        (tmp_path / f"file{number}.py").write_text("".join(functions))
    return tmp_path


def study(tree: Path, **options: object) -> Completion:
    given = {"positions": 2, "temperatures": [0.0], "max_new_tokens": 8, "budget": 12}
    return Completion(packages=[str(tree)], **given | options)  # type: ignore[arg-type]


def test_what_the_model_sees(tree: Path) -> None:
    """A cursor is between two lines; neither the lines behind it nor a held-out file's are given, unless asked for."""
    asked = study(tree)
    (divided,) = asked.trees.values()
    held_out = {file.path for file in divided.held_out}
    assert held_out and not held_out & {file.path for file in divided.files}
    decode = asked.loaded.tokenizer.decode
    for cursor in asked.cursors:
        assert f"{cursor.before}\n{cursor.behind}" == (tree / cursor.path).read_text() and cursor.path in held_out
        assert cursor.line in ("", *map(str.strip, cursor.behind.splitlines()))
        prefix = decode(asked.prompt_of(cursor, PREFIX), skip_special_tokens=True)
        assert cursor.before.endswith(prefix) and len(prefix) > 500
        whole = decode(asked.prompt_of(cursor, NEIGHBOURS), skip_special_tokens=True)
        assert whole.endswith(f"# {cursor.path}\n{prefix}")
        named = {line.removeprefix("# ") for line in whole.splitlines() if line.startswith("# ")}
        assert len(named) == completion.PIECES + 1 and named - {cursor.path} <= {file.path for file in divided.files}
        with pytest.raises(UserError, match="has no tokens for a gap; give --prompts prefix neighbours"):
            asked.prompt_of(cursor, GAP)


def test_pieces_are_the_most_like(tmp_path: Path) -> None:
    far = SourceText("far.py", "alpha = beta\n" * LINES)
    near = SourceText("near.py", "\n" * LINES + "socket.connect(address)\n" + "\n" * LINES)
    found = neighbours("open\nsocket.connect(host)", [near, far], 1)
    assert [each.name for each in found] == ["near.py"] and "socket.connect(address)" in found[0].text
    assert [each.name for each in neighbours("socket.connect(host)", [near, far], 2)] == ["far.py", "near.py"]


def test_exact_match_is_of_the_next_line() -> None:
    assert first_line("\n\n    return 1  \n    x") == "return 1"
    assert first_line(" \n") == ""


def test_a_run(tree: Path) -> None:
    """Each cursor with and without the corpus, the texts equal, and a line for each kind of prompt."""
    asked = study(tree, prompts=[PREFIX, NEIGHBOURS])
    results = asked.measure()
    assert len(results) == 2 * 2 * 2
    (table,) = asked.tables(results)
    assert [line[0] for line in table.lines] == [PREFIX, NEIGHBOURS]
    assert {each["method"] for each in results} == {completion.WITH, completion.WITHOUT}
    sizes = {(each["prompt"], each["index"]): each["prompt_tokens"] for each in results}
    assert sizes[PREFIX, 0] + 100 < sizes[NEIGHBOURS, 0]
    row = next(iter(asked.rows()))
    with pytest.raises(RuntimeError, match="differ"):
        asked.check(row, [{"text": 1}, {"text": 2}])


def test_a_package_that_pip_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pip does not get 'no-such-package-of-lp'"):
        fetch_package("no-such-package-of-lp", tmp_path)
