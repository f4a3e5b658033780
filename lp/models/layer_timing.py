"""Estimate how long a forward pass of the whole model takes by timing one layer, before the first decode step.

A pass through the LM head, the embeddings, the masks and one layer is timed, and within it the layer. The estimate is
the time of this pass, plus the layer's time for each further layer of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lp.models.clock import clock_of
from lp.models.first_layer import shallow_runner
from lp.models.runner import ModelRunner
from lp.models.sharded_layers import replica_of

# Tokens of the passes. Libraries have kernels of their own for one token and for a few; on some processors bfloat16 is
# slow below 32 (docs/experiments/budget.md).
TIMED_SIZES = (1, 2, 8, 48)
# Passes of each size: the first is not counted, and of the others the fastest counts, since one may be slow by chance.
ROUNDS = 3
# Rounds end after so many seconds of this thread. One round is always complete.
ROUNDS_S = 0.25


def time_passes(runner: ModelRunner, sizes: tuple[int, ...] = TIMED_SIZES) -> dict[int, float]:
    """Estimate how long a pass of the whole model takes, by timing its first layer, before the first decode step.

    Where ranks divide the model, all of them must call this.

    Args:
        runner: the model's runner; other threads may use the model meanwhile.
        sizes: numbers of tokens for which a pass is timed.

    Returns:
        Estimated seconds of a pass, by its number of tokens.
    """
    clock = clock_of(runner.device, replica_of(runner.model))
    shallow = _Shallow(runner, clock)
    divided = replica_of(runner.model).size > 1  # then all of its ranks must run the same passes
    fastest: dict[int, float] = {}
    start = clock()
    with torch.inference_mode():
        for turn in range(ROUNDS):
            if turn > 1 and clock() - start > ROUNDS_S and not divided:
                break
            for size in sizes:
                seconds = shallow.pass_s(size, num_logits=size if turn else 1)
                if turn:  # the first one allocates; what it takes of the LM head is not counted
                    fastest[size] = min(seconds, fastest.get(size, seconds))
    return fastest


class _Shallow:
    """A model with its first layer alone, over the same weights.

    Args:
        runner: the model's runner.
        clock: the device's clock, as `clock_of` gives it.
    """

    def __init__(self, runner: ModelRunner, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._layer_s = 0.0
        self._runner, self._num_layers = shallow_runner(runner, self._timed)

    def _timed(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            start = self._clock()
            out = layer(*args, **keywords)
            self._layer_s += self._clock() - start
            return out

        return timed

    def pass_s(self, num_tokens: int, num_logits: int) -> float:
        """Estimated seconds of a pass of the whole model.

        Args:
            num_tokens: tokens of the pass.
            num_logits: tokens whose logits are computed.
        """
        runner = self._runner
        cache = runner.cache_without_buffers(runner.padded(num_tokens))
        visible = np.tri(num_tokens, dtype=bool)
        tokens = range(num_tokens)
        self._layer_s = 0.0
        start = self._clock()
        runner.forward(tokens, tokens, visible, cache, range(num_logits), capture=False, whole=False)
        seconds = self._clock() - start
        return seconds + (self._num_layers - 1) * self._layer_s
