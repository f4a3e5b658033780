"""Models with several LoRA adapters of PEFT, of which a text chooses one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from torch import nn
from transformers import PreTrainedModel

from lp.models.adapters import OTHER_ROWS
from tests.support.peft_releases import skip_without_peft

NAMES = ("red", "green", "blue")


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers whose rows are the tokens of a pass, but for those that PEFT refuses beside Mamba."""
    named = [(name, each) for name, each in model.named_modules() if not OTHER_ROWS.search(name)]
    return [name for name, each in named if type(each) is nn.Linear and not name.endswith("out_proj")]


def add_adapters(model: Any, seed: int = 7, names: tuple[str, ...] = NAMES, **fields: Any) -> None:
    """Add random adapters of different ranks to a model in place; none is active.

    Args:
        model: a causal LM without adapters.
        seed: seed that the adapters are drawn with.
        names: what they are called.
        fields: fields of LoraConfig.

    A test is skipped where transformers refuses the PEFT that is installed.
    """
    skip_without_peft()
    dtype = model.dtype
    settings: dict[str, Any] = {"lora_alpha": 16, "init_lora_weights": False, "target_modules": linear_layers(model)}
    torch.manual_seed(seed)
    for rank, name in enumerate(names, 2):
        config = peft.LoraConfig(task_type="CAUSAL_LM", **settings | {"r": rank} | fields)
        model.add_adapter(config, adapter_name=name)
    model.disable_adapters()
    model.to(dtype).eval()


@contextmanager
def active(model: PreTrainedModel, name: str | None) -> Iterator[None]:
    """Within the block the model is what PEFT makes of this adapter; None: without any."""
    if name is not None:
        model.enable_adapters()
        model.set_adapter(name)
    try:
        yield
    finally:
        if name is not None:
            model.disable_adapters()
