"""Turns a caller's arguments into plain lists: token ids of the prompt and of EOS, logits processors, criteria."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from lp.checks import as_int, check_callables, check_int, check_kind, flat_list
from lp.errors import UserError
from lp.models.loader import context_limit
from lp.models.vocabulary import embedded_tokens
from lp.sampling.params import SamplingParams

Prompt = Sequence[int] | np.ndarray | torch.Tensor
Eos = int | Iterable[int] | np.ndarray | torch.Tensor


def check_model(model: Any) -> None:
    """Raise an error if the argument `model` is not a loaded model but something else, such as a model's name.

    Raises:
        UserError: names the value, and the calls that load a model.
    """
    if not isinstance(model, torch.nn.Module):
        raise UserError(
            f"model is {model!r}; it must be a loaded model: AutoModelForCausalLM.from_pretrained(...), or "
            "lp.load(...).model, which takes a folder, a hub name or 'demo'"
        )


def prompt_ids(model: PreTrainedModel, input_ids: Prompt) -> list[int]:
    """Convert a prompt to a list of token ids, and check that the model can continue it.

    Args:
        model: the model whose vocabulary and context length limit the prompt.
        input_ids: token ids, (L,) or (1, L).

    Returns:
        The L token ids.

    Raises:
        ValueError: there are several prompts or none, values that are no integers or outside the vocabulary, or more
            tokens than the model's context has room for.
    """
    if isinstance(input_ids, str | bytes | Mapping):
        raise UserError(f'input_ids is {input_ids!r}; give token ids, as in tokenizer(text)["input_ids"]')
    given = _elements(input_ids)
    if given is None:
        raise UserError(f"input_ids is {input_ids!r}, no sequence of token ids; give them as (L,) or (1, L)")
    if given and (first := _elements(given[0])) is not None:
        if len(given) > 1:
            raise UserError(f"input_ids holds {len(given)} prompts; generate takes one, call it for each")
        given = first
    if not given:
        raise UserError("the prompt is empty; give at least one token, such as the model's BOS")
    vocabulary = embedded_tokens(model)
    ids = list[int]()
    for value in given:
        token = as_int(value)
        if token is None or not 0 <= token < vocabulary:
            raise UserError(f"the prompt has token id {value!r}; this model's vocabulary is 0..{vocabulary - 1}")
        ids.append(token)
    context = context_limit(model)
    if context is not None and len(ids) >= context:
        raise UserError(
            f"the prompt has {len(ids)} tokens, the model's context {context}; leave room for one new token"
        )
    return ids


def eos_ids(model: PreTrainedModel, eos_token_id: Eos | None) -> frozenset[int]:
    """Collect the token ids that end a text.

    Args:
        model: the model, whose generation config has its EOS.
        eos_token_id: one id or several; None: the model's own; an empty sequence: no token ends the text.

    Raises:
        ValueError: a value is no integer.
    """
    given = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
    ids = set[int]()
    for value in [] if given is None else flat_list(given):
        token = as_int(value)
        if token is None:
            raise UserError(f"eos_token_id has {value!r}; give one token id or several, or () for none")
        ids.add(token)
    return frozenset(ids)


def check_seed(seed: int | None) -> None:
    """Refuse a seed of a `generate` call that is neither None nor an integer in [0, 2**63)."""
    if seed is not None:
        check_int("seed", seed, 0, 2**63 - 1, "leave it out to draw one")


def check_sampling(sampling: object) -> None:
    """Raise an error if the argument `sampling` is neither SamplingParams nor None, such as a lone temperature.

    Raises:
        ValueError: names the value and what to give.
    """
    check_kind("sampling", sampling, (SamplingParams, type(None)), "lp.SamplingParams, or None for greedy")


def listed_processors(logits_processor: Iterable[LogitsProcessor] | None) -> list[LogitsProcessor]:
    """A caller's logits processors as a list; empty for None, as in transformers.

    Raises:
        ValueError: the argument is no list, or one of its elements can't be called.
    """
    return check_callables("logits_processor", logits_processor, "a list of transformers' logits processors")


def listed_criteria(stopping_criteria: Iterable[StoppingCriteria] | None) -> list[StoppingCriteria]:
    """A caller's stopping criteria as a list; empty for None, as in transformers.

    Raises:
        ValueError: the argument is no list, or one of its elements can't be called.
    """
    return check_callables("stopping_criteria", stopping_criteria, "a list of transformers' stopping criteria")


def _elements(value: Any) -> list[Any] | None:
    """The elements of a sequence, array or tensor, as plain Python numbers; None if `value` is a lone value."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else None
