"""What releases of transformers name or do differently: found by asking the installed one, never by its number.

Everything of this kind lies here, so that a new release is one file's work.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import GenerationMixin

# What a forward pass calls its cache, the present name first: one call has one of them.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# The method of layers that cache latents which makes keys and values of them; older releases cache keys and values.
EXPAND_LATENTS = "expand_kv"


def cache_keyword(model: nn.Module) -> str:
    """The name under which a causal LM takes its cache: that of its own class, which may be older than transformers.

    A wrapper that passes everything on is taken to wrap a model of the installed release.
    """
    named = (type(model).forward, GenerationMixin.prepare_inputs_for_generation)
    parameters = [inspect.signature(function).parameters for function in named]
    return next(name for taken in parameters for name in CACHE_NAMES if name in taken)


def cache_name_in(keywords: Mapping[str, Any]) -> str | None:
    """What the cache is called among the keywords of a call, or the fields of an output; None without one."""
    return next((name for name in CACHE_NAMES if keywords.get(name) is not None), None)


def cache_in(keywords: Mapping[str, Any]) -> Any:
    """The cache among the keywords of a call, or the fields of an output; None without one."""
    name = cache_name_in(keywords)
    return None if name is None else keywords[name]
