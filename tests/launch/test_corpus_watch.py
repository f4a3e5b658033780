"""`lp corpus watch`: a corpus that follows its folder, however it is edited and wherever the watch is ended."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import launch.data.kept_corpus
import launch.data.watched_folder
from launch.cli import run_tool
from launch.corpus import TextReader, build, own_files
from launch.data.kept_corpus import WAIT_S, KeptCorpus
from launch.data.source_files import SourceFile, source_files
from launch.data.watched_folder import WatchedFolder
from lp.commands import install_command
from lp.draft.pool.corpus_file import contents_of, delta_path, identity_of, mapped, new_file
from lp.draft.pool.followed_corpora import FollowedCorpus
from lp.errors import UserError
from lp.models.loader import load_tokenizer
from tests.conftest import Processes
from tests.launch.test_corpus_tool import write

TOKENIZER, V = load_tokenizer("demo")
FILES: dict[str, str | bytes] = {"a.py": "a = 1\n", "deep/b.py": "b = 1\n", "deep/c.py": "c = 1\n", "x.png": b"\0"}


class Editor:
    """A folder that is edited, and the corpus that follows it.

    Attributes:
        folder: the folder, which is a repository.
        path: where the corpus is.
    """

    def __init__(self, tmp_path: Path, files: dict[str, str | bytes] = FILES, path: str = "x.corpus") -> None:
        self.folder, self.path = tmp_path / "tree", tmp_path / path
        write(self.folder, files)
        subprocess.run(["git", "init", "-q", str(self.folder)], check=True)
        self.reader = TextReader(self.folder, TOKENIZER, 1 << 20)
        build(self.reader, self.path, V)
        self.kept = self.kept_anew()
        self.followed = FollowedCorpus(str(self.path), V)

    def kept_anew(self) -> KeptCorpus:
        """What a watch is that begins now, on what the one before has left."""
        watched = WatchedFolder(self.folder, own_files(self.folder, self.path))
        return KeptCorpus(watched, self.reader.tokens, self.path, V)

    def texts(self) -> dict[str, str]:
        """The text of each file, as a request that begins now has it."""
        self.followed.look()
        return texts_of(self.followed)

    def becomes(self, expected: dict[str, str], seconds: float = 30) -> bool:
        """Whether requests have these texts in time."""
        until = time.monotonic() + seconds
        while (found := self.texts()) != expected and time.monotonic() < until:
            self.kept.look(0.01)
        assert found == expected
        return True

    def truth(self) -> dict[str, str]:
        """The text of each file that a corpus built now has."""
        other = self.path.with_name("truth.corpus")
        build(self.reader, other, V)
        return texts_of(FollowedCorpus(str(other), V))


def texts_of(followed: FollowedCorpus) -> dict[str, str]:
    found = contents_of(followed.file)
    assert found
    base = {file.path: TOKENIZER.decode(text) for file, text in zip(found[0].files, found[1], strict=True)}
    if followed.delta is not None:
        changed = contents_of(followed.delta)
        assert changed
        texts = {file.path: text for file, text in zip(changed[0].files, changed[1], strict=True)}
        assert len(followed.gone) == 2 * len(base.keys() & texts.keys())
        base |= {path: TOKENIZER.decode(text) for path, text in texts.items()}
        base = {path: text for path, text in base.items() if path not in texts or len(texts[path])}
    return base


def test_changed_new_deleted_and_renamed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old text is drafted where it is not: what is typed agrees with it the longest."""
    monkeypatch.setattr(launch.data.watched_folder, "LIST_S", 3600)
    editor = Editor(tmp_path)
    texts = {"a.py": "a = 1\n", "deep/b.py": "b = 1\n", "deep/c.py": "c = 1\n"}
    assert editor.texts() == texts and not delta_path(editor.path).exists()
    write(editor.folder, {"a.py": "a = 22\n"})
    assert editor.becomes(texts | {"a.py": "a = 22\n"})
    write(editor.folder, {"new.py": "n = 1\n", "deep/er/new.py": "d = 1\n"})
    texts |= {"a.py": "a = 22\n", "new.py": "n = 1\n", "deep/er/new.py": "d = 1\n"}
    assert editor.becomes(texts)
    write(editor.folder, {"deep/er/new.py": "d = 333\n"})
    (editor.folder / "deep/b.py").unlink()
    texts |= {"deep/er/new.py": "d = 333\n"}
    del texts["deep/b.py"]
    assert editor.becomes(texts)
    (editor.folder / "deep").rename(editor.folder / "shallow")
    texts = {path.replace("deep/", "shallow/", 1): text for path, text in texts.items()}
    assert editor.becomes(texts)
    write(editor.folder, {"new.py": b"\0", "a.py": b"caf\xe9"})
    del texts["new.py"], texts["a.py"]
    assert editor.becomes(texts), "they are no texts any more"
    part = editor.folder / "part"
    part.write_text("c = 4\n")
    part.replace(editor.folder / "shallow/c.py")  # as many editors save
    assert editor.becomes(texts | {"shallow/c.py": "c = 4\n"})
    assert editor.texts() == editor.truth()


def test_a_file_that_becomes_what_it_was(tmp_path: Path) -> None:
    """A switch to another branch and back leaves nothing that differs from the corpus."""
    editor = Editor(tmp_path)
    texts, place = editor.texts(), editor.folder / "a.py"
    state = place.stat()
    place.unlink()
    assert editor.becomes({path: text for path, text in texts.items() if path != "a.py"})
    place.write_text("a = 1\n")
    os.utime(place, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert editor.becomes(texts) and not delta_path(editor.path).exists()


def test_gitignore_is_respected_while_it_changes(tmp_path: Path) -> None:
    """What a user leaves out may be secret."""
    editor = Editor(tmp_path)
    texts = editor.texts()
    write(editor.folder, {".gitignore": "secret*\nbuilt/\n", "secret.py": "PASSWORD\n", "built/x.py": "x\n"})
    texts |= {".gitignore": "secret*\nbuilt/\n"}
    assert editor.becomes(texts)
    write(editor.folder, {"deep/secret.py": "PASSWORD\n", "d.py": "d\n"})
    texts |= {"d.py": "d\n"}
    assert editor.becomes(texts)
    write(editor.folder, {".gitignore": "secret*\nbuilt/\na.py\n"})
    del texts["a.py"]
    assert editor.becomes(texts | {".gitignore": "secret*\nbuilt/\na.py\n"})
    write(editor.folder, {"a.py": "a = 5\n"})
    write(editor.folder, {"d.py": "dd\n"})
    assert editor.becomes(texts | {".gitignore": "secret*\nbuilt/\na.py\n", "d.py": "dd\n"})


def listings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders whose files have been listed since, each as often as they were; no time asks for it."""
    monkeypatch.setattr(launch.data.watched_folder, "LIST_S", 3600)
    found: list[Path] = []

    def counted(folder: Path, **named: Any) -> list[SourceFile]:
        found.append(folder)
        return source_files(folder, **named)

    monkeypatch.setattr(launch.data.watched_folder, "source_files", counted)
    return found


def looked(watched: WatchedFolder, *wanted: str, seconds: float = 30) -> set[str]:
    """What has changed until all that is wanted has, or until the time is over."""
    found, until = set[str](), time.monotonic() + seconds
    while time.monotonic() < until and not (wanted and found.issuperset(wanted)):
        found |= watched.look(0.05)
    return found


def test_an_edit_is_told_and_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large folder a listing takes long; and nobody has to type twice until a file is followed."""
    write(tmp_path, {f"{index % 7}/{index}.py": "x\n" for index in range(50)})
    watched = WatchedFolder(tmp_path, lambda path: False)
    counted = listings(monkeypatch)
    watched._list_by_s = time.monotonic() + 3600
    for name in ("0/7.py", "1/8.py", "0/7.py"):
        write(tmp_path, {name: f"typed {time.monotonic()}\n"})
        assert looked(watched, name) == {name} and not watched.look()
    (tmp_path / "0/7.py").replace(tmp_path / "0/backup")  # as some editors save, and they are slow at it
    assert looked(watched, "0/7.py") == {"0/7.py"} and "0/7.py" not in watched.files
    (tmp_path / "0/backup").unlink()
    watched._list_from_s = watched._list_by_s = time.monotonic() + 3600
    write(tmp_path, {"0/7.py": "saved\n"})
    assert looked(watched, "0/7.py") == {"0/7.py"} and watched.files["0/7.py"].size == 6
    part = tmp_path / "part"
    part.write_text("renamed\n")
    part.replace(tmp_path / "1/8.py")  # as other editors do
    assert looked(watched, "1/8.py") == {"1/8.py"}
    assert len(counted) <= 1, "for the backup"


def test_what_git_leaves_out_asks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that build write thousands of files, and a log has a line more each second."""
    write(tmp_path, {"a.py": "x\n", ".gitignore": "built/\n*.log\n", "built/x.py": "x\n", "x.log": "x\n"})
    watched = WatchedFolder(tmp_path, lambda path: path == "own.corpus")
    counted = listings(monkeypatch)
    watched._list_from_s, watched._list_by_s = 0.0, time.monotonic() + 3600
    for index in range(20):
        write(tmp_path, {f"built/{index}.py": "x\n", "x.log": "x\n" * index, "own.corpus": f"{index}"})
        assert not watched.look()
    assert not looked(watched, seconds=0.1) and not counted
    write(tmp_path, {"b.py": "x\n"})
    assert looked(watched, "b.py") == {"b.py"} and counted


def test_a_folder_that_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another branch has no such folder; after the way there and back notices of the old one say nothing."""
    tree = tmp_path / "tree"
    write(tree, {"a.py": "x\n", "deep/b.py": "x\n", "deep/er/c.py": "x\n"})
    watched = WatchedFolder(tree, lambda path: False)
    counted = listings(monkeypatch)
    watched._list_from_s, watched._list_by_s = 0.0, time.monotonic() + 3600
    (tree / "deep").rename(tmp_path / "away")
    write(tree, {"deep/b.py": "new\n", "deep/er/c.py": "new\n"})
    both = {"deep/b.py", "deep/er/c.py"}
    assert looked(watched, *both) == both and counted
    looked(watched, seconds=1)  # while a listing may be due
    watched._list_from_s = watched._list_by_s = time.monotonic() + 3600
    write(tree, {"deep/b.py": "typed\n", "deep/er/c.py": "typed\n"})
    write(tmp_path, {"away/b.py": "typed elsewhere\n"})
    assert looked(watched, *both) == both


def test_a_name_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """watchfiles ends at it; edits before and after are not lost."""
    listings(monkeypatch)
    write(tmp_path, {"a.py": "x\n", "b.py": "x\n"})
    watched = WatchedFolder(tmp_path, lambda path: False)
    write(tmp_path, {"a.py": "typed\n"})
    name = os.fsencode(tmp_path) + b"/caf\xe9.py"
    Path(os.fsdecode(name)).write_text("x\n")
    new = os.fsdecode(b"caf\xe9.py")
    assert looked(watched, "a.py", new) == {"a.py", new}
    write(tmp_path, {"b.py": "typed\n"})
    assert looked(watched, "b.py") == {"b.py"}


@pytest.mark.parametrize("error", [OSError("OS file watch limit reached."), None], ids=["limit", "silence"])
def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """Too many folders, or edits that come from another machine: the files are listed now and then."""
    write(tmp_path, {"a.py": "x\n"})

    class Silent:
        def __init__(self, *args: Any) -> None:
            if error:
                raise error

        def watch(self, debounce_ms: int, step_ms: int, timeout_ms: int, stop: None) -> str:
            time.sleep(timeout_ms / 1000)
            return "timeout"

    monkeypatch.setattr(launch.data.watched_folder, "RustNotify", Silent)
    monkeypatch.setattr(launch.data.watched_folder, "LIST_S", 0.2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        watched = WatchedFolder(tmp_path, lambda path: False)
        write(tmp_path, {"a.py": "typed\n", "deep/b.py": "x\n"})
        assert looked(watched, "a.py", "deep/b.py") == {"a.py", "deep/b.py"}
    if not error:
        assert not warned
        return
    said = str(warned[0].message)
    assert "limit reached" in said and "fs.inotify.max_user_watches must be 1 or more" in said and "sysctl" in said
    assert len(warned) == 2, "and once more, for the new folder"


def test_ctrl_c_while_it_waits(tmp_path: Path) -> None:
    """watchfiles takes the interrupt; the watch must end nevertheless, and at once."""
    write(tmp_path, {"a.py": "x\n"})
    watched = WatchedFolder(tmp_path, lambda path: False)
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        watched.look(60)
    assert time.monotonic() - began < 5
    timer.join()


def test_watchfiles_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The extra is named before hours of reading, and `build` needs none."""
    for name in ("watchfiles", "launch.data.watched_folder"):
        monkeypatch.setitem(sys.modules, name, None)
    write(tmp_path / "tree", {"a.py": "x = 1\n"})
    asked = [str(tmp_path / "tree"), "--model", "demo", "-o", str(tmp_path / "x.corpus")]
    with pytest.raises(SystemExit, match="2"):
        run_tool("corpus", ["watch", *asked])
    assert f"lp corpus watch needs watchfiles; install the extra: {install_command('watch')}" in capsys.readouterr().err
    assert not (tmp_path / "x.corpus").exists()
    run_tool("corpus", ["build", *asked])
    assert (tmp_path / "x.corpus").exists()


def test_a_first_file_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a file is not looked at: the files are listed now and then."""
    monkeypatch.setattr(launch.data.watched_folder, "LIST_S", 1)
    editor = Editor(tmp_path)
    (editor.folder / "new").mkdir()
    for _ in range(20):
        editor.kept.look()
        time.sleep(0.01)
    write(editor.folder, {"new/a.py": "n\n"})
    assert editor.becomes(editor.truth())


def test_a_corpus_in_its_own_folder(tmp_path: Path) -> None:
    """A watch that reads what it writes writes for ever."""
    editor = Editor(tmp_path, path="tree/own.corpus")
    write(editor.folder, {"a.py": "a = 2\n"})
    assert editor.becomes(editor.truth())
    assert not any(path.startswith(("own.corpus", "truth.corpus.")) for path in editor.texts())
    written = delta_path(editor.path).stat().st_mtime_ns
    for _ in range(20):
        editor.kept.look()
        time.sleep(0.02)
    assert delta_path(editor.path).stat().st_mtime_ns == written


def sorted_late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the thread that sorts a corpus' tokens wait for an event, which is returned."""
    goes_on = threading.Event()

    def late(*args: Any) -> np.ndarray:
        if threading.current_thread() is not threading.main_thread():
            assert goes_on.wait(60)
        return new_file(*args)

    monkeypatch.setattr(launch.data.kept_corpus, "new_file", late)
    return goes_on


def test_the_corpus_is_written_anew_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits are followed meanwhile, and those that the new corpus lacks are not lost when it comes."""
    monkeypatch.setattr(launch.data.kept_corpus, "MOST_DELTA_TOKENS", 8)
    editor = Editor(tmp_path)
    goes_on, first = sorted_late(monkeypatch), identity_of(mapped(editor.path))
    write(editor.folder, {"a.py": "a = 2\n" * 9})
    assert editor.becomes(editor.truth())
    write(editor.folder, {"deep/c.py": "c = 3\n" * 4, "late.py": "late\n"})
    (editor.folder / "deep/b.py").unlink()
    assert editor.becomes(editor.truth()) and identity_of(mapped(editor.path)) == first
    kept = FollowedCorpus(str(editor.path), V)
    before = texts_of(kept)
    goes_on.set()
    until = time.monotonic() + 30
    while identity_of(mapped(editor.path)) == first and time.monotonic() < until:
        editor.kept.look()
        time.sleep(0.01)
    assert identity_of(mapped(editor.path)) != first and editor.texts() == editor.truth()
    found = contents_of(mapped(delta_path(editor.path)))
    assert found and [file.path for file in found[0].files] == ["deep/b.py", "deep/c.py", "late.py"]
    assert texts_of(kept) == before, "of a request that began before"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("rebuilds", [False, True], ids=["delta", "corpus"])
def test_a_watch_that_is_killed_at_any_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rebuilds: bool) -> None:
    """Requests have what was there before or what is new, and the next watch has all that was changed."""
    monkeypatch.setattr(launch.data.kept_corpus, "MOST_DELTA_TOKENS", 1 if rebuilds else 1 << 20)
    write_bytes, replace, unlink = Path.write_bytes, Path.replace, Path.unlink
    editor = Editor(tmp_path)
    left, ended = 0, 0

    def cut(path: Path, data: Any) -> int:
        nonlocal left
        left -= len(data)
        write_bytes(path, bytes(data)[: len(data) + min(left, 0)])
        if left < 0:
            raise Killed
        return len(data)

    def call(name: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0 and name is not unlink:  # no process that was killed cleans up
            raise Killed
        return name(*args, **options) if left >= 0 else None

    for kill_at in [*range(0, 9000, 1500), *range(0, 40000, 4001), 10**9]:
        before = editor.truth()
        write(editor.folder, {"a.py": f"a = {kill_at}\n" * 3, "deep/c.py": f"c = {kill_at + 1}\n"})
        (editor.folder / "deep/b.py").unlink(missing_ok=True)
        write(editor.folder, {} if kill_at % 3 else {"deep/b.py": "b\n"})
        after, left = editor.truth(), kill_at
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_bytes", cut)
            patched.setattr(Path, "replace", lambda *args: call(replace, *args))
            patched.setattr(Path, "unlink", lambda *args, **options: call(unlink, *args, **options))
            try:
                until = time.monotonic() + 0.5
                while time.monotonic() < until:
                    editor.kept.look()
            except Killed:
                ended += 1
        assert texts_of(FollowedCorpus(str(editor.path), V)).items() <= {*before.items(), *after.items()}
        editor.kept = editor.kept_anew()
        assert editor.texts() == after
    assert ended > 5


def test_another_program_writes_the_corpus(tmp_path: Path) -> None:
    """`lp corpus build` beside a watch: its delta would be of a corpus that is there no more."""
    editor = Editor(tmp_path)
    write(editor.folder, {"a.py": "a = 2\n"})
    build(editor.reader, editor.path, V)
    write(editor.folder, {"deep/b.py": "b = 2\n"})
    assert editor.becomes(editor.truth())
    other = TextReader(editor.folder, TOKENIZER, 1 << 20)
    other.digest = 5
    build(other, editor.path, V)
    write(editor.folder, {"deep/b.py": "b = 3\n"})
    with pytest.raises(UserError, match="of another folder, or for another model"):
        editor.becomes(editor.truth())
    editor = Editor(tmp_path)
    editor.path.unlink()
    write(editor.folder, {"deep/b.py": "b = 4\n"})
    with pytest.raises(UserError, match=r"x.corpus' can't be read"):
        editor.becomes(editor.truth())


def test_a_build_beside_a_watch(tmp_path: Path) -> None:
    """A build takes the delta away, and with it an edit that came after it had read that file."""
    editor = Editor(tmp_path)
    write(editor.folder, {"a.py": "a = 2\n"})
    assert editor.becomes(editor.truth())
    delta_path(editor.path).unlink()
    assert editor.becomes(editor.truth())

    class LateReader(TextReader):
        def tokens(self, file: SourceFile) -> np.ndarray | None:
            tokens = super().tokens(file)
            if file.path == "a.py":
                write(self.folder, {"a.py": "a = 4\n"})
                editor.becomes({**editor.texts(), "a.py": "a = 4\n"})
            return tokens

    write(editor.folder, {"a.py": "a = 33\n"})
    build(LateReader(editor.folder, TOKENIZER, 1 << 20), editor.path, V)
    assert editor.texts()["a.py"] == "a = 33\n" and editor.becomes(editor.truth())
    assert editor.texts()["a.py"] == "a = 4\n"


def test_another_corpus_takes_the_place_while_tokens_are_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not be lost, for it has other files."""
    monkeypatch.setattr(launch.data.kept_corpus, "MOST_DELTA_TOKENS", 8)
    editor, goes_on = Editor(tmp_path), sorted_late(monkeypatch)
    write(editor.folder, {"a.py": "a = 2\n" * 9})
    assert editor.becomes(editor.truth())
    other = tmp_path / "other"
    write(other, {"z.py": "z = 1\n"})
    build(TextReader(other, TOKENIZER, 1 << 20), editor.path, V)
    goes_on.set()
    with pytest.raises(UserError, match="of another folder, or for another model; give another file with -o"):
        editor.becomes({})
    assert editor.texts() == {"z.py": "z = 1\n"}


def test_a_delta_that_has_grown_waits_for_no_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is written anew once it is time to, though nobody edits any more."""
    monkeypatch.setattr(launch.data.kept_corpus, "MOST_DELTA_TOKENS", 8)
    editor = Editor(tmp_path)
    first, editor.kept._next_from_s = identity_of(mapped(editor.path)), time.monotonic() + 0.5
    write(editor.folder, {"a.py": "a = 2\n" * 9})
    assert editor.becomes(editor.truth()) and identity_of(mapped(editor.path)) == first
    until = time.monotonic() + 30
    while delta_path(editor.path).exists() and time.monotonic() < until:
        editor.kept.look()
        time.sleep(0.01)
    assert identity_of(mapped(editor.path)) != first and editor.becomes(editor.truth())


def test_all_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus of no tokens is none; the delta says that all are gone."""
    monkeypatch.setattr(launch.data.kept_corpus, "MOST_DELTA_TOKENS", 1)
    editor = Editor(tmp_path, {"a.py": "a = 1\n" * 9, "b.py": "b = 1\n" * 9})
    (editor.folder / "a.py").unlink()
    (editor.folder / "b.py").unlink()
    assert editor.becomes({})
    for _ in range(20):
        editor.kept.look()
        time.sleep(0.01)
    write(editor.folder, {"c.py": "c = 1\n"})
    assert editor.becomes({"c.py": "c = 1\n"})


def test_files_are_not_listed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the list has no more, such as the last one of its folder, is no change for ever."""
    editor = Editor(tmp_path)
    (editor.folder / "deep/b.py").unlink()
    (editor.folder / "deep/c.py").unlink()
    assert editor.becomes({"a.py": "a = 1\n"})
    counted = listings(monkeypatch)
    for _ in range(50):
        editor.kept.look()
        time.sleep(0.02)
    assert len(counted) <= 2


def test_git_that_fails_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves out may be secret; nothing is read that it did not name, and nothing is forgotten."""
    monkeypatch.setattr(launch.data.watched_folder, "LIST_S", 0.05)
    editor = Editor(tmp_path, FILES | {".gitignore": "secret.py\n", "secret.py": "PASSWORD = 1\n"})
    before = editor.texts()
    assert "secret.py" not in before
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="until then new files are not found"):
        patched.setattr(
            subprocess, "run", lambda *args, **named: (_ for _ in ()).throw(OSError(11, "no more processes"))
        )
        for _ in range(60):
            editor.kept.look()
            time.sleep(0.01)
    assert editor.texts() == before
    write(editor.folder, {"new.py": "new = 1\n"})
    assert editor.becomes(before | {"new.py": "new = 1\n"})


def test_a_full_disk_costs_no_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is written as soon as it fits."""
    editor = Editor(tmp_path)
    monkeypatch.setattr(launch.data.kept_corpus, "AGAIN_S", 0.05)
    before = editor.texts()

    def full(array: np.ndarray, path: Path) -> None:
        raise OSError(28, "No space left on device")

    write(editor.folder, {"a.py": "a = 2\n"})
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="delta' was not written"):
        patched.setattr(launch.data.kept_corpus, "write_file", full)
        for _ in range(300):
            editor.kept.look()
            time.sleep(0.001)
    assert editor.texts() == before
    assert editor.becomes(before | {"a.py": "a = 2\n"})


def test_a_repository_of_thousands_of_files(tmp_path: Path) -> None:
    """What is typed is drafted from at once, and looking for it leaves the processor to others."""
    rng = random.Random(0)
    names = [f"p{index % 30}/q{index % 100}/m{index}.py" for index in range(2000)]
    editor = Editor(tmp_path, {name: f"value = {rng.random()}\n" * 3 for name in names})
    ended = threading.Event()

    def keep() -> None:
        while not ended.is_set():
            editor.kept.look(WAIT_S)

    def edited(name: str) -> float:
        """Seconds from a change to a look-up that has it."""
        text = f"changed = {rng.random()}\n"
        began = time.perf_counter()
        (editor.folder / name).write_text(text)
        while not delta_has(editor.followed, name, text):
            assert time.perf_counter() < began + 60
            time.sleep(0.001)
            editor.followed.look()
        return time.perf_counter() - began

    watch = threading.Thread(target=keep)
    watch.start()
    try:
        typed = [edited(names[7]) for _ in range(15)]
        others = [edited(name) for name in rng.sample(names, 9)]
        used, began = time.process_time(), time.perf_counter()
        time.sleep(1)
        share = (time.process_time() - used) / (time.perf_counter() - began)
    finally:
        ended.set()
        watch.join()
    of_typed, of_others = (1e3 * statistics.median(seconds) for seconds in (typed, others))
    print(f"a file that is typed on {of_typed:.0f} ms, others {of_others:.0f} ms, {share:.1%} of a core meanwhile")
    assert of_typed < 1000 and of_others < 1000 and share < 0.5


def delta_has(followed: FollowedCorpus, name: str, text: str) -> bool:
    """Whether the delta has this text for a file, and the corpus' own is gone."""
    found = followed.delta is not None and contents_of(followed.delta)
    if not found:
        return False
    texts = {file.path: tokens for file, tokens in zip(found[0].files, found[1], strict=True)}
    return name in texts and TOKENIZER.decode(texts[name]) == text and len(followed.gone) == 2 * len(texts)


def lines_until(process: subprocess.Popen[str], wanted: Sequence[str]) -> list[str]:
    """Lines of a program's output up to one that has all of these."""
    assert process.stdout
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if all(each in line for each in wanted):
            return lines
    raise AssertionError(f"{lines} {process.stderr.read() if process.stderr else ''}")


def test_the_command(tmp_path: Path, processes: Processes) -> None:
    """It builds, follows, and ends by Ctrl-C; what it has left is read on, and a build takes it in."""
    folder, path = tmp_path / "tree", tmp_path / "x.corpus"
    write(folder, FILES)
    asked = ["corpus", "watch", str(folder), "--model", "demo", "-o", str(path)]
    process = processes.start([sys.executable, "-u", "-m", "launch.cli", *asked])
    lines_until(process, ["x.corpus:", "3 files"])
    time.sleep(0.5)
    write(folder, {"a.py": "a = 2\n"})
    lines_until(process, ["x.corpus.delta", "1 file that has changed"])
    assert texts_of(FollowedCorpus(str(path), V))["a.py"] == "a = 2\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert texts_of(FollowedCorpus(str(path), V))["a.py"] == "a = 2\n"
    build(TextReader(folder, TOKENIZER, 1 << 20), path, V)
    assert not delta_path(path).exists() and texts_of(FollowedCorpus(str(path), V))["a.py"] == "a = 2\n"
