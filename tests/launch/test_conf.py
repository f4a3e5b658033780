"""Every config composes, and says what it is for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import lp
from launch.config.builders import draft_configs
from launch.config.schema import Common, ModelSchema, TaskSchema, register, settings
from launch.running.hydra_app import CONF, register_resolvers
from lp.removed_keys import REMOVED

GROUPS = [*sorted(CONF.glob("*/*.yaml"))]
PLUGINS = {"optuna": "hydra_plugins.hydra_optuna_sweeper", "joblib": "hydra_plugins.hydra_joblib_launcher"}
PLUGINS |= {"slurm": "hydra_plugins.hydra_submitit_launcher", "ray": "hydra_plugins.hydra_ray_launcher"}
MODELS = "codellama_{7b,13b,34b}_base codellama_{7b,13b,34b}_instruct llama2_{7b,13b,70b}_chat llama31_8b demo hf"
MODELS += " qwen25_coder_{1b5,7b,32b} deepseek_coder_6b7"
PAPER = "figure_4 figure_5 figure_6 figure_7 table_2 table_3 table_4 precision"


@pytest.fixture(autouse=True)
def configs() -> Iterator[None]:
    register()
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("app", ["generate", "chat", "benchmark", "scaling"])
def test_apps_compose_with_their_defaults(app: str) -> None:
    config = settings(compose(app, ["model=demo"]))
    assert isinstance(config, Common) and config.model.name == "demo"


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_files_of_apps_repeat_no_key(path: Path) -> None:
    """A default that stands in the schema and in a file is changed in one of them."""
    assert {*OmegaConf.load(path)} <= {"defaults", "hydra"}


@pytest.mark.parametrize("path", [p for p in GROUPS if p.parent.name in ("model", "task")], ids=lambda path: path.stem)
def test_files_of_groups_repeat_no_default(path: Path) -> None:
    """A file of a task says what is particular to it."""
    defaults = vars({"model": ModelSchema, "task": TaskSchema}[path.parent.name]())
    given = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(given, dict)
    given.pop("defaults", None)
    assert not [name for name, value in given.items() if value == defaults[name]]


def test_the_page_has_few_keys() -> None:
    """A key that nobody would set is one more to read past: a new one has to be worth a line."""
    page = (CONF.parent / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    rows = [name for name in re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE) if not name.endswith("=")]
    assert 100 < len(rows) <= 140
    assert not {*REMOVED} & ({*rows} - {f"decoder.{item.name}" for item in fields(lp.PaperConfig)})


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_config_composes(path: Path) -> None:
    """A typo in a config that nobody ran yet is found by the one who waits for a node."""
    group, name = path.parent.name, path.stem
    if group == "experiment" and name in PLUGINS and not _there(PLUGINS[name]):
        pytest.skip(f"experiment={name} needs a Hydra plugin that is not installed")
    app = "generate" if (group, name) == ("experiment", "demo") else "benchmark"
    cfg = compose(app, [f"{group}={name}", *(["model.name=x"] if (group, name) == ("model", "hf") else [])])
    assert isinstance(settings(cfg), Common)
    if group in ("experiment", "task", "model"):
        assert path.read_text().count("# ") >= 1, "nobody knows what it reproduces"


def test_what_was_promised_is_there() -> None:
    """The models and the paper's experiments by name."""
    there = {path.stem for path in GROUPS if path.parent.name == "model"}
    for name in MODELS.split():
        head, _, tail = name.partition("{")
        sizes, _, end = tail.partition("}")
        assert {f"{head}{size}{end}" for size in sizes.split(",")} <= there
    experiments = [path.stem for path in GROUPS if path.parent.name == "experiment"]
    assert all(any(name.startswith(f"paper_{part}") for name in experiments) for part in PAPER.split())


@pytest.mark.parametrize("path", [p for p in GROUPS if p.stem.startswith("paper_")], ids=lambda path: path.stem)
def test_experiments_of_the_paper_use_its_decoder(path: Path) -> None:
    """Its shapes are those of its own table 4, its methods start with its own."""
    config = settings(compose("benchmark", [f"experiment={path.stem}"]))
    assert config.decoder.name == "lookahead_paper" and config.model.dtype == "float16"
    (paper,) = draft_configs(config, ["lookahead_paper"]).values()
    assert paper == lp.PaperConfig(
        window_size=config.W, ngram_size=config.N, guess_set_size=config.G, prompt_ngrams=config.decoder.prompt_ngrams
    )
    shapes = {"7b": 15, "13b": 10, "34b": 7}
    if path.stem.startswith(("paper_figure_5", "paper_figure_6", "paper_figure_7")):
        size = next(size for size in shapes if size in config.model.name)
        assert (shapes[size], 5, shapes[size]) == (config.W, config.N, config.G)
