"""lp.models.compile_options: pyproject.toml allows releases of torch that lack an option of the newest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lp.models.compile_options import compile_options


def test_torch_takes_every_option() -> None:
    """The one at hand: whatever it lacks raises a TypeError here."""
    assert torch.compile(lambda x: x + 1, **compile_options())(torch.zeros(1)) == 1


@pytest.mark.parametrize("known", [True, False])
def test_an_option_is_given_where_torch_knows_it(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases raise a TypeError for it, newer ones stop compiling without it."""

    def older(model: Callable[..., Any], *, fullgraph: bool = False, dynamic: bool | None = None) -> None: ...

    def newer(
        model: Callable[..., Any],
        *,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        isolate_recompiles: bool = False,
    ) -> None: ...

    monkeypatch.setattr(torch, "compile", newer if known else older)
    assert compile_options() == {"fullgraph": True, "dynamic": False} | ({"isolate_recompiles": True} if known else {})
    torch.compile(print, **compile_options())
