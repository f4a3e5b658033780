"""The registry of draft sources. A new draft source is one file of this form:

    @dataclass(frozen=True, kw_only=True, slots=True)
    class RepeatConfig:
        num_tokens: int = 8

        def shape(self) -> LookaheadConfig:
            return windowless(self.num_tokens)

    @register_source("repeat", RepeatConfig)
    class Repeat(DraftSource):
        def __init__(self, config: RepeatConfig, prompt: Sequence[int]) -> None: ...
        def propose(self, text, budget, window, price) -> DraftTree: ...

Once this file is imported, `lp.LookaheadDecoder(model, RepeatConfig())` decodes with the new source, and so do the apps
with `decoder=repeat`. Built-in sources are imported by `lp/draft/__init__.py`.
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
    """Settings of a draft source: a frozen dataclass that checks its values, with a default for every field."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def shape(self) -> LookaheadConfig:
        """Return lookahead settings for the source's largest step: window size, and most draft tokens."""


def _alone(numbers: Sequence[int] | None) -> Sequence[int] | None:
    return numbers


def _one(number: int) -> Sequence[int]:
    return [number]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInfo:
    """Facts of a `generate` call from which a factory opens files before the text begins.

    They are equal on all ranks, except for `is_main`.

    Attributes:
        vocabulary_size: V, number of tokens in the model's vocabulary.
        model_folder: path of the folder from which the model was loaded, or the model's name; may be empty.
        owner: name of the user whom the text belongs to, such as the name of an API key; may be empty. What draft
            sources remember of a text is used only for later texts of the same owner. None: nothing is remembered.
        is_main: whether this rank is rank 0, the only one that may write files.
        share: function that sends rank 0's argument (int64 numbers, or None) to all ranks, and returns it on each of
            them.
        gather: function that returns the arguments of all ranks, one int64 number each, in the order of ranks.
    """

    vocabulary_size: int
    model_folder: str = ""
    owner: str | None = ""
    is_main: bool = True
    share: Callable[[Sequence[int] | None], Sequence[int] | None] = _alone
    gather: Callable[[int], Sequence[int]] = _one


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(CallInfo):
    """Facts of one `generate` call from which a factory makes the call's draft source.

    They are equal on all ranks, except for `is_main`.

    Attributes:
        prompt: token ids of the prompt.
        max_length: most tokens of the text, the prompt included.
        noise: (seed, sequence number) of the sampler's Gumbel noise, from which a draft source can foresee samples;
            None if the sampler uses no such noise.
        step_tokens: most tokens of a decode step, on all ranks together, that an adaptive budget finds worth their
            time; None if the budget is fixed.
        temperature: temperature of the sampler; 1 if it has none.
        corpora: names of the corpora (indexes of files) from which the text may be drafted; None: all corpora.
    """

    prompt: Sequence[int]
    max_length: int
    noise: tuple[int, int] | None
    step_tokens: int | None
    temperature: float
    corpora: Sequence[str] | None = None


class SourceFactory(ABC):
    """Makes a draft source for each `generate` call of a decoder, and keeps what draft sources remember between calls.

    Attributes:
        corpora: names of the corpora (indexes of files) from which a request may choose; empty if there are none.
    """

    corpora: Sequence[str] = ()

    @abstractmethod
    def new_source(self, call: Call) -> DraftSource:
        """Make the draft source for one `generate` call.

        Args:
            call: facts of the call, such as its prompt and its sampler's settings.
        """

    def digests(self, info: CallInfo) -> dict[str, int]:
        """Digests of all data with which a text's draft source begins; ranks compare them, and fail if they differ.

        Files that an owner's draft sources need are opened here, before the owner's first text.

        Args:
            info: facts of the `generate` call that is about to begin.

        Returns:
            Digests, int64, by the name that an error message shows, such as "corpora"; the names are the same on every
            rank.
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
    """A draft source in the registry, with its settings and its factory.

    Attributes:
        name: name by which users choose the source, as in `decoder=NAME`.
        config: class of the source's settings, a DraftConfig.
        factory: function that makes the SourceFactory from an instance of `config`; raises a ValueError if the source
            can't be used, for example because a package is missing.
    """

    name: str
    config: type
    factory: Callable[[Any], SourceFactory]


_entries: dict[str, SourceEntry] = {}


def register_source(name: str, config: type, requires: Callable[[], object] | None = None) -> Callable[[T], T]:
    """Class decorator that registers a DraftSource, so that users can choose it by a name.

    Every `generate` call makes one instance of the decorated class, as `source(config, prompt)`.

    Args:
        name: name by which users choose the source, as in `decoder=NAME`.
        config: class of the source's settings, a DraftConfig.
        requires: function that is called when a decoder is made; raises a ValueError if the source can't be used, for
            example because a package is missing. None: the source can always be used.

    Raises:
        ValueError: the name or the settings class is registered already, the settings class is no DraftConfig, or the
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
    """Class decorator that registers the SourceFactory of a draft source which remembers things between calls.

    Every decoder makes one instance of the decorated class, as `factory(config)`. This instance makes a draft source
    for each call.

    Args:
        name: name by which users choose the source, as in `decoder=NAME`.
        config: class of the source's settings, a DraftConfig.

    Raises:
        ValueError: the name or the settings class is registered already, the settings class is no DraftConfig, or the
            decorated class is no SourceFactory.
    """

    def register(factory: T) -> T:
        _check_class(factory, SourceFactory)
        _add(SourceEntry(name, config, factory))
        return factory

    return register


def sources() -> tuple[SourceEntry, ...]:
    """List all registered draft sources, in the order in which they were registered."""
    return tuple(_entries.values())


def source_of(config: object) -> SourceEntry:
    """Find the registered draft source that belongs to the settings given by a user.

    Args:
        config: instance of a registered settings class, such as `JacobiConfig()`.

    Raises:
        ValueError: no draft source is registered for this class; the message lists the registered classes.
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
