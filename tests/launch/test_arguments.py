"""A prompt as it is, before Hydra parses overrides; and the command that finds an app."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import textwrap

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

import launch.apps
import launch.cli
import lp
from launch.config.arguments import PROMPT, STDIN, overrides_first, take_files, take_prompt
from lp.errors import UserError
from tests.conftest import ROOT

CODE = "def f(a, b=2): return '${x}' # \u65e5\u672c"


@pytest.mark.parametrize(
    ("args", "others"),
    [
        ([CODE], []),
        (["--prompt", CODE, "W=4"], ["W=4"]),
        ([f"--prompt={CODE}"], []),
        (["W=4", CODE, "+x=1", "~task"], ["W=4", "+x=1", "~task"]),
        (["--cfg", "job", CODE, "-m", "decoder@x.y=z"], ["--cfg", "job", "-m", "decoder@x.y=z"]),
        (["W=4", "--", CODE], ["W=4"]),
    ],
)
def test_a_prompt_needs_no_quoting(args: list[str], others: list[str]) -> None:
    """Hydra's grammar refuses brackets and commas, and OmegaConf reads ${x} as an interpolation."""
    assert take_prompt(args, positional=True) == others
    assert os.environ[PROMPT] == CODE


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input becomes the prompt; of several ranks none has it, so their launcher's reading is taken."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    assert take_prompt(["-"], positional=True) == [] and os.environ[PROMPT] == "import os\n"
    monkeypatch.setenv(STDIN, "of the launcher")
    assert take_prompt(["--prompt", "-"], positional=False) == [] and os.environ[PROMPT] == "of the launcher"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["def", "f"], "there are 2 prompts, 'def' and 'f'; quote a text as one"),
        (["--prompt"], "--prompt is the last argument"),
        (["a b", "prompt=c"], "the prompt is given twice"),
        (["--prompt", "a\0b"], "null character"),
        (["-1 + 2"], "'-1 [+] 2' begins with - and is no option; a text to continue is given as --prompt '-1 [+] 2'"),
        (["-1\n2"], "is given as --prompt TEXT$"),
        (["W=4", "-1"], "'-1' begins with - and is no option; .* --prompt '-1'"),
    ],
)
def test_prompts_that_cannot_be(args: list[str], message: str) -> None:
    with pytest.raises(lp.UserError, match=message):
        take_prompt(args, positional=True)


def test_other_apps_take_no_text_by_itself() -> None:
    assert take_prompt(["hello"], positional=False) == ["hello"]


@pytest.mark.parametrize(
    ("args", "taken"),
    [
        (["a.jsonl", "b.jsonl", "seed=1"], ["seed=1", "input='a.jsonl'", "out='b.jsonl'"]),
        (["--cfg", "job", "a.jsonl", "out=b"], ["--cfg", "job", "out=b", "input='a.jsonl'"]),
        (["in=a", "b.jsonl"], ["input=a", "out='b.jsonl'"]),
        (["in=a", "out=b", "-m"], ["input=a", "out=b", "-m"]),
    ],
)
def test_files_need_no_keys(args: list[str], taken: list[str]) -> None:
    assert take_files(args, ("input", "out")) == taken


def test_files_of_any_name_are_what_they_are() -> None:
    """Hydra reads quotes, brackets and commas in a value."""
    for name in ("a b.jsonl", "it's.jsonl", "a,b.jsonl", "[x].jsonl", "a\\", "a\\'b", "{x}: y", '"q"', "null", "1e3"):
        (override,) = OverridesParser.create().parse_overrides(take_files([name], ("input", "out")))
        value = override.value()
        assert (value.text if isinstance(value, QuotedString) else value) == name


def test_a_file_with_an_equals_sign_is_given_by_its_path() -> None:
    """A file such as lr=0.1.jsonl, given as ./lr=0.1.jsonl, must not be taken for a setting."""
    for name in ("./lr=0.1.jsonl", "../a=b", "/data/a=b.jsonl"):
        assert take_files([name, "W=4"], ("input", "out")) == ["W=4", f"input='{name}'"]


def test_too_many_files() -> None:
    with pytest.raises(UserError, match=r"'c' is one file too many; give input and out, and settings as KEY=VALUE"):
        take_files(["a", "b", "c"], ("input", "out"))
    assert take_files(["x", "in=y"], ()) == ["x", "in=y"]


@pytest.mark.parametrize(
    ("args", "ordered"),
    [
        (["a=1", "--cfg", "job", "b=2"], ["a=1", "b=2", "--cfg", "job"]),
        (
            ["-m", "a=1,2", "~b", "--config-dir", "my-api-keys", "+c=3"],
            ["a=1,2", "~b", "+c=3", "-m", "--config-dir", "my-api-keys"],
        ),
        (["--config-dir=x", "a=1", "-cn"], ["a=1", "--config-dir=x", "-cn"]),
    ],
)
def test_overrides_come_first(args: list[str], ordered: list[str]) -> None:
    """In their order: Hydra takes them in one piece."""
    assert overrides_first(args) == ordered


def test_the_command_lists_its_apps(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone and behind a typo; torchrun.sh has the same list, since it must not install anything to refuse one."""
    launch.cli.main([])
    listed = capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        launch.cli.main(["genrate"])
    error = capsys.readouterr().err
    assert error.startswith("error: there is no app 'genrate'; did you mean 'generate'?\n") and listed in error
    script = (ROOT / "torchrun.sh").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^  launch\.(\w+) +(.+?)(?: \(the default\))?$", script, re.MULTILINE))
    assert shown == {name: app.summary for name, app in launch.apps.APPS.items()} | launch.apps.TOOLS
    assert all(f"launch.{name} " in script for name in [*launch.apps.APPS, *launch.apps.TOOLS])
    launch.cli.main(["--version"])
    assert capsys.readouterr().out == f"lp {lp.__version__}\n"


def test_torchrun_sh_refuses_an_unknown_app() -> None:
    """Before it sets anything up."""
    done = subprocess.run(["bash", "torchrun.sh", "launch.genrate"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no app 'launch.genrate'" in done.stderr and "launch.tune" in done.stderr


def test_public_names_are_the_imported_ones() -> None:
    """lp/__init__.py has them three times: for type checkers, for `import *`, and to import them late."""
    assert sorted(lp.__all__) == lp.__all__ == sorted(lp._MODULES)
    source = (ROOT / "lp" / "__init__.py").read_text(encoding="utf-8").partition("if TYPE_CHECKING:")[2]
    statements = ast.parse(textwrap.dedent(source.partition("__version__")[0])).body
    imported = [alias.name for one in statements if isinstance(one, ast.ImportFrom) for alias in one.names]
    assert sorted(imported) == lp.__all__
    assert all(hasattr(lp, name) for name in lp.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lp.nothing  # noqa: B018
