"""Where draft sources are registered. A new one is one file, of this form:

    @dataclass(frozen=True, kw_only=True, slots=True)
    class RepeatConfig:
        num_tokens: int = 8

        def shape(self) -> LookaheadConfig:
            return windowless(self.num_tokens)

    @register_source("repeat", RepeatConfig)
    class Repeat(DraftSource):
        def __init__(self, config: RepeatConfig, prompt: Sequence[int]) -> None: ...
        def propose(self, text, budget, window, price) -> DraftTree: ...

Once the file is imported, `lp.LookaheadDecoder(model, RepeatConfig())` decodes with it, and so do the apps with
`decoder=repeat`. Built-in sources are imported by `lp/draft/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from lp.config import LookaheadConfig
from lp.draft.source import DraftSource
from lp.errors import UserError

T = TypeVar("T", bound=type)


class DraftConfig(Protocol):
    """The settings of a draft source: a frozen dataclass with a default for every field, which checks its values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def shape(self) -> LookaheadConfig:
        """How large the source's steps may be: the window, and the most draft tokens."""


def _alone(numbers: Sequence[int] | None) -> Sequence[int] | None:
    return numbers


def _one(number: int) -> Sequence[int]:
    return [number]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInfo:
    """The facts of a `generate` call with which a factory opens files before the text begins; equal on all ranks.

    Attributes:
        vocabulary_size: V, number of tokens of the model's vocabulary.
        model_folder: the folder that the model was loaded from, or its name; may be empty.
        owner: whose text it is, such as the name of an API key; may be empty. What draft sources remember of a text
            serves later texts of the same owner alone. None: nothing is remembered.
        is_main: whether this rank is rank 0, which alone may write files; the one fact that differs between ranks.
        share: sends rank 0's argument, int64 numbers or None, to every rank, and returns it there.
        gather: returns every rank's argument, an int64 number, by rank.
    """

    vocabulary_size: int
    model_folder: str = ""
    owner: str | None = ""
    is_main: bool = True
    share: Callable[[Sequence[int] | None], Sequence[int] | None] = _alone
    gather: Callable[[int], Sequence[int]] = _one


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(CallInfo):
    """The facts of one `generate` call, from which a factory makes the call's draft source; equal on all ranks.

    Attributes:
        prompt: token ids.
        max_length: most tokens of the text, the prompt included.
        noise: (seed, sequence number) of the sampler's noise, so that a source can foresee samples; None if the sampler
            draws otherwise, or not at all.
        step_tokens: most tokens of a step, on all ranks together, that an adaptive budget finds worth their time; None
            if the budget is fixed.
        temperature: temperature of the sampler; 1 if it has none.
        corpora: names of the corpora that the text may be drafted from; None: all.
    """

    prompt: Sequence[int]
    max_length: int
    noise: tuple[int, int] | None
    step_tokens: int | None
    temperature: float
    corpora: Sequence[str] | None = None


class SourceFactory(ABC):
    """Makes a draft source for each `generate` call of a decoder, and keeps what sources remember between calls.

    Attributes:
        corpora: names of the corpora that a request may choose from; empty if there are none.
    """

    corpora: Sequence[str] = ()

    @abstractmethod
    def new_source(self, call: Call) -> DraftSource:
        """Make the draft source of one call."""

    def digests(self, info: CallInfo) -> dict[str, int]:
        """Digests of what a text's draft source begins with: ranks compare them, and refuse to start if they differ.

        Files that sources of this owner need are opened here, before the owner's first text.

        Args:
            info: the call that is about to begin.

        Returns:
            Digests, int64, by the name that an error message shows, such as "corpora"; every rank has the same names.
        """
        return {}


class _OneEachCall(SourceFactory):
    """The factory of a source that needs nothing but its config and the prompt."""

    def __init__(self, source: Callable[[Any, Sequence[int]], DraftSource], config: DraftConfig) -> None:
        self.source = source
        self.config = config

    def new_source(self, call: Call) -> DraftSource:
        return self.source(self.config, call.prompt)


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """A registered draft source.

    Attributes:
        name: what users choose it by, as in `decoder=NAME`.
        config: class of its settings, a DraftConfig.
        factory: makes its SourceFactory from such settings; raises a ValueError if the source cannot be used, for
            example because a package is missing.
    """

    name: str
    config: type
    factory: Callable[[Any], SourceFactory]


_entries: dict[str, SourceEntry] = {}


def register_source(name: str, config: type, requires: Callable[[], object] | None = None) -> Callable[[T], T]:
    """Class decorator that makes a DraftSource available to users by a name.

    Every `generate` call makes one instance, as `source(config, prompt)`.

    Args:
        name: what users choose it by, as in `decoder=NAME`.
        config: class of its settings, a DraftConfig.
        requires: called when a decoder is made; raises a ValueError if the source cannot be used, for example because
            a package is missing.

    Raises:
        ValueError: the name or the config class is registered already, the config class is no DraftConfig, or the
            decorated class is no DraftSource.
    """

    def register(source: T) -> T:
        _check_class(source, DraftSource)

        def factory(settings: DraftConfig) -> SourceFactory:
            if requires is not None:
                requires()
            return _OneEachCall(source, settings)

        _add(SourceEntry(name, config, factory))
        return source

    return register


def register_factory(name: str, config: type) -> Callable[[T], T]:
    """Class decorator for a draft source that remembers things between calls: registers its SourceFactory.

    Every decoder makes one instance, as `factory(config)`; the instance makes a source for each call.

    Args:
        name: what users choose it by, as in `decoder=NAME`.
        config: class of its settings, a DraftConfig.

    Raises:
        ValueError: the name or the config class is registered already, the config class is no DraftConfig, or the
            decorated class is no SourceFactory.
    """

    def register(factory: T) -> T:
        _check_class(factory, SourceFactory)
        _add(SourceEntry(name, config, factory))
        return factory

    return register


def sources() -> tuple[SourceEntry, ...]:
    """All registered draft sources, in the order of registration."""
    return tuple(_entries.values())


def source_of(config: object) -> SourceEntry:
    """Find the registered draft source for the settings that a user gave.

    Args:
        config: an instance of a registered DraftConfig class, such as `JacobiConfig()`.

    Raises:
        ValueError: no draft source is registered for its class; the message lists the registered ones.
    """
    for entry in _entries.values():
        if type(config) is entry.config:
            return entry
    known = ", ".join(entry.config.__name__ for entry in _entries.values())
    raise UserError(
        f"no draft source is registered for a config of type {type(config).__name__}; give one of {known}, or register "
        "yours with lp.register_source"
    )


def _check_class(given: type, wanted: type) -> None:
    if not (isinstance(given, type) and issubclass(given, wanted)):
        raise UserError(
            f"{given!r} is no {wanted.__name__}; make it a subclass of {wanted.__module__}.{wanted.__name__}"
        )


def _add(entry: SourceEntry) -> None:
    if not is_dataclass(entry.config) or not hasattr(entry.config, "shape"):
        raise UserError(f"{entry.config!r} is no config of a draft source; make it a dataclass with shape()")
    if entry.name in _entries:
        raise UserError(f"a draft source named {entry.name!r} is registered already; choose another name")
    if any(other.config is entry.config for other in _entries.values()):
        raise UserError(f"{entry.config.__name__} is the config of another draft source; give each its own")
    _entries[entry.name] = entry
