"""Forward passes over a cached prefix, as calls to be timed.

T: rows, L: cached rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.models.runner import ModelRunner
from lp.parallel.sharding import RankShare

from .ceilings import Call

HEAD_CALLS = 8  # timed together: one alone is as short as a launch


class Passes:
    """Passes of one runner behind the same prefix; none is committed, so that each finds what the last one found.

    Args:
        runner: runs them.
        prefix: tokens, L.
        max_tokens: T of the largest pass.
        chunk: rows of a pass of the prefill.
    """

    def __init__(self, runner: ModelRunner, prefix: Sequence[int], max_tokens: int, chunk: int) -> None:
        self.runner, self.prefix = runner, list(prefix)
        self.cache = runner.new_cache(len(prefix) + max_tokens)
        runner.prefill(self.prefix, self.cache, chunk)

    def chain(self, rows: int) -> Call:
        """T rows in a row, all read."""
        return self._call(range(rows), np.tri(rows, dtype=bool), range(rows))

    def shard(self, rows: RankShare, count: int) -> Call:
        """The first `count` rows of a rank's: slots come before those that see them, so these are a step as well."""
        offsets = [position - rows.positions[0] for position in rows.positions[:count]]
        return self._call(offsets, rows.visible[:count, :count], reads_of(rows, count))

    def _call(self, offsets: Sequence[int], visible: np.ndarray, reads: Sequence[int]) -> Call:
        start, tokens = len(self.prefix), [self.prefix[i % len(self.prefix)] for i in range(len(offsets))]
        positions = [start + offset for offset in offsets]
        return partial(self.runner.forward, tokens, positions, visible, self.cache, list(reads))


def reads_of(rows: RankShare, count: int) -> list[int]:
    """Which of the first `count` rows are read."""
    return [read for read in rows.sample_at if read < count]


def head_call(model: PreTrainedModel, rows: int) -> Call:
    """The LM head on so many rows, HEAD_CALLS times."""
    head = model.get_output_embeddings()
    width = model.get_input_embeddings().weight.shape[1]
    hidden = torch.randn(rows, width, device=head.weight.device).to(head.weight.dtype)

    def call() -> None:
        for _ in range(HEAD_CALLS):
            head(hidden)

    return call
