"""A key or an argument that is gone is refused with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

import lp
from launch.config.schema import register, settings
from launch.running.errors import explain
from launch.running.hydra_app import CONF, register_resolvers
from lp.removed_keys import REMOVED, removal
from tests.conftest import LONG
from tests.support.switches import SWITCHES

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


GROUP = "parallel="
# Written out here too, or a key that is dropped from REMOVED would be a case less.
GONE = (
    *(f"decoder.{name}" for name in sorted(SWITCHES)),
    *(f"decoder.{name}" for name in ("window_size", "ngram_size", "guess_set_size", "adaptive", "max_spec_offset")),
    *(f"decoder.pool_{name}" for name in ("scope", "mib", "file", "model_ngrams")),
    *("W_per_rank", "G_per_rank", "measure_step_times"),
    *("sampling.seed", "model.attn_implementation", "parallel.setup_timeout_s", "show_prompt"),
    *("nodes", "nodes.count", "nodes.rank", "nodes.nproc", "nodes.endpoint"),
)
# What a key needs to be asked for: another app than generate, or another choice of its group.
ASKED_WITH = {"sampling.seed": ["sampling=sample"]}
FORMS = ("", "+", "~")  # a key is set, added or taken away; each key in one of them, the next key in the next
CASES = [
    (key, form)
    for number, key in enumerate(GONE)
    for form in FORMS
    if LONG or key == "nodes" or form == FORMS[number % len(FORMS)]
]


@pytest.fixture
def configs() -> Iterator[None]:
    register()
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize(("key", "plus"), CASES)
def test_keys_of_apps(key: str, plus: str) -> None:
    """A run that took an old key for nothing, or called it unknown, would leave its user to look for the new one."""
    app = "scaling" if key.startswith("nodes") else "generate"
    with pytest.raises((HydraException, OmegaConfBaseException, lp.UserError)) as raised:
        settings(compose(app, [*ASKED_WITH.get(key, []), f"~{key}" if plus == "~" else f"{plus}{key}=1"]))
    assert REMOVED["nodes" if plus == "+" and key.startswith("nodes") else key] in explain(raised.value)


def test_all_that_is_gone_is_tried_here() -> None:
    assert {*GONE, GROUP} == {*REMOVED}


@pytest.mark.usefixtures("configs")
def test_a_key_that_another_decoder_still_has() -> None:
    """A wrong value of it was called a key that is gone."""
    with pytest.raises((HydraException, OmegaConfBaseException)) as raised:
        compose("generate", ["decoder=lookahead_paper", "decoder.prompt_ngrams=abc"])
    told = explain(raised.value)
    assert "gone" not in told and "prompt_ngrams" in told and "abc" in told


@pytest.mark.usefixtures("configs")
def test_a_group_of_one_choice() -> None:
    """Without a group of that name, Hydra takes its choice for a value."""
    with pytest.raises(HydraException) as raised:
        compose("generate", ["parallel=default"])
    assert explain(raised.value) == f"{GROUP} is gone; {REMOVED[GROUP]}"


@pytest.mark.usefixtures("configs")
def test_a_file_of_settings_from_before(tmp_path: Path) -> None:
    """`lp tune` wrote decoder.num_logits into its tuned.yaml."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "tuned.yaml").write_text("# @package _global_\ndecoder:\n  num_logits: 16\n")
    with pytest.raises(HydraException) as raised:
        compose("generate", ["experiment=tuned", f"hydra.searchpath=[file://{tmp_path}]"])
    assert REMOVED["decoder.num_logits"] in explain(raised.value)
