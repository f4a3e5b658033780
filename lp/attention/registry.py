"""Which attention backend a model runs its steps with."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lp.attention.hf import FLASH, register
from lp.config import Attention
from lp.errors import UserError

NAMES = {Attention.SDPA: "sdpa", Attention.EAGER: "eager", Attention.FLASH: FLASH, Attention.FLEX: "flex_attention"}
_THEIRS = (Attention.SDPA, Attention.EAGER)  # that transformers can load a model with
HALVES = (torch.float16, torch.bfloat16)


def choices(model: PreTrainedModel, attention: Attention) -> list[Attention]:
    """The backends to try in turn: an explicit one alone; for `auto`, flash if it was loaded with sdpa, then that.

    Raises:
        ValueError: the model's own implementation takes no tree mask.
    """
    if attention is not Attention.AUTO:
        return [attention]
    current = model.config._attn_implementation
    loaded = next((name for name, theirs in NAMES.items() if theirs == current), None)
    if loaded is None:
        raise UserError(
            f"the model's attention is {current!r}, which takes no tree mask; "
            "load it with attn_implementation='sdpa' or 'eager', or choose attention=sdpa"
        )
    settable = getattr(model, "_can_set_attn_implementation", lambda: True)()  # or transformers says at length why not
    if loaded is Attention.SDPA and settable and not _unfit_for_flash(model):
        return [Attention.FLASH, loaded]
    return [loaded]


def set_attention(model: PreTrainedModel, attention: Attention) -> None:
    """Set the backend on the model.

    Raises:
        ValueError: it has none of that name, or one that gives other results; names a remedy.
    """
    name, before = type(model).__name__, model.config._attn_implementation
    if attention in (Attention.SDPA, Attention.FLASH) and getattr(
        model.config.get_text_config(), "attn_logit_softcapping", None
    ):
        raise UserError(f"{name} caps its attention scores, which {attention} leaves out; choose attention=eager")
    if attention is Attention.FLASH and (why := _unfit_for_flash(model)):
        raise UserError(f"attention=flash {why}; choose attention=sdpa")
    if attention is Attention.FLEX and model.device.type == "cpu":
        raise UserError("attention=flex is for GPUs, and on a CPU slower than the others; choose attention=flash")
    if attention in (Attention.SDPA, Attention.FLASH) and not getattr(model, "_supports_sdpa", True):
        raise UserError(f"{name} has no sdpa attention in transformers; choose attention={before}")
    if before == NAMES[attention]:
        return
    register()
    model.set_attn_implementation(NAMES[attention])
    if model.config._attn_implementation != NAMES[attention]:  # transformers only warns
        other = f"load it with attn_implementation={NAMES[attention]!r}, or " if attention in _THEIRS else ""
        raise UserError(
            f"{name} cannot change its attention once loaded with {before!r}; {other}choose attention={before}"
        )


def _unfit_for_flash(model: PreTrainedModel) -> str | None:
    if model.device.type == "cuda" and model.dtype not in HALVES:
        return f"takes float16 and bfloat16 on a GPU, and this model is {model.dtype}"
    if model.device.type not in ("cpu", "cuda"):
        return f"runs on CPUs and CUDA devices, not on {model.device.type!r}"
    return None
