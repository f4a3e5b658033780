"""The pool: what it remembers and for how long, within how many bytes, and that every rank has the same."""

from __future__ import annotations

import importlib.util
import random
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp
from lp.compiled import COMPILED, U64
from lp.draft.pool import best_first_tree, ngram_pool
from lp.draft.pool.factory import fresh_tables, tables_digest
from lp.draft.pool.mixture import FEATURES, TOGETHER_0
from lp.draft.pool.model_ngrams import FILE_NAME, Contexts, new_file, write_file
from lp.draft.pool.tables import (
    ORDERS,
    TEXT,
    WAYS,
    M,
    add_follower,
    claim,
    context_key,
    find,
    hash_context,
    new_tables,
)
from tests.conftest import ROOT, Processes
from tests.support.architectures import tiny_model
from tests.support.pools import (
    TEXT_ONLY,
    ballot,
    drawn_run,
    drawn_step,
    empty_tables,
    graded_weights,
    logits_of,
    pool_of,
    proposal_digest,
    reads_of,
    run_digests,
)


def test_100_000_insertions_take_no_more_memory() -> None:
    """A pool that grows ends a long session by running out of memory."""
    rng, insertions = random.Random(0), 0
    text = [rng.randrange(30_000) for _ in range(2000)]
    pool = pool_of(text, pool_mib=1)
    arrays = [np.asarray(values) for values in pool._tables]
    before = [(array.ctypes.data, array.nbytes) for array in arrays]
    evicted = set(np.asarray(pool._tables.keys).tolist())
    while insertions < 100_000:
        new = [rng.randrange(30_000) for _ in range(500)]
        _, seen = drawn_step(rng, text, 30_000, 16)
        text += new
        pool.observe(text, len(new), seen)
        insertions += len(new) * len(ORDERS)
        after = [(np.asarray(values).ctypes.data, np.asarray(values).nbytes) for values in pool._tables]
        assert after == before
    assert sum(nbytes for _, nbytes in before) <= 1 << 20
    keys = np.asarray(pool._tables.keys)
    assert np.count_nonzero(keys) > 0.95 * len(keys) and evicted - set(keys.tolist()), "it was never full"


@pytest.mark.parametrize("num_logits", [0, 1, 16, 256])
@pytest.mark.parametrize("mebibytes", [1, 4, 16])
def test_tables_keep_to_their_bound(mebibytes: int, num_logits: int) -> None:
    """The bound is the user's, whatever K is, and most of it is of use."""
    tables = new_tables(num_logits, mebibytes, np.zeros(FEATURES), np.ones(FEATURES))
    size = sum(np.asarray(values).nbytes for values in tables)
    assert (mebibytes << 20) / 4 < size <= mebibytes << 20
    entries = len(tables.logits_keys)
    assert len(tables.logits_tokens) == len(tables.logits_values) == entries * num_logits
    assert len(tables.followers) == M * len(tables.keys)
    assert not any(size & size - 1 for size in (len(tables.keys), entries)), "places are found by a mask"


def test_same_bytes_give_the_same_pool() -> None:
    """Ranks lay out what they propose on their own: one difference in 2,000 steps ends the job."""
    digests = [0, 0]
    for step, (trees, tables) in enumerate(drawn_run(1, 2000, pools=2)):
        digests = [proposal_digest(digest, tree) for digest, tree in zip(digests, trees, strict=True)]
        assert digests[0] == digests[1], f"step {step}"
        if step % 100 == 99:
            assert tables_digest(tables[0]) == tables_digest(tables[1]), f"step {step}"


def test_digest_covers_all_tables() -> None:
    """What it leaves out may differ among ranks without a word."""
    tables = pool_of([1, 2, 3])._tables
    digests = {tables_digest(tables)}
    for values in tables:
        changed = np.asarray(values)
        changed.view(np.uint8)[-1] ^= 1
        digests.add(tables_digest(tables))
    assert len(digests) == len(tables) + 1


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed: nothing is compiled")
def test_compiled_equals_plain(processes: Processes) -> None:
    """A rank without numba, or with another, must propose the same, to the last bit of every chance."""
    ran = processes.run(
        [sys.executable, "-m", "tests.support.pools", "5", "200"], {"NUMBA_DISABLE_JIT": str(int(COMPILED))}
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(not COMPILED), *map(str, run_digests(5, 200))]


TEXTS = """
import lp
from tests.support.tiny_models import plain_greedy, tiny_model
model, ids = tiny_model(), [5, 3, 3, 3, 7]
for config in (lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6), lp.PromptLookupConfig()):
    decoder = lp.LookaheadDecoder(model, config)
    assert decoder.generate(ids, 30).tokens == plain_greedy(model, ids, 30)
    assert [each.tokens for each in decoder.generate_batch([ids, ids[::-1]], 9)][0] == plain_greedy(model, ids, 9)
"""


def test_texts_without_compiled_code(processes: Processes) -> None:
    """As where numba is not installed: arrays are memoryviews there, which have no methods of numpy's."""
    ran = processes.run([sys.executable, "-c", TEXTS], {"NUMBA_DISABLE_JIT": "1"})
    assert ran.returncode == 0, ran.stderr


NOISE = "from lp.compiled import U64; from lp.draft.pool import mixture; print(mixture.gumbel(U64(5), 3))"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of lp, of which the pool can be imported alone."""
    copy = tmp_path / "lp"
    shutil.copytree(ROOT / "lp", copy, ignore=shutil.ignore_patterns("__pycache__", "demo"))
    for init in ("__init__.py", "draft/__init__.py"):
        (copy / init).write_text("")  # or a whole runtime would be imported
    return copy


def printed(package: Path, processes: Processes, code: str, **env: str) -> str:
    """What the copy prints, in a process of its own."""
    env = {"NUMBA_DISABLE_JIT": "0", "PYTHONPATH": str(package.parent)} | env
    ran = processes.run([sys.executable, "-c", code], env, cwd=package.parent)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif(not COMPILED, reason="nothing is compiled")
def test_compiled_code_is_of_these_sources(processes: Processes, package: Path) -> None:
    """numba caches compiled code by its own file: a change of another would reach some ranks and not others."""
    first = printed(package, processes, NOISE)
    compiled = package / "compiled.py"
    compiled.write_text(compiled.read_text().replace("U64(30)", "U64(29)"))
    assert printed(package, processes, NOISE) == printed(package, processes, NOISE, NUMBA_DISABLE_JIT="1") != first


@pytest.mark.skipif(not COMPILED, reason="nothing is compiled")
def test_growth_is_compiled_once(tmp_path: Path) -> None:
    """A whole number as temperature, or arrays of another layout, would each compile all of it again."""
    model = tiny_model("llama", vocab_size=64)
    file, _ = new_file(64, 256, [Contexts(np.arange(64)[:, None], np.zeros((64, 16), np.int64))])
    write_file(file, tmp_path / FILE_NAME)
    step_times = lp.StepTimes((1, 64), (1.0, 1.1), plain_s=0.9)
    for model_ngrams in ("off", str(tmp_path / FILE_NAME)):
        config = lp.LookaheadConfig(window_size=2, ngram_size=2, guess_set_size=4, pool_model_ngrams=model_ngrams)
        for budget, temperature in product((None, step_times), (1, 0.5)):
            decoder = lp.LookaheadDecoder(model, config, step_times=budget)
            sampling = lp.SamplingParams(temperature=temperature)
            assert len(decoder.generate([1, 2, 3, 1, 2], 8, sampling).tokens) == 8
    assert len(best_first_tree.propose.signatures) == 1 and len(ngram_pool._learn.signatures) == 1


@pytest.mark.skipif(not COMPILED, reason="nothing is compiled")
def test_constants_that_compiled_code_imports_are_part_of_it(processes: Processes, package: Path) -> None:
    """A constant is compiled in: its file may have no compiled function. Others must not cost a compilation."""
    code = "from lp import compile_cache; print(compile_cache.sources_digest())"
    digests = [printed(package, processes, code)]
    for name in ("engine/step.py", "sampling/noise.py"):
        with (package / name).open("a") as file:
            file.write("CONSTANT = 1\n")
        digests.append(printed(package, processes, code))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.skipif(not COMPILED, reason="nothing is compiled")
@pytest.mark.slow  # the test of compiled code's sources
def test_a_package_that_is_read_only_is_compiled_once(processes: Processes, package: Path, tmp_path: Path) -> None:
    """As in another user's site-packages: compiling takes several seconds, which every process would pay again."""
    (package / "__pycache__").write_text("no folder can be made here")
    first = printed(package, processes, NOISE, XDG_CACHE_HOME=str(tmp_path / "cache"))
    (folder,) = (tmp_path / "cache" / "lp").iterdir()
    cached = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}
    assert cached and first == printed(package, processes, NOISE, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert cached == {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}


def test_shipped_weights_fit() -> None:
    """Compiled code looks up a weight that is not there without complaint."""
    pool = pool_of([1, 2, 3], pool_mib=1)
    tables = fresh_tables(pool.config, 8)  # a vocabulary smaller than K
    assert len(tables.weights) == len(tables.squares) == FEATURES
    assert np.isfinite(np.asarray(tables.weights)).all() and (np.asarray(tables.squares) >= 1).all()
    assert len(tables.logits_tokens) == 8 * len(tables.logits_keys)


def test_oldest_of_a_bucket_makes_room() -> None:
    """Any other order forgets what was just said and keeps what is past."""
    tables = empty_tables(pool_of([1]).config)
    sets = len(tables.keys) // WAYS
    keys = [U64(((7 + sets * i) << 11) | 1) for i in range(WAYS + 2)]  # all of bucket 7
    for now, key in enumerate(keys[:WAYS], 1):
        tables.clock[0] = now
        add_follower(tables, key, now)
        add_follower(tables, key, 50 + now)
    tables.clock[0] = WAYS + 1
    add_follower(tables, keys[0], 9)  # so the second is the oldest
    add_follower(tables, keys[WAYS], 99)
    found = [find(tables.keys, key) for key in keys]
    assert found[1] == found[-1] == -1 and sorted(place % WAYS for place in found if place >= 0) == list(range(WAYS))
    base = found[WAYS] * M
    followers = np.asarray(tables.followers) >> 32
    assert followers[base : base + M].tolist() == [100, 0, 0, 0], "followers of the context before"
    assert followers[found[0] * M :][:M].tolist() == [10, 52, 2, 0]
    tables.clock[0] += 1
    assert claim(tables.keys, tables.stamps, keys[-1], tables.clock[0]) == (found[2], False)


def test_prompt_fills_empty_places_first() -> None:
    """Contexts that push each other out of a table almost empty are lost for the whole text."""
    rng = random.Random(3)
    text = [rng.randrange(30_000) for _ in range(200)]
    pool = pool_of(text, pool_mib=16)
    context = pool._predictor.context
    for end in range(8, len(text)):
        for back in range(8):
            context.tokens[back] = text[end - 1 - back]
        hash_context(context, 8)
        for order in ORDERS:
            assert find(pool._tables.keys, U64(context_key(context.hashes[order], TEXT, 0))) >= 0, (end, order)


def test_newest_follower_first() -> None:
    """A pool that keeps the oldest misses what the text says now."""
    pool = pool_of([9, 1], prompt_ngrams=False, output_ngrams=False)
    ngrams = [(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7)]
    pool.observe([9, 1, 1], 1, reads_of(1, [], logits_of([]), ngrams))
    tree = pool.propose([9, 1, 1], 99)
    assert tree.tokens[:3] == [6, 2, 4] and tree.parents[:3] == [-1] * 3
    assert {(tree.tokens[parent], token) for parent, token in zip(tree.parents[3:], tree.tokens[3:], strict=True)} >= {
        (6, 7), (2, 3), (4, 5)
    }  # fmt: skip
    more = [(1, token, 0) for token in range(20, 20 + M)]
    pool.observe([9, 1, 1, 1], 1, reads_of(2, [], logits_of([]), more))
    assert ballot(pool, [9, 1, 1, 1]).tokens == [*reversed(range(20, 20 + M))]


def test_longer_contexts_know_better() -> None:
    """One token of context leaves a loop at the first token that stands in it twice."""
    text = [1, 2, 1, 3, 1, 2, 1, 3, 1, 2]
    config = {"draft_depth": 6, **TEXT_ONLY}
    pool = pool_of(text, tables=empty_tables(pool_of([1], **config).config, graded_weights()), **config)
    assert pool.propose(text, 6).tokens == [1, 3, 1, 2, 1, 3]
    pool = pool_of([9], **TEXT_ONLY | {"window_ngrams": True})
    pool.observe([9, 8], 1, reads_of(0, [], logits_of([]), [(9, 8, 7), (5, 8, 6)]))
    of_kinds = [pair[0] for pair in ballot(pool, [9, 8]).votes if pair[1] < TOGETHER_0]
    votes = [of_kinds.count(index) for index in range(2)]
    assert ballot(pool, [9, 8]).tokens == [6, 7] and votes == [1, 2], "(9, 8) says 7 too"


def test_chains_to_depth() -> None:
    """Depth beyond N - 1 is what a looping text pays for."""
    text = [1, 2, 3, 4, 1]
    for depth in (None, 2, 7):
        pool = pool_of(text, ngram_size=5, draft_depth=depth, **TEXT_ONLY)
        tree = pool.propose(text, 99)
        assert tree.tokens == [2, 3, 4, 1, 2, 3, 4][: depth or 4]
        assert tree.parents == list(range(-1, len(tree) - 1))


def test_a_loop_fills_a_whole_step() -> None:
    """Paths of at most 96 tokens left half of a GPU's step to tokens that are not likely: 0.95 x of S in loops."""
    config = lp.LookaheadConfig()
    text = [*range(100, 111)] * 40
    pool = pool_of(text, tables=fresh_tables(config, 200, 1), adaptive=True)
    tree = pool.propose(text, config.draft_budget)
    path = [text[index % 11] for index in range(config.depth)]
    assert tree.tokens[:150] == path[:150] and tree.parents[:150] == list(range(-1, 149))


def _after_a_step(**config: Any) -> set[str]:
    """Who votes behind 1, 2 once the text, the window, a row and its logits have each said what follows 2."""
    pool = pool_of([2, 9, 7, 8, 1], **config)
    rows = [[(2, 3.0)] + [(50 + k, 0.0) for k in range(pool.num_logits - 1)]] * 2 if pool.num_logits else [[], []]
    pool.observe([2, 9, 7, 8, 1, 2], 1, reads_of(4, [(1, -1, 2), (2, 0, 31)], logits_of(rows), [(5, 2, 32)]))
    return ballot(pool, [2, 9, 7, 8, 1, 2]).sources()


@pytest.mark.parametrize(
    ("off", "silent"),
    [
        ({}, set()),
        ({"prompt_ngrams": False}, {"text"}),
        ({"output_ngrams": False}, set()),
        ({"window_ngrams": False}, {"window"}),
        ({"position_guesses": False}, {"guess"}),
        ({"num_logits": 0}, {"logits"}),
        (TEXT_ONLY, {"window", "guess", "logits"}),
    ],
    ids=lambda value: str(sorted(value)),
)
def test_switches_silence_their_source(off: dict[str, Any], silent: set[str]) -> None:
    """An ablation of a source that still votes measures nothing."""
    assert _after_a_step(**off) == {"text", "window", "guess", "logits"} - silent


def test_output_is_known_if_wanted() -> None:
    """The text's own n-grams are the larger part of what a long text repeats."""
    for output_ngrams in (True, False):
        pool = pool_of([9], output_ngrams=output_ngrams, **TEXT_ONLY)
        pool.observe([9, 1, 2, 1], 3, reads_of(0, [], logits_of([])))
        assert ballot(pool, [9, 1, 2, 1]).tokens == ([2] if output_ngrams else [])


def test_guesses_are_for_their_position() -> None:
    """A guess for another position is worth little under sampling; one for a past position nothing."""
    pool = pool_of([7, 7, 7, 1], prompt_ngrams=False, output_ngrams=False, window_ngrams=False, num_logits=0)
    nodes = [(1, -1, 4), (4, 0, 5), (5, 1, 2), (4, 0, 6)]  # 1 at position 3
    pool.observe([7, 7, 7, 1, 4], 1, reads_of(3, nodes, logits_of([[]] * 4)))
    assert ballot(pool, [7, 7, 7, 1, 4]).tokens == [6, 5]  # position 5, behind 4
    assert ballot(pool, [7, 7, 7, 1, 4, 5]).tokens == [2]
    assert ballot(pool, [7, 7, 7, 1, 4, 9]).tokens == [2], "no context is needed"
    assert ballot(pool, [7, 7, 7, 7, 7, 1, 4]).tokens == [], "the same context elsewhere"


def test_guesses_do_not_reach_the_next_text() -> None:
    """Positions begin again with every text of a session: an earlier text's guesses for them are of another text."""
    config: dict[str, Any] = {"prompt_ngrams": False, "output_ngrams": False, "window_ngrams": False, "num_logits": 2}
    first = pool_of([7, 7, 7, 1], **config)
    nodes, rows = [(1, -1, 4), (4, 0, 5)], logits_of([[(4, 1.0), (3, 0.0)], [(5, 1.0), (3, 0.0)]])
    first.observe([7, 7, 7, 1, 4], 1, reads_of(3, nodes, rows))
    assert ballot(first, [7, 7, 7, 1, 4]).sources() == {"guess", "logits"}
    assert ballot(first, [7, 7, 7, 8, 9]).tokens, "by the position alone"
    second = pool_of([7, 7, 7, 1], tables=first._tables, **config)
    assert ballot(second, [7, 7, 7, 1, 4]).sources() == {"logits"}, "logits of a context are of any text"
    assert ballot(second, [7, 7, 7, 8, 9]).tokens == []
    elsewhere = {feature for _, feature in ballot(second, [7, 7, 7, 1, 4]).votes}
    third = pool_of([7, 7, 7, 1], **config)
    third.observe([7, 7, 7, 1, 4], 1, reads_of(3, nodes, rows))
    assert elsewhere != {feature for _, feature in ballot(third, [7, 7, 7, 1, 4]).votes}, "but not of this position"


def test_prompt_rows_leave_their_logits() -> None:
    """A row off by one would tell of another context; the prompt's last token is read by the first step."""
    pool = pool_of([4, 5, 6], prompt_ngrams=False, num_logits=2)
    pool.begin([4, 5, 6], logits_of([[(20, 2.0), (21, 1.0)], [(22, 2.0), (23, 1.0)]]))
    assert [ballot(pool, text).tokens for text in ([4], [4, 5], [9, 4, 5], [4, 5, 6])] == [
        [20, 21], [22, 23], [22, 23], []
    ]  # fmt: skip
    assert ballot(pool, [4, 5]).sources() == {"logits"}


def test_a_prompt_behind_a_cached_prefix_leaves_its_logits_where_they_belong() -> None:
    """Behind a prefix that an engine reused, they were filed behind the prefix's first tokens."""

    def entries(first: int) -> dict[int, tuple[int, list[int], list[float]]]:
        pool = pool_of(prompt, prompt_ngrams=False, num_logits=2)
        pool.begin(prompt[first:], logits_of(rows[first:]))
        names = ("logits_keys", "logits_positions", "logits_tokens", "logits_values")
        keys, positions, tokens, values = (np.asarray(getattr(pool._tables, name)) for name in names)
        return {
            int(keys[at]): (int(positions[at]), tokens[2 * at :][:2].tolist(), values[2 * at :][:2].tolist())
            for at in np.flatnonzero(keys)
        }

    rng = random.Random(2)
    prompt = [rng.randrange(8) for _ in range(20)]
    rows = [[(20 + at, 2.0), (50 + at, 1.0)] for at in range(len(prompt) - 1)]
    whole = entries(0)
    for first in (1, 7, 18):
        suffix = entries(first)
        assert suffix == {key: entry for key, entry in whole.items() if entry[1][0] >= 20 + first}
