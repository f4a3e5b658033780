"""Forward passes after a cached prefix, as calls to be timed.

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
    """Makes calls that run a forward pass of a given size after one cached prefix, so that such passes can be timed.

    No pass is committed to the cache, so every call starts from the same prefix.

    Args:
        runner: runs the model.
        prefix: token ids to cache, (L,).
        max_tokens: T of the largest pass.
        chunk: most tokens in each of the passes that compute the prefix.
    """

    def __init__(self, runner: ModelRunner, prefix: Sequence[int], max_tokens: int, chunk: int) -> None:
        self.runner = runner
        self.prefix = list(prefix)
        self.cache = runner.new_cache(len(prefix) + max_tokens)
        runner.prefill(self.prefix, self.cache, chunk)

    def chain(self, num_tokens: int) -> Call:
        """Make a call that runs a forward pass of T tokens, each following the one before, with logits for all of them.

        Args:
            num_tokens: T, the number of tokens in the pass.
        """
        return self._call(range(num_tokens), np.tri(num_tokens, dtype=bool), range(num_tokens))

    def share(self, layout: StepLayout, count: int) -> Call:
        """Make a call that runs the first T tokens of a rank's decode step, with their positions and attention mask.

        Every draft-tree node comes before the nodes that attend to it, so the first tokens are a valid step by
        themselves.

        Args:
            layout: positions, parents and sampled tokens of the rank's decode step.
            count: T, how many of the step's tokens to take.
        """
        offsets = (layout.step_positions[:count] - layout.step_positions[0]).tolist()
        visible = ancestors(layout.step_parents)
        return self._call(offsets, visible[:count, :count], sampled_of(layout, count))

    def _call(self, offsets: Sequence[int], visible: np.ndarray, sample_at: Sequence[int]) -> Call:
        start = len(self.prefix)
        tokens = [self.prefix[i % start] for i in range(len(offsets))]
        positions = [start + offset for offset in offsets]
        return partial(self.runner.forward, tokens, positions, visible, self.cache, list(sample_at))


def sampled_of(layout: StepLayout, count: int) -> list[int]:
    """Indices of the tokens whose logits are sampled, among the first `count` tokens of a decode step.

    Args:
        layout: layout of the decode step.
        count: how many of its tokens to look at.
    """
    return [token for token in layout.sampled_tokens if token < count]


def head_call(model: PreTrainedModel, num_tokens: int) -> Call:
    """Make a call that runs the LM head alone, HEAD_CALLS (8) times in a row, since one run is too short to time.

    Args:
        model: the causal LM.
        num_tokens: number of hidden states that go through the head in each run.
    """
    head = model.get_output_embeddings()
    width = model.get_input_embeddings().weight.shape[1]
    hidden = torch.randn(num_tokens, width, device=head.weight.device).to(head.weight.dtype)

    def call() -> None:
        for _ in range(HEAD_CALLS):
            head(hidden)

    return call
