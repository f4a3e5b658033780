"""Texts that were generated before: their file, their indexes, what they bring, and whose they are."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

import lp
from lp.digest import chain_digest
from lp.draft.pool.corpus import MAX_MATCH, SEPARATOR, Corpus, places_of
from lp.draft.pool.factory import PoolFactory
from lp.draft.pool.history import History
from lp.draft.pool.history_file import MARK, HistoryFile, newest
from lp.errors import UserError
from lp.file_locks import lock
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.draft.test_corpus import looked_up, searched
from tests.support.limits import limited
from tests.support.switches import lookahead_config
from tests.support.tiny_models import VOCABULARY, drawn_text, plain_greedy, tiny_model

SAMPLING = lp.SamplingParams(temperature=0.7, seed=11)
MANY = 1 << 20


def config_of(path: Path | None, **values: Any) -> lp.LookaheadConfig:
    """A config with a small pool, and a history in a file."""
    small: dict[str, Any] = {"window_size": 3, "ngram_size": 3, "guess_set_size": 8, "pool_mib": 1}
    return lookahead_config(**small | {"history": path and str(path)} | values)


def drawn_texts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def kept_in(path: Path, most_tokens: int = MANY) -> list[list[int]]:
    """The texts that the next decoder to open the file begins with."""
    file = HistoryFile(str(path), VOCABULARY, most_tokens)
    texts = file.texts()
    file.close()
    return [text.tolist() for text in texts]


def written(path: Path, texts: Sequence[Sequence[int]], most_tokens: int = MANY) -> bytes:
    """The file's contents once these texts were appended."""
    file = HistoryFile(str(path), VOCABULARY, most_tokens)
    for text in texts:
        file.append(text)
    file.close()
    return path.read_bytes()


def steps_of(output: lp.GenerationOutput) -> list[tuple[int, int, int]]:
    return [(step.num_tokens, step.num_draft, step.accepted) for step in output.step_stats]


def test_a_file_cut_after_any_byte(tmp_path: Path) -> None:
    """A process that is killed in a write must cost the text that it was writing, and no other."""
    path, texts = tmp_path / "history", drawn_texts(5)
    ends = [len(written(path, texts[:1]))]
    for text in texts[1:]:
        ends.append(len(written(path, [text])))
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        for zeros in (0, 40):  # which some file systems leave behind a crash
            path.write_bytes(whole[:length] + bytes(zeros))
            with warnings.catch_warnings():
                warnings.simplefilter("error" if length in (0, *ends) and not zeros else "ignore")
                before = kept_in(path)
            whole_ones = sum(not whole[length:end].strip(b"\0" if zeros else b"") for end in ends)
            assert before == texts[:whole_ones], (length, zeros)
            written(path, [[7, 8, 9]])
            assert kept_in(path) == [*before, [7, 8, 9]], "what was added is hidden behind the torn text"


def test_a_cut_is_told(tmp_path: Path) -> None:
    """What was taken away without a word would be looked for."""
    path = tmp_path / "history"
    path.write_bytes(written(path, drawn_texts(2))[:-1])
    with pytest.warns(UserWarning, match=r"the last \d+ bytes of history .* were no whole text"):
        kept_in(path)


def test_a_file_damaged_elsewhere_is_refused_and_stays(tmp_path: Path) -> None:
    """Cutting at a byte that a disk has changed would throw all later texts away."""
    path, texts = tmp_path / "history", drawn_texts(4)
    whole = written(path, texts)
    first = 16 + 16 + 4 * len(texts[0])
    for at in range(first):
        changed = bytearray(whole)
        changed[at] ^= 0x10
        path.write_bytes(changed)
        if 16 <= at < 24:  # a length that leads out of the file looks like a text that was cut off
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                try:
                    assert kept_in(path) == []
                    continue
                except UserError:
                    pass
        else:
            with pytest.raises(UserError, match="move this one away"):
                kept_in(path)
        assert path.read_bytes() == changed


def test_files_of_other_things_are_refused(tmp_path: Path) -> None:
    """Tokens of another model are nonsense, and a file of the user's own must not be lost."""
    path = tmp_path / "history"
    written(path, drawn_texts(1))
    with pytest.raises(UserError, match=f"is of {VOCABULARY} tokens, and the model has 5; give another file"):
        HistoryFile(str(path), 5, MANY)
    for contents in (b"short", b"a note that is longer than a header is"):
        path.write_bytes(contents)
        with pytest.raises(UserError, match="holds no history; give another file"):
            kept_in(path)
        assert path.read_bytes() == contents
    with pytest.raises(UserError, match=r"can't be used .* give a file that can be written, in a folder that is there"):
        kept_in(tmp_path / "none" / "history")
    too_large = drawn_texts(1)[0] + [VOCABULARY]
    data = (
        np.array([len(too_large), chain_digest(0, too_large)], "<i8").tobytes() + np.array(too_large, "<i4").tobytes()
    )
    path.write_bytes(np.array([MARK, VOCABULARY], "<i8").tobytes() + data + data)
    with pytest.raises(UserError, match="is damaged at byte 16"):
        kept_in(path)


def test_a_file_that_can_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError in place of a UserError would end a server for everybody."""

    def full(file: Any, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lp.draft.pool.history_file._write", full)
    with pytest.raises(UserError, match=r"can't be used .*No space left"):
        kept_in(tmp_path / "history")


def test_a_file_is_one_decoder_s(tmp_path: Path) -> None:
    """Two that write at once would each leave out what the other has kept when the oldest texts leave."""
    path = tmp_path / "history"
    decoder = lp.LookaheadDecoder(tiny_model(), config_of(path))
    decoder.generate([1, 2, 3], 4)
    with pytest.raises(UserError, match="in use by another decoder; give each its own file"):
        lp.LookaheadDecoder(tiny_model(), config_of(path)).generate([1, 2, 3], 4)
    code = f"from lp.draft.pool.history_file import HistoryFile; HistoryFile({str(path)!r}, {VOCABULARY}, 9)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "in use by another decoder" in other.stderr
    del decoder
    assert len(kept_in(path)) == 1
    assert path.stat().st_mode & 0o777 == 0o600, "others can read what was generated"


def test_the_oldest_texts_leave(tmp_path: Path) -> None:
    """A file without a bound fills the disk, and one that loses the newest texts forgets what is of use."""
    path, texts, sizes = tmp_path / "history", drawn_texts(60), []
    file = HistoryFile(str(path), VOCABULARY, 100)
    for text in texts:
        file.append(text)
        sizes.append(path.stat().st_size)
    file.close()
    assert max(sizes) <= 16 + 4 * 200 + 16 * 200
    assert any(after < before for before, after in pairwise(sizes)), "nothing has left"
    kept = kept_in(path, MANY)
    assert kept == texts[-len(kept) :] and 70 < sum(map(len, kept)) <= 200
    assert sum(map(len, kept_in(path, 100))) <= 100 and kept_in(path, 100) == kept[-len(kept_in(path, 100)) :]
    assert [each.name for each in tmp_path.iterdir()] == ["history"]


def test_what_a_killed_process_left_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the next process has the number of the last one, and would append to what that one left."""
    path = tmp_path / "history"
    left = tmp_path / f"history.{os.getpid()}.part"
    for cut in (0, 16, 30, 60):
        path.unlink(missing_ok=True)
        left.write_bytes(written(tmp_path / "other", drawn_texts(6))[:cut])
        (tmp_path / "other").unlink()
        written(path, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], 4)
        assert kept_in(path) == [[7, 8, 9]] and not left.exists(), cut


def test_a_file_is_written_anew_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is written anew for every text costs more than it saves; where it can't be, texts go on joining it."""
    counted: list[int] = []
    shorten = HistoryFile._leave_out_oldest
    monkeypatch.setattr(HistoryFile, "_leave_out_oldest", lambda file: (counted.append(1), shorten(file))[1])
    path = tmp_path / "history"
    texts = [[number, 1, 2, 3, 4] for number in range(40)]
    written(path, texts, 20)
    assert 5 <= len(counted) <= 10

    def refused(part: Any, target: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    kept = kept_in(path)
    monkeypatch.setattr(Path, "replace", refused)
    with pytest.warns(UserWarning, match="the oldest texts of history .* stay: .*Permission denied"):
        written(path, texts[:8], 20)
    assert kept_in(path) == [*kept, *texts[:8]] and [each.name for each in tmp_path.iterdir()] == ["history"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    """Whoever keeps the file elsewhere would lose it there."""
    (tmp_path / "link").symlink_to(tmp_path / "history")
    written(tmp_path / "link", [[1, 2, 3], [4, 5, 6], [7, 8, 9]], 4)
    assert (tmp_path / "link").is_symlink() and kept_in(tmp_path / "history") == [[7, 8, 9]]


def test_a_file_that_is_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a file that has no name any more keeps nobody from the one in its place."""
    path, locks = tmp_path / "history", []
    written(path, [[1, 2]])

    def replaced(handle: int) -> bool:
        locks.append(handle)
        if len(locks) == 1:
            written_bytes = path.read_bytes()
            path.unlink()
            path.write_bytes(written_bytes)
        return lock(handle)

    monkeypatch.setattr("lp.draft.pool.history_file.lock", replaced)
    file = HistoryFile(str(path), VOCABULARY, MANY)
    file.append([3, 4])
    assert len(locks) == 2 and len(path.read_bytes()) == 16 + 2 * (16 + 8)
    file.close()


def test_another_decoder_is_kept_out_behind_a_new_file(tmp_path: Path) -> None:
    """The file that took the old one's place has a lock of its own to have."""
    file = HistoryFile(str(tmp_path / "history"), VOCABULARY, 4)
    for text in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        file.append(text)
    with pytest.raises(UserError, match="in use"):
        kept_in(tmp_path / "history")
    file.close()
    assert kept_in(tmp_path / "history") == [[7, 8, 9]]


def found(history: History, text: Sequence[int]) -> tuple[int, dict[int, int]]:
    """The longest match of any index, and what followed it in the first that has one as long."""
    matches = [looked_up(Corpus.of(index), text)[:2] for index in history.indexes]
    return max(matches, key=lambda match: match[0], default=(0, {}))


@pytest.mark.parametrize("seed", range(4))
def test_indexes_have_all_texts(seed: int) -> None:
    """A text that no index has between two renewals, or twice, is not remembered, or counted for two."""
    rng = random.Random(seed)
    history = History(VOCABULARY, most_tokens=MANY, recent_tokens=rng.choice([1, 40, 200]))
    texts: list[list[int]] = []
    for _ in range(60):
        prompt, tokens = drawn_text(rng, rng.randint(1, 40)), drawn_text(rng, rng.randint(1, 20))
        history.add(prompt, tokens)
        texts.append([*prompt[-MAX_MATCH:], *tokens])
        assert sorted(text for index in history.indexes for text in looked_up_texts(index)) == sorted(texts)
        probe = rng.choice(texts)
        end = probe[: rng.randint(2, len(probe))]
        assert found(history, end)[0] == searched(texts, end)[0]


def test_the_newest_text_votes_and_ranks_see_what_there_is() -> None:
    """What was written last is likeliest to come; a digest that stays as it was tells ranks nothing."""
    history = History(VOCABULARY, [np.array([1, 2, 3, 4], np.int32)])
    digests = {history.digest}
    history.add([1, 2], [3, 5])
    digests.add(history.digest)
    history.add([1, 2], [3, 6, 7])
    digests.add(history.digest)
    assert len(digests) == 3
    assert found(history, [1, 2, 3])[1] == {5: 1, 6: 1}


def test_an_index_that_can_not_be_made_costs_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was short for once must not fail all texts to come; ranks that have the index are told."""
    history = History(VOCABULARY, recent_tokens=10)
    whole = History(VOCABULARY, recent_tokens=10)
    make = History._index

    def fails(own: History, texts: Sequence[np.ndarray]) -> np.ndarray | None:
        if own is history and threading.current_thread() is not threading.main_thread():
            raise MemoryError
        return make(own, texts)

    monkeypatch.setattr(History, "_index", fails)
    texts = drawn_texts(4)
    with pytest.warns(UserWarning, match="older texts of a history draft nothing for now: MemoryError"):
        for text in texts:
            for each in (history, whole):
                each.add([1] * 10, text)
    assert history.digest != whole.digest
    monkeypatch.setattr(History, "_index", make)
    for text in drawn_texts(4, 1):
        history.add([1] * 10, text)
    assert len([text for index in history.indexes for text in looked_up_texts(index)]) == 8


def looked_up_texts(index: np.ndarray) -> list[list[int]]:
    """All texts that an index has."""
    at = places_of(index)
    tokens = index.view(np.int32)[at.tokens : at.rows].tolist()
    ends = [place for place, token in enumerate(tokens) if token == SEPARATOR]
    return [tokens[first + 1 : last] for first, last in pairwise(ends)]


def test_the_oldest_leave_the_indexes() -> None:
    """A server that runs for months has memory for so many texts."""
    history = History(VOCABULARY, most_tokens=100, recent_tokens=30)
    for text in drawn_texts(100):
        history.add([1, 2], text)
    assert sum(index.nbytes for index in history.indexes) < 40 * (100 + 2 * 30 + 60) + 16 * VOCABULARY


@pytest.mark.parametrize("sampling", [None, SAMPLING], ids=["greedy", "coupled"])
def test_a_decoder_remembers_and_stays_exact(tmp_path: Path, sampling: lp.SamplingParams | None) -> None:
    """What an earlier text left must speed a later one up, in the next process too, and never reach its tokens."""
    model, rng, path = tiny_model(), random.Random(1), tmp_path / "history"
    prompts = [drawn_text(rng, 30), drawn_text(rng, 45), drawn_text(rng, 20)]
    plain = [lp.AutoregressiveDecoder(model).generate(ids, 48, sampling).tokens for ids in prompts]
    steps = []
    for _ in range(2):
        decoder = lp.LookaheadDecoder(model, config_of(path))
        for ids, expected in zip(prompts, plain, strict=True):
            output = decoder.generate(ids, 48, sampling)
            assert output.tokens == expected
            steps.append(output.steps)
        del decoder
    assert all(again < first for first, again in zip(steps[:3], steps[3:], strict=True)), steps
    assert kept_in(path) == [[*ids[-MAX_MATCH:], *tokens] for ids, tokens in zip(prompts * 2, plain * 2, strict=True)]


def test_what_a_stop_string_cut_off_is_not_remembered(tmp_path: Path) -> None:
    """The file holds what the caller got, and nothing behind it."""
    model, path, ids = tiny_model(), tmp_path / "history", drawn_text(random.Random(1), 9)
    expected = plain_greedy(model, ids, 12)
    decoder = lp.LookaheadDecoder(model, config_of(path))
    output = decoder.generate(ids, 48, eos_token_id=expected[6])
    del decoder
    assert kept_in(path) == [[*ids, *output.tokens]] and len(output.tokens) <= 7


def test_what_its_caller_has_cut_off_is_not_remembered(tmp_path: Path) -> None:
    """A server finds stop strings behind a step, of which the client gets the tokens before them alone."""
    path, ids = tmp_path / "history", drawn_text(random.Random(1), 9)
    decoder = lp.LookaheadDecoder(tiny_model(), config_of(path))
    outputs = []
    with lp.Engine(decoder, cache_tokens=512) as engine:
        for wanted in range(8, 12):
            handle = engine.submit(ids, 48)
            while len(handle.tokens) < 12:
                engine.step()
            engine.cancel(handle, wanted)
            outputs.append((handle.result().tokens, wanted))
            assert handle.result().finish_reason == "cancelled"
    del decoder, engine
    assert [len(tokens) for tokens, _ in outputs] == [wanted for _, wanted in outputs]
    assert kept_in(path) == [[*ids, *tokens] for tokens, _ in outputs]


def test_a_disk_that_is_full_costs_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of minutes must not be lost for the sake of the next one's speed; its part must not hide later ones."""
    model, path, ids = tiny_model(), tmp_path / "history", drawn_text(random.Random(4), 20)
    decoder = lp.LookaheadDecoder(model, config_of(path))
    first = decoder.generate(ids, 4)
    whole = path.read_bytes()

    class Full:
        """A file with room for few more bytes."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            return int(self.file.write(data[:9]))

    assert isinstance(decoder.factory, PoolFactory)
    file = decoder.factory._histories[""]._file
    assert file is not None and file._file is not None
    file._file = Full(file._file)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="history .* was not written: .* bytes did not fit"):
        output = decoder.generate(ids, 12)
    assert output.tokens == plain_greedy(model, ids, 12) and path.read_bytes() == whole
    file._file = file._file.file  # type: ignore[attr-defined]
    last = decoder.generate(ids[1:], 4)
    del decoder, file
    assert kept_in(path) == [[*ids, *first.tokens], [*ids[1:], *last.tokens]]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("sampling", [None, SAMPLING], ids=["greedy", "coupled"])
def test_ranks_share_one_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, sampling: lp.SamplingParams | None
) -> None:
    """Rank 0 alone has the file; an index that another rank takes up one text later parts them."""
    monkeypatch.setattr("lp.draft.pool.factory.History", partial(History, recent_tokens=60))
    model, rng, path = tiny_model(), random.Random(3), tmp_path / "history"
    prompts = [drawn_text(rng, rng.randint(5, 40)) for _ in range(4)] * 2
    written(path, [[*prompts[0], *plain_greedy(model, prompts[0], 20)]])
    known = kept_in(path)

    def body(context: ParallelContext) -> list[Any]:
        decoder, seen = lp.LookaheadDecoder(model, config_of(path), context), []
        for ids in prompts:
            output = decoder.generate(ids, 20, sampling)
            seen.append((output.tokens, [step.accepted for step in output.step_stats]))
        for output in decoder.generate_batch(prompts[:3], 20, sampling):
            seen.append((output.tokens, [step.accepted for step in output.step_stats]))
        assert isinstance(decoder.factory, PoolFactory)
        return [*seen, decoder.factory._histories[""].digest]

    told = run_lockstep(ranks, body)
    assert all(each == told[0] for each in told)
    plain = lp.AutoregressiveDecoder(model)
    expected = [plain.generate(ids, 20, sampling).tokens for ids in prompts]
    assert [tokens for tokens, _ in told[0][:8]] == expected
    assert sum(map(len, [steps for _, steps in told[0][4:8]])) < sum(map(len, [steps for _, steps in told[0][:4]]))
    assert len(kept_in(path)) == len(known) + 8 + 3, "the file has each text once"


def test_ranks_refuse_a_history_together(tmp_path: Path) -> None:
    """A rank that waits for what rank 0 can't read waits for ever."""
    path, model = tmp_path / "history", tiny_model()
    path.write_bytes(b"a note that is longer than a header is")

    def body(context: ParallelContext) -> str:
        with pytest.raises(UserError) as raised:
            lp.LookaheadDecoder(model, config_of(path), context).generate([1, 2], 4)
        return str(raised.value)

    first, second = run_lockstep(2, body)
    assert "holds no history" in first and "rank 0 can't open history" in second


def test_a_text_that_goes_on_is_remembered_whole(tmp_path: Path) -> None:
    """The first part of a text that another process began is a part of it, and of no prompt."""
    model, ids = tiny_model(), drawn_text(random.Random(5), 9)
    tokens = plain_greedy(model, ids, 60)
    decoder = lp.LookaheadDecoder(model, config_of(tmp_path / "history"))
    decoder.generate([*ids, *tokens[:50]], 10, continued=50)
    del decoder
    assert kept_in(tmp_path / "history") == [[*ids, *tokens]]


def test_ranks_with_other_owners_are_refused(tmp_path: Path) -> None:
    """A text that is one owner's here and another's there would part the ranks at some later text."""
    model = tiny_model()

    def body(context: ParallelContext) -> str:
        decoder = lp.LookaheadDecoder(model, config_of(None), context)
        with pytest.raises(UserError) as raised:
            decoder.generate([1, 2], 4, owner=f"rank{context.rank}")
        return str(raised.value)

    assert all("the owner of rank 1 differs" in told for told in run_lockstep(2, body))


def test_what_is_kept_is_opened_before_the_first_text(tmp_path: Path) -> None:
    """A server refuses a file at its start, where a person looks, and no client waits for it."""
    for name, values in (("history", {}), ("pool", {"pool_scope": "session", "pool_file": str(tmp_path / "pool.ann")})):
        (tmp_path / f"{name}.ann").write_bytes(b"a note that is longer than a header is")
        decoder = lp.LookaheadDecoder(tiny_model(), config_of(tmp_path / "history", **values))
        with pytest.raises(UserError, match=f"{name}.ann"):
            decoder.open_for("ann" if name == "history" else "")
        (tmp_path / f"{name}.ann").unlink()
    decoder.open_for("ann")
    assert (tmp_path / "history.ann").exists()


def test_another_owner_s_texts_change_nothing(tmp_path: Path) -> None:
    """Steps that shrink on what somebody else has asked tell what it was."""
    model, rng, path = tiny_model(), random.Random(1), tmp_path / "history"
    ids, other = drawn_text(rng, 30), drawn_text(rng, 25)

    def run(owners: Sequence[str], **values: Any) -> list[lp.GenerationOutput]:
        for file in tmp_path.iterdir():
            file.unlink()
        decoder = lp.LookaheadDecoder(model, config_of(path, **values))
        outputs = []
        with lp.Engine(decoder, cache_tokens=512) as engine:
            for owner in owners:
                handle = engine.submit(ids, 30, owner=owner)
                engine.run()
                outputs.append(handle.result())
                engine.submit(other, 5, owner=owner)
                engine.run()
        return outputs

    for values in ({}, {"pool_scope": "session", "pool_file": str(tmp_path / "pool")}):
        alone, again = run(["ann", "ann"], **values)
        assert again.steps < alone.steps and again.reused == len(ids) - 1
        assert {file.name for file in tmp_path.iterdir()} <= {"history.ann", "pool.ann"}
        _, beside = run(["bob", "ann"], **values)
        assert steps_of(beside) == steps_of(alone) and beside.reused == 0
        assert [*run(["", "ann"], **values)][1].reused == 0
        assert (tmp_path / "history").exists() and (tmp_path / "history.ann").exists()


@pytest.mark.slow
def test_another_owner_s_texts_take_no_time(tmp_path: Path) -> None:
    """Steps that are as many would tell by their time: measured by the thread's clock, in turn with a decoder alone."""
    model, rng = tiny_model(), random.Random(1)
    ids, texts = drawn_text(rng, 30), [drawn_text(rng, 200) for _ in range(300)]
    decoders = []
    for name in ("alone", "beside"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "history"
        if name == "beside":
            file = HistoryFile(f"{path}.bob", VOCABULARY, 1 << 20)
            for text in [ids, *texts]:
                file.append(text)
            file.close()
        decoder = lp.LookaheadDecoder(model, config_of(path))
        for owner in ("bob", "ann"):
            decoder.generate(ids, 4, owner=owner)
        decoders.append(decoder)
    ratios, steps = [], []
    for _ in range(40):
        taken = []
        for decoder in decoders:
            began = time.thread_time()
            steps.append(decoder.generate(ids, 30, owner="ann").steps)
            taken.append(time.thread_time() - began)
        ratios.append(taken[1] / taken[0])
    assert steps[::2] == steps[1::2]
    assert 0.95 < median(ratios) < 1.05


def test_a_running_text_s_cache_is_its_owner_s(tmp_path: Path) -> None:
    """A prompt must not begin with the cache of another owner's text, that runs or has ended."""
    decoder = lp.LookaheadDecoder(tiny_model(), config_of(None))
    ids = drawn_text(random.Random(2), 40)
    with lp.Engine(decoder, cache_tokens=1024) as engine:
        first = engine.submit(ids, 40, owner="ann")
        for _ in range(3):
            engine.step()
        handles = [engine.submit(ids, 4, owner=owner) for owner in ("bob", "ann", "")]
        engine.run()
        assert [handle.result().reused for handle in (first, *handles)] == [0, 0, len(ids) - 1, 0]


def test_a_text_of_nobody_leaves_nothing(tmp_path: Path) -> None:
    """A server's own first text would be in every history, and would take the place of a client's prefix."""
    config = config_of(tmp_path / "history", pool_scope="session", pool_file=str(tmp_path / "pool"))
    decoder = lp.LookaheadDecoder(tiny_model(), config)
    ids = drawn_text(random.Random(1), 30)
    with lp.Engine(decoder, cache_tokens=512) as engine:
        outputs = []
        for owner in (None, None, "", None, ""):
            handle = engine.submit(ids, 30, owner=owner)
            engine.run()
            outputs.append(handle.result())
            if owner is None and len(outputs) < 3:
                assert not [*tmp_path.iterdir()]
        running = engine.submit(ids, 30, owner=None)
        engine.step()
        beside = engine.submit(ids, 4, owner=None)
        engine.run()
        assert [running.result().reused, beside.result().reused] == [0, 0]
    nobody, again, first, still, last = outputs
    assert steps_of(nobody) == steps_of(again) == steps_of(still) and nobody.reused == still.reused == 0
    assert first.reused == 0 and last.reused == len(ids) - 1 and last.steps < first.steps
    del decoder, engine
    assert len(kept_in(tmp_path / "history")) == 2


@pytest.mark.parametrize(
    ("history", "pool", "owner", "message"),
    [("kept.ann", "kept", "ann", "kept.ann' is history"), ("kept", "a/../kept.ann", "ann", "kept.ann' is pool_file")],
)
def test_a_file_of_an_owner_is_nothing_else(history: str, pool: str, owner: str, message: str, tmp_path: Path) -> None:
    """The pool's file, written whole, would take the place of a history, whose texts then go nowhere."""
    (tmp_path / "a").mkdir()
    decoder = lp.LookaheadDecoder(
        tiny_model(), config_of(tmp_path / history, pool_scope="session", pool_file=str(tmp_path / pool))
    )
    for other in ("", "bob", "ann_"):
        decoder.open_for(other)
    with pytest.raises(UserError, match=f"{message} and the file of the owner 'ann', too"):
        decoder.open_for(owner)
    with pytest.raises(UserError, match="history and pool_file are both"):
        config_of(tmp_path / "kept", pool_scope="session", pool_file=str(tmp_path / "a" / ".." / "kept"))


def test_more_owners_than_files_may_be_open(tmp_path: Path) -> None:
    """Each owner's file stays open; the message must name this limit, not the folder."""
    decoder = lp.LookaheadDecoder(tiny_model(), config_of(tmp_path / "history"))
    decoder.open_for("")
    with (
        limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 8),
        pytest.raises(UserError, match=r"\(ulimit -n\)"),
    ):
        for number in range(40):
            decoder.open_for(f"owner{number}")


@pytest.mark.parametrize("owner", ["a/b", "ä", "x" * 65, "a b", ".."])
def test_owners_that_would_name_other_files_are_refused(owner: str) -> None:
    """An owner's name ends a file's name."""
    with pytest.raises(UserError, match="give up to 64 ASCII letters, digits, '_' and '-'"):
        lp.PlainDecoder(tiny_model()).generate([1, 2], 4, owner=owner)


def test_the_newest_texts() -> None:
    """The bound holds whole texts."""
    texts = [np.zeros(size, np.int32) for size in (3, 4, 5)]
    for most, kept in ((0, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 3), (99, 3)):
        assert len(newest(texts, most)) == kept
