"""Coupled sampling: the same tokens with lookahead on or off, on any number of ranks, and the right distribution."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as tf

import lp
import lp.sampling.sampler as sampling_module
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.node_sampling import CallRules, NodeSampling, ScoreRules
from lp.sampling.noise import CHUNK, NoiseCache, fill_noise, gumbel, position_key
from lp.sampling.penalties import CountPenalty
from lp.sampling.processors import BranchProcessors
from lp.sampling.sampler import CoupledSampler, RejectionSampler, Sampler
from tests.support.chi_square import joint, lumped, p_value
from tests.support.tiny_models import VOCABULARY, plain_greedy, tiny_model

LONG = bool(os.environ.get("LP_TEST_LONG"))
CASES, DRAWS, DRAWS_OF_PAIRS = (200, 6000, 2000) if LONG else (25, 750, 500)
CPU = torch.device("cpu")


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_choices_follow_softmax(temperature: float) -> None:
    """50,000 draws at vocabulary 8: a noise that is not Gumbel or not independent by position shows."""
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.0, -1.0, 0.7, 1.5], dtype=torch.float64)
    draws = 50_000
    cache = NoiseCache(11, 0, 8, draws + 1, CPU, torch.float64)
    sampler = CoupledSampler(BranchProcessors([tf.TemperatureLogitsWarper(temperature)]), cache)
    scores = sampler.scores(logits.expand(draws, 8), [[]] * draws, [0])
    tokens = sampler.sample(scores, range(draws), [[]] * draws, [[]] * draws)
    expected = torch.softmax(logits / temperature, -1) * draws
    assert p_value(torch.bincount(tokens, minlength=8).double(), expected) > 0.001
    wrong = torch.softmax(logits / temperature * 1.1, -1) * draws
    assert p_value(torch.bincount(tokens, minlength=8).double(), wrong) < 0.001  # the test can tell


def test_what_no_walk_reaches_gets_the_temperature_alone() -> None:
    """Guesses for the window are drawn at the text's temperature, or few of them come true; by each way to score."""
    processors = BranchProcessors([tf.TemperatureLogitsWarper(0.5), tf.TopKLogitsWarper(2)])
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]] * 2)
    expected = torch.tensor([[-math.inf, 6.0, 4.0, -math.inf], [2.0, 6.0, 4.0, 0.0]])
    reachable = torch.tensor([True, False])
    assert torch.equal(processors(logits, [[], None], [1]), expected)
    rules = ScoreRules.of([tf.TemperatureLogitsWarper(0.5), tf.TopKLogitsWarper(2)])
    assert rules is not None
    sampling = NodeSampling(CallRules.of([rules], False), rules, torch.tensor([rules.numbers]), reachable[:, None])
    assert torch.equal(sampling.scores(logits), expected)


def test_what_is_an_argmax_of_the_models_own_logits() -> None:
    """Baselines that decode greedily alone must not be compared with a sampled text."""
    none, one = BranchProcessors([]), BranchProcessors([tf.TemperatureLogitsWarper(0.5)])
    assert Sampler(none).is_argmax and not Sampler(one).is_argmax
    assert not CoupledSampler(none, NoiseCache(3, 1, 16, 5, CPU, torch.float64)).is_argmax


def test_rejection_draws_nothing_for_what_no_walk_reaches() -> None:
    """Guesses are the likeliest token, and draws for them would be other draws for the text."""
    generator = torch.Generator().manual_seed(5)
    sampler = RejectionSampler(BranchProcessors([tf.TemperatureLogitsWarper(1.5)]), generator)
    before = generator.get_state()
    scores = torch.tensor([[0.0, 0.1, 0.0, 0.05]] * 40)
    assert sampler.sample(scores, range(40), [None] * 40, [[]] * 40).tolist() == [1] * 40
    assert torch.equal(generator.get_state(), before)
    assert len(set(sampler.sample(scores, range(40), [[]] * 40, [[]] * 40).tolist())) == 4


@pytest.mark.parametrize("verifier", [lp.Verifier.COUPLED, lp.Verifier.REJECTION])
def test_draft_tokens_that_the_head_cannot_give(verifier: lp.Verifier) -> None:
    """A model may embed more tokens than its head has, such as an image's: rejection sampling gave IndexError."""
    model = tiny_model()
    embedding = model.get_input_embeddings().weight
    model.get_input_embeddings().weight = torch.nn.Parameter(torch.cat([embedding, embedding[:3]]))
    model.get_input_embeddings().num_embeddings = VOCABULARY + 3
    prompt = [token for first in range(VOCABULARY) for token in (first, VOCABULARY + first % 3)]
    output = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4)).generate(
        prompt, 40, lp.SamplingParams(seed=3, verifier=verifier), eos_token_id=()
    )
    assert sum(step.num_draft for step in output.step_stats)
    assert len(output.tokens) == 40 and max(output.tokens) < VOCABULARY


def test_noise_depends_on_every_part_of_its_key() -> None:
    """Noise shared by two positions or sequences would repeat text; noise that depends on V would not reproduce."""
    base = gumbel(7, 0, 100, 4096, CPU)
    assert torch.equal(base, gumbel(7, 0, 100, 4096, CPU))
    assert torch.equal(base[:50], gumbel(7, 0, 100, 50, CPU))
    for other in [(8, 0, 100), (7, 1, 100), (7, 0, 101), (0, 7, 100), (7, 100, 0), (2**62 + 7, 0, 100)]:
        correlation = torch.corrcoef(torch.stack([base, gumbel(*other, 4096, CPU)]))[0, 1]
        assert abs(float(correlation)) < 5 / math.sqrt(4096), other
    assert abs(float(base.mean()) - 0.5772) < 5 * math.pi / math.sqrt(6 * 4096)


def test_cache_keeps_positions_apart() -> None:
    """Noise kept of another position gives another token than plain decoding."""
    cache = NoiseCache(3, 1, 16, 5, CPU, torch.float64)
    for positions in ([4, 5, 6], [9, 5, 13], [6, 7, 8, 9, 10]):
        expected = torch.stack([gumbel(3, 1, position, 16, CPU) for position in positions])
        assert torch.equal(cache.noise_SV[cache.rows(positions)], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocabulary", [16, CHUNK // 3, CHUNK + 5])
def test_rows_are_those_of_their_positions(vocabulary: int, dtype: torch.dtype) -> None:
    """Bit by bit, in chunks: other bits would be another text. Other rows stay, those beside a -1 too."""
    for seed, first in ((3, 0), (2**62 + 1, 6), (4, 10**6 + 1)):
        found = torch.full((7, vocabulary), 7.0, dtype=dtype)
        rows = {row: first + number for number, row in enumerate((4, 2, 6, 1, 0))}
        keys = [position_key(seed, 1, position) for position in rows.values()]
        fill_noise(found, torch.tensor([*rows, -1]), torch.tensor([*keys, 9]))
        expected = torch.full_like(found, 7.0)
        for row, position in rows.items():
            expected[row] = gumbel(seed, 1, position, vocabulary, CPU).to(dtype)
        assert torch.equal(found, expected)


def test_missing_positions_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation for all texts of a buffer, in whatever order they ask, and none for what is held."""
    made: list[int] = []

    def fill(noise_SV: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> None:
        made.append(len(rows))
        fill_noise(noise_SV, rows, keys)

    monkeypatch.setattr("lp.sampling.noise.fill_noise", fill)
    caches = [NoiseCache(3, sequence, 16, 20, CPU, torch.float64) for sequence in range(3)]
    buffer = caches[0].buffer(2)
    for place, cache in enumerate(caches[:2]):
        cache.use(buffer, place)
    NoiseCache.fill(caches, [[9, 4, 5, 5, 6, 11, 10], [7], [6, 7]])
    assert sorted(made) == [2, 7]
    NoiseCache.fill(caches, [[6, 7, 8, 9, 10], [7], [6]])
    NoiseCache.fill(caches, [[4, 11], [7], []])
    assert made[2:] == [2]
    for sequence, cache in enumerate(caches[:2]):
        position = (11, 7)[sequence]
        assert torch.equal(buffer[cache.rows([position])[0]], gumbel(3, sequence, position, 16, CPU))


def _drawn(rng: random.Random, prompt: list[int]) -> dict[str, Any]:
    sampling = lp.SamplingParams(
        temperature=rng.choice([0.3, 0.8, 1.0, 2.0]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        typical_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        seed=rng.randrange(2**63),
    )
    processors = rng.choice(
        [
            [],
            [tf.NoRepeatNGramLogitsProcessor(3)],
            [tf.NoBadWordsLogitsProcessor([[3], [4, 5]])],
            [tf.MinLengthLogitsProcessor(len(prompt) + 10, torch.tensor([7]))],
            [tf.ForcedEOSTokenLogitsProcessor(len(prompt) + 20, torch.tensor([7]))],
        ]
    )
    eos = rng.choice([(), 7])
    return {"sampling": rng.choice([sampling, sampling, None]), "logits_processor": processors, "eos_token_id": eos}


def test_coupled_equals_plain_sampling_on_any_ranks() -> None:
    """The promise: one seed, one text, lookahead on or off, 1, 2 or 4 ranks, every processor."""
    for case in range(CASES):
        rng = random.Random(f"coupled-{case}")
        model = tiny_model(rng.choice(["llama", "gemma3", "gpt_neox"]), seed=rng.randrange(4), sharpness=1.5)
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 60))]
        asked = _drawn(rng, prompt) | {"max_new_tokens": rng.randint(1, 50)}
        config = lp.LookaheadConfig(
            window_size=rng.randint(0, 12), ngram_size=rng.randint(2, 6), guess_set_size=rng.randint(0, 8)
        )
        expected = lp.AutoregressiveDecoder(model).generate(prompt, **asked).tokens

        def rank(context: ParallelContext) -> list[int]:
            return lp.LookaheadDecoder(model, config, context).generate(prompt, **asked).tokens  # noqa: B023

        for tokens in run_lockstep(rng.choice([1, 1, 2, 4]), rank):
            assert tokens == expected, f"case {case}: {config} {asked}"


PROMPT = [1, 2, 3, 1, 2, 0, 1]


def _rejection_p(
    ranks: int,
    draws: int,
    vocabulary: int = 4,
    sharpness: float = 1.0,
    tokens: int = 3,
    processors: Sequence[Any] = (),
    **warpers: Any,
) -> float:
    """p of the chi-square test of rejection sampling's first tokens; 0 if one came out that has no chance."""
    model = tiny_model(vocab_size=vocabulary, sharpness=sharpness, seed=1, num_hidden_layers=1)
    config = lp.LookaheadConfig(window_size=2, ngram_size=3, guess_set_size=1)  # few: with many none is turned down
    accepted = [0] * ranks

    def rank(context: ParallelContext) -> torch.Tensor:
        decoder = lp.LookaheadDecoder(model, config, context)
        counts = torch.zeros(vocabulary**tokens, dtype=torch.float64)
        for seed in range(draws):
            params = lp.SamplingParams(temperature=0.7, seed=seed, verifier=lp.Verifier.REJECTION, **warpers)
            output = decoder.generate(PROMPT, tokens, params, logits_processor=processors)
            counts[sum(token * vocabulary**at for at, token in enumerate(reversed(output.tokens)))] += 1
            accepted[context.rank] += output.steps < tokens
        return counts

    counts = run_lockstep(ranks, rank)
    assert all(torch.equal(counts[0], other) for other in counts)
    assert draws / 5 < accepted[0] < draws  # drafts are accepted and turned down
    applied = [*processors, *lp.SamplingParams(temperature=0.7, **warpers).processors()]
    expected = joint(model, PROMPT, tokens, applied) * draws
    if bool(counts[0][expected == 0].any()):
        return 0.0
    return p_value(*(lumped(values, expected) for values in (counts[0], expected)))


@pytest.mark.parametrize("ranks", [1, 2] if LONG else [2])
def test_rejection_has_the_joint_distribution(ranks: int) -> None:
    """Algorithm 4 must be lossless over several tokens, in a tree, with rows of one step on several ranks."""
    assert _rejection_p(ranks, DRAWS) > 0.001


PAIRS: dict[str, Any] = {"draws": DRAWS_OF_PAIRS, "vocabulary": 5, "sharpness": 2.0, "tokens": 2}
# Of the new tokens alone, so that a branch's own tokens matter: drafts of the first step are all in the prompt.
PENALTY = tf.RepetitionPenaltyLogitsProcessor(20.0, prompt_ignore_length=len(PROMPT))


@pytest.mark.subset(1)
@pytest.mark.parametrize(
    ("ranks", "asked"),
    [
        (1, {"top_k": 3}),
        (1, {"top_p": 0.8}),
        (1, {"repetition_penalty": 2.0}),
        (1, {"processors": [PENALTY]}),
        (2, {"processors": [PENALTY], "repetition_penalty": 1.5, "top_k": 4, "top_p": 0.9}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_rejection_with_processors(ranks: int, asked: dict[str, Any]) -> None:
    """Drafts are accepted by the processed distribution of their own branch, never by the model's bare one."""
    assert _rejection_p(ranks, **PAIRS, **asked) > 0.001


@pytest.mark.subset(1)
@pytest.mark.parametrize("fault", ["prefix", "processors", "dropped drafts"])
def test_faulty_processing_under_rejection_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can tell: processors without the branch, none at all, and drafts that warpers had dropped."""
    if fault == "prefix":
        monkeypatch.setattr(BranchProcessors, "_own_prefix", lambda self, branch: [0] * len(branch))
        asked: dict[str, Any] = {"processors": [PENALTY]}
    elif fault == "processors":
        monkeypatch.setattr(
            BranchProcessors, "__call__", lambda self, logits, branches, text: logits / self.temperature
        )
        asked = {"top_p": 0.8}
    else:
        honest = sampling_module.accept_or_resample
        monkeypatch.setattr(
            sampling_module, "accept_or_resample", lambda p, drafts, g: honest(p + 0.05 * (p == 0), drafts, g)
        )
        asked = {"top_k": 3}
    assert _rejection_p(1, **PAIRS, **asked) < 0.001


@pytest.mark.slow  # half a minute of draws
def test_rejection_without_renormalising_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the residual is not renormalised, so later drafts are accepted too rarely."""

    def faulty(probabilities: torch.Tensor, drafts: Any, generator: torch.Generator) -> int:
        for draft in drafts:
            if float(torch.rand((), generator=generator)) < float(probabilities[draft]):
                return draft
            probabilities[draft] = 0
        left = probabilities if probabilities.any() else torch.ones(len(probabilities))  # all four may be drafts
        return int(torch.multinomial(left, 1, generator=generator))

    monkeypatch.setattr(sampling_module, "accept_or_resample", faulty)
    assert _rejection_p(1, 3 * DRAWS) < 0.001  # few drafts are turned down: with DRAWS it is 0.09


def test_drawn_seed_is_one_for_all_ranks() -> None:
    """Ranks that drew their own seeds would drift at the first token."""
    model = tiny_model(sharpness=1.0)
    sampling = lp.SamplingParams(temperature=2.0)
    texts = run_lockstep(3, lambda c: lp.LookaheadDecoder(model, context=c).generate([1, 2], 20, sampling).tokens)
    assert texts[0] == texts[1] == texts[2]
    assert lp.LookaheadDecoder(model).generate([1, 2], 20, sampling).tokens != texts[0]


def test_window_guesses_under_the_samplers_noise() -> None:
    """A window iterated greedily would almost never guess a sampled text; under the same noise it finds some."""
    model = tiny_model(sharpness=1.5)
    config = lp.LookaheadConfig(
        window_size=8, ngram_size=4, guess_set_size=0, ablation=lp.Ablation(prompt_ngrams=False)
    )
    sampling = lp.SamplingParams(temperature=0.5, seed=5)
    decoder = lp.LookaheadDecoder(model, config)
    steps = sum(decoder.generate([i, 3, 1], 80, sampling).steps for i in range(6))
    assert steps < 6 * 80  # with no pool at all, only row 0 and column 0 can have come true


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-310),
        ("temperature", -1),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 1.0),
        ("typical_p", 0),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-310),
        ("repetition_penalty", 2e6),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_bad_sampling_is_refused(name: str, value: Any) -> None:
    """The error names the value and the remedy."""
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; it must be .*; "):
        lp.SamplingParams(**{name: value})


def test_a_temperature_of_zero_is_greedy_behind_the_penalty() -> None:
    """A penalty can be had without drawing, as transformers' `generate` has it; what leaves tokens out has no say."""
    model, ids = tiny_model(), [5, 9, 3, 5, 9, 3, 7]
    plain = plain_greedy(model, ids, 30)
    for penalty in (1.0, 1.3):
        expected = plain_greedy(model, ids, 30, repetition_penalty=penalty)
        assert (expected == plain) == (penalty == 1)
        sampling = lp.SamplingParams(temperature=0, repetition_penalty=penalty, top_k=2, typical_p=0.1)
        for decoder in (lp.AutoregressiveDecoder(model), lp.PlainDecoder(model), lp.LookaheadDecoder(model)):
            assert decoder.generate(ids, 30, sampling).tokens == expected
    with pytest.raises(ValueError, match="verifier is 'rejection' with a temperature of 0"):
        lp.SamplingParams(temperature=0, verifier=lp.Verifier.REJECTION)


def test_scores_that_processors_spoil_are_not_the_models_fault() -> None:
    """Who reads of the model's weights looks for the fault in the wrong place."""

    class Overflows(tf.RepetitionPenaltyLogitsProcessor):
        per_branch = True

    model = tiny_model()
    with pytest.raises(ValueError, match=r"scores at step 0 .* behind Overflows, which may overflow"):
        lp.LookaheadDecoder(model).generate([1, 2], 9, logits_processor=[Overflows(1e-310)])


def test_the_hardest_settings_keep_scores_finite() -> None:
    """Limits of a field that let scores overflow would blame the model for what was asked."""
    logits = torch.tensor([[65504.0, -65504.0, 1.0, -1.0]])
    for penalty in (1e-6, 1e6):
        sampling = lp.SamplingParams(temperature=1e-20, repetition_penalty=penalty, seed=0)
        processors = [CountPenalty(0, 1e6, 1e6), *sampling.processors()]
        scores = BranchProcessors(processors)(logits, [[]], [0, 1] * 5000)
        assert scores.isfinite().all()


def test_unknown_processors_are_refused_unless_declared() -> None:
    """A processor with state of its own would see branches that never come true."""

    class Custom(tf.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.masked_fill(torch.arange(scores.shape[1])[None] == input_ids[:, -1:], -math.inf)

    model, custom = tiny_model(), Custom()
    with pytest.raises(ValueError, match=r"Custom is not known.*per_branch = True"):
        lp.LookaheadDecoder(model).generate([1, 2], 9, logits_processor=[custom])
    custom.per_branch = True  # type: ignore[attr-defined]
    expected = lp.AutoregressiveDecoder(model).generate([1, 2], 30, logits_processor=[custom]).tokens
    assert lp.LookaheadDecoder(model).generate([1, 2], 30, logits_processor=[custom]).tokens == expected
    assert all(a != b for a, b in pairwise(expected))


class _Anneals(tf.TemperatureLogitsWarper):
    """Colder with every token, and never the last but one again."""

    def __init__(self) -> None:
        super().__init__(1.5)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        cooled = scores / (1 + 0.1 * input_ids.shape[1])
        return cooled.scatter(1, input_ids[:, -2:-1], -math.inf)


def test_a_subclass_of_a_warper_is_given_its_prefix() -> None:
    """Taken for the warper it derives from, it saw one token of its prefix, and gave other tokens."""
    model, ids = tiny_model(), [5, 9, 3, 5, 9, 3, 7]
    expected = plain_greedy(model, ids, 30, logits_processor=tf.LogitsProcessorList([_Anneals()]))
    assert expected != plain_greedy(model, ids, 30)
    for decoder in (lp.AutoregressiveDecoder(model), lp.PlainDecoder(model), lp.LookaheadDecoder(model)):
        assert decoder.generate(ids, 30, logits_processor=[_Anneals()]).tokens == expected


def test_penalties_count_generated_tokens_alone() -> None:
    """As OpenAI's: once for a token that came, and once for each time; the prompt's tokens cost nothing."""
    penalty = CountPenalty(prompt_tokens=3, presence=0.5, frequency=0.25)
    input_ids = torch.tensor([[1, 1, 4, 0, 2, 2], [1, 1, 4, 3, 3, 3]])
    found = penalty(input_ids, torch.zeros(2, 5))
    assert found.tolist() == [[-0.75, 0.0, -1.0, 0.0, 0.0], [0.0, 0.0, 0.0, -1.25, 0.0]]
