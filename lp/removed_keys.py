"""Keys of the apps and arguments of configs that are gone, and what to write instead: the errors about them say it."""

from __future__ import annotations

from typing import Any, Self

from lp.errors import UserError

_SWITCHES = (
    "prompt_ngrams",
    "prompt_logits",
    "output_ngrams",
    "window_ngrams",
    "position_guesses",
    "num_logits",
    "renoise",
    "learn",
    "window_noise",
    "warmup_steps",
    "kv_sync",
)
# By key of an app; the argument of a config is what follows "decoder.".
REMOVED = {
    f"decoder.{name}": f"it is for ablations, in Python: lp.LookaheadConfig(ablation=lp.Ablation({name}=...))"
    for name in _SWITCHES
}


def removal(key: str) -> str | None:
    """What an error says of a key that is gone; None for one that never was."""
    return f"{key} is gone; {REMOVED[key]}" if key in REMOVED else None


class RefusesRemoved:
    """Base of the decoders' configs: an argument that is gone is a UserError that says what to write instead.

    Raises:
        UserError: names the argument and the remedy.
    """

    __slots__ = ()

    def __new__(cls, **given: Any) -> Self:
        known = getattr(cls, "__dataclass_fields__", {})
        for name in given:
            if name not in known and f"decoder.{name}" in REMOVED:
                raise UserError(f"{name} is gone; {REMOVED[f'decoder.{name}']}")
        return super().__new__(cls)
