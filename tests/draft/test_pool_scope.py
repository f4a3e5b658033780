"""How long the pool remembers: for a call, for a decoder's session, or in a file."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lp
from lp.budget.step_times import StepTimes
from lp.draft.pool.factory import PoolFactory, fresh_tables, load_tables, save_tables, tables_digest
from lp.draft.pool.tables import Tables
from lp.engine.lookahead import LookaheadDecoder
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.switches import lookahead_config
from tests.support.tiny_models import VOCABULARY, drawn_text, plain_greedy, tiny_model

SAMPLING = lp.SamplingParams(temperature=0.7, seed=11)


def config_of(**values: Any) -> lp.LookaheadConfig:
    """A config with a small pool that lasts for a session."""
    small: dict[str, Any] = {"window_size": 5, "ngram_size": 4, "guess_set_size": 4, "pool_mib": 1}
    return lookahead_config(**{"pool_scope": "session"} | small | values)


def digest(decoder: LookaheadDecoder) -> int:
    """A digest of the tables that a session's pool remembers, to see whether a call changed them."""
    assert isinstance(decoder.factory, PoolFactory) and "" in decoder.factory.tables
    return tables_digest(decoder.factory.tables[""])


@pytest.mark.parametrize("sampling", [None, SAMPLING], ids=["greedy", "coupled"])
def test_a_session_remembers_and_stays_exact(sampling: lp.SamplingParams | None) -> None:
    """What an earlier call left must speed the next up, and must never reach its tokens."""
    model, rng = tiny_model(), random.Random(1)
    decoder, steps = lp.LookaheadDecoder(model, config_of()), []
    for ids in [drawn_text(rng, 30), drawn_text(rng, 45), drawn_text(rng, 20)] * 2:
        output = decoder.generate(ids, 48, sampling)
        assert output.tokens == lp.AutoregressiveDecoder(model).generate(ids, 48, sampling).tokens
        steps.append(output.steps)
    assert all(again < first for first, again in zip(steps[:3], steps[3:], strict=True)), steps


def test_a_request_leaves_nothing() -> None:
    """Nothing of one prompt reaches the next unless the user asks for it."""
    model, ids, other = tiny_model(), drawn_text(random.Random(1), 30), drawn_text(random.Random(2), 30)
    decoder = lp.LookaheadDecoder(model, config_of(pool_scope="request"))
    stats = []
    for prompt in (ids, ids, other, ids):
        output = decoder.generate(prompt, 48)
        stats.append([(step.num_draft, step.accepted) for step in output.step_stats])
    assert stats[0] == stats[1] == stats[3] and not decoder.factory.tables  # type: ignore[attr-defined]


def test_the_file_carries_a_session_on(tmp_path: Path) -> None:
    """A pool that comes back another one, or half of one, is a session lost without a word."""
    model, ids, file = tiny_model(), drawn_text(random.Random(1), 30), tmp_path / "pool.safetensors"
    config = config_of(pool_file=str(file))
    first = lp.LookaheadDecoder(model, config)
    alone = first.generate(ids, 48)
    loaded = fresh_tables(config, VOCABULARY)
    load_tables(loaded, str(file), VOCABULARY)
    assert tables_digest(loaded) == digest(first)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    second = lp.LookaheadDecoder(model, config)
    again = second.generate(ids, 48)
    assert again.tokens == alone.tokens and again.steps < alone.steps
    assert digest(second) != digest(first), "it learned nothing more"
    load_tables(loaded, str(file), VOCABULARY)
    assert tables_digest(loaded) == digest(second), "the file was left behind"


def test_a_file_that_is_no_such_pool_is_refused(tmp_path: Path) -> None:
    """Tables of another size would be read past their end by compiled code."""
    model, ids, file = tiny_model(), [1, 2, 3], tmp_path / "pool.safetensors"
    whole = config_of(pool_file=str(file))
    lp.LookaheadDecoder(model, whole).generate(ids, 4)
    for other in ({"pool_mib": 2}, {"num_logits": 4}):
        with pytest.raises(ValueError, match=f"{file} is of another pool_mib, num_logits or version; delete it"):
            lp.LookaheadDecoder(model, config_of(pool_file=str(file), **other)).generate(ids, 4)
    with pytest.raises(ValueError, match=f"{file} has token .*, the model 2; it is another model's"):
        load_tables(fresh_tables(whole, 2 * VOCABULARY), str(file), 2)
    arrays = load_file(file)
    save_file(arrays | {"weights": arrays["weights"][:-1].copy()}, file)
    with pytest.raises(ValueError, match=f"{file} is of another pool_mib, num_logits or version"):
        lp.LookaheadDecoder(model, whole).generate(ids, 4)
    save_file({name: values.astype(np.float64) for name, values in arrays.items()}, file)
    with pytest.raises(ValueError, match=f"{file} is of another"):
        lp.LookaheadDecoder(model, whole).generate(ids, 4)
    file.write_bytes(b"half a pool")
    with pytest.raises(ValueError, match=f"pool_file {file} can't be read as safetensors"):
        lp.LookaheadDecoder(model, whole).generate(ids, 4)
    assert file.read_bytes() == b"half a pool"
    with pytest.raises(ValueError, match="there is no folder"):
        lp.LookaheadDecoder(model, config_of(pool_file=str(tmp_path / "none" / "pool"))).generate(ids, 4)


def test_a_pool_that_cannot_be_written_costs_no_text(tmp_path: Path) -> None:
    """A disk that fills up after minutes of generating must not take them along."""
    folder = tmp_path / "gone"
    folder.mkdir()
    model, ids = tiny_model(), drawn_text(random.Random(4), 20)
    decoder = lp.LookaheadDecoder(model, config_of(pool_file=str(folder / "pool")))
    decoder.generate(ids, 4)
    shutil.rmtree(folder)
    with pytest.warns(UserWarning, match="gone/pool was not written"):
        output = decoder.generate(ids, 12)
    assert output.tokens == plain_greedy(model, ids, 12)


def test_several_decoders_may_have_one_file(tmp_path: Path) -> None:
    """It has no lock: each writes all that it has learned, the last one's stays, and no reader finds a part of one."""
    model, path, ids = tiny_model(), tmp_path / "pool", drawn_text(random.Random(4), 20)
    one, other = (lp.LookaheadDecoder(model, config_of(pool_file=str(path))) for _ in range(2))
    for decoder, new in ((one, 4), (other, 12), (one, 8)):
        decoder.generate(ids, new)
    assert digest(one) != digest(other)
    read = lp.LookaheadDecoder(model, config_of(pool_file=str(path)))
    read.open_for("")
    assert digest(read) == digest(one)
    factories = [decoder.factory for decoder in (one, other)]
    tables = [factory.tables[""] for factory in factories if isinstance(factory, PoolFactory)]

    def write(of: Tables) -> None:
        for _ in range(40):
            save_tables(of, str(path))

    known = {tables_digest(of) for of in tables}
    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(write, of) for of in tables]
        while not all(writer.done() for writer in writers):
            loaded = fresh_tables(one.config, VOCABULARY)
            load_tables(loaded, str(path), VOCABULARY)
            assert tables_digest(loaded) in known
        for writer in writers:
            writer.result()
    assert [file.name for file in tmp_path.iterdir()] == ["pool"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pool_scope": "request", "pool_file": "x"}, "pool_file is 'x'.*add pool_scope=session"),
        ({"pool_scope": "ever"}, "pool_scope is 'ever'; it must be one of"),
        ({"pool_mib": 0}, "pool_mib is 0"),
        ({"num_logits": 257}, r"num_logits \(K\) is 257"),
    ],
)
def test_config_checks_itself(values: dict[str, Any], message: str) -> None:
    """A file that nothing is ever written to would be waited for."""
    with pytest.raises(ValueError, match=message):
        config_of(**values)


@pytest.mark.parametrize("sampling", [None, SAMPLING], ids=["greedy", "coupled"])
def test_ranks_share_one_session(tmp_path: Path, sampling: lp.SamplingParams | None) -> None:
    """Each rank has its own tables, and one bit that differs ends the job at some later prompt."""
    model, rng = tiny_model(), random.Random(3)
    prompts = [drawn_text(rng, 30), drawn_text(rng, 25)] * 2
    config = config_of(pool_file=str(tmp_path / "pool"))
    alone = lp.LookaheadDecoder(model, config_of())
    expected = [alone.generate(ids, 40, sampling) for ids in prompts]

    def body(context: ParallelContext) -> list[Any]:
        decoder, seen = lp.LookaheadDecoder(model, config, context), []
        for ids in prompts:
            output = decoder.generate(ids, 40, sampling)
            seen.append((output.tokens, [step.accepted for step in output.step_stats], digest(decoder)))
        return seen

    ranks = run_lockstep(2, body)
    assert ranks[0] == ranks[1]
    assert [tokens for tokens, _, _ in ranks[0]] == [output.tokens for output in expected]
    assert plain_greedy(model, prompts[0], 40) == ranks[0][0][0] or sampling
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]


@pytest.mark.parametrize("together", [False, True])
def test_ranks_share_one_session_behind_a_failure(together: bool) -> None:
    """What a step left to learn is learned on the rank whose callback fails, too, or every later call fails."""
    model, ids = tiny_model(), drawn_text(random.Random(1), 30)

    def body(context: ParallelContext) -> tuple[list[int], int]:
        decoder = lp.LookaheadDecoder(model, config_of(), context)
        decoder.merges_late = True  # as on a GPU

        def fail(step: int) -> None:
            if step == 2 and context.rank == 1:
                raise ValueError("the callback")

        with pytest.raises((ValueError, lp.Interrupted)):
            if together:
                decoder.generate_batch([ids, ids[1:]], 30, on_tokens=lambda index, tokens, step: fail(step))
            else:
                decoder.generate(ids, 30, on_tokens=lambda tokens, step: fail(step))
        return decoder.generate(ids, 30).tokens, digest(decoder)

    (tokens, left), other = run_lockstep(2, body)
    assert (tokens, left) == other and tokens == plain_greedy(model, ids, 30)


def test_a_request_gets_no_larger_pool_than_it_can_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing 16 MiB takes a hundredth of a short text."""
    sizes: list[int] = []

    def noted(config: lp.LookaheadConfig, vocabulary_size: int, mebibytes: int | None = None) -> Any:
        sizes.append(mebibytes or config.pool_mib)
        return fresh_tables(config, vocabulary_size, mebibytes)

    monkeypatch.setattr("lp.draft.pool.factory.fresh_tables", noted)
    model, step_times = tiny_model(), StepTimes((1, 24, 120), (1.0, 2.0, 9.0), 1.0)
    request, session = (lp.LookaheadConfig(adaptive=True, pool_scope=scope) for scope in ("request", "session"))
    for config, new in ((request, 9), (request, 400), (session, 9), (lp.LookaheadConfig(guess_set_size=2), 9)):
        decoder = lp.LookaheadDecoder(model, config, step_times=step_times)
        assert len(decoder.generate([1, 2, 3], new, eos_token_id=()).tokens) == new
    longer = tiny_model(max_position_embeddings=1024)
    dear = lp.LookaheadDecoder(longer, request, step_times=StepTimes((1, 2, 120), (1.0, 2.5, 9.0), 1.0))
    dear.generate([1, 2, 3] * 170, 20, eos_token_id=())
    assert sizes == [1, 3, 16, 16, 2], "where no row pays, a text has n-grams all the same"
    sizes.clear()
    run_lockstep(
        4, lambda context: lp.LookaheadDecoder(model, request, context, step_times=step_times).generate([1, 2, 3], 400)
    )
    assert sizes == [10] * 4, "every rank learns what all of them sample"
