"""A draft source is one file: a config, a class and one registration."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lp
from lp.config import windowless
from lp.draft import registry
from lp.draft.registry import register_factory, register_source, sources
from lp.draft.source import DraftSource
from lp.draft.tree import DraftTree
from lp.parallel.thread_ranks import run_lockstep
from tests.support.apps import Ran
from tests.support.tiny_models import plain_greedy, tiny_model

TOY = "tests.support.toy_source"


@pytest.fixture
def toy() -> Iterator[ModuleType]:
    """The user's module, imported; afterwards it never was."""
    yield importlib.import_module(TOY)
    _forget()


def _forget() -> None:
    del registry._entries["test_repeat"]
    del sys.modules[TOY]


@pytest.mark.parametrize("sampling", [None, lp.SamplingParams(temperature=0.5, seed=3)], ids=["greedy", "coupled"])
def test_a_new_source_decodes_exactly(toy: ModuleType, sampling: lp.SamplingParams | None) -> None:
    """Found by its config's type alone, on one rank and two; and it must be this source that proposes."""
    model, ids = tiny_model(), [5, 3, 3, 3, 7]
    plain = lp.AutoregressiveDecoder(model).generate(ids, 40, sampling)
    config = toy.RepeatConfig(num_tokens=3)
    output = lp.LookaheadDecoder(model, config).generate(ids, 40, sampling)
    assert output.tokens == plain.tokens
    assert max(step.num_draft for step in output.step_stats) == 3
    texts = run_lockstep(2, lambda c: lp.LookaheadDecoder(model, config, c).generate(ids, 40, sampling).tokens)
    assert texts == [plain.tokens] * 2


def test_the_apps_know_a_new_source(
    launch_generate: Callable[..., Ran], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No YAML file and no table of names beside it; its config checks itself, its keys are known."""
    monkeypatch.setenv("LP_PLUGINS", TOY)
    overrides = [
        "decoder=test_repeat",
        f"model.name={tiny_folder}",
        "model.dtype=float64",
        "limit=1",
        "max_new_tokens=20",
    ]
    try:
        ran = launch_generate(*overrides, "decoder.num_tokens=3", "output=json", "compare=true")
        assert ran.code == 0, ran.err
        found = json.loads(ran.out)
        assert found["method"] == "test_repeat" and found["equal"] is True
        assert "num_tokens is 0" in launch_generate(*overrides, "decoder.num_tokens=0").err
        assert "known here: name, num_tokens" in launch_generate(*overrides, "decoder.num=0").err
        refused = launch_generate("decoder.name=none").err
        assert "decoder.name is 'none'; choose with decoder=<one of lookahead_auto," in refused
        assert "test_repeat" in refused
    finally:
        _forget()


def test_a_plugin_that_is_not_there_is_named(
    launch_generate: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LP_PLUGINS", "no_such_module")
    ran = launch_generate("decoder=prompt_lookup")
    assert ran.code == 2 and "LP_PLUGINS names 'no_such_module', which cannot be imported" in ran.err


@dataclass(frozen=True)
class _Other:
    def shape(self) -> lp.LookaheadConfig:
        return windowless(1)


def test_a_config_of_no_source_is_refused() -> None:
    """A dict, or a config whose module was never imported, must not end in an AttributeError."""
    wrong: list[Any] = [_Other(), {"window_size": 5}, "demo"]
    for config in wrong:
        name = type(config).__name__
        with pytest.raises(ValueError, match=f"of type {name}; give one of JacobiConfig, PaperConfig"):
            lp.LookaheadDecoder(tiny_model(), config)


class _Source(DraftSource):
    """Proposes nothing."""

    def propose(self, *_: object) -> DraftTree:
        return DraftTree()


def test_registrations_that_clash_are_refused() -> None:
    """Two sources with one name or one config: one of them would silently never run."""
    before = sources()
    with pytest.raises(ValueError, match="a draft source named 'suffix' is registered already"):
        register_source("suffix", _Other)(_Source)
    with pytest.raises(ValueError, match="SuffixConfig is the config of another draft source"):
        register_source("mine", lp.SuffixConfig)(_Source)
    with pytest.raises(ValueError, match="is no config of a draft source; make it a dataclass"):
        register_source("mine", dict)(_Source)
    with pytest.raises(ValueError, match=r"is no DraftSource; make it a subclass of lp\.draft\.source\.DraftSource"):
        register_source("mine", _Other)(object)
    with pytest.raises(ValueError, match="is no SourceFactory"):
        register_factory("mine", _Other)(_Source)
    assert sources() == before


def test_a_new_source_is_exact_on_a_text_that_loops(toy: ModuleType) -> None:
    """Only a text that repeats tokens shows that what it proposes is accepted."""
    model = tiny_model()
    for first in range(40):
        ids = [first]
        expected = plain_greedy(model, ids, 30)
        output = lp.LookaheadDecoder(model, toy.RepeatConfig()).generate(ids, 30)
        assert output.tokens == expected
        if sum(step.accepted for step in output.step_stats) > 3:
            return
    pytest.fail("no text repeats a token")
