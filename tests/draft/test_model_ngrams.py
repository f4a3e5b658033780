"""Model n-grams: what the pool is told of contexts that it has not seen, and the file that it comes from."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import launch.ngrams
import lp
from launch.cli import run_tool
from lp.draft.pool.mixture import LOGITS_0, MODEL_0, MODEL_NONE_0, NONE_0, TOGETHER_0
from lp.draft.pool.model_ngrams import (
    AUTO,
    FILE_NAME,
    OFF,
    Contexts,
    ModelNgrams,
    new_file,
    read_file,
    rows_of,
    write_file,
)
from lp.draft.pool.ngram_pool import NGramPool
from lp.models.loader import DEMO_MODEL, load
from lp.models.ngrams import measure_ngrams
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.noise import gumbel
from lp.sampling.top_logits import pack_top_logits, unpack_top_logits
from tests.support.pools import Ballot, ballot, empty_tables, logits_of, reads_of
from tests.support.switches import lookahead_config
from tests.support.tiny_models import VOCABULARY, drawn_text, tiny_model

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=12)
V = 50


def packed(contexts: int, k: int = 4, seed: int = 0, vocabulary: int = V) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return pack_top_logits(3 * torch.randn(contexts, vocabulary, generator=generator), k).numpy()


def file_of(longer: Sequence[tuple[int, ...]] = (), seed: int = 0, vocabulary: int = V, k: int = 4) -> np.ndarray:
    """The file of model n-grams that knows every single token and these longer contexts."""
    contexts = [Contexts(np.arange(vocabulary)[:, None], packed(vocabulary, k, seed, vocabulary))]
    for length in (2, 3):
        of_length = [each for each in longer if len(each) == length]
        tokens = np.array(of_length, np.int64).reshape(-1, length)
        contexts.append(Contexts(tokens, packed(len(of_length), k, seed + length, vocabulary)))
    file, placed = new_file(vocabulary, 1024, contexts)
    assert placed == vocabulary + len(longer)
    return file


def pool_with(file: np.ndarray | None, noise: tuple[int, int] | None, temperature: float = 1.0) -> NGramPool:
    config = lp.LookaheadConfig(pool_mib=1, ablation=lp.Ablation(learn=False))
    return NGramPool(config, [1, 2, 3], noise, empty_tables(config), file, temperature)


def voters(at: Ballot) -> set[int]:
    return {feature for _, feature in at.votes}


def model_votes(at: Ballot) -> set[int]:
    """Tokens that a model n-gram votes for."""
    return {at.tokens[index] for index, feature in at.votes if MODEL_0 <= feature < MODEL_NONE_0}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_longest_context_votes_under_the_samplers_noise(length: int, temperature: float) -> None:
    """Logits of another context, another position's noise, or another temperature, guess no better than chance."""
    longer = [(3, 30), (2, 3, 30), (30, 3), (1, 30), (30, 2, 3)]
    file = file_of([each for each in longer if len(each) <= length])
    at = ballot(pool_with(file, (7, 1), temperature), [1, 2, 3, 30])
    row = {1: packed(V)[30], 2: packed(3, seed=2)[0], 3: packed(2, seed=3)[0]}[length]
    tokens, logits = (np.asarray(each)[0] for each in unpack_top_logits(row[None]))
    noisy = logits / temperature + gumbel(7, 1, 4, V, torch.device("cpu")).numpy()[tokens]
    assert model_votes(at) == set(at.tokens) == set(tokens[noisy.max() - noisy <= 10].tolist())
    best = at.tokens.index(int(tokens[noisy.argmax()]))
    (feature,) = (feature for index, feature in at.votes if index == best and feature < TOGETHER_0)
    assert (feature - MODEL_0) // 24 == 2 * (length - 1) and (feature - MODEL_0) % 24 < 6, "the first by rank"
    assert len([feature for feature in voters(at) if MODEL_NONE_0 <= feature < TOGETHER_0]) == 1
    of_model = {index: feature for index, feature in at.votes if MODEL_0 <= feature < MODEL_NONE_0}
    together = {index: feature - TOGETHER_0 for index, feature in at.votes if feature >= TOGETHER_0}
    ranks = {index: (feature - MODEL_0) % 24 // 6 for index, feature in of_model.items()}
    assert together == {index: 4 - rank for index, rank in ranks.items()}, "no other kind votes: its levels are 0"


def test_they_vote_only_behind_longer_contexts_than_logits_are_known_of() -> None:
    """What the model said in this text is worth more; and none of what was learned without them may change."""
    text = [1, 2, 3, 30]
    seen = reads_of(3, [(30, -1, 9)], logits_of([[(9, 3.0), (8, 1.0), (7, 0.5), (6, 0.1)] * 4]))
    longer = [(30, 20), (9, 30, 20)]
    pools = [pool_with(file, None) for file in (file_of(), file_of(longer), None)]
    for pool in pools:
        pool.observe([*text, 9], 1, seen)
    known, unknown = [*text, 9, 30], [*text, 9, 40]
    of_tokens, of_longer, without = (ballot(pool, known) for pool in pools)
    assert of_tokens == of_longer == without and any(LOGITS_0 <= feature < NONE_0 for feature in voters(without))
    assert not any(MODEL_0 <= feature < TOGETHER_0 for feature in voters(without))
    assert model_votes(ballot(pools[0], unknown)) and not model_votes(ballot(pools[2], unknown))


def test_a_context_longer_than_that_of_the_logits_votes_beside_them() -> None:
    """Logits behind the newest token alone know less than the model behind the newest two."""
    seen = reads_of(3, [(30, -1, 9)], logits_of([[(9, 3.0), (8, 1.0), (7, 0.5), (6, 0.1)] * 4]))
    with_longer, with_tokens = (pool_with(file, None) for file in (file_of([(11, 30)]), file_of()))
    for pool in (with_longer, with_tokens):
        pool.observe([1, 2, 3, 30, 9], 1, seen)
    text = [1, 2, 3, 30, 9, 11, 30]  # of which (11, 30) was not seen, and 30 was
    assert not model_votes(ballot(with_tokens, text))
    at = ballot(with_longer, text)
    assert model_votes(at) and any(LOGITS_0 <= feature < NONE_0 for feature in voters(at))
    assert any(MODEL_0 + 3 * 24 <= feature < MODEL_0 + 4 * 24 for feature in voters(at)), "2 tokens, 1 known"


def rows(file: np.ndarray) -> int:
    return int((np.asarray(ModelNgrams.of(file).keys) != 0).sum())


def test_contexts_beyond_the_room_are_left_out() -> None:
    """The first ones are those that come most often; a file has the size that was asked for."""
    tokens = np.stack(np.meshgrid(np.arange(V), np.arange(V)), -1).reshape(-1, 2)
    contexts = [Contexts(np.arange(V)[:, None], packed(V)), Contexts(tokens, packed(len(tokens)))]
    size = rows_of(1 / 64, 4)
    file, placed = new_file(V, size, contexts)
    assert file.nbytes <= 2**14 + 64 and V < placed <= 0.6 * size and rows(file) == placed
    everything, placed = new_file(V, 1 << 14, contexts)
    assert rows(everything) == placed > V + 0.98 * len(tokens), "few buckets are full"


def test_they_are_the_models(tmp_path: Path) -> None:
    """Logits of the wrong context, or of the wrong token, would be believed all the same."""
    model = tiny_model()
    beginnings = [[3], [4, 5]]
    (measured,) = measure_ngrams(model, beginnings, 0, 100, 8, batch=7)
    assert measured.packed.shape == (VOCABULARY, 8)
    top = unpack_top_logits(measured.packed)
    for row in (0, 6, VOCABULARY - 1):
        token = int(measured.tokens[row, 0])
        with torch.inference_mode():
            texts = [torch.tensor([[*beginning, token]]) for beginning in beginnings]
            said = [model(text).logits[0, -1].float().softmax(-1).topk(32) for text in texts]
        mean = torch.zeros(VOCABULARY)
        for each in said:
            mean[each.indices] += each.values / 2
        expected = mean.log().topk(8)
        assert np.asarray(top.tokens)[row].tolist() == expected.indices.tolist()
        assert np.asarray(top.logits)[row] == pytest.approx(expected.values.numpy(), rel=1e-5)
    file, _ = new_file(VOCABULARY, 1024, [measured])
    write_file(file, tmp_path / FILE_NAME)
    read = read_file(AUTO, str(tmp_path), VOCABULARY)
    assert read is not None and np.array_equal(read, file) and isinstance(read, np.memmap)


def test_a_beginning_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anew for every batch, the beginnings of a vocabulary of 49,152 took most of two hours."""
    model = tiny_model()
    beginning = [*range(3, 23)]
    tokens = 0
    forward = model.forward

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal tokens
        tokens += options["input_ids"].numel()
        return forward(*args, **options)

    monkeypatch.setattr(model, "forward", counted)
    measure_ngrams(model, [beginning], 0, 100, 8, batch=2)
    assert tokens == len(beginning) + VOCABULARY


def test_models_with_recurrent_layers() -> None:
    """Their states cannot be given to several texts: they are computed anew, and are the same as of a text alone."""
    model = tiny_model("qwen3_next")
    (measured,) = measure_ngrams(model, [[3, 4]], 0, 100, 4, batch=7)
    with torch.inference_mode():
        said = model(torch.tensor([[3, 4, 9]])).logits[0, -1].float().log_softmax(-1).topk(4)
    row = measured.tokens[:, 0].tolist().index(9)
    top = unpack_top_logits(measured.packed[row : row + 1])
    assert np.asarray(top.tokens)[0].tolist() == said.indices.tolist()
    assert np.asarray(top.logits)[0] == pytest.approx(said.values.numpy(), rel=1e-4)


class Ended(BaseException):
    """Raised in place of a kill, to end the tool in the middle of its passes."""


@pytest.mark.parametrize("passes", [1, 3, 9, 14])
def test_a_run_that_was_killed_goes_on(passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour of a large model's texts must not be lost; nor may what goes on be another file than the whole one."""
    model = tiny_model(eos_token_id=None)
    asked = {"beginnings": [[3], [4, 5]], "num_tokens": 64, "max_contexts": 50, "num_logits": 4, "batch": 5}
    whole = measure_ngrams(model, **asked)
    forward, count = model.forward, 0

    def killed(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count > passes:
            raise Ended
        return forward(*args, **options)

    monkeypatch.setattr(model, "forward", killed)
    with pytest.raises(Ended):
        measure_ngrams(model, **asked, folder=tmp_path / "part")
    count = -(10**6)
    gone_on = measure_ngrams(model, **asked, folder=tmp_path / "part")
    passes_again = 10**6 + count
    for one, other in zip(whole, gone_on, strict=True):
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.packed, other.packed)
    count = -(10**6)
    measure_ngrams(model, **asked)
    done = min(max(passes - 2, 0), 8)  # but the two beginnings: all batches of the vocabulary, at most
    assert passes_again <= 10**6 + count - done, "what was done is not done again"
    with pytest.raises(ValueError, match="has what was measured of another model or with other options; remove it"):
        measure_ngrams(model, **{**asked, "seed": 1}, folder=tmp_path / "part")
    with pytest.raises(ValueError, match="has what was measured of another model or with other options; remove it"):
        measure_ngrams(tiny_model(seed=1, eos_token_id=None), **asked, folder=tmp_path / "part")


def test_the_tool_writes_a_file_that_the_pool_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    """From a model's folder to tokens that are plain decoding's, with votes of the file."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    run_tool("ngrams", [str(folder), "--tokens", "256", "--mib", "4", "--device", "cpu"])
    said = capsys.readouterr()
    assert said.out.startswith(f"{folder / FILE_NAME}: 8 logits after each of ")
    assert "interrupted, it continues from" in said.err and said.err.count("\n") == 1
    assert sorted(path.name for path in folder.glob("lp_*")) == [FILE_NAME]
    model = load(str(folder), "float64").model
    decoder = lp.LookaheadDecoder(model, CONFIG)
    assert decoder.generate([1, 2, 3], 8).tokens == lp.AutoregressiveDecoder(model).generate([1, 2, 3], 8).tokens
    assert decoder.factory._model_ngrams is not None


def test_what_the_model_writes_is_counted_by_its_last_tokens() -> None:
    """The text is written in batches with a cache: of another text, or one position off, it would be noise."""
    model = tiny_model(eos_token_id=None)
    beginning = [3, 4]
    tokens, pairs, triples = measure_ngrams(model, [beginning], 4 * VOCABULARY, 5, 4, batch=VOCABULARY)
    assert sorted(tokens.tokens[:, 0].tolist()) == list(range(VOCABULARY))
    assert pairs.tokens.shape == (5, 2) and triples.tokens.shape == (5, 3), "the most frequent of each length"
    many = measure_ngrams(model, [beginning], 4 * VOCABULARY, 10**6, 4, batch=VOCABULARY)[2]
    first = many.tokens[:, 0].tolist().index(3)  # of those right behind the beginning, [3, 4, any token]
    context = many.tokens[first].tolist()
    assert context[1] == 4
    with torch.inference_mode():
        expected = model(torch.tensor([context])).logits[0, -1].float().log_softmax(-1).topk(4)
    found = unpack_top_logits(many.packed[first : first + 1])
    assert np.asarray(found.tokens)[0].tolist() == expected.indices.tolist()
    assert np.asarray(found.logits)[0] == pytest.approx(expected.values.numpy(), rel=1e-4)


@pytest.mark.parametrize("sampling", [None, lp.SamplingParams(temperature=0.8, seed=5)])
def test_tokens_are_those_of_plain_decoding(sampling: lp.SamplingParams | None, tmp_path: Path) -> None:
    """At one rank and at two, whatever the n-grams say; and with those of a wider file than K."""
    model = tiny_model(seed=2)
    ids = drawn_text(random.Random(1), 12)
    expected = lp.AutoregressiveDecoder(model).generate(ids, 30, sampling).tokens
    text = [*ids, *expected]
    longer = sorted({*itertools.pairwise(text), *zip(text, text[1:], text[2:], strict=False)})
    write_file(file_of(longer, vocabulary=VOCABULARY, k=20), tmp_path / "n.npy")
    config = lookahead_config(
        window_size=4, ngram_size=3, guess_set_size=12, num_logits=4, pool_model_ngrams=str(tmp_path / "n.npy")
    )

    def body(context: ParallelContext) -> list[int]:
        decoder = lp.LookaheadDecoder(model, config, context)
        tokens = decoder.generate(ids, 30, sampling).tokens
        assert decoder.factory._model_ngrams is not None
        return tokens

    for ranks in (1, 2):
        assert run_lockstep(ranks, body) == [expected] * ranks


def test_files_that_are_none(tmp_path: Path) -> None:
    """A path that is not there must not pass for "auto"; a file of another model would be read past its end."""
    model = tiny_model()
    (tmp_path / "junk").write_bytes(b"no numpy file")
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "floats.npy", np.zeros((VOCABULARY, 4)))
    np.save(tmp_path / "numbers.npy", np.arange(1000))
    np.save(tmp_path / "short.npy", file_of(vocabulary=VOCABULARY)[:-1])
    write_file(file_of(vocabulary=VOCABULARY + 1), tmp_path / "larger.npy")
    write_file(file_of(vocabulary=VOCABULARY), tmp_path / "cut.npy")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-100])
    wrong_token = file_of(vocabulary=VOCABULARY)
    wrong_token[-1] = VOCABULARY << 32
    write_file(wrong_token, tmp_path / "token.npy")
    for name, error in {
        "missing": "can't be read",
        "junk": "can't be read",
        "pickled.npy": "can't be read",
        "cut.npy": "can't be read",
        "floats.npy": "holds no model n-grams",
        "numbers.npy": "holds no model n-grams",
        "short.npy": "holds no model n-grams",
        "larger.npy": f"are of {VOCABULARY + 1} tokens, and the model has {VOCABULARY}",
        "token.npy": "the model has",
    }.items():
        path = str(tmp_path / name)
        decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(adaptive=False, pool_model_ngrams=path))
        with pytest.raises(ValueError, match=f"pool_model_ngrams .*{error}.*choose pool_model_ngrams=off"):
            decoder.generate([1, 2], 4)


def test_a_vocabulary_that_was_changed_since(tmp_path: Path) -> None:
    """Tokens added to a model must not stop it for a file beside it that nobody asked for."""
    model = tiny_model()
    write_file(file_of(vocabulary=VOCABULARY - 1), tmp_path / FILE_NAME)
    model.config._name_or_path = str(tmp_path)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    with pytest.warns(UserWarning, match=f"are left out: .* of {VOCABULARY - 1} tokens.*choose pool_model_ngrams=off"):
        tokens = decoder.generate([1, 2, 3], 8, eos_token_id=()).tokens
    assert tokens == lp.AutoregressiveDecoder(model).generate([1, 2, 3], 8, eos_token_id=()).tokens


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--output", "missing/n.npy"], "no file can be written to the folder 'missing'"),
        (["--num-logits", "0"], "--num-logits is 0 and --batch 64; both must be 1 at least"),
        (["--tokens", "-1"], "--tokens is -1; it must be 0 at least"),
        (["--threads", "0"], "--threads is 0; it must be 1 at least"),
        (["--device", "tpu9"], "device is 'tpu9', which torch does not have here"),
        (["--mib", "0.1"], "--mib 0.1 has no room for a vocabulary of 4096"),
    ],
)
def test_what_is_refused_before_it_is_measured(
    options: list[str], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of measuring, and then no file."""
    monkeypatch.setattr(launch.ngrams, "measure_ngrams", lambda *_, **__: pytest.fail("it has measured"))
    with pytest.raises(SystemExit) as ended:
        run_tool("ngrams", ["demo", *options])
    assert ended.value.code == 2 and error in capsys.readouterr().err


def test_ranks_that_have_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trunks would differ, and the text with them."""
    files = iter([file_of(vocabulary=VOCABULARY, seed=10 * rank) for rank in range(2)])
    monkeypatch.setattr("lp.draft.pool.factory.read_file", lambda *_: next(files))
    model = tiny_model()

    def body(context: ParallelContext) -> None:
        lp.LookaheadDecoder(model, CONFIG, context).generate([1, 2, 3], 8)

    with pytest.raises(ValueError, match="model n-grams"):
        run_lockstep(2, body)


def test_the_demo_model_has_some() -> None:
    """The file beside it is found, and brings tokens a step: sampled text is the one that needs them."""
    demo = load("demo", "float32")
    vocabulary = demo.model.config.vocab_size
    assert read_file(OFF, str(DEMO_MODEL), vocabulary) is None
    assert read_file(AUTO, demo.model.config._name_or_path, vocabulary) is not None
    steps = {}
    for choice in (AUTO, OFF):
        config = lp.LookaheadConfig(window_size=8, ngram_size=2, guess_set_size=38, pool_model_ngrams=choice)
        decoder = lp.LookaheadDecoder(demo.model, config)
        steps[choice] = 0
        for seed, text in enumerate(["def add(a, b):\n", "Write a story about a cat.\n", "x = [1, 2, 3]\nfor "]):
            ids = demo.tokenizer(text)["input_ids"]
            sampling = lp.SamplingParams(temperature=0.8, seed=seed)
            steps[choice] += decoder.generate(ids, 64, sampling, eos_token_id=()).steps
    assert steps[AUTO] < 0.97 * steps[OFF]
