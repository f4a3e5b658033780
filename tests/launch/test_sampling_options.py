"""launch.generate with sampling and stop strings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.apps import Ran

SMALL = ("model=hf", "model.dtype=float64", "W=4", "N=3", "G=4", "max_new_tokens=16", "prompt=x", "compare=true")
SAMPLE = ("sampling=sample", "sampling.temperature=0.8", "sampling.top_p=0.95")


@pytest.fixture
def generate(launch_generate: Callable[..., Ran], tiny_folder: Path) -> Callable[..., Ran]:
    """launch.generate with a tiny model in float64, where no two kernels disagree on a token."""
    return lambda *overrides: launch_generate(*SMALL, f"model.name={tiny_folder}", *overrides)


def _found(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    return dict(json.loads(ran.out))


def test_coupled_sampling_is_equal_and_said(generate: Callable[..., Ran]) -> None:
    """A table that does not name temperature and seed can be repeated by nobody."""
    ran = generate(*SAMPLE, "seed=7")
    assert ran.code == 0 and "1 prompt, sampled, decoding only" in ran.out
    assert "sampled with temperature=0.8 top_p=0.95 seed=7 verifier=coupled, median of 3 rounds" in ran.out
    verdicts = [line.split()[-1] for line in ran.out.splitlines() if line.startswith(("  lookahead", "  prompt_look"))]
    assert verdicts == ["equal", "equal"]


def test_the_seed_makes_the_text(generate: Callable[..., Ran]) -> None:
    """A field that stops at the config would leave the text as it was."""
    flags = (*SAMPLE, "output=json", "compare=false", "sampling.repetition_penalty=1.1")
    once, again, other, greedy = (
        _found(generate(*flags, "seed=7")),
        _found(generate(*flags, "seed=7", "decoder=autoregressive")),
        _found(generate(*flags, "seed=8")),
        _found(generate("output=json", "compare=false")),
    )
    assert once["sampling"]["seed"] == 7 and once["sampling"]["repetition_penalty"] == 1.1
    assert greedy["sampling"] is None
    texts = [found["prompts"][0]["text"] for found in (once, again, other, greedy)]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_a_drawn_seed_is_one_for_all_methods(generate: Callable[..., Ran]) -> None:
    """Each run used to draw its own, and every method would have differed from the reference."""
    found = _found(generate(*SAMPLE, "seed=null", "output=json"))
    assert found["equal"] is True and found["sampling"]["seed"] > 0


def test_rejection_is_equal_in_distribution_only(generate: Callable[..., Ran]) -> None:
    """Texts that differ, as they may, must not read as an error."""
    flags = (*SAMPLE, "sampling.verifier=rejection")
    ran = generate(*flags)
    assert ran.code == 0 and ran.out.count("equal in distribution only") == 3 and "differs" not in ran.out
    found = _found(generate(*flags, "output=json"))
    assert found["equal"] is None and found["methods"]["lookahead_auto"]["equal"] is None
    assert found["prompts"][0]["differences"] == [] and found["sampling"]["verifier"] == "rejection"


@pytest.mark.usefixtures("wrong_prompt_lookup")
def test_a_wrong_token_under_sampling_is_no_near_tie(generate: Callable[..., Ran]) -> None:
    """The gap is that of the noisy scores: the raw logits' may be small by chance."""
    ran = generate("sampling=sample")
    assert "prompt_lookup differs from plain decoding at new token 5 (" in ran.out
    assert "the two best scores (processed logits with noise) are " in ran.out and "NOT a near-tie" in ran.out
    single = generate("sampling=sample", "sampling.top_k=1")
    assert "the warpers leave one token: NOT a near-tie" in single.out


def test_stop_strings_end_every_method(generate: Callable[..., Ran]) -> None:
    """The text ends with the token that completes one, as transformers' does."""
    whole = _found(generate("output=json", "compare=false"))["prompts"][0]["text"]
    stop = whole[8:11]
    found = _found(generate("output=json", f"stop_strings=['{stop}']"))
    (prompt,) = found["prompts"]
    assert found["equal"] is True and found["stop_strings"] == [stop]
    assert {run["finish_reason"] for run in prompt["methods"].values()} == {"stop_string"}
    assert stop in prompt["text"] and whole.startswith(prompt["text"]) and len(prompt["text"]) < len(whole)
