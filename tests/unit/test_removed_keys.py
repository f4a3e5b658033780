"""A key or an argument that is gone is refused with what to write instead."""

from __future__ import annotations

import re
from typing import Any

import pytest

import lp
from lp.removed_keys import REMOVED, removal
from tests.switches import SWITCHES

PEERS = (lp.JacobiConfig, lp.PaperConfig, lp.PromptLookupConfig, lp.RecyclingConfig, lp.SuffixConfig)


@pytest.mark.parametrize("name", sorted(SWITCHES))
def test_arguments_that_became_switches_of_an_ablation(name: str) -> None:
    """Python's own TypeError says that there is no such argument, and not where it went."""
    told = f"{name} is gone; {REMOVED[f'decoder.{name}']}"
    with pytest.raises(lp.UserError, match=re.escape(told)):
        lp.LookaheadConfig(**{name: getattr(lp.Ablation(), name)})
    assert f"lp.LookaheadConfig(ablation=lp.Ablation({name}=...))" in told


@pytest.mark.parametrize("config", PEERS)
def test_other_sources_have_no_kv_sync(config: Any) -> None:
    """They had it, too."""
    with pytest.raises(lp.UserError, match=r"kv_sync is gone; .*lp.Ablation\(kv_sync="):
        config(kv_sync="broadcast")


def test_what_never_was_an_argument_is_pythons_error() -> None:
    """A typo must not be told that it is gone."""
    with pytest.raises(TypeError, match="lern"):
        lp.LookaheadConfig(lern=False)  # type: ignore[call-arg]
    assert removal("decoder.lern") is None
