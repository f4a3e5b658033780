"""Log probabilities of generated tokens, recorded step by step.

n: sampled nodes of a step, V: vocabulary, K: how many of the likeliest tokens are recorded for each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lp.sampling.sampler import Sampler


class Logprob(NamedTuple):
    """A generated token's log probability in the model's own distribution: before temperature, processors and warpers.

    Attributes:
        token: token id.
        logprob: natural logarithm of its probability.
        top: (token id, log probability) of the K likeliest tokens at its position, likeliest first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


class LogprobSampler(Sampler):
    """Wraps a sampler, and records the log probabilities of the tokens that are generated with it.

    Args:
        inner: the sampler that samples.
        num_top: how many of the likeliest tokens are recorded for each position.

    Attributes:
        recorded: log probabilities of the generated tokens so far, in order; a caller may empty the list after reading.
    """

    def __init__(self, inner: Sampler, num_top: int) -> None:
        super().__init__(inner.processors)
        self.inner = inner
        self.num_top = num_top
        self.uses_drafts = inner.uses_drafts
        self.noise_key = inner.noise_key
        self.full_vocabulary_temperature = inner.full_vocabulary_temperature
        self.recorded: list[Logprob] = []
        self._logits = torch.empty(0, 0)
        self._sampled = torch.empty(0, dtype=torch.int64)

    def scores(
        self, logits: torch.Tensor, branches: Sequence[Sequence[int] | None], text: Sequence[int]
    ) -> torch.Tensor:
        """Compute the inner sampler's scores, and keep the logits for `record`; arguments: see `Sampler.scores`.

        Returns:
            Scores (n, V): a row for each of n nodes, a column for each token of the vocabulary.
        """
        self._logits = logits
        return self.inner.scores(logits, branches, text)

    def sample(
        self,
        scores: torch.Tensor,
        positions: Sequence[int],
        branches: Sequence[Sequence[int] | None],
        drafts: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        self._sampled = self.inner.sample(scores, positions, branches, drafts)
        return self._sampled

    def record(self, nodes: Sequence[int], sampled_at: Sequence[int]) -> None:
        index = [nodes.index(node) for node in sampled_at]
        self.recorded += logprobs_of(self._logits[index], self._sampled[index].tolist(), self.num_top)


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[Logprob]:
    """Compute the log probabilities of given tokens, and list the likeliest tokens at the same positions.

    Args:
        logits: (n, V), the model's logits at n positions, before processors and warpers.
        tokens: n token ids, one for each position.
        num_top: how many of the likeliest tokens to list for each position.
    """
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = logprobs.gather(1, torch.tensor([*tokens], device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Logprob(token, value, list(zip(ids, values, strict=True)))
        for token, value, (ids, values) in zip(tokens, own, tops, strict=True)
    ]
