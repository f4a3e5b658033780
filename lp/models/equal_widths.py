"""Find the numbers of tokens in a pass (widths) at which a token gets the same bits, whatever else is in the pass.

On most machines and at most numbers of rows, a matrix product sums a row (the hidden state of one token) alike whatever
the other rows are. But libraries have other kernels for a few rows, and element-wise code rounds differently at the end
of a thread's part of a tensor. So the model itself is tried, with the number of threads that it runs with. Tokens that
follow one prefix are computed at each width, beside other tokens and in other places, and every row is compared. The
experts of a mixture are also tried by themselves, with one token and with many.

A trial may miss one difference. Torch computes SiLU and sigmoid on vectors of numbers, and the numbers at the end of a
tensor that fill no vector one at a time, which rounds a few of a hundred differently. So widths are left out at which a
layer's rows would not fill vectors.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import nn

from lp.errors import RanksParted, UserError
from lp.models.experts_by_row import experts_of, pad_experts
from lp.models.few_layers import FewLayers, decoder_layers, first_of_each, kind_of_layer
from lp.models.kv_cache import StaticKVCache
from lp.models.latents import BLOCK
from lp.models.runner import ModelRunner
from lp.models.sharded_layers import replica_of
from lp.models.vocabulary import embedded_tokens

logger = logging.getLogger(__name__)
WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)  # tokens
REFERENCE = BLOCK  # the width that the others are compared with
VECTORS = 64  # numbers, of at least two bytes, that torch's element-wise code takes at once, at most
PREFIX = 320  # cached tokens before them: enough for a full tile of attention's kernel and a part of one


def equal_widths(runner: ModelRunner) -> tuple[int, ...]:
    """Find the numbers of tokens (widths) that `exact="bitwise"` pads passes to: at each, a token gets the same bits.

    At each width a token's logits, its KV and the sum over its experts are compared with those at one reference width.
    One layer of each kind and the LM head are tried, or all layers where the model's code does not run with a few.
    Ranks that divide a model try at the same time, and get the widths at which all of them agree.

    Args:
        runner: the model's runner, made with `same_bits=True`.

    Returns:
        Numbers of tokens in a pass, ascending.

    Raises:
        ValueError: even at the reference width, a token's bits depend on the other tokens in the pass.
    """
    model = runner.original
    replica, every = replica_of(runner.model), range(len(decoder_layers(model)))
    firsts = first_of_each(model, _kind)  # ranks have parts of their own, and must run the same passes
    kept = [*compress(every, replica.any_rank([layer in firsts for layer in every], runner.device))]
    with torch.inference_mode():
        try:
            agree = _agreeing(runner, FewLayers(model, {*kept}))
        except (RanksParted, UserError, torch.OutOfMemoryError):
            raise
        except Exception as failure:  # a model's code may not run with few layers
            logger.info("all layers of %s are asked, for a few do not run: %s", type(model).__name__, failure)
            agree = _agreeing(runner, FewLayers(model, {*every}))
    differ = replica.any_rank([not each for each in agree], runner.device)
    equal = tuple(width for width, differs in zip(WIDTHS, differ, strict=True) if not differs)
    if REFERENCE not in equal:
        where, remedy = f" on {runner.device.type!r}", ""
        if runner.device.type == "cpu":
            where = f", with {torch.get_num_threads()} threads"
            remedy = "try one thread (threads=1, or torch.set_num_threads(1)), or "
        name = type(model).__name__
        raise UserError(
            f"exact is 'bitwise', but {name} gives a token other bits beside other tokens{where}; "
            f"{remedy}choose exact=tokens"
        )
    return equal


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What the bits of a layer's rows go by: what it computes, and how its weights lie in memory."""
    weights = [(weight.shape, weight.stride(), weight.dtype) for weight in layer.parameters()]
    return (*kind_of_layer(layer), *weights)


def _filling(model: Any) -> set[int]:
    """The widths at which layers' rows fill vectors, whatever sizes their weights have."""
    weights = [weight for layer in decoder_layers(model) or [model] for weight in layer.parameters()]
    sizes = {size for weight in weights if weight.is_floating_point() and weight.ndim > 1 for size in weight.shape[-2:]}
    return {width for width in WIDTHS if all(width * size % VECTORS == 0 for size in sizes)}


def _agreeing(runner: ModelRunner, view: FewLayers) -> list[bool]:
    """Whether a few layers agree, at each of WIDTHS."""
    pad_experts(view.model, ())
    view.model(torch.zeros(1, 1, dtype=torch.int64, device=runner.device), use_cache=False)
    view.settle()
    asked = runner.over(view.model)
    rng = random.Random(0)
    vocabulary = embedded_tokens(asked.model)
    tokens = [rng.randrange(vocabulary) for _ in range(PREFIX)]
    cache = asked.cache_without_buffers(PREFIX + WIDTHS[-1])
    asked.forward(tokens, range(PREFIX), np.tri(PREFIX, dtype=bool), cache, [0], capture=False)
    cache.commit(range(PREFIX))
    tokens = tokens[: WIDTHS[-1]]
    blocks = [tokens[start : start + REFERENCE] for start in range(0, len(tokens), REFERENCE)]
    reference = torch.cat([_rows(asked, cache, block) for block in blocks])
    experts = [_Asked(each) for each in experts_of(asked.model)]

    def agrees(width: int) -> bool:
        drawn = rng.sample(range(len(tokens)), width)
        rows = _rows(asked, cache, [tokens[index] for index in drawn])
        return torch.equal(rows, reference[drawn]) and all(each.agrees(drawn) for each in experts)

    filling = _filling(asked.model)
    return [agrees(width) and width in filling for width in WIDTHS]


def _rows(runner: ModelRunner, cache: StaticKVCache, tokens: Sequence[int]) -> torch.Tensor:
    """Logits and KV of tokens that each follow the prefix, in one pass.

    Returns:
        (len(tokens), numbers of a token).
    """
    count, first = len(tokens), cache.length
    logits = runner.forward(tokens, [first] * count, np.eye(count, dtype=bool), cache, range(count), capture=False)
    written = [states for layer in range(runner.config.num_hidden_layers) if (states := cache.whole(layer))]
    rows = [part[0, :, first : first + count].transpose(0, 1).flatten(1) for states in written for part in states]
    return torch.cat([logits, *rows], 1)


class _Asked:
    """The experts of a layer, who are asked about rows that are drawn.

    Args:
        experts: transformers' module.
    """

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        self._several = experts.num_experts > 1
        weight = experts.down_proj
        size = weight.shape[2 if experts.is_transposed else 1]
        drawn = torch.randn(WIDTHS[-1], size, generator=torch.Generator().manual_seed(0))
        self._states = drawn.to(weight.device, weight.dtype)
        self._reference = torch.cat([self._outputs(part, [0] * len(part)) for part in self._states.split(REFERENCE)])

    def agrees(self, drawn: Sequence[int]) -> bool:
        """Whether an expert gives a token the same bits beside all of these, and with no other."""
        states, reference = self._states[drawn], self._reference[drawn]
        count = len(drawn)
        if not torch.equal(self._outputs(states, [0] * count), reference):
            return False
        for alone in (0, count // 2, count - 1) if self._several else ():
            outputs = self._outputs(states, [int(token != alone) for token in range(count)])
            if not torch.equal(outputs[alone], reference[alone]):
                return False
        return True

    def _outputs(self, states: torch.Tensor, experts: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(experts, device=states.device)[:, None]
        outputs: torch.Tensor = self._experts(states, index, torch.full_like(index, 0.7, dtype=states.dtype))
        return outputs
