"""The file of a benchmark's records: nothing lost, nothing twice, whatever ended the process before."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from launch.bench.records import RecordFile, digest, load_records, slug

METHODS = ["a", "b"]


def _block(index: int) -> list[dict[str, Any]]:
    return [{"index": index, "method": method, "prompt_digest": digest(index), "text": "é\n"} for method in METHODS]


def _written(path: Path, prompts: int) -> bytes:
    file = RecordFile(path, METHODS)
    for index in range(prompts):
        file.append(_block(index))
    file.close()
    return path.read_bytes()


def test_every_cut_of_the_tail_is_survived(tmp_path: Path) -> None:
    """A kill may come after any byte; what was finished before stays, what was not is measured again."""
    path = tmp_path / "new" / "records.jsonl"
    whole, first = _written(path, 2), len(_written(tmp_path / "one.jsonl", 1))
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        file = RecordFile(path, METHODS)
        done = sorted(file.done)
        assert done == ([0, 1] if length == len(whole) else [0] if length >= first else [])
        for index in {0, 1} - {*done}:
            file.append(_block(index))
        file.close()
        assert path.read_bytes() == whole


def test_records_are_on_the_disk_when_the_next_prompt_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written but not synced, they are lost with the power."""
    synced = list[int]()
    monkeypatch.setattr("os.fsync", lambda file: synced.append(os.fstat(file).st_size))
    whole = _written(tmp_path / "records.jsonl", 2)
    assert synced[1:] == [len(whole)] and len(synced) == 2


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none: no other run is there, and a benchmark must not wait for one."""

    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    RecordFile(tmp_path / "records.jsonl", ["plain"]).close()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """Two would each write what the other has."""
    file = RecordFile(tmp_path / "records.jsonl", METHODS)
    with pytest.raises(ValueError, match="being written by another run"):
        RecordFile(tmp_path / "records.jsonl", METHODS)
    file.close()
    RecordFile(tmp_path / "records.jsonl", METHODS).close()


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}\n", "line 1 is no record"), ("nonsense\n", "line 1 is no record"), ("[1]\n", "line 1 is no record")],
)
def test_what_is_no_row_is_not_overwritten(tmp_path: Path, text: str, said: str) -> None:
    """A file that the user named by mistake must be left as it is."""
    path = tmp_path / "records.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        RecordFile(path, METHODS)
    assert path.read_text() == text


def test_records_of_other_methods_are_refused(tmp_path: Path) -> None:
    whole = _written(tmp_path / "records.jsonl", 1)
    with pytest.raises(ValueError, match="other methods"):
        RecordFile(tmp_path / "records.jsonl", ["b", "a"])
    assert (tmp_path / "records.jsonl").read_bytes() == whole


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    _written(tmp_path / "sub" / "b.jsonl", 1)
    _written(tmp_path / "a.jsonl", 2)
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b'{"torn')
    assert [record["index"] for record in load_records(tmp_path)] == [0, 0, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="holds no records"):
        load_records(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b\\c:d", "", "..", "x" * 300, "naïve task"])
def test_no_name_leaves_its_folder(name: str) -> None:
    """Names of tasks come from files and from the command line."""
    made = slug(name)
    assert made and len(made) <= 80 and not set(made) & set("/\\: ") and made not in (".", "..")


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A wrong out= is the user's, and no traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written \(.*\); give another out="):
        RecordFile(tmp_path / "file" / "records.jsonl", METHODS)
