"""Records logits and scores of generated tokens, for transformers' `output_logits` and `output_scores`.

V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lp.sampling.sampler import Sampler


class RecordingSampler(Sampler):
    """Wraps a sampler, and records logits, scores, or both, of the tokens that are generated with it.

    Scores are the logits after processors and warpers, without noise, as in transformers.

    Args:
        inner: the sampler that samples.
        names: what to record: "logits", "scores", or both.
        no_logits: an empty tensor (0, V) with the dtype and device of the logits, for a sequence without any step.
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
        """Compute the inner sampler's scores, and keep scores and logits for `record`; arguments: see `Sampler.scores`.

        Returns:
            Scores (n, V): a row for each of n nodes, a column for each token of the vocabulary.
        """
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
        """Store the logits and scores of nodes whose sampled tokens were accepted; arguments: see `Sampler.record`."""
        index = [nodes.index(node) for node in sampled_at]
        for name, steps in self._recorded.items():
            steps.append(self._step[name][index])

    def recorded(self, name: str, tokens: int) -> torch.Tensor | None:
        """Get the recorded logits or scores of the first generated tokens: (tokens, V), float32 or wider.

        Call it outside inference mode, so that the caller may change the result in place.

        Args:
            name: "logits" or "scores".
            tokens: number of generated tokens, from the first one on, to return rows for.

        Returns:
            None if `name` is not recorded.
        """
        if name not in self._recorded:
            return None
        empty = self._step[name][:0]  # a text that was stopped in its first step has this width too
        stacked = torch.cat([empty, *self._recorded[name]])[:tokens]
        return stacked.to(torch.promote_types(stacked.dtype, torch.float32))
