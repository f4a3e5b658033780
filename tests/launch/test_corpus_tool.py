"""`lp corpus build`: which files it reads, and what it does not read again."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

import launch.corpus
from launch.cli import run_tool
from launch.data.source_files import source_files
from lp.draft.pool.corpus_file import contents_of, mapped
from lp.models.loader import load_tokenizer


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def built(folder: Path, path: Path, *options: str) -> dict[str, list[int]]:
    """The tokens of every file that the corpus has after it was built."""
    run_tool("corpus", ["build", str(folder), "--model", "demo", "-o", str(path), *options])
    found = contents_of(mapped(path))
    assert found
    return {file.path: text.tolist() for file, text in zip(found[0].files, found[1], strict=True)}


FILES: dict[str, str | bytes] = {
    "a.py": "def f(x):\n    return x\n",
    "deep/b.py": "import os\n",
    "deep/.gitignore": "secret*\n!secret_not.py\n",
    "deep/secret.py": "PASSWORD = 1\n",
    "deep/secret_not.py": "x = 1\n",
    "build/c.py": "y = 2\n",
    ".gitignore": "build/\n",
    "image.png": b"\x89PNG",
    "table.bin": b"1\0\0\0002\0\0\0",
    "latin.txt": b"caf\xe9",
    "large.py": "x = 1\n" * 1000,
}


@pytest.mark.parametrize("place", ["folder", "repository", "ignored"])
def test_which_files_are_read(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a repository leaves out may be secret, and what a program wrote; that holds outside a repository too."""
    folder = tmp_path / "site" / "tree"
    write(folder, FILES)
    if place != "folder":
        root = folder if place == "repository" else tmp_path
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        (tmp_path / ".gitignore").write_text("site\n")
    (folder / "link.py").symlink_to(folder / "a.py")
    tokens = built(folder, tmp_path / "x.corpus", "--most-kib", "4")
    assert [*tokens] == [".gitignore", "a.py", "deep/.gitignore", "deep/b.py", "deep/secret_not.py"]
    tokenizer, _ = load_tokenizer("demo")
    assert tokens["a.py"] == tokenizer(str(FILES["a.py"]), add_special_tokens=False)["input_ids"]
    assert "left out: 3 binary, 1 too large" in capsys.readouterr().out


def test_a_corpus_does_not_read_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor its delta; but a file whose name begins like its own is one of the folder."""
    own: dict[str, str | bytes] = {"own.delta": b"\0", "own.12.part": "x = 1", "own.delta.12.part": "x = 1"}
    write(tmp_path, {"own.py": "a = 1\n", "own.delta.py": "b = 1\n", "deep/own": "c = 1\n"} | own)
    assert [*built(tmp_path, tmp_path / "own")] == ["deep/own", "own.delta.py", "own.py"]
    assert "left out: none" in capsys.readouterr().out


def test_files_that_have_not_changed_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a repository takes minutes; what has changed, came or went must be seen."""
    folder, path = tmp_path / "tree", tmp_path / "tree" / "own.corpus"
    write(folder, {"a.py": "a = 1\n", "b.py": "b = 1\n", "c.py": "c = 1\n"})
    built(folder, path)
    written = path.stat().st_mtime_ns
    read: list[str] = []
    text_of = launch.corpus.text_of
    monkeypatch.setattr(launch.corpus, "text_of", lambda path: (read.append(path.name), text_of(path))[1])
    assert [*built(folder, path)] == ["a.py", "b.py", "c.py"] and not read
    assert path.stat().st_mtime_ns == written, "nothing has changed, and nothing is written"
    write(folder, {"b.py": "b = 2\n", "d.py": "d = 1\n"})
    os.utime(folder / "b.py", ns=(1, 1))  # of the same size
    (folder / "c.py").unlink()
    tokens = built(folder, path)
    assert read == ["b.py", "d.py"] and [*tokens] == ["a.py", "b.py", "d.py"]
    tokenizer, _ = load_tokenizer("demo")
    assert [tokenizer.decode(each) for each in tokens.values()] == ["a = 1\n", "b = 2\n", "d = 1\n"]
    (folder / "d.py").unlink()
    assert [*built(folder, path)] == ["a.py", "b.py"], "a file that went alone is no reason to read, but to write"


def test_another_tokenizer_reads_everything_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the old one would match nothing that the model writes."""
    folder, path = tmp_path / "tree", tmp_path / "x.corpus"
    write(folder, {"a.py": "a = 1\n"})
    built(folder, path)
    monkeypatch.setattr(launch.corpus, "tokenizer_digest", lambda tokenizer: 5)
    read: list[Path] = []
    text_of = launch.corpus.text_of
    monkeypatch.setattr(launch.corpus, "text_of", lambda path: (read.append(path), text_of(path))[1])
    built(folder, path)
    assert read
    write(tmp_path / "other", {"a.py": "a = 1\n"})
    read.clear()
    built(tmp_path / "other", path)
    assert read, "of another folder"


def test_a_damaged_corpus_is_built_anew_and_another_file_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index can be made again; the file of a user who mixed up two arguments cannot."""
    folder, path = tmp_path / "tree", tmp_path / "x.corpus"
    write(folder, {"a.py": "a = 1\n"})
    first = built(folder, path)
    data = path.read_bytes()
    path.write_bytes(data[:-8] + b"\1" * 8)
    assert built(folder, path) == first and path.read_bytes() == data
    own = tmp_path / "own.py"
    own.write_text("precious")
    with pytest.raises(SystemExit):
        built(folder, own)
    assert own.read_text() == "precious" and "own.py' can't be read" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder here takes access and refuses files")
def test_a_file_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder may refuse a file though its permissions allow it: that was a traceback, after all files were read."""
    write(tmp_path / "tree", {"a.py": "a = 1\n"})
    with pytest.raises(SystemExit, match="2"):
        built(tmp_path / "tree", Path("/proc/x.corpus"))
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and last.endswith("; give another path with -o") and "/proc" in last


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOSPC])
def test_a_write_that_fails(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message is of the file that was asked for, and not of the unfinished one beside it."""

    def failing(array: object, path: Path) -> None:
        raise OSError(number, os.strerror(number), f"{path}.1.part")

    monkeypatch.setattr(launch.corpus, "write_file", failing)
    write(tmp_path / "tree", {"a.py": "a = 1\n"})
    path = tmp_path / "x.corpus"
    with pytest.raises(SystemExit, match="2"):
        built(tmp_path / "tree", path)
    assert f"error: cannot write '{path}' ({os.strerror(number)}); give another path" in capsys.readouterr().err


def test_a_model_of_more_tokens_gets_a_corpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one family share a tokenizer and differ in V: one refused the corpus, and building it did nothing."""
    folder, path = tmp_path / "tree", tmp_path / "x.corpus"
    write(folder, {"a.py": "a = 1\n"})
    first = built(folder, path)
    tokenizer, size = load_tokenizer("demo")
    monkeypatch.setattr(launch.corpus, "load_tokenizer", lambda name: (tokenizer, size + 64))
    assert built(folder, path) == first and mapped(path)[1] == size + 64


def test_repositories_within_a_folder(tmp_path: Path) -> None:
    """git names a repository in another one, and none of its files: a folder of projects would have no text."""
    write(tmp_path, {"one/a.py": "", "two/deep/b.py": "", "two/.gitignore": "c.py", "two/c.py": "", "top.py": ""})
    for name in ("one", "two"):
        subprocess.run(["git", "init", "-q", str(tmp_path / name)], check=True)
    assert {file.path for file in source_files(tmp_path)} == {
        "one/a.py",
        "two/deep/b.py",
        "two/.gitignore",
        "top.py",
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing", "-o", "x"], "'missing' is no folder"),
        (["empty", "-o", "x"], "'empty' has no text to read (left out: none)"),
        (["empty", "-o", "no/x"], "no file can be written to the folder 'no'"),
        (["empty", "-o", "x", "--most-kib", "0"], "--most-kib is 0"),
    ],
)
def test_errors_name_the_remedy(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error is one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        run_tool("corpus", ["build", *args, "--model", "demo"])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_without_git_hidden_files_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where git is missing .gitignore can't be read, which is said."""
    write(tmp_path, {"a.py": "", ".git/x": "", "deep/b.py": ""})
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match=r"\.gitignore is not read"):
        assert [file.path for file in source_files(tmp_path)] == ["a.py", "deep/b.py"]
