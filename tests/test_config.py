"""One rule says whether the token budget adapts, however a decoder is made."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest

import lp
from launch.config.schema import decoder_choices, frozen
from lp.budget.policy import FixedBudget
from tests.support.tiny_models import tiny_model

SHAPE = {"window_size": 5, "ngram_size": 3, "guess_set_size": 7}


@pytest.mark.parametrize("count", range(4))
def test_any_of_w_n_g_fixes_the_budget(count: int) -> None:
    """A config without them that fixed the budget would slow down who sets pool_mib alone; the others are filled in."""
    for names in itertools.combinations(SHAPE, count):
        values: dict[str, Any] = {name: SHAPE[name] for name in names}
        for adaptive in (None, False, True):
            config = lp.LookaheadConfig(**values, adaptive=adaptive, pool_mib=2)  # type: ignore[arg-type]
            assert config.adaptive is ((count == 0) if adaptive is None else adaptive)
            filled = {"window_size": 16, "ngram_size": 2, "guess_set_size": 184 if config.adaptive else 104} | values
            assert {name: getattr(config, name) for name in SHAPE} == filled
    assert lp.LookaheadConfig(window_size=0).adaptive is False, "0 is given"


def test_a_made_config_never_changes_its_mind() -> None:
    """`replace` passes all fields: read as given, W of an adaptive config would fix it, and a copy would differ."""
    adaptive, fixed = lp.LookaheadConfig(), lp.LookaheadConfig(guess_set_size=9)
    for config in (adaptive, fixed):
        given = {item.name: getattr(config, item.name) for item in fields(config)}
        assert replace(config) == config == lp.LookaheadConfig(**given)
        assert replace(config, window_size=4).adaptive is config.adaptive
        assert repr(replace(config)) == repr(config) and "None, ngram" not in repr(config)
    assert replace(adaptive, adaptive=None).adaptive is False  # type: ignore[arg-type]


def test_decoders_of_no_config_and_of_the_default_are_one() -> None:
    """`LookaheadDecoder(model)` adapts, and so does what its documentation calls the same."""
    assert lp.LookaheadConfig().adaptive
    assert lp.LookaheadConfig() == lp.LookaheadConfig(adaptive=True)


def test_presets_state_what_they_fix() -> None:
    """launch always has a W: the rule above would make both presets fixed."""
    for name, adaptive in (("lookahead", False), ("lookahead_auto", True)):
        choice = decoder_choices()[name]
        made = frozen(lp.LookaheadConfig, choice.schema(name)(), **choice.values, **SHAPE)
        assert made == lp.LookaheadConfig(**SHAPE, adaptive=adaptive)


def test_ranks_divide_a_fixed_step_and_not_the_bounds_of_an_adaptive_one() -> None:
    """64 ranks of 200 tokens take 12,800, more than one rank's message and mask have room for."""
    shared = lp.LookaheadConfig(window_size=0, guess_set_size=64 * 199)
    assert FixedBudget(shared, 64).step_tokens == 200
    with pytest.raises(ValueError, match=r"on 1 rank\(s\) has 12737 tokens a rank, more than 8192; .*add ranks"):
        FixedBudget(shared)
    with pytest.raises(ValueError, match="has 12737 tokens a rank"):
        lp.LookaheadDecoder(tiny_model(), shared)
    assert FixedBudget(lp.LookaheadConfig(window_size=0, guess_set_size=8191)).step_tokens == 8192
    with pytest.raises(ValueError, match=r"\(G\) is 8193"):
        lp.LookaheadConfig(guess_set_size=8193, adaptive=True)
    with pytest.raises(ValueError, match="more than 8192"):
        lp.LookaheadConfig(guess_set_size=8190, adaptive=True)
    with pytest.raises(ValueError, match="more than 65536"):
        lp.LookaheadConfig(guess_set_size=65530)
