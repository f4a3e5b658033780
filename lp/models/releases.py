"""Names and behaviour that differ between releases of transformers.

What the installed release has is found by looking at its code, never by its version number. All of this lies in one
file, so that a new release of transformers means work in one file.
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
    """Name of the argument with which a causal LM's forward takes the cache, such as "past_key_values".

    The model's own class decides, since it may be older than the installed transformers. A wrapper that passes all
    arguments on is taken to wrap a model of the installed release.

    Args:
        model: a causal LM or a wrapper of one.
    """
    named = (type(model).forward, GenerationMixin.prepare_inputs_for_generation)
    parameters = [inspect.signature(function).parameters for function in named]
    return next(name for taken in parameters for name in CACHE_NAMES if name in taken)


def cache_name_in(keywords: Mapping[str, Any]) -> str | None:
    """Name of the cache among the arguments of a call, such as "past_key_values"; None: there is no cache among them.

    Releases of transformers differ in that name. The fields of a model's output can be searched in the same way.

    Args:
        keywords: arguments of the call, or fields of the output, by name.
    """
    return next((name for name in CACHE_NAMES if keywords.get(name) is not None), None)


def cache_in(keywords: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call, or the fields of an output, whatever its name; None: there is none.

    Args:
        keywords: arguments of the call, or fields of the output, by name.
    """
    name = cache_name_in(keywords)
    return None if name is None else keywords[name]
