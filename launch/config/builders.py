"""Decoders by name: functions that build them for a loaded model, from the run's config."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

import lp
from lp.attention.registry import attention_choices
from lp.config import KVDtype
from lp.draft.registry import DraftConfig, source_of
from lp.engine.decoder import Decoder
from lp.errors import UserError
from lp.sampling.generation_config import NONE

from .schema import POOL_KEYS, SHAPE_KEYS, Common, decoder_choices, frozen

PLAIN = "plain"  # one token a step on the same engine: what speeds are compared with
ALONE = "@1"  # ends the name of a method that runs on rank 0 alone
ORACLE = "autoregressive"  # one token a step without that engine: what tokens are compared with
METHODS = ("lookahead_auto", PLAIN, "prompt_lookup")  # compared with the one chosen
Builder = Callable[[Any, lp.ParallelContext], Decoder]
Builders = dict[str, Builder]
D = TypeVar("D", bound=Decoder)


def decoder_names() -> tuple[str, ...]:
    """Names that `decoder=` takes: plain decoding, the oracle (autoregressive), and every registered draft source.

    A draft source is a way to draft tokens, such as lookahead or prompt lookup.
    """
    return tuple(dict.fromkeys([*METHODS, ORACLE, *decoder_choices()]))


def decoder_builders(config: Common, names: Iterable[str]) -> Builders:
    """Make the functions that build decoders for a loaded model; the settings are checked before it is loaded.

    Args:
        config: the run's config.
        names: names of decoders, such as "lookahead".

    Returns:
        A function (model, context) -> decoder for each name.

    Raises:
        ValueError: a value out of range, or a decoder whose package is not installed.
    """
    for key, value, known in (
        ("name", config.attention.name, attention_choices()),
        ("capture", config.attention.capture, list(lp.Capture)),
    ):
        if value not in known:
            raise UserError(f"attention.{key} is {value!r}; it must be one of {', '.join(known)}")
    KVDtype.of(config.model.kv_dtype)
    if config.exact not in list(lp.Exact):
        raise UserError(f"exact is {config.exact!r}; it must be one of {', '.join(lp.Exact)}")
    if config.exact == lp.Exact.BITWISE and config.decoder.name == ORACLE:
        raise UserError(f"exact=bitwise is of this engine, and decoder={ORACLE} is transformers' own; choose another")
    if config.decoder.name not in decoder_names():
        chosen = config.decoder.name
        raise UserError(f"decoder.name is {chosen!r}; choose with decoder=<one of {', '.join(decoder_names())}>")
    return {name: _builder(name, config) for name in names}


def guess_set_sizes(config: Common, names: Iterable[str]) -> dict[str, int]:
    """G (the paper's guess_set_size) of each decoder that has one, by the decoder's name.

    Args:
        config: the run's config.
        names: names of decoders.

    Raises:
        ValueError: a value out of range.
    """
    settings = draft_configs(config, names).items()
    return {name: each.guess_set_size for name, each in settings if hasattr(each, "guess_set_size")}


def draft_configs(config: Common, names: Iterable[str]) -> dict[str, DraftConfig]:
    """Settings for drafting tokens, by decoder; decoders that draft nothing are left out.

    Plain decoding and the oracle (autoregressive) draft nothing.

    Args:
        config: the run's config.
        names: names of decoders.

    Raises:
        ValueError: a value out of range.
    """
    choices = decoder_choices()
    return {name: _settings(name, config) for name in names if name in choices}


def has_pool(names: Iterable[str]) -> bool:
    """Whether at least one of these decoders drafts from an n-gram pool.

    Args:
        names: names of decoders.
    """
    choices = decoder_choices()
    return any(choices[name].has(field) for name in names if name in choices for field in POOL_KEYS)


def measured(decoder: D) -> D:
    """Make a decoder ignore the checkpoint's generation config, so that runs of different models are measured alike.

    Apps that follow the generation config turn it on again afterwards.

    Args:
        decoder: the decoder, which is changed and returned.
    """
    decoder.follows = NONE
    return decoder


def _builder(name: str, config: Common) -> Builder:
    attention, capture, exact = config.attention.name, config.attention.capture, config.exact
    kv_dtype = config.model.kv_dtype
    if name == ORACLE:
        return lambda model, context: lp.AutoregressiveDecoder(model, context, kv_dtype)
    if name == PLAIN:
        return lambda model, context: measured(lp.PlainDecoder(model, context, attention, capture, exact, kv_dtype))
    settings = _settings(name, config)
    source_of(settings).factory(settings)  # a package that is missing is refused before the model is loaded
    own = attention, capture, None, exact, kv_dtype
    return lambda model, context: measured(lp.LookaheadDecoder(model, settings, context, *own))


def _settings(name: str, config: Common) -> DraftConfig:
    """A decoder's settings: the user's if it is the chosen one, else defaults; W, N, G and the pool are the run's."""
    choice = decoder_choices()[name]
    given = {field: value for field, value in shape_and_pool(config).items() if choice.has(field)}
    if config.decoder.name == name:
        return frozen(choice.config, config.decoder, **choice.values, **given)
    return choice.config(**choice.values, **given)


def shape_and_pool(config: Common) -> dict[str, Any]:
    """The run's W, N, G and settings of the n-gram pool, by their names in draft configs, such as window_size.

    Settings that are null are left out.
    """
    values = {field: attrgetter(key)(config) for field, key in (SHAPE_KEYS | POOL_KEYS).items()}
    return {field: value for field, value in values.items() if value is not None}
