"""Tests that add adapters by transformers' own call, which refuses a PEFT older than it asks for."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION


def takes_peft() -> bool:
    """Whether transformers takes the installed release of PEFT; the one that it asks for may not be out yet."""
    return Version(peft.__version__) >= Version(MIN_PEFT_VERSION)


def skip_without_peft() -> None:
    """Skip the test where transformers refuses the installed release of PEFT."""
    if not takes_peft():
        pytest.skip(
            f"transformers {transformers.__version__} asks for PEFT {MIN_PEFT_VERSION}, {peft.__version__} is installed"
        )


def add_adapter(model: PreTrainedModel, config: Any, name: str) -> None:
    """`model.add_adapter`, or a skip."""
    skip_without_peft()
    model.add_adapter(config, name)
