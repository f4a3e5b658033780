"""From a decoder's name and its config to how it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import lp
from lp.attention import choices
from lp.draft.suffix import native_tree
from lp.engine.decoder import Decoder

from .schema import Common, frozen

PLAIN = "autoregressive"  # the oracle the others are held against
METHODS = ("lookahead_auto", PLAIN, "prompt_lookup")  # compared with the one chosen
CHOICES = (*METHODS, "lookahead", "lookahead_paper", "token_recycling", "suffix")  # the last needs an optional package
T = TypeVar("T")
Builder = Callable[[Any, lp.ParallelContext], Decoder]
Builders = dict[str, Builder]


def decoder_builders(config: Common, names: Iterable[str]) -> Builders:
    """How to build the decoders of these names; their configs are checked now.

    Raises:
        ValueError: a value out of range, or a decoder whose package is not installed.
    """
    for key, value, known in (
        ("name", config.attention.name, choices()),
        ("capture", config.attention.capture, list(lp.Capture)),
    ):
        if value not in known:
            raise ValueError(f"attention.{key} is {value!r}; it must be one of {', '.join(known)}")
    if config.decoder.name not in CHOICES:
        chosen = config.decoder.name
        raise ValueError(f"decoder.name is {chosen!r}; choose with decoder=<one of {', '.join(CHOICES)}>")
    return {name: _builder(name, config) for name in names}


def _settings(name: str, config: Common, made: type[T], **defaults: Any) -> T:
    """As the user set the decoder that was chosen; of the others, the defaults."""
    return frozen(made, config.decoder) if config.decoder.name == name else made(**defaults)


def _builder(name: str, config: Common) -> Builder:
    how = (config.attention.name, config.attention.capture)
    shape = {"window_size": config.W, "ngram_size": config.N, "guess_set_size": config.G}
    if name == PLAIN:
        return lambda model, context: lp.AutoregressiveDecoder(model, context)
    if name == "prompt_lookup":
        lookup = _settings(name, config, lp.PromptLookupConfig)
        return lambda model, context: lp.PromptLookupDecoder(model, lookup, context, *how)
    if name == "lookahead_paper":
        paper = _settings(name, config, lp.PaperConfig, **shape)
        return lambda model, context: lp.PaperDecoder(model, paper, context, *how)
    if name == "token_recycling":
        recycling = _settings(name, config, lp.RecyclingConfig)
        return lambda model, context: lp.RecyclingDecoder(model, recycling, context, *how)
    if name == "suffix":
        native_tree()  # refused before the model is loaded
        suffix = _settings(name, config, lp.SuffixConfig)
        return lambda model, context: lp.SuffixDecoder(model, suffix, context, *how)
    own = _settings(name, config, lp.LookaheadConfig, adaptive=name == "lookahead_auto", **shape)
    return lambda model, context: lp.LookaheadDecoder(model, own, context, *how)
