"""The files of a batch: what a line of requests may be, and answers that outlive the process that wrote them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launch.batch.answers import Answers
from launch.batch.lines import BadLine, Lines
from lp.errors import UserError


def request(custom_id: Any = "a", **fields: Any) -> dict[str, Any]:
    body = {"prompt": "x = ", "max_tokens": 8}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | fields


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def answer(lines: Lines, index: int, text: str = "1") -> dict[str, Any]:
    line = lines.lines[index]
    response = {"status_code": 200, "request_id": "r", "body": {"text": text}}
    return {"id": line.key, "custom_id": line.custom_id, "response": response, "error": None}


@pytest.fixture
def asked(tmp_path: Path) -> Lines:
    return Lines(write(tmp_path / "in.jsonl", *(request(name) for name in "abcd")))


BAD = {
    "nonsense": ("invalid_json_line", "the line is no JSON"),
    "[1]": ("invalid_json_line", "no JSON object"),
    "[" * 100_000: ("invalid_json_line", "the line is no JSON"),
    json.dumps(request(None)): ("missing_required_parameter", "custom_id is missing"),
    json.dumps(request(7)): ("missing_required_parameter", "custom_id is 7; give a text"),
    json.dumps(request(method="GET")): ("invalid_method", "method is 'GET'; it must be POST"),
    json.dumps(request(url="http://other.example/v1/completions")): ("invalid_url", "it must be one of /v1/chat/"),
    json.dumps(request(url="/metrics")): ("invalid_url", "url is '/metrics'"),
    json.dumps(request(url=["/v1/completions"])): ("invalid_url", "url is ['/v1/completions']"),
    json.dumps(request(body="x")): ("missing_required_parameter", "body is 'x'; give an object"),
    json.dumps(request(body={"prompt": "x", "stream": True})): ("invalid_request", "answers of a batch come whole"),
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:60])
def test_a_line_that_is_no_request(line: str, tmp_path: Path) -> None:
    """It has an error of its own, and the lines beside it are what they are; a URL may not lead elsewhere."""
    lines = Lines(write(tmp_path / "in.jsonl", request("first"), "", line, request("last")))
    assert [each.number for each in lines.lines] == [1, 3, 4]
    first, bad, last = lines.lines
    assert json.loads(lines.request(first).body) == json.loads(lines.request(last).body) == request()["body"]
    with pytest.raises(BadLine) as error:
        lines.request(bad)
    code, message = BAD[line]
    assert error.value.code == code and message in str(error.value) and len(str(error.value)) < 300


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """What can be said before a model is loaded is said then."""
    with pytest.raises(UserError, match=r"cannot read .*in\.jsonl \(No such file"):
        Lines(tmp_path / "in.jsonl")
    with pytest.raises(UserError, match="has no requests"):
        Lines(write(tmp_path / "in.jsonl", "", ""))
    with pytest.raises(UserError, match="has custom_id 'b' in lines 2 and 4; give each line its own"):
        Lines(write(tmp_path / "in.jsonl", request("a"), request("b"), "", request("b")))


def test_files_that_are_read_once(asked: Lines, tmp_path: Path) -> None:
    """A pipe is at its end when lines are read again; as the file of answers it would be waited for without end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UserError, match=r"input is .*, which is no file on a disk; write its lines to one"):
            Lines(path)
        with pytest.raises(UserError, match=r"out is .*, which is no file on a disk; give one"):
            Answers(path, asked)


def test_a_folder_that_is_closed(asked: Lines, tmp_path: Path) -> None:
    """Whether the file is there can't even be asked; a traceback would not say whose folder it is."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0)
    if os.access(folder, os.X_OK):
        pytest.skip("root enters every folder")
    with pytest.raises(UserError, match=r"cannot write .*out\.jsonl \(Permission denied\)"):
        Answers(folder / "out.jsonl", asked)
    with pytest.raises(UserError, match=r"cannot read .*in\.jsonl \(Permission denied\)"):
        Lines(folder / "in.jsonl")


def test_a_file_that_changes_meanwhile(asked: Lines) -> None:
    """An answer must not be recorded under the name of another request."""
    write(asked.path, *(request(name, body={"prompt": "y = ", "max_tokens": 8}) for name in "abcd"))
    with pytest.raises(UserError, match=r"line 2 of .* has changed meanwhile"):
        asked.request(asked.lines[1])


def test_texts_of_other_scripts_and_halves_of_characters(tmp_path: Path) -> None:
    """A byte order mark, as editors of Windows write it, is no reason to refuse the first line."""
    body = {"prompt": "名 = \ud83d", "max_tokens": 8}
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(request("名", body=body)).encode() + b"\r\n")
    (line,) = Lines(path).lines
    assert line.custom_id == "名" and json.loads(Lines(path).request(line).body) == body
    with Answers(tmp_path / "out.jsonl", Lines(path)) as answers:
        answers.add([answer(Lines(path), 0, "\ud83d")])
    assert json.loads((tmp_path / "out.jsonl").read_text())["custom_id"] == "名"


def test_a_file_cut_off_anywhere_goes_on(asked: Lines, tmp_path: Path) -> None:
    """After any byte: what is whole counts, the rest is asked again, and no line is glued to half of another."""
    path = tmp_path / "out.jsonl"
    with Answers(path, asked) as answers:
        answers.add([answer(asked, 0)])
        answers.add([answer(asked, 1), answer(asked, 2, "é" * 9)])
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        for zeros in (0, 3):  # which a machine that ends in the middle of the writing may leave
            path.write_bytes(whole[:cut] + bytes(zeros))
            done = sum(end <= cut for end in ends)
            with Answers(path, asked) as answers:
                assert answers.done == {line.key for line in asked.lines[:done]}
                answers.add([answer(asked, 3)])
            found = [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]
            assert found == [*"abc"[:done], "d"]


@pytest.mark.parametrize("content", ["text\n", "{}\n", '{"id": 1}', "x", '{"id":"other"}\n{"id":"batch_req_1'])
def test_a_file_of_something_else_stays(content: str, asked: Lines, tmp_path: Path) -> None:
    """Given by mistake, it must be neither cut nor added to."""
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=r"line 1 is no answer in .*out\.jsonl; give another out="):
        Answers(path, asked)
    assert path.read_text() == content


def test_answers_to_other_requests(asked: Lines, tmp_path: Path) -> None:
    """An old answer to the same custom_id with another prompt would pass for the new one's."""
    path = tmp_path / "out.jsonl"
    with Answers(path, asked) as answers:
        answers.add([answer(asked, 0), answer(asked, 1)])
    other = Lines(write(asked.path, request("a"), request("b", body={"prompt": "y = "})))
    with pytest.raises(UserError, match=r"line 2 \(custom_id 'b'\) answers what is not asked now"):
        Answers(path, other)
    reordered = Lines(write(asked.path, *({**reversed_(request(name))} for name in "dcba")))
    with Answers(path, reordered) as answers:
        assert answers.done == {line.key for line in asked.lines[:2]}
    path.write_text(path.read_text() * 2)
    with pytest.raises(UserError, match=r"line 3 \(custom_id 'a'\) answers what another line does"):
        Answers(path, asked)


def reversed_(fields: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(fields.items()))


def test_one_run_writes_a_file(asked: Lines, tmp_path: Path) -> None:
    """Two would answer everything twice."""
    path = tmp_path / "out.jsonl"
    with Answers(path, asked), pytest.raises(UserError, match="is being written by another run"):
        Answers(path, asked)
    with Answers(path, asked):
        pass
    with pytest.raises(UserError, match="is the file of requests"):
        Answers(asked.path, asked)
    with pytest.raises(UserError, match=r"cannot write .* \(No such file"):
        Answers(tmp_path / "none" / "out.jsonl", asked)


def test_an_answer_counts_once_it_is_on_the_disk(asked: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever counts lines after a power failure must find what was counted before."""
    synced: list[int] = []
    path = tmp_path / "out.jsonl"
    with Answers(path, asked) as answers:
        monkeypatch.setattr(os, "fsync", lambda handle: synced.append(path.stat().st_size))
        answers.add([answer(asked, 0)])
        assert synced == [path.stat().st_size] and len(answers.done) == 1

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError):
            answers.add([answer(asked, 1)])
        assert len(answers.done) == 1
