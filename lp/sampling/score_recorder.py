"""The rows behind a text: what transformers calls `logits` and `scores`, kept only when asked for.

V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lp.sampling.sampler import Sampler


class RecordingSampler(Sampler):
    """A chooser that keeps, of every row that chose a token of the text, its logits, its scores, or both.

    Scores are the logits behind the processors and warpers, without noise, as transformers has them.

    Attributes:
        kept: "logits" and "scores", as far as they are wanted, to one (tokens of the step, V) a step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[str, list[torch.Tensor]] = {}
        self._step: dict[str, torch.Tensor] = {}

    def scores(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Sampler.scores`; the step's rows are held until `keep`."""
        scores = super().scores(logits, *args, **kwargs)
        self._step = {"logits": logits, "scores": scores}
        return scores

    def keep(self, reads: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the rows that chose the step's tokens."""
        rows = [reads.index(slot) for slot in slots]
        for name, kept in self.kept.items():
            kept.append(self._step[name][rows])

    def stacked(self, name: str, tokens: int) -> torch.Tensor | None:
        """(tokens, V) of the first tokens, in float32 or wider; None where it was not wanted.

        Call it outside inference mode, so that the caller may change what comes back.
        """
        if name not in self.kept:
            return None
        none = self._step[name][:0]  # so that a text that was stopped in its first step has rows of this width too
        rows = torch.cat([none, *self.kept[name]])[:tokens]
        return rows.to(torch.promote_types(rows.dtype, torch.float32))
