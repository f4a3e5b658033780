"""The attention backends by name, and which one a model runs its steps with."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from lp.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lp.attention.base import AttentionBackend

AUTO = "auto"
BUILT_IN = ("sdpa", "eager", "flash", "flex")  # modules of this package; imported when needed, as they import torch
Backend = TypeVar("Backend", bound="AttentionBackend")
_BACKENDS: dict[str, AttentionBackend] = {}


def register(backend: type[Backend]) -> type[Backend]:
    """Make a backend a choice by its name; a class decorator.

    Raises:
        ValueError: another backend has the name.
    """
    name = backend.name
    if name == AUTO or name in _BACKENDS:
        raise UserError(f"an attention backend is named {name!r} already; give it another name")
    _BACKENDS[name] = backend()
    return backend


def unregister(name: str) -> None:
    """Forget a backend, such as one of a test."""
    del _BACKENDS[name]


def choices() -> list[str]:
    """What `attention` may be: "auto" and the names of all backends."""
    return [AUTO, *dict.fromkeys([*BUILT_IN, *_BACKENDS])]


def backends() -> dict[str, AttentionBackend]:
    """All of them by name."""
    for name in BUILT_IN:
        import_module(f"lp.attention.{name}")
    return _BACKENDS


def backend_named(name: str) -> AttentionBackend:
    """The backend of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in backends():
        raise UserError(f"attention is {name!r}; it must be one of {', '.join(choices())}")
    return _BACKENDS[name]


def backends_to_try(model: PreTrainedModel, attention: str) -> list[AttentionBackend]:
    """The backends to try in turn: a named one alone; for "auto", what may replace the one it was loaded with, then it.

    Raises:
        ValueError: no such backend, or the model's own implementation takes no tree mask.
    """
    if attention != AUTO:
        return [backend_named(attention)]
    implementation = model.config._attn_implementation
    loaded = next((backend for backend in backends().values() if backend.implementation == implementation), None)
    if loaded is None:
        raise UserError(
            f"the model's attention is {implementation!r}, which takes no tree mask; "
            "load it with attn_implementation='sdpa' or 'eager', or choose attention=sdpa"
        )
    settable = getattr(model, "_can_set_attn_implementation", lambda: True)()  # or transformers says at length why not
    if not settable:
        return [loaded]
    better = [
        backend for backend in backends().values() if loaded.name in backend.replaces and not backend.unfit(model)
    ]
    better.sort(key=lambda backend: backend.priority, reverse=True)
    return [*better, loaded]


def set_attention(model: PreTrainedModel, backend: AttentionBackend) -> None:
    """Make a model run with a backend.

    Raises:
        ValueError: the model cannot, or would give other results; names a remedy.
    """
    if reason := backend.unfit(model):
        raise UserError(reason)
    before = model.config._attn_implementation
    if before == backend.implementation:
        return
    backend.install()
    model.set_attn_implementation(backend.implementation)
    if model.config._attn_implementation != backend.implementation:  # transformers only warns
        remedy = f"choose attention={before}"
        if backend.loadable:
            remedy = f"load it with attn_implementation={backend.implementation!r}, or {remedy}"
        raise UserError(f"{type(model).__name__} cannot change its attention once loaded with {before!r}; {remedy}")
