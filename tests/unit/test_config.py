"""One rule says whether the token budget adapts, however a decoder is made."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import pytest

import lp
from launch.schema import decoder_choices, frozen, mirror

SHAPE = {"window_size": 5, "ngram_size": 3, "guess_set_size": 7}


@pytest.mark.parametrize("count", range(4))
def test_any_of_w_n_g_fixes_the_budget(count: int) -> None:
    """A config without them that fixed the budget would slow down who sets pool_mib alone; the others are filled in."""
    for names in itertools.combinations(SHAPE, count):
        values: dict[str, Any] = {name: SHAPE[name] for name in names}
        config = lp.LookaheadConfig(**values, pool_mib=2)
        assert config.adaptive == (count == 0)
        filled = {"window_size": 16, "ngram_size": 2, "guess_set_size": 104} | values
        assert {name: getattr(config, name) for name in SHAPE} == filled
        for adaptive in (False, True):
            assert lp.LookaheadConfig(**values, adaptive=adaptive).adaptive is adaptive
    assert lp.LookaheadConfig(window_size=0).adaptive is False, "0 is given"


def test_a_made_config_never_changes_its_mind() -> None:
    """`replace` passes all fields: read as given, W of an adaptive config would fix it, and a copy would differ."""
    adaptive, fixed = lp.LookaheadConfig(), lp.LookaheadConfig(guess_set_size=9)
    for config in (adaptive, fixed):
        assert replace(config) == config == lp.LookaheadConfig(**asdict(config))
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
        schema = mirror(choice.config, name, choice.values | SHAPE)()
        assert frozen(lp.LookaheadConfig, schema) == lp.LookaheadConfig(**SHAPE, adaptive=adaptive)


def test_a_schema_may_leave_them_out() -> None:
    """A mirror with the config's own defaults, as a user's YAML may use it, resolves as the config does."""
    assert frozen(lp.LookaheadConfig, mirror(lp.LookaheadConfig, "x")()) == lp.LookaheadConfig()
