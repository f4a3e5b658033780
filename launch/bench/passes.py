"""Forward passes over a cached prefix, as calls to be timed.

T: tokens of a pass, L: cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.draft.layout import StepLayout, ancestors
from lp.models.runner import ModelRunner

from .ceilings import Call

HEAD_CALLS = 8  # timed together: one alone is as short as a launch


class Passes:
    """Passes of one runner behind the same prefix; none is committed, so that each starts from the same cache.

    Args:
        runner: runs them.
        prefix: tokens, L.
        max_tokens: T of the largest pass.
        chunk: tokens of a pass of the prefill.
    """

    def __init__(self, runner: ModelRunner, prefix: Sequence[int], max_tokens: int, chunk: int) -> None:
        self.runner = runner
        self.prefix = list(prefix)
        self.cache = runner.new_cache(len(prefix) + max_tokens)
        runner.prefill(self.prefix, self.cache, chunk)

    def chain(self, num_tokens: int) -> Call:
        """T tokens, each behind the one before, all sampled."""
        return self._call(range(num_tokens), np.tri(num_tokens, dtype=bool), range(num_tokens))

    def share(self, layout: StepLayout, count: int) -> Call:
        """The first `count` tokens of a rank's step: nodes come before those that see them, so they are a step too."""
        offsets = (layout.step_positions[:count] - layout.step_positions[0]).tolist()
        visible = ancestors(layout.step_parents)
        return self._call(offsets, visible[:count, :count], sampled_of(layout, count))

    def _call(self, offsets: Sequence[int], visible: np.ndarray, sample_at: Sequence[int]) -> Call:
        start = len(self.prefix)
        tokens = [self.prefix[i % start] for i in range(len(offsets))]
        positions = [start + offset for offset in offsets]
        return partial(self.runner.forward, tokens, positions, visible, self.cache, list(sample_at))


def sampled_of(layout: StepLayout, count: int) -> list[int]:
    """Which of the first `count` tokens of a rank's step are sampled."""
    return [token for token in layout.sampled_tokens if token < count]


def head_call(model: PreTrainedModel, num_tokens: int) -> Call:
    """The LM head on this many tokens, HEAD_CALLS times."""
    head = model.get_output_embeddings()
    width = model.get_input_embeddings().weight.shape[1]
    hidden = torch.randn(num_tokens, width, device=head.weight.device).to(head.weight.dtype)

    def call() -> None:
        for _ in range(HEAD_CALLS):
            head(hidden)

    return call
