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
    """A frozen dataclass with a default for every field, which checks itself."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def shape(self) -> LookaheadConfig:
        """The steps that it takes: the window and the largest draft tree."""


def _alone(numbers: Sequence[int] | None) -> Sequence[int] | None:
    return numbers


def _one(number: int) -> Sequence[int]:
    return [number]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInfo:
    """What a factory may know of a `generate` call before its text begins; every rank knows the same.

    Attributes:
        vocabulary_size: size of the model's vocabulary.
        model_folder: folder that the model was loaded from, or its name; may be empty.
        owner: whose text it is: what sources remember of texts is for the same owner's alone; None: nothing is
            remembered.
        is_main: whether this is the one rank that may write files.
        share: hands rank 0's numbers, int64, or None, to every rank.
        gather: hands every rank's number, int64, to every rank, by rank.
    """

    vocabulary_size: int
    model_folder: str = ""
    owner: str | None = ""
    is_main: bool = True
    share: Callable[[Sequence[int] | None], Sequence[int] | None] = _alone
    gather: Callable[[int], Sequence[int]] = _one


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(CallInfo):
    """What a factory may know of the `generate` call that it makes a source for.

    Attributes:
        prompt: token ids.
        max_length: tokens that the text may reach, the prompt included.
        noise: (seed, sequence) of the sampler's noise; None where tokens are not sampled under it.
        step_tokens: most tokens of a step, on all ranks, that an adaptive budget finds worth their time; None: the
            budget is fixed.
        temperature: the sampler's temperature; 1 where it has none.
        corpora: names of the factory's corpora that the text may look in; None: all.
    """

    prompt: Sequence[int]
    max_length: int
    noise: tuple[int, int] | None
    step_tokens: int | None
    temperature: float
    corpora: Sequence[str] | None = None


class SourceFactory(ABC):
    """Makes the draft sources of a decoder, one for every call, and has what outlives a call.

    Attributes:
        corpora: names of the corpora that calls may choose among.
    """

    corpora: Sequence[str] = ()

    @abstractmethod
    def new_source(self, call: Call) -> DraftSource:
        """Make the source that drafts in one call."""

    def digests(self, info: CallInfo) -> dict[str, int]:
        """Digests that ranks compare before a text, by name: its sources must begin alike on every rank.

        What the sources of an owner's texts need is opened here, where it is the first.
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
        name: how users choose it, as in `decoder=NAME`.
        config: its config's class.
        factory: makes its factory from a config; raises a ValueError where the source cannot be used.
    """

    name: str
    config: type
    factory: Callable[[Any], SourceFactory]


_entries: dict[str, SourceEntry] = {}


def register_source(name: str, config: type, requires: Callable[[], object] | None = None) -> Callable[[T], T]:
    """Register the decorated class, a DraftSource, made as `source(config, prompt)` for every call.

    Args:
        name: how users choose it, as in `decoder=NAME`.
        config: the class of its config, a DraftConfig.
        requires: called when a decoder is made; raises a ValueError where the source cannot be used.

    Raises:
        ValueError: the name or the config is taken, the config is none, or the class is no DraftSource.
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
    """Register the decorated SourceFactory, made as `factory(config)` for every decoder; else as `register_source`."""

    def register(factory: T) -> T:
        _check_class(factory, SourceFactory)
        _add(SourceEntry(name, config, factory))
        return factory

    return register


def sources() -> tuple[SourceEntry, ...]:
    """All of them, in the order of registration."""
    return tuple(_entries.values())


def source_of(config: object) -> SourceEntry:
    """The source that a config is of.

    Raises:
        ValueError: there is none; names those that there are.
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
