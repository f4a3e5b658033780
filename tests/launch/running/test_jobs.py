"""What a long run prints of its folder is a command that can be pasted."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launch.running.jobs import goes_on


@pytest.mark.parametrize("name", ["e,1", "a b", "a  b", "a ", "f(x)", "it's", "a=b", "back\\", "\u65e5", "{x}"])
def test_the_same_command_goes_on_in_any_folder(name: str) -> None:
    """Quoted for the shell alone, `out=/tmp/e,1` was a sweep over two unrelated folders."""
    folder = Path("/runs") / name / "0"
    (override,) = shlex.split(goes_on(folder).partition("the same command with ")[2].removesuffix(" goes on"))
    (out,) = OverridesParser.create().parse_overrides([override])
    assert not out.is_sweep_override() and out.key_or_group == "out"
    assert str(out.value()) == str(folder)


def test_a_plain_folder_is_printed_as_it_is() -> None:
    """Quotes that nobody needs are in the way of a reader."""
    line = goes_on(Path("/runs/2026-01-02/03-04-05-6"))
    assert line.endswith("the same command with out=/runs/2026-01-02/03-04-05-6 goes on")
