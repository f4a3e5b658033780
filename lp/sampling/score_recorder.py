"""What transformers calls `logits` and `scores`: recorded of the sampled tokens, only when asked for.

V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lp.sampling.sampler import Sampler


class RecordingSampler(Sampler):
    """Records the logits, the scores, or both, of the tokens that another sampler samples.

    Scores are the logits behind the processors and warpers, without noise, as transformers has them.

    Args:
        inner: samples.
        names: what to record: "logits", "scores", or both.
        no_logits: (0, V), of a text that has taken no step.
    """

    def __init__(self, inner: Sampler, names: Iterable[str], no_logits: torch.Tensor) -> None:
        super().__init__(inner.processors)
        self.inner = inner
        self.uses_drafts = inner.uses_drafts
        self.noise_key = inner.noise_key
        self.full_vocabulary_temperature = inner.full_vocabulary_temperature
        self._recorded: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        self._step = dict.fromkeys(("logits", "scores"), no_logits)

    def scores(
        self, logits: torch.Tensor, branches: Sequence[Sequence[int] | None], text: Sequence[int]
    ) -> torch.Tensor:
        """The inner sampler's scores; the step's logits are held until `record`."""
        scores = self.inner.scores(logits, branches, text)
        self._step = {"logits": logits, "scores": scores}
        return scores

    def sample(
        self,
        scores: torch.Tensor,
        positions: Sequence[int],
        branches: Sequence[Sequence[int] | None],
        drafts: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        return self.inner.sample(scores, positions, branches, drafts)

    def record(self, nodes: Sequence[int], sampled_at: Sequence[int]) -> None:
        """Copy the logits of the nodes that gave the step's tokens."""
        index = [nodes.index(node) for node in sampled_at]
        for name, steps in self._recorded.items():
            steps.append(self._step[name][index])

    def recorded(self, name: str, tokens: int) -> torch.Tensor | None:
        """(tokens, V) of the first tokens, in float32 or wider; None where it was not asked for.

        Call it outside inference mode, so that the caller may change what comes back.
        """
        if name not in self._recorded:
            return None
        empty = self._step[name][:0]  # a text that was stopped in its first step has this width too
        stacked = torch.cat([empty, *self._recorded[name]])[:tokens]
        return stacked.to(torch.promote_types(stacked.dtype, torch.float32))
