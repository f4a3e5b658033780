"""Model bigrams: what the pool is told of tokens that it has never seen, and the file that they come from."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import lp
from lp.draft.pool.bigrams import AUTO, FILE_NAME, OFF, read_bigrams, write_bigrams
from lp.draft.pool.mixture import BIGRAM_0, BIGRAM_NONE_0, LOGITS_0, NONE_0
from lp.draft.pool.ngram_pool import NGramPool
from lp.models.bigrams import measure_bigrams
from lp.models.loader import DEMO_MODEL, load
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.noise import gumbel
from lp.sampling.top_logits import pack_top_logits, unpack_top_logits
from tests.pools import Ballot, ballot, empty_tables, logits_of, reads_of
from tests.tiny_models import VOCABULARY, drawn_text, tiny_model

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=12)


def packed(vocabulary: int, k: int = 4, seed: int = 0) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return pack_top_logits(3 * torch.randn(vocabulary, vocabulary, generator=generator), k).numpy()


def pool_with(bigrams: np.ndarray | None, noise: tuple[int, int] | None, temperature: float = 1.0) -> NGramPool:
    config = lp.LookaheadConfig(pool_mib=1, learn=False)
    return NGramPool(config, [1, 2, 3], noise, empty_tables(config), bigrams, temperature)


def voters(at: Ballot) -> set[int]:
    return {feature for _, feature in at.votes}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_they_vote_under_the_samplers_noise(temperature: float) -> None:
    """Logits of another token, another position's noise, or another temperature, guess no better than chance."""
    bigrams = packed(50)
    pool = pool_with(bigrams, (7, 1), temperature)
    at = ballot(pool, [1, 2, 3, 30])
    tokens, logits = (np.asarray(each)[30] for each in unpack_top_logits(bigrams))
    noisy = logits / temperature + gumbel(7, 1, 4, 50, torch.device("cpu")).numpy()[tokens]
    best = int(tokens[noisy.argmax()])
    assert at.votes[at.tokens.index(best)][1] - BIGRAM_0 < 6, "it is the first by rank"
    assert set(at.tokens) == set(tokens[noisy.max() - noisy <= 10].tolist())
    assert {feature for feature in voters(at) if feature >= BIGRAM_NONE_0} == {BIGRAM_NONE_0}, "nothing else is known"


def test_they_vote_only_where_no_logits_are_known_behind_the_token() -> None:
    """What the model said in this text is worth more; and none of what was learned without them may change."""
    text = [1, 2, 3, 30]
    pools = [pool_with(bigrams, None) for bigrams in (packed(50), None)]
    seen = reads_of(3, [(30, -1, 9)], logits_of([[(9, 3.0), (8, 1.0), (7, 0.5), (6, 0.1)] * 4]))
    for pool in pools:
        pool.observe([*text, 9], 1, seen)
    known, unknown = [*text, 9, 30], [*text, 9, 40]
    with_them, without = (ballot(pool, known) for pool in pools)
    assert with_them == without and any(LOGITS_0 <= feature < NONE_0 for feature in voters(without))
    assert not any(feature >= BIGRAM_0 for feature in voters(with_them))
    assert any(BIGRAM_0 <= feature < BIGRAM_NONE_0 for feature in voters(ballot(pools[0], unknown)))
    assert not any(feature >= BIGRAM_0 for feature in voters(ballot(pools[1], unknown)))


def test_they_are_the_models(tmp_path: Path) -> None:
    """Logits of the wrong row, or of the wrong token, would be believed all the same."""
    model = tiny_model()
    contexts = [[3], [4, 5]]
    measured = measure_bigrams(model, contexts, 8, batch=7)
    assert measured.shape == (VOCABULARY, 8)
    for token in (0, 6, VOCABULARY - 1):
        with torch.inference_mode():
            each = [model(torch.tensor([[*context, token]])).logits[0, -1].float().softmax(-1) for context in contexts]
        expected = (sum(each) / 2).log().topk(8)  # type: ignore[attr-defined]
        top = unpack_top_logits(measured)
        assert np.asarray(top.tokens)[token].tolist() == expected.indices.tolist()
        assert np.asarray(top.logits)[token] == pytest.approx(expected.values.numpy(), rel=1e-5)
    write_bigrams(measured, tmp_path / FILE_NAME)
    read = read_bigrams(AUTO, str(tmp_path), VOCABULARY)
    assert read is not None and np.array_equal(read, measured) and isinstance(read, np.memmap)


@pytest.mark.parametrize("sampling", [None, lp.SamplingParams(temperature=0.8, seed=5)])
def test_tokens_are_those_of_plain_decoding(sampling: lp.SamplingParams | None, tmp_path: Path) -> None:
    """At one rank and at two, whatever the bigrams say; and with those of a wider file than K."""
    model = tiny_model(seed=2)
    write_bigrams(packed(VOCABULARY, 20), tmp_path / "b.npy")
    config = lp.LookaheadConfig(
        window_size=4, ngram_size=3, guess_set_size=12, num_logits=4, pool_bigrams=str(tmp_path / "b.npy")
    )
    ids = drawn_text(random.Random(1), 12)
    expected = lp.AutoregressiveDecoder(model).generate(ids, 30, sampling).tokens

    def body(context: ParallelContext) -> list[int]:
        decoder = lp.LookaheadDecoder(model, config, context)
        tokens = decoder.generate(ids, 30, sampling).tokens
        assert decoder.factory._bigrams is not None
        return tokens

    for ranks in (1, 2):
        assert run_lockstep(ranks, body) == [expected] * ranks


def test_files_that_are_none(tmp_path: Path) -> None:
    """A path that is not there must not pass for "auto"; a file of another model would be read past its end."""
    model = tiny_model()
    (tmp_path / "junk").write_bytes(b"no numpy file")
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "floats.npy", np.zeros((VOCABULARY, 4)))
    write_bigrams(packed(VOCABULARY + 1), tmp_path / "larger.npy")
    write_bigrams(packed(VOCABULARY), tmp_path / "cut.npy")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-100])
    for name, error in {
        "missing": "can't be read",
        "junk": "can't be read",
        "pickled.npy": "can't be read",
        "cut.npy": "can't be read",
        "floats.npy": "holds no model bigrams",
        "larger.npy": f"are of {VOCABULARY + 1} tokens, and the model has {VOCABULARY}",
    }.items():
        path = str(tmp_path / name)
        decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(adaptive=False, pool_bigrams=path))
        with pytest.raises(ValueError, match=f"pool_bigrams .*{error}.*choose pool_bigrams=off"):
            decoder.generate([1, 2], 4)


def test_ranks_that_have_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trunks would differ, and the text with them."""
    seeds = itertools.count()
    monkeypatch.setattr("lp.draft.pool.factory.read_bigrams", lambda *_: packed(VOCABULARY, seed=next(seeds)))
    model = tiny_model()

    def body(context: ParallelContext) -> None:
        lp.LookaheadDecoder(model, CONFIG, context).generate([1, 2, 3], 8)

    with pytest.raises(ValueError, match="model bigrams"):
        run_lockstep(2, body)


def test_the_demo_model_has_some() -> None:
    """The file beside it is found, and brings tokens a step: sampled text is the one that needs them."""
    demo = load("demo", "float32")
    vocabulary = demo.model.config.vocab_size
    assert read_bigrams(OFF, str(DEMO_MODEL), vocabulary) is None
    assert read_bigrams(AUTO, demo.model.config._name_or_path, vocabulary) is not None
    steps = {}
    for choice in (AUTO, OFF):
        config = lp.LookaheadConfig(window_size=8, ngram_size=2, guess_set_size=38, pool_bigrams=choice)
        decoder = lp.LookaheadDecoder(demo.model, config)
        steps[choice] = 0
        for seed, text in enumerate(["def add(a, b):\n", "Write a story about a cat.\n", "x = [1, 2, 3]\nfor "]):
            ids = demo.tokenizer(text)["input_ids"]
            sampling = lp.SamplingParams(temperature=0.8, seed=seed)
            steps[choice] += decoder.generate(ids, 64, sampling, eos_token_id=()).steps
    assert steps[AUTO] < 0.97 * steps[OFF]
