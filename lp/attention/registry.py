"""Registers attention backends by name, and chooses the backends for a model. A new backend is one file:

    @register_attention("ring")
    class Ring(AttentionBackend):
        implementation = "my_ring"  # by which transformers knows the attention function

        def install(self) -> None:
            AttentionInterface.register(self.implementation, ring_attention)
            AttentionMaskInterface.register(self.implementation, sdpa_mask)

Once the file is imported, `lp.LookaheadDecoder(model, attention="ring")` decodes with it, and so do the apps with
`attention=ring`. `AttentionBackend` says what else a backend may define.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from lp.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lp.attention.base import AttentionBackend

AUTO = "auto"
# Backends of this package, each in the module of its name. They are imported when they are first used: torch and
# transformers take seconds, and the apps' `--help` needs only the names.
BUILT_IN = ("sdpa", "eager", "flash", "flex", "by_position")
Backend = TypeVar("Backend", bound="type[AttentionBackend]")
_backends: dict[str, AttentionBackend] = {}


def register_attention(name: str) -> Callable[[Backend], Backend]:
    """Class decorator that registers an AttentionBackend under a name, by which users can choose it.

    Args:
        name: the backend's name, as in `attention=NAME`.

    Raises:
        ValueError: another backend has this name.
    """

    def register(backend: Backend) -> Backend:
        if name in attention_choices() and backend.__module__ != _module_of(name):
            raise UserError(f"an attention backend named {name!r} is registered already; choose another name")
        _backends[name] = backend(name)
        return backend

    return register


def attention_choices() -> list[str]:
    """List the values that the setting `attention` may have: "auto" and the names of all backends."""
    return list(dict.fromkeys([AUTO, *BUILT_IN, *_backends]))


def backend_named(name: str) -> AttentionBackend:
    """Get the backend with this name; a built-in one is imported if needed.

    Args:
        name: value of the setting `attention`, but not "auto".

    Raises:
        ValueError: no backend has this name.
    """
    if name not in _backends and name in BUILT_IN:
        import_module(_module_of(name))
    if name not in _backends:
        raise UserError(f"attention is {name!r}; it must be one of {', '.join(attention_choices())}")
    return _backends[name]


def backends_to_try(model: PreTrainedModel, attention: str) -> list[AttentionBackend]:
    """List the backends to try for a model, the best first; the caller finds out whether the model runs with them.

    Args:
        model: the model.
        attention: name of a backend, which is then the only one in the list. "auto": all backends that can replace the
            implementation that the model was loaded with, and last the backend for this implementation, if there is
            one.

    Raises:
        ValueError: no backend has this name; or, with "auto", no backend suits the model's implementation.
    """
    if attention != AUTO:
        return [backend_named(attention)]
    backends = [backend_named(name) for name in attention_choices() if name != AUTO]
    implementation = model.config._attn_implementation
    loaded = next((backend for backend in backends if backend.implementation == implementation), None)
    settable = getattr(model, "_can_set_attn_implementation", lambda: True)()  # or transformers says at length why not
    better = [backend for backend in backends if settable and _replaces(backend, model, loaded)]
    better.sort(key=lambda backend: backend.priority, reverse=True)
    if loaded is not None:
        better.append(loaded)
    if not better:
        raise UserError(
            f"the model's attention is {implementation!r}, which takes no tree mask; "
            "load it with attn_implementation='sdpa' or 'eager', or choose attention=sdpa"
        )
    return better


def set_attention(model: PreTrainedModel, backend: AttentionBackend) -> None:
    """Make a model compute its attention with a given backend.

    Args:
        model: the model; its attention implementation is changed in place.
        backend: the backend to use.

    Raises:
        ValueError: the model can't use the backend, or would give other results with it; the message has a remedy.
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


def _replaces(backend: AttentionBackend, model: PreTrainedModel, loaded: AttentionBackend | None) -> bool:
    replaced = backend.replaced_in(model)
    return model.config._attn_implementation in replaced or (loaded is not None and loaded.name in replaced)


def _module_of(name: str) -> str:
    return f"lp.attention.{name}"
