"""Models that say what no trained one does: one token for ever, all tokens alike, NaN, an end at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, PreTrainedModel

import lp
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import VOCABULARY, drawn_text, plain_greedy, tiny_model

SHAPE = lp.LookaheadConfig(window_size=6, ngram_size=4, guess_set_size=6)
PAPER = lp.PaperConfig(window_size=4, ngram_size=3, guess_set_size=4)
RECYCLING = lp.RecyclingConfig(successors=4, nodes=12)
SAMPLING = lp.SamplingParams(temperature=0.8, top_p=0.9, seed=5)
DECODERS: dict[str, Callable[..., lp.LookaheadDecoder]] = {
    "lookahead": lambda model, context: lp.LookaheadDecoder(model, SHAPE, context),
    "paper": lambda model, context: lp.LookaheadDecoder(model, PAPER, context),
    "prompt_lookup": lambda model, context: lp.LookaheadDecoder(model, lp.PromptLookupConfig(), context),
    "recycling": lambda model, context: lp.LookaheadDecoder(model, RECYCLING, context),
}


class Table(nn.Module):
    """An LM head that knows the last token alone: rows of `logits` by token, which the hidden states carry one-hot."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(logits.T.contiguous())  # (V, hidden) as any head's

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight)


def bigram(logits: torch.Tensor) -> PreTrainedModel:
    """A Llama whose logits behind token t are `logits[t]`: (V, V)."""
    size = 64  # hidden, at least V
    model = tiny_model(vocab_size=len(logits), hidden_size=size)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(logits), size))
        table = torch.zeros(size, len(logits), dtype=torch.float64)
        table[: len(logits)] = logits.double() / size**0.5  # the norm scales a one-hot vector by it
    model.lm_head = Table(table)
    return model


def constant(winner: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.eye(vocabulary)[winner].repeat(vocabulary, 1)


def successor(follows: dict[int, int], vocabulary: int = VOCABULARY) -> torch.Tensor:
    table = torch.zeros(vocabulary, vocabulary)
    for token in range(vocabulary):
        table[token, follows.get(token, token)] = 5.0
    return table


TABLES = {
    "one token for ever": constant(7),
    "the last token for ever": constant(VOCABULARY - 1),
    "a cycle of two": successor({t: 4 if t != 4 else 9 for t in range(VOCABULARY)}),
    "a cycle of all": successor({t: (t + 1) % VOCABULARY for t in range(VOCABULARY)}),
    "all alike": torch.zeros(VOCABULARY, VOCABULARY),
    "two maxima": constant(11) + constant(30),
    "a vocabulary of two": successor({0: 1, 1: 0}, 2),
    "two tokens alike": torch.zeros(2, 2),
    "large": 1e30 * successor({t: (3 * t + 1) % VOCABULARY for t in range(VOCABULARY)}),
}


@pytest.mark.parametrize("name", TABLES)
def test_odd_models_equal_generate(name: str) -> None:
    """Among equal maxima the first wins in argmax; a pool or verifier that prefers another changes the text."""
    model, table = bigram(TABLES[name]), TABLES[name]
    ids = drawn_text(random.Random(name), 20, len(table))
    plain = plain_greedy(model, ids, 24)
    assert plain[0] == int(table[ids[-1]].argmax())
    sampled = lp.AutoregressiveDecoder(model).generate(ids, 24, SAMPLING).tokens
    for method, decoder in DECODERS.items():
        for ranks in (1, 3) if method == "lookahead" else (1,):

            def body(context: ParallelContext, made: Any = decoder) -> list[list[int]]:
                decoding = made(model, context)
                return [decoding.generate(ids, 24).tokens, decoding.generate(ids, 24, SAMPLING).tokens]

            assert run_lockstep(ranks, body) == [[plain, sampled]] * ranks


def test_what_repeats_takes_few_steps() -> None:
    """A text of one token is all guessed once it is known: were guesses lost, steps would be as many as tokens."""
    output = lp.LookaheadDecoder(bigram(TABLES["one token for ever"]), SHAPE).generate([7] * 9, 60)
    assert output.steps <= 20


@pytest.mark.parametrize("ranks", [1, 2])
def test_eos_at_once(ranks: int) -> None:
    """The first token ends it: guesses behind the end, all of them right, are no part of the text."""
    model = bigram(TABLES["one token for ever"])

    def body(context: ParallelContext) -> lp.GenerationOutput:
        return lp.LookaheadDecoder(model, SHAPE, context).generate([7, 7, 7, 7], 40, eos_token_id=7)

    for output in [*run_lockstep(ranks, body), lp.AutoregressiveDecoder(model).generate([7], 40, eos_token_id=7)]:
        assert (output.tokens, output.finish_reason, output.steps) == ([7], "eos", 1)


def test_a_pool_full_of_near_misses() -> None:
    """Every candidate is right up to its last token: an acceptance one too long shows in each step."""
    follows = {t: (t + 1) % VOCABULARY for t in range(VOCABULARY)}
    model = bigram(successor(follows))
    run = list(range(3, 3 + 4))
    ids = [token for wrong in range(20, 60) for token in [*run, wrong]] + [3]  # 3 4 5 6 and then never the truth
    plain = plain_greedy(model, ids, 30)
    assert plain[:5] == [4, 5, 6, 7, 8]
    for decoder in DECODERS.values():
        for ranks in (1, 2):
            made = run_lockstep(ranks, lambda context, made=decoder: made(model, context).generate(ids, 30))
            assert all(output.tokens == plain for output in made)


def _bad(value: float, behind: int) -> PreTrainedModel:
    """t is followed by t + 1, and behind one token the logits are of no use."""
    model = bigram(successor({t: (t + 1) % VOCABULARY for t in range(VOCABULARY)}))

    def spoil(head: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(args[0][..., behind, None] > 1, value)

    model.lm_head.register_forward_hook(spoil)
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [None, SAMPLING, lp.SamplingParams(seed=1, verifier="rejection")])
def test_logits_of_no_use_are_an_error(value: float, sampling: lp.SamplingParams | None) -> None:
    """argmax of NaN is a token like any other: the text would go on as garbage, or on one rank alone raise."""
    model, ids = _bad(value, behind=20), [1, 2, 3, 4, 5, 6, 7, 8]
    cold = sampling and lp.SamplingParams(temperature=0.01, seed=1, verifier=sampling.verifier)
    streamed: list[int] = []
    with pytest.raises(ValueError) as error:
        lp.AutoregressiveDecoder(model).generate(ids, 40, cold, on_tokens=lambda tokens, step: streamed.extend(tokens))
    assert streamed == list(range(9, 21))
    assert "logits at step 12 (position 19) are NaN or infinite; load it with dtype=" in str(error.value)
    for decoder in DECODERS.values():
        for ranks in (1, 3):
            said: list[tuple[str, list[int]]] = []

            def body(context: ParallelContext, made: Any = decoder, said: Any = said) -> None:
                got: list[int] = []
                try:
                    made(model, context).generate(ids, 40, cold, on_tokens=lambda tokens, step: got.extend(tokens))
                except ValueError as failure:
                    said.append((str(failure), got))

            run_lockstep(ranks, body)
            assert len(said) == ranks and len({message for message, _ in said}) == 1
            assert "(position 19) are NaN or infinite" in said[0][0]
            assert all(got == list(range(9, 21)) for _, got in said), "plain decoding delivered these twelve"


def test_a_guess_of_no_use_is_no_error() -> None:
    """Plain decoding never meets what only a wrong guess would lead to."""
    model = _bad(float("nan"), behind=40)
    ids = [40, 3, 40, 5, 1, 2]  # the window and the pool guess 40; the text is 3, 4, ... 32
    plain = plain_greedy(model, ids, 30)
    for decoder in DECODERS.values():
        for ranks in (1, 2):
            made = run_lockstep(ranks, lambda context, made=decoder: made(model, context).generate(ids, 30))
            assert all(output.tokens == plain for output in made)


def test_a_model_of_nan_alone_is_refused() -> None:
    """The probe compares logits: of NaN it could only say that the mask is not honoured."""
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits that are NaN or infinite; load it with dtype=float32"):
        lp.LookaheadDecoder(model)
    with pytest.raises(ValueError, match=r"logits at step 0 \(position 2\) are NaN"):
        lp.AutoregressiveDecoder(model).generate([1, 2, 3], 5)


class _Fails(LogitsProcessor):
    """Raises for some lengths of the text."""

    per_branch = True

    def __init__(self, at: Callable[[int], bool]) -> None:
        self.at = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.at(input_ids.shape[1]):
            raise ZeroDivisionError("from the processor")
        return scores


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 40])  # in the prefill's place, and later
def test_a_processor_that_fails_on_one_rank_stops_every_rank(
    bad: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait in the step's exchange until its time limit."""
    monkeypatch.setattr("lp.parallel.context.DEFAULT_TIMEOUT_S", 20)
    model, ids = tiny_model(), drawn_text(random.Random(3), 30)
    plain = lp.AutoregressiveDecoder(model).generate(ids, 40).tokens

    def body(context: ParallelContext) -> lp.GenerationOutput | BaseException:
        decoder = lp.LookaheadDecoder(model, SHAPE, context)
        processor = _Fails(lambda now: context.rank == bad and now >= length)
        try:
            return decoder.generate(ids, 40, logits_processor=[processor])
        except (ArithmeticError, lp.Interrupted) as error:
            return error

    outputs = run_lockstep(3, body)
    assert isinstance(outputs[bad], ZeroDivisionError)
    rest = [other.output for other in outputs if isinstance(other, lp.Interrupted)]
    assert len(rest) == 2
    assert len({tuple(output.tokens) for output in rest}) == 1
    for output in rest:
        assert output.finish_reason == "interrupted"
        assert output.tokens == plain[: len(output.tokens)] and (length == 1) == (not output.tokens)
