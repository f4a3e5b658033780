"""A disk that is full after any byte of any file that is written, or that takes nothing: no text is lost by it.

The limit is the process's own (RLIMIT_FSIZE), which cuts a write as a disk does that has room for a part of it.
"""

from __future__ import annotations

import resource
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import lp
from launch.bench.plots import figure
from launch.bench.records import RecordFile
from launch.running.errors import DISK_FULL
from launch.serve.spec import TextSpec
from launch.serve.unfinished import UnfinishedRequests
from lp.budget.observed_times import Estimate
from lp.budget.step_times_cache import StepTimesFile, read_estimate
from lp.draft.pool.model_ngrams import Contexts, new_file, read_file, write_file
from lp.engine.journal import Journal
from lp.parallel.context import ParallelContext
from tests.conftest import LONG
from tests.support.limits import limited
from tests.support.tiny_models import plain_greedy, tiny_model

ALONE = ParallelContext()
CONFIG = lp.LookaheadConfig(window_size=2, ngram_size=2, guess_set_size=2, pool_mib=1)
IDS, NEW = [1, 2, 3], 6


def room_for(num_bytes: int) -> AbstractContextManager[None]:
    """No file may have more than so many bytes. Only around what writes: the limit is the whole process's."""
    return limited(resource.RLIMIT_FSIZE, num_bytes)


def sizes(size: int, few: int) -> list[int]:
    """Room for any number of the bytes of a file; `few` of them in the short form, its ends among them."""
    step = 1 if LONG else max(1, size // few)
    return sorted({*range(0, size, step), size - 1})


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_journal_without_room(tmp_path: Path) -> None:
    """The text goes on with a warning, and the next start goes on behind what is whole."""
    model = tiny_model()
    expected = plain_greedy(model, IDS, NEW)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    path = tmp_path / "journal.jsonl"
    Journal(path, ALONE).generate(decoder, IDS, NEW)
    for room in sizes(path.stat().st_size, 40):
        path.unlink()
        with room_for(room), pytest.warns(UserWarning, match="is not written any more"):
            assert Journal(path, ALONE).generate(decoder, IDS, NEW).tokens == expected
        assert Journal(path, ALONE).generate(decoder, IDS, NEW).tokens == expected


def test_a_pool_file_without_room(tmp_path: Path) -> None:
    """The pool of the calls before stays, whole; the text is there, with a warning."""
    model = tiny_model()
    expected = plain_greedy(model, IDS, NEW)
    path = tmp_path / "pool.safetensors"
    config = replace(CONFIG, pool_scope=lp.PoolScope.SESSION, pool_file=str(path))
    decoder = lp.LookaheadDecoder(model, config)
    decoder.generate(IDS, NEW)
    before = path.read_bytes()
    for room in sizes(len(before), 30) if not LONG else sizes(len(before), 30)[::4096]:
        with room_for(room), pytest.warns(UserWarning, match=r"pool_file .* was not written"):
            assert decoder.generate(IDS, NEW).tokens == expected
        assert path.read_bytes() == before and left(tmp_path) == {path.name}
    decoder.generate(IDS, NEW)
    assert path.read_bytes() != before, "there is room again"


def test_a_pool_file_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A folder that is gone, or read-only, when the text has ended."""
    model = tiny_model()
    folder = tmp_path / "folder"
    folder.mkdir()
    config = replace(CONFIG, pool_scope=lp.PoolScope.SESSION, pool_file=str(folder / "pool"))
    decoder = lp.LookaheadDecoder(model, config)
    folder_gone = lambda tokens, step: folder.exists() and folder.rmdir()  # noqa: E731
    with pytest.warns(UserWarning, match=r"pool_file .* was not written"):
        assert decoder.generate(IDS, NEW, on_tokens=folder_gone).tokens == plain_greedy(model, IDS, NEW)


def test_model_ngrams_without_room(tmp_path: Path) -> None:
    """The old file stays, and no part of a new one beside it."""
    path = tmp_path / "ngrams.npy"
    old, new = (new_file(5, 8, [Contexts(np.arange(5)[:, None], np.full((5, 2), value))])[0] for value in (0, 1))
    write_file(old, path)
    for room in sizes(path.stat().st_size, 60):
        with room_for(room), pytest.raises(OSError):
            write_file(new, path)
        assert np.array_equal(read_file(str(path), "", 5), old) and left(tmp_path) == {path.name}


def test_step_times_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept for this process, with one warning, and no half of them on the disk for the next."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    estimate = Estimate.of_prior(lp.StepTimes((1, 8, 64), (0.1, 0.2, 0.3), 0.05))
    StepTimesFile({"model": "tiny"}, ["size"], {}).write(estimate)
    folder = tmp_path / "lp" / "step_times"
    (written,) = folder.iterdir()
    kept: dict[str, str] = {}
    file = StepTimesFile({"model": "tiny"}, ["key"], kept)
    for room in sizes(written.stat().st_size, 60):
        kept.clear()
        with room_for(room), pytest.warns(UserWarning, match="is lost with this process"):
            file.write(estimate)
        with room_for(room), warnings.catch_warnings():
            warnings.simplefilter("error")
            file.write(estimate)
        found = read_estimate(file.text() or "")
        assert found and found.times == estimate.times
        assert left(folder) == {written.name}


def test_records_without_room(tmp_path: Path) -> None:
    """The run ends with an error that the apps report in one line; what was measured before it is kept, and goes on."""
    path = tmp_path / "records.jsonl"

    def block(index: int) -> list[dict[str, object]]:
        return [{"index": index, "method": method, "prompt_digest": "d", "text": "é"} for method in ("a", "b")]

    file = RecordFile(path, ["a", "b"])
    file.append(block(0))
    first = path.stat().st_size
    file.append(block(1))
    file.close()
    whole = path.read_bytes()
    for room in sizes(len(whole), 80):
        path.unlink()
        with room_for(room), pytest.raises(OSError) as error:
            file = RecordFile(path, ["a", "b"])
            file.append(block(0))
            file.append(block(1))
        assert error.value.errno in DISK_FULL
        with pytest.raises(OSError), room_for(room):
            file.close()
        again = RecordFile(path, ["a", "b"])
        assert sorted(again.done) == ([0] if room >= first else [])
        for index in {0, 1} - {*again.done}:
            again.append(block(index))
        again.close()
        assert path.read_bytes() == whole


def test_figures_without_room(tmp_path: Path) -> None:
    """An error that the apps report in one line."""
    for room in (0, 1, 1000):
        with room_for(room), pytest.raises(OSError) as error, figure(tmp_path / "a.png", "caption", 2.0) as (_, axes):
            axes[0].plot([1, 2])
        assert error.value.errno in DISK_FULL


def test_requests_of_a_server_without_room(tmp_path: Path) -> None:
    """Noting a request must not refuse it, and half a note must not keep the server from starting again."""
    spec = TextSpec(prompt=[1, 2, 3], max_new_tokens=12)
    tokens = [4, 15, 926, 5, 35, 8]
    whole = set[int]()
    for room in range(220):
        requests = UnfinishedRequests(tmp_path, "model")
        key = requests.key([spec])
        with room_for(room):
            noted = requests.begin("cmpl-1", key)
            for at in range(0, len(tokens), 2):
                noted.add(0, tokens[at : at + 2])
        left = UnfinishedRequests(tmp_path, "model")
        (found,) = left.earlier
        assert found["id"] in ("unknown", "cmpl-1")
        (resumed,) = left.resumed([spec], key)
        count = found.get("tokens", 0)
        assert resumed.resumed == tokens[: max(count - 1, 0)]
        whole.add(count)
        noted.end()
    assert whole == {0, 2, 4, 6}
