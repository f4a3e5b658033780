"""Files cut off after every byte: what is whole is read, or one line says what to do; never a traceback, never a guess.

The records of a benchmark are in `test_records.py`.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lp
from launch.serve.spec import TextSpec
from launch.serve.unfinished import UnfinishedRequests
from lp.budget.observed_times import Estimate
from lp.budget.step_times_cache import StepTimesFile, read_estimate
from lp.digest import chain_digest
from lp.draft.pool.corpus import HEADER, places_of
from lp.draft.pool.corpus_file import read_file as read_corpus
from lp.draft.pool.factory import load_tables, save_tables
from lp.draft.pool.model_ngrams import Contexts, new_file, read_file, write_file
from lp.draft.pool.tables import Tables
from lp.engine.journal import Journal
from lp.errors import UserError
from lp.parallel.context import ParallelContext
from tests.conftest import LONG
from tests.support.corpora import corpus_of
from tests.support.pools import empty_tables
from tests.support.tiny_models import drawn_text, plain_greedy, tiny_model

ALONE = ParallelContext()
CONFIG = lp.LookaheadConfig(window_size=2, ngram_size=2, guess_set_size=2, pool_mib=1)
PROMPTS, NEW = ([1, 2, 3], [7, 5]), 5


def test_a_journal_cut_after_any_byte(tmp_path: Path) -> None:
    """Two texts, the second under way: whatever the kill left, each ends with the tokens of an undisturbed run."""
    model = tiny_model()
    expected = [plain_greedy(model, ids, NEW) for ids in PROMPTS]
    decoder = lp.LookaheadDecoder(model, CONFIG)
    path = tmp_path / "journal.jsonl"
    written = Journal(path, ALONE)
    for ids in PROMPTS:
        written.generate(decoder, ids, NEW)
    whole = path.read_bytes()
    resumed = set[int]()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        journal = Journal(path, ALONE)
        outputs = [journal.generate(decoder, ids, NEW) for ids in PROMPTS]
        assert [output.tokens for output in outputs] == expected, length
        resumed |= {output.resumed for output in outputs}
        kept = Journal(path, ALONE).records
        assert sorted(record.tokens for record in kept.values()) == sorted(expected), "what was added is whole"
    assert {0, NEW} < resumed, "from nothing, from a part, and from all"


def test_a_batch_s_journal_cut_after_any_byte(tmp_path: Path) -> None:
    """The lines of two texts in turn: what a cut leaves of each is a beginning of its own."""
    model = tiny_model()
    expected = [plain_greedy(model, ids, NEW) for ids in PROMPTS]
    decoder = lp.LookaheadDecoder(model, CONFIG)
    path = tmp_path / "journal.jsonl"
    Journal(path, ALONE).generate_batch(decoder, PROMPTS, NEW)
    whole = path.read_bytes()
    assert whole.count(b'"of"') > 2, "they took steps together"
    resumed = set[tuple[int, ...]]()
    for length in range(len(whole), -1, -1 if LONG else -3):
        path.write_bytes(whole[:length])
        outputs = Journal(path, ALONE).generate_batch(decoder, PROMPTS, NEW)
        assert [output.tokens for output in outputs] == expected, length
        resumed.add(tuple(output.resumed for output in outputs))
        kept = Journal(path, ALONE).records
        assert sorted(record.tokens for record in kept.values()) == sorted(expected), "what was added is whole"
    assert {(0, 0), (NEW, NEW)} < resumed, "from nothing, from a part, and from all"


def remembered() -> Tables:
    """Tables that hold something."""
    tables = empty_tables(CONFIG)
    rng = np.random.default_rng(0)
    for values in tables:
        array = np.asarray(values)
        if array.dtype.kind == "f" and array.size < 1000:
            array[:] = rng.normal(size=array.shape)
    return tables


def test_a_pool_cut_after_any_byte(tmp_path: Path) -> None:
    """Half a pool would draft nonsense, and ranks that read other halves would differ."""
    path = tmp_path / "pool.safetensors"
    save_tables(remembered(), str(path))
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    cuts = {
        *range(header + 64),
        *range(header, len(whole), 4096 if LONG else 65536),
        *range(len(whole) - 64, len(whole)),
    }
    for length in sorted(cuts):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="delete it to begin anew"):
            load_tables(empty_tables(CONFIG), str(path), 61)
    path.write_bytes(whole)
    loaded = empty_tables(CONFIG)
    load_tables(loaded, str(path), 61)
    for name, values in remembered()._asdict().items():
        assert np.array_equal(np.asarray(getattr(loaded, name)), np.asarray(values), equal_nan=True), name


def test_a_pool_whose_header_is_changed(tmp_path: Path) -> None:
    """A header says where arrays lie: one that lies must not read or write beyond them."""
    path = tmp_path / "pool.safetensors"
    save_tables(remembered(), str(path))
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(1)
    refused = 0
    for at in range(header):
        path.write_bytes(whole[:at] + bytes([rng.choice([0, 48 + rng.randrange(10), 255])]) + whole[at + 1 :])
        try:
            load_tables(empty_tables(CONFIG), str(path), 61)
        except UserError:
            refused += 1
    assert refused > header // 2


CHANGES: dict[str, list[float]] = {
    "followers": [-1, -5 << 32, 100 << 32],
    "logits_tokens": [-1, -1 << 31, 61],
    "logits_values": [math.nan, math.inf, -math.inf],
    "weights": [math.nan, math.inf, 1e300],
    "squares": [0, -1, math.nan],
    "clock": [-1, 1 << 62],
    "stamps": [-1, 1 << 62],
    "logits_stamps": [-1 << 62, 1 << 62],
    "logits_positions": [-1 << 62, 1 << 62],
}
REFUSED = ("followers", "logits_tokens", "weights", "squares", "clock")


def test_a_pool_that_remembers_what_no_text_said(tmp_path: Path) -> None:
    """Broken on a disk, or made by hand: values become draft tokens, which index the model's embeddings."""
    path = tmp_path / "pool.safetensors"
    model = tiny_model()
    config = replace(CONFIG, pool_scope=lp.PoolScope.SESSION, pool_file=str(path))
    ids = drawn_text(random.Random(2), 30)
    expected = plain_greedy(model, ids, 20)
    lp.LookaheadDecoder(model, config).generate(ids, 20)
    written = load_file(path)
    refused = 0
    for name, values in CHANGES.items():
        for value in values:
            changed = {key: array.copy() for key, array in written.items()}
            changed[name][changed[name] != 0] = value
            save_file(changed, path)
            try:
                assert lp.LookaheadDecoder(model, config).generate(ids, 20).tokens == expected, (name, value)
            except UserError as error:
                assert name in REFUSED and "pool_file" in str(error)
                refused += 1
    assert refused == sum(len(CHANGES[name]) for name in REFUSED)


def test_model_ngrams_cut_after_any_byte(tmp_path: Path) -> None:
    """They are mapped, not read: a file that is too short would end the process when its last page is touched."""
    path = tmp_path / "ngrams.npy"
    file, _ = new_file(5, 8, [Contexts(np.arange(5)[:, None], np.zeros((5, 2), np.int64))])
    write_file(file, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="pool_model_ngrams"):
            read_file(str(path), "", 5)
    path.write_bytes(whole)
    assert np.array_equal(read_file(str(path), "", 5), file)


def test_a_corpus_cut_or_changed_at_any_byte(tmp_path: Path) -> None:
    """It is mapped, not read, and what it has becomes draft tokens, which index the model's embeddings."""
    path = tmp_path / "corpus"
    file = corpus_of([[1, 2, 3, 4], [2, 3, 4, 0]], 5)
    write_file(file, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"corpus' (can't be read|is damaged)|holds no corpus"):
            read_corpus(str(path), 5)
    begin = len(whole) - file.nbytes
    for at in range(begin, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        with pytest.raises(UserError, match=r"corpus' is (damaged|of)|holds no corpus"):
            read_corpus(str(path), 5)
    path.write_bytes(whole)
    assert np.array_equal(read_corpus(str(path), 5), file)


def test_a_corpus_that_somebody_made_by_hand(tmp_path: Path) -> None:
    """Compiled functions read whatever memory a number leads them to, and a digest can be made for anything."""
    path = tmp_path / "corpus"
    whole = corpus_of([[1, 2, 3, 4], [2, 3, 4, 0]], 5)
    at = places_of(whole)
    changes = [
        (at.tokens, 1),
        (at.rows - 1, 1),
        (at.tokens + 2, -2),
        (at.tokens + 2, 5),
        (at.rows, 0),
        (at.rows + 1, 99),
        (at.rows, 4),  # nothing follows there
        (at.rows, 1),  # nothing is before it
    ]
    changes += [(at.firsts, 1), (at.firsts + 2, 9), (at.pairs - 1, 99), (at.starts, 1), (at.listing - 1, 99)]
    for place, number in changes:
        file = whole.copy()
        file.view(np.int32)[place] = number
        file[7] = chain_digest(0, file[:7], file[HEADER:])
        write_file(file, path)
        with pytest.raises(UserError, match="corpus' is damaged"):
            read_corpus(str(path), 5)


def test_step_times_cut_after_any_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file of step times is no file; times of some sizes alone would steer every step."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = StepTimesFile({"model": "tiny"}, ["key"], {})
    times = lp.StepTimes((1, 8, 64), (0.1, 0.2, 0.3), 0.05)
    file.write(Estimate.of_prior(times))
    whole = file.path.read_bytes()
    for length in range(len(whole)):
        file.path.write_bytes(whole[:length])
        assert read_estimate(file.text() or "") is None, length
    file.path.write_bytes(whole)
    found = read_estimate(file.text() or "")
    assert found and found.times == times


def test_unfinished_requests_cut_after_any_byte(tmp_path: Path) -> None:
    """A server that does not start because of what the last one left behind would not start again either."""
    spec = TextSpec(prompt=[1, 2, 3], max_new_tokens=12)
    requests = UnfinishedRequests(tmp_path, "model")
    key = requests.key([spec, spec])
    noted = requests.begin("cmpl-é1", key, path="/v1/completions")
    for text, tokens in [(0, [4, 15]), (1, [9]), (0, [26, 5]), (1, [35, 8])]:
        noted.add(text, tokens)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    resumed = set[tuple[int, ...]]()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        left = UnfinishedRequests(tmp_path, "model")
        (found,) = left.earlier
        assert found["id"] == ("unknown" if b"\n" not in whole[:length] else "cmpl-é1")
        texts = [text.resumed for text in left.resumed([spec, spec], key)]
        assert texts == [[4, 15, 26][: len(texts[0])], [9, 35][: len(texts[1])]]
        resumed.add((len(texts[0]), len(texts[1])))
        left.taken(key)
        assert not [*tmp_path.iterdir()]
    assert resumed == {(0, 0), (1, 0), (3, 0), (3, 2)}
