"""Corpora whose files change: what a text begins with, what it keeps, and that ranks have the same."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

import lp
from lp.digest import chain_digest
from lp.draft.pool import followed_corpora
from lp.draft.pool.corpus import HEADER, Corpus
from lp.draft.pool.corpus_file import delta_path, digest_of
from lp.draft.pool.factory import PoolFactory
from lp.draft.pool.followed_corpora import FollowedCorpora, FollowedCorpus
from lp.draft.pool.model_ngrams import write_file
from lp.draft.registry import CallInfo
from lp.errors import UserError
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.draft.test_corpus import looked_up
from tests.support.corpora import corpus_of, delta_of
from tests.support.tiny_models import VOCABULARY, plain_greedy, tiny_model

INFO = CallInfo(vocabulary_size=9)
OLD, NEW, OTHER = [1, 2, 3, 4, 5], [1, 2, 3, 6, 5], [7, 8, 7, 1]


def written(path: Path, texts: Sequence[Sequence[int]], vocabulary: int = 9) -> np.ndarray:
    corpus = corpus_of(texts, vocabulary)
    write_file(corpus, path)
    return corpus


def indexes_of(corpora: FollowedCorpora, names: Sequence[str] | None = None) -> list[Corpus]:
    return corpora.indexes(names, 9)


def followers(indexes: Sequence[Corpus], text: Sequence[int]) -> set[int]:
    """What followed the longest run of the text's last tokens in these."""
    found = [looked_up(index, text) for index in indexes]
    longest = max((length for length, *_ in found), default=0)
    return {token for length, counts, _ in found if length == longest for token in counts}


def test_a_changed_file_has_its_new_text_alone(tmp_path: Path) -> None:
    """The old text is what a text that is typed agrees with longest."""
    path = tmp_path / "a"
    base = written(path, [OLD, OTHER])
    corpora = FollowedCorpora([str(path)])
    first = corpora.follow(INFO)
    assert followers(indexes_of(corpora), [1, 2, 3]) == {4} and corpora.follow(INFO) == first
    write_file(delta_of(base, {"0.py": NEW, "new.py": [2, 2, 8]}, 9), delta_path(path))
    before = [*indexes_of(corpora)]
    second = corpora.follow(INFO)
    assert followers(indexes_of(corpora), [1, 2, 3]) == {6} and followers(indexes_of(corpora), [2, 2]) == {8}
    assert followers(indexes_of(corpora), [7, 8]) == {7}, "another file"
    assert followers(before, [1, 2, 3]) == {4}, "of a text that began before"
    write_file(delta_of(base, {"0.py": []}, 9), delta_path(path))
    third = corpora.follow(INFO)
    assert followers(indexes_of(corpora), [1, 2, 3]) == set() == followers(indexes_of(corpora), [2, 2]), "deleted"
    delta_path(path).unlink()
    assert corpora.follow(INFO) == first and followers(indexes_of(corpora), [1, 2, 3]) == {4}
    written(path, [NEW])
    fourth = corpora.follow(INFO)
    assert followers(indexes_of(corpora), [1, 2, 3]) == {6} and len({first, second, third, fourth}) == 4
    base = written(path, [OTHER * 2, OLD, NEW])
    write_file(delta_of(base, {"1.py": []}, 9), delta_path(path))
    corpora.follow(INFO)
    assert followers(indexes_of(corpora), [1, 2, 3]) == {6}, "the file has another place there"


def test_a_delta_of_another_corpus_is_left_out(tmp_path: Path) -> None:
    """Between the writing of a corpus and of its delta the one before lies there; its names are of other tokens."""
    path = tmp_path / "a"
    write_file(delta_of(corpus_of([OTHER, OLD], 9), {"0.py": NEW}, 9), delta_path(path))
    written(path, [OLD, OTHER])
    followed = FollowedCorpus(str(path), 9)
    assert followed.delta is None and not followed.gone


def test_deltas_of_several_corpora_are_one_index(tmp_path: Path) -> None:
    """Compiled functions take a fixed number of them."""
    paths = [tmp_path / name for name in "abcd"]
    for token, path in enumerate(paths):
        base = written(path, [[1, 2, token], OTHER])
        write_file(delta_of(base, {"0.py": [3, 4, token]}, 9), delta_path(path))
    corpora = FollowedCorpora([*map(str, paths)])
    corpora.follow(INFO)
    assert len(indexes_of(corpora)) == 5 and looked_up(indexes_of(corpora)[0], [3, 4])[1].keys() == {0, 1, 2, 3}
    assert followers(indexes_of(corpora), [1, 2]) == set() and followers(indexes_of(corpora), [7, 8]) == {7}


def test_a_text_looks_in_the_corpora_that_it_names(tmp_path: Path) -> None:
    """And in what has changed of these alone: a client may have no right to the others."""
    paths = [tmp_path / f"{name}.corpus" for name in "abc"]
    for token, path in enumerate(paths, 3):
        base = written(path, [[1, 2, token], [6, 7, token]])
        if token != 3:
            write_file(delta_of(base, {"1.py": [6, 8, token]}, 9), delta_path(path))
    corpora = FollowedCorpora([*map(str, paths)])
    corpora.follow(INFO)
    for names in (None, (), ("a",), ("b",), ("a", "c"), ("b", "c"), ("a", "b", "c")):
        indexes = indexes_of(corpora, names)
        own = [token for token, path in enumerate(paths, 3) if names is None or path.stem in names]
        assert set[int]().union(*(followers([index], [1, 2]) for index in indexes)) == {*own}
        assert set[int]().union(*(followers([index], [6, 8]) for index in indexes)) == {*own} - {3}
        assert followers(indexes, [6, 7]) == ({3} if 3 in own else set()), "the others' file has changed"
    merged = {*corpora._deltas}
    assert merged == {("b", "c")}, "all have the same delta as b and c have"
    write_file(delta_of(base, {"1.py": [6, 8, 7]}, 9), delta_path(paths[2]))
    corpora.follow(INFO)
    assert followers(indexes_of(corpora), [6, 8]) == {4, 7}, "and no longer what it was"
    before = indexes_of(corpora, ["b"])
    written(paths[1], [[1, 2, 8]])
    corpora.follow(INFO)
    assert followers(indexes_of(corpora, ["b"]), [1, 2]) == {8} and followers(before, [1, 2]) == {4}


def test_files_cut_after_any_byte(tmp_path: Path) -> None:
    """A disk that was full, or a copy under way: at first it is refused by name; later all stays as it was."""
    path = tmp_path / "a"
    base = written(path, [OLD, OTHER])
    delta = delta_path(path)
    write_file(delta_of(base, {"0.py": NEW}, 9), delta)
    corpora = FollowedCorpora([str(path)])
    digest = corpora.follow(INFO)
    for file in (delta, path):
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            with pytest.raises(UserError, match=rf"{file.name}' (can't be read|is damaged|holds no corpus)"):
                FollowedCorpora([str(path)]).follow(INFO)
            if length % 16 == 0:
                with pytest.warns(UserWarning, match="until then the corpus stays as it was"):
                    assert corpora.follow(INFO) == digest
                assert followers(indexes_of(corpora), [1, 2, 3]) == {6}
        file.write_bytes(whole)
        assert corpora.follow(INFO) == digest
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path.write_bytes(b"")
        with pytest.raises(UserWarning, match=r"corpus .*a' can't be read"):
            corpora.follow(INFO)
        assert corpora.follow(INFO) == digest, "said once"


def test_a_new_corpus_beside_a_damaged_delta(tmp_path: Path) -> None:
    """What could not be read once must be looked at again when the other file has changed."""
    path = tmp_path / "a"
    written(path, [OLD])
    followed = FollowedCorpus(str(path), 9)
    delta_path(path).write_bytes(b"")
    base = written(path, [OTHER, OLD])
    with pytest.raises(UserError, match=r"a.delta' can't be read"):
        followed.look()
    followed.look()
    assert digest_of(followed.file) != digest_of(base)
    write_file(delta_of(base, {"1.py": NEW}, 9), delta_path(path))
    followed.look()
    assert digest_of(followed.file) == digest_of(base) and followed.delta is not None and len(followed.gone) == 2
    path.unlink()
    with pytest.raises(UserError, match=r"a' can't be read"):
        followed.look()
    followed.look()
    assert digest_of(followed.file) == digest_of(base), "said once"


def test_what_could_not_be_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that this process may not open now may be open to it later, and no state of it tells."""
    path = tmp_path / "a"
    base = written(path, [OLD])
    followed = FollowedCorpus(str(path), 9)
    write_file(delta_of(base, {"0.py": NEW}, 9), delta_path(path))

    def no_more_handles(*args: object) -> np.ndarray:
        raise UserError("too many open files; close some")

    with monkeypatch.context() as patched, pytest.raises(UserError, match="too many open files; delete it, and write"):
        patched.setattr(followed_corpora, "read_file", no_more_handles)
        followed.look()
    assert followed.delta is None
    until = time.monotonic() + 30
    while followed.delta is None and time.monotonic() < until:
        followed.look()
        time.sleep(0.05)
    assert followed.delta is not None


def test_a_delta_made_by_hand(tmp_path: Path) -> None:
    """A digest can be made for anything, and what a list of files should be is parsed."""
    path = tmp_path / "a"
    base = written(path, [OLD])
    for listed in (b"[]", b"{", b'{"files": [{}]}', b'{"files": []}', b'{"files": 1, "x": 2}'):
        delta = delta_of(base, {}, 9)
        own = len(delta) - -(-int(delta[5]) // 8)
        delta = np.concatenate([delta[:own], np.frombuffer(listed.ljust(-(-len(listed) // 8) * 8), "<i8")])
        delta[5] = len(listed)
        delta[7] = chain_digest(0, delta[:7], delta[HEADER:])
        write_file(delta, delta_path(path))
        with pytest.raises(UserError, match=r"a.delta' .*(lists no files|damaged)"):
            FollowedCorpora([str(path)]).follow(INFO)


def small(path: Path | str) -> lp.LookaheadConfig:
    return lp.LookaheadConfig(
        window_size=2, ngram_size=2, guess_set_size=16, pool_mib=1, adaptive=False, corpora=[str(path)]
    )


def accepted(output: lp.GenerationOutput) -> list[int]:
    return [step.accepted for step in output.step_stats]


def test_a_text_keeps_what_it_began_with(tmp_path: Path) -> None:
    """A corpus that changes in mid-text changes no draft of it; the next one has what is new."""
    model, rng, path = tiny_model(eos_token_id=None), random.Random(2), tmp_path / "a"
    ids = [rng.randrange(VOCABULARY) for _ in range(20)]
    plain = plain_greedy(model, ids, 30)
    others = [[rng.randrange(VOCABULARY) for _ in range(40)]]
    base = written(path, others, VOCABULARY)
    undisturbed = lp.LookaheadDecoder(model, small(path)).generate(ids, 30)

    def change(tokens: Sequence[int], step: object) -> None:
        write_file(delta_of(base, {"typed.py": [*ids, *plain]}, VOCABULARY), delta_path(path))

    decoder = lp.LookaheadDecoder(model, small(path))
    first = decoder.generate(ids, 30, on_tokens=change)
    second = decoder.generate(ids, 30)
    assert first.tokens == second.tokens == plain
    assert accepted(first) == accepted(undisturbed) and second.steps < first.steps
    delta_path(path).unlink()
    with lp.Engine(lp.LookaheadDecoder(model, small(path)), 2, 400) as engine:
        running = engine.submit(ids, 30)
        engine.step()
        change([], None)
        late = engine.submit(ids, 30)
        engine.run()
        assert running.output and late.output
        assert running.output.tokens == late.output.tokens == plain
        assert accepted(running.output) == accepted(undisturbed) and late.output.steps < running.output.steps


def test_a_call_names_its_corpora(tmp_path: Path) -> None:
    """Texts that run at once look each in its own, in any order of the names; other names are refused."""
    model, rng = tiny_model(eos_token_id=None), random.Random(2)
    ids = [rng.randrange(VOCABULARY) for _ in range(20)]
    plain = plain_greedy(model, ids, 30)
    written(tmp_path / "own.corpus", [[*ids, *plain]], VOCABULARY)
    written(tmp_path / "other.corpus", [[rng.randrange(VOCABULARY) for _ in range(40)]], VOCABULARY)
    config = replace(small(""), corpora=[str(tmp_path / f"{name}.corpus") for name in ("own", "other")])
    decoder = lp.LookaheadDecoder(model, config)
    asked: list[Sequence[str] | None] = [None, ["own"], ["other", "own"], ["other"], []]
    outputs = [decoder.generate(ids, 30, corpora=names) for names in asked]
    assert all(output.tokens == plain for output in outputs)
    steps = [output.steps for output in outputs]
    assert steps[0] == steps[1] == steps[2] < steps[3] == steps[4]
    with lp.Engine(decoder, 5, 1000) as engine:
        handles = [engine.submit(ids, 30, corpora=names) for names in asked]
        engine.run()
    assert [handle.output and handle.output.steps for handle in handles] == steps
    for wrong in ("own", ["own", "mine"], 3, ["own.corpus"]):
        with pytest.raises(UserError, match=r"corpora (is|has) .*; give names of these: own, other"):
            decoder.generate(ids, 4, corpora=wrong)  # type: ignore[arg-type]
    for other in (lp.PlainDecoder(model), lp.LookaheadDecoder(model)):
        with pytest.raises(UserError, match="corpora has 'own'; leave it out: there are no corpora here"):
            other.generate(ids, 4, corpora=["own"])
    with pytest.raises(UserError, match="two have one name, that of the file without the ending; rename one"):
        lp.LookaheadConfig(corpora=["a/x.corpus", "b/x.corpus"])


def test_ranks_that_name_other_corpora_are_refused(tmp_path: Path) -> None:
    """They would grow different trees."""
    model = tiny_model()
    written(tmp_path / "own.corpus", [[1, 2, 3]], VOCABULARY)

    def body(context: ParallelContext) -> str:
        decoder = lp.LookaheadDecoder(model, small(tmp_path / "own.corpus"), context)
        with pytest.raises(UserError) as raised:
            decoder.generate([1, 2], 4, corpora=["own"] if context.rank else [])
        return str(raised.value)

    assert all("the choice of corpora of rank 1 differs" in told for told in run_lockstep(2, body))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_take_what_all_of_them_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The file changes whenever a rank has looked: ranks that each took what they saw would grow different trees."""
    model, rng, path = tiny_model(eos_token_id=None), random.Random(2), tmp_path / "a"
    ids = [rng.randrange(VOCABULARY) for _ in range(20)]
    plain = plain_greedy(model, ids, 30)
    base = written(path, [ids], VOCABULARY)
    look, lock, left, made = FollowedCorpus.look, threading.Lock(), [ranks], [0]

    def change_behind(followed: FollowedCorpus) -> None:
        with lock:
            look(followed)
            if left[0] > 0:
                left[0] -= 1
                made[0] += 1
                texts = {"typed.py": [*ids, *plain[: 8 + made[0]]]}
                write_file(delta_of(base, texts, VOCABULARY), delta_path(path))

    monkeypatch.setattr(FollowedCorpus, "look", change_behind)

    def body(context: ParallelContext) -> list[tuple[list[int], list[int], int]]:
        decoder, seen = lp.LookaheadDecoder(model, small(path), context), []
        assert isinstance(decoder.factory, PoolFactory)
        for changes in (None, 0, ranks, 0):  # looks of all ranks
            if context.is_main and changes is not None:
                left[0] = changes
            context.share_numbers([], "waiting for rank 0")
            output = decoder.generate(ids, 30)
            seen.append((output.tokens, accepted(output), decoder.factory._corpora._digest))
        return seen

    told = run_lockstep(ranks, body)
    assert all(each == told[0] for each in told)
    first, second, third, fourth = (digest for _, _, digest in told[0])
    assert first == second == third != fourth, "it is what all ranks had last"
    assert all(tokens == plain for tokens, _, _ in told[0])


def own_files(context: ParallelContext, model: PreTrainedModel, paths: Sequence[Path]) -> lp.LookaheadDecoder:
    """A decoder that reads a file of its rank's own, as if each machine had its own disk."""
    decoder = lp.LookaheadDecoder(model, small("here"), context)
    decoder.factory = PoolFactory(small(paths[context.rank]))
    return decoder


def test_a_rank_that_reads_something_else(tmp_path: Path) -> None:
    """At first all ranks refuse it by name, and none waits; later all stay with what they have, and say so."""
    model, paths = tiny_model(), [tmp_path / name for name in "abc"]
    written(paths[0], [OLD], VOCABULARY)
    written(paths[1], [NEW], VOCABULARY)

    def refused(context: ParallelContext, paths: Sequence[Path]) -> str:
        with pytest.raises(UserError) as raised:
            own_files(context, model, paths).generate([1, 2], 4)
        return str(raised.value)

    told = run_lockstep(3, lambda context: refused(context, [paths[0], paths[1], paths[0]]))
    assert told == ["the corpora of rank 1 differ from rank 0's; give every rank the same corpora"] * 3
    first, second = run_lockstep(2, lambda context: refused(context, [paths[0], paths[2]]))
    assert first == "rank 1 can't read the corpora; its own message has the reason"
    assert "c' can't be read" in second
    first, second = run_lockstep(2, lambda context: refused(context, [paths[2], paths[0]]))
    assert "c' can't be read" in first and "rank 0 can't read" in second
    written(paths[1], [OLD], VOCABULARY)

    def later(context: ParallelContext) -> list[int]:
        decoder = own_files(context, model, paths)
        seen = []
        for change in (None, 0, None, 1, None):
            context.share_numbers([], "waiting for all ranks")
            if change is not None and context.is_main:
                written(paths[change], [NEW], VOCABULARY)
            context.share_numbers([], "waiting for rank 0")
            decoder.generate([1, 2, 3], 4)
            seen.append(decoder.factory._corpora._digest)  # type: ignore[attr-defined]
        return seen

    with pytest.warns(UserWarning, match="the corpora of rank 1 differ .* until then corpora stay as they were"):
        told_digests = run_lockstep(2, later)
    assert told_digests[0] == told_digests[1]
    first_digest, *kept, fourth, last = told_digests[0]
    assert kept == [first_digest] * 2 and first_digest != fourth == last


def test_files_that_change_while_ranks_begin(tmp_path: Path) -> None:
    """A watch that writes as a server starts must not end it."""
    path, pauses = tmp_path / "a", []
    base = written(path, [OLD])
    corpora = FollowedCorpora([str(path)])

    def gather(number: int) -> list[int]:
        pauses.append(number)
        if len(pauses) < 3:
            write_file(delta_of(base, {"0.py": [1, 2, len(pauses)]}, 9), delta_path(path))
            return [number, 0]
        return [number, number]

    corpora.follow(CallInfo(vocabulary_size=9, gather=gather))
    assert len({*pauses}) == 3 and followers(indexes_of(corpora), [1, 2]) == {2}
