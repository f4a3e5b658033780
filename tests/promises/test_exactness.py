"""Greedy lookahead gives the tokens of transformers' own `generate`, over drawn shapes and architectures."""

from __future__ import annotations

import os
import random

import pytest

import lp
from tests.support.pools import drawn_step_times, drawn_switches
from tests.support.switches import lookahead_config
from tests.support.tiny_models import ARCHITECTURES, CONTEXT, drawn_text, plain_greedy, tiny_model

LONG = bool(os.environ.get("LP_TEST_LONG"))
CASES = 64 if LONG else 6  # by architecture: 512 in the long form


@pytest.mark.subset(2)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_equals_generate(arch: str) -> None:
    """A wrong position, mask, commit or truncation changes a token somewhere in these draws."""
    for case in range(CASES):
        rng = random.Random(f"{arch}-{case}")
        model = tiny_model(arch, seed=rng.randrange(8))
        ids, new = drawn_text(rng, rng.randint(1, 200)), rng.randint(1, 80)
        plain = plain_greedy(model, ids, new)
        eos = rng.choice(plain) if rng.random() < 0.5 else None
        expected = plain[: plain.index(eos) + 1] if eos is not None else plain
        shape = {
            "window_size": rng.randint(0, 20),
            "ngram_size": rng.randint(2, 8),
            "guess_set_size": rng.randint(0, 20),
        }
        policy = {
            "draft_depth": rng.choice([None, 1, 12]),
            "warmup_steps": rng.choice([0, 0, 3]),
            **drawn_switches(rng),
        }
        config = lookahead_config(**shape, **policy)
        output = lp.LookaheadDecoder(model, config, step_times=drawn_step_times(rng)).generate(
            ids, new, eos_token_id=eos, prefill_chunk=rng.choice([7, 64, 512])
        )
        assert output.tokens == expected, f"{arch} case {case}: {config}, prompt {len(ids)}, new {new}, eos {eos}"
        assert output.finish_reason == ("length" if eos is None else "eos")
        assert sum(s.accepted + 1 for s in output.step_stats) >= len(output.tokens)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mistral_sliding", "gpt_neox"])
def test_eager_attention_equals_generate(arch: str) -> None:
    """`eager` adds its mask: a boolean one would be silently wrong."""
    for case in range(24 if LONG else 3):
        rng = random.Random(f"eager-{arch}-{case}")
        model = tiny_model(arch, seed=case)
        ids = drawn_text(rng, rng.randint(1, 60))
        expected = plain_greedy(model, ids, 40)
        config = lp.LookaheadConfig(window_size=7, ngram_size=4, guess_set_size=7)
        assert lp.LookaheadDecoder(model, config, attention="eager").generate(ids, 40).tokens == expected


@pytest.mark.parametrize("arch", ["llama", "mistral_sliding", "gemma3"])
def test_oracle_and_prompt_lookup_equal_generate(arch: str) -> None:
    """The oracle and the peer must be right themselves, or comparisons mean nothing."""
    for case in range(24 if LONG else 3):
        rng = random.Random(f"oracle-{arch}-{case}")
        model = tiny_model(arch, seed=case)
        ids = drawn_text(rng, rng.randint(1, 120))
        expected = plain_greedy(model, ids, 50)
        assert lp.AutoregressiveDecoder(model).generate(ids, 50, prefill_chunk=rng.choice([5, 512])).tokens == expected
        lookup = lp.PromptLookupConfig(max_matching_ngram=rng.randint(1, 3), num_tokens=rng.randint(1, 20))
        assert lp.LookaheadDecoder(model, lookup).generate(ids, 50).tokens == expected


def test_context_end() -> None:
    """Slots past the model's context would index past its position table or change its rotary scaling."""
    model = tiny_model("llama", max_position_embeddings=64)
    ids = drawn_text(random.Random(1), 50)
    plain = lp.AutoregressiveDecoder(model).generate(ids, 100)
    output = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=9, ngram_size=4)).generate(ids, 100)
    assert (output.tokens, output.finish_reason) == (plain.tokens, plain.finish_reason)
    assert (len(output.tokens), output.finish_reason) == (14, "context")


def test_long_prompt_in_chunks() -> None:
    """A chunked prefill that misplaces a chunk or its mask shows at the first token."""
    model = tiny_model("gemma3")
    ids = drawn_text(random.Random(2), CONTEXT - 40)
    expected = plain_greedy(model, ids, 30)
    for chunk in (1, 13, 128, 4096):
        assert lp.LookaheadDecoder(model).generate(ids, 30, prefill_chunk=chunk).tokens == expected
