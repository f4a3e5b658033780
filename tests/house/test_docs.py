"""The pages for people: their code runs, their commands are understood, and the files that they name exist."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException

from launch.apps import APPS
from launch.cli import own_arguments
from launch.config.schema import register, settings
from launch.running.hydra_app import CONF, import_plugins, register_resolvers
from lp.attention import registry as attention_registry
from lp.draft import registry as source_registry
from lp.draft.registry import sources
from scripts import studies
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*/*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# `lp/draft/tree.py`: a file or a folder of the clone.
FILE = re.compile(r"`((?:lp|launch|conf|scripts|tests|docs)/[\w./-]*)`")


def blocks(page: Path, language: str, heading: str = "") -> list[str]:
    """The code blocks of a language on a page, or of one of its sections."""
    text = page.read_text(encoding="utf-8")
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [code for found, code in BLOCK.findall(text) if found == language]


def commands() -> list[tuple[str, str]]:
    """Every command of an app in the pages, with its page."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(page.name, line) for line in lines if app_of(line) is not None]
    return found


def app_of(line: str) -> tuple[str, list[str]] | None:
    """The app that a shell command starts, and its arguments; None for another command."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"\w+=", words[0]):  # of the environment
        words.pop(0)
    for start in (["lp"], ["python", "-m", "lp"], ["bash", "torchrun.sh"], ["python", "-m"]):
        if words[: len(start)] == start:
            name = words[len(start)].removeprefix("launch.") if len(words) > len(start) else "generate"
            return (name, words[len(start) + 1 :]) if name in APPS else None
    return None


@pytest.fixture
def clean_registries() -> Iterator[None]:
    before = {entry.name for entry in sources()}
    yield
    for name in {entry.name for entry in sources()} - before:
        del source_registry._entries[name]


@pytest.fixture
def configs() -> None:
    register()
    register_resolvers()


def config_of(app: str, arguments: list[str]) -> object:
    """The config of a command; of a sweep, that of its first job."""
    overrides = [word for word in own_arguments(app, arguments) if not word.startswith("-")]
    first = []
    for override in OverridesParser.create().parse_overrides(overrides):
        value = override.sweep_iterator() if override.is_sweep_override() else None
        line = override.input_line
        first.append(f"{override.get_key_element()}={next(iter(value))}" if value else line)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return settings(compose(app, [*first, *([] if app != "generate" else ["hydra.output_subdir=null"])]))


def run_python(page: Path, heading: str) -> dict[str, object]:
    """Run the Python blocks of a section one after the other, as one module."""
    module = ModuleType(f"docs_{heading.split()[-1]}")
    sys.modules[module.__name__] = module  # where dataclasses look up their annotations
    try:
        for code in blocks(page, "python", heading):
            exec(compile(code, f"{page.name}: {heading}", "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return vars(module)


EXTENDING = ROOT / "docs" / "design" / "extending.md"


def run_commands(heading: str) -> list[object]:
    """The configs of a section's commands."""
    return [config_of(*app) for block in blocks(EXTENDING, "bash", heading) if (app := app_of(block))]


def test_extending_with_a_draft_source(configs: None, clean_registries: None) -> None:
    """The page's source decodes exactly, and the apps know it by its name."""
    run_python(EXTENDING, "A draft source")
    register()
    (config,) = run_commands("A draft source")
    assert config.decoder.name == "repeat" and config.decoder.num_tokens == 6  # type: ignore[attr-defined]


def test_extending_with_a_plugin(clean_registries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LP_PLUGINS imports the page's file."""
    (tmp_path / "repeat_source.py").write_text(blocks(EXTENDING, "python", "A draft source")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LP_PLUGINS", "repeat_source")
    import_plugins()
    del sys.modules["repeat_source"]
    assert "repeat" in {entry.name for entry in sources()}


def test_extending_with_an_attention_backend(configs: None) -> None:
    """The page's backend decodes exactly, and is a choice of the apps."""
    run_python(EXTENDING, "An attention backend")
    try:
        register()
        (config,) = run_commands("An attention backend")
        assert config.attention.name == "float64"  # type: ignore[attr-defined]
    finally:
        del attention_registry._backends["float64"]


def test_extending_with_a_model() -> None:
    """A class that transformers did not bring is taken, and decodes exactly."""
    run_python(EXTENDING, "A model")


def test_extending_with_a_baseline(configs: None) -> None:
    """The page's baseline gives plain decoding's tokens."""
    import lp
    from launch.bench.baselines import BASELINES, BaselineOptions

    run_python(EXTENDING, "A baseline")
    try:
        model, tokenizer = lp.load("demo")
        prompt = tokenizer("import os")["input_ids"]
        decoder = BASELINES["no_cache"].build(model, lp.ParallelContext(), BaselineOptions())
        assert decoder.generate(prompt, 8).tokens == lp.AutoregressiveDecoder(model).generate(prompt, 8).tokens
        assert run_commands("A baseline")
    finally:
        del BASELINES["no_cache"]


def test_extending_with_a_task(configs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's prompts are read, by path and by name."""
    from launch.config.task import read_prompts

    monkeypatch.chdir(tmp_path)
    (tmp_path / "haiku.jsonl").write_text(blocks(EXTENDING, "json", "A task")[0])
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "haiku.yaml").write_text(blocks(EXTENDING, "yaml", "A task")[0])
    by_path, by_name = blocks(EXTENDING, "bash", "A task")
    for line in (by_path, by_name.replace("$PWD", str(tmp_path))):
        app, arguments = app_of(line) or ("", [])
        config = config_of(app, arguments)
        assert [prompt.task_id for prompt in read_prompts(config)] == ["haiku/0"]  # type: ignore[arg-type]


@pytest.mark.parametrize(("page", "line"), [command for command in commands() if command[0] != "extending.md"])
def test_commands_of_the_pages_are_understood(page: str, line: str, configs: None) -> None:
    """A key that was renamed, or an experiment that is gone, must not stay in a page."""
    app, arguments = app_of(line) or ("", [])
    try:
        config_of(app, arguments)
    except MissingConfigException as error:
        if "hydra/" not in str(error):
            raise
        pytest.skip("a plugin of Hydra that is not installed")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_exist(page: Path) -> None:
    """A path to a file that has moved leads nowhere; links are those of test_pages.py."""
    named = FILE.findall(page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("folder", ["lp", "launch", "conf", "scripts", "tests"])
def test_files_name_pages_that_exist(folder: str) -> None:
    """Comments named a page that had moved."""
    files = [path for pattern in ("*.py", "*.yaml", "*.sh") for path in (ROOT / folder).rglob(pattern)]
    named = {name for path in files for name in re.findall(r"\bdocs/[\w./-]+\.md\b", path.read_text(encoding="utf-8"))}
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_no_page_refers_to_a_design_page() -> None:
    """There is none in the repository."""
    design = "DES" + "IGN"
    files = [
        *PAGES,
        *(path for folder in ("lp", "launch", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")),
    ]
    assert not [str(path.relative_to(ROOT)) for path in files if design in path.read_text(encoding="utf-8")]


def test_config_page_is_up_to_date() -> None:
    """A key that is new, gone or has another default must be so in the page too."""
    studies.main(["config", "--check"])  # which ends the process if not
