"""Samplers: the token of every node of a step, from its processed logits.

Every sampler gives a node the model's own distribution given the node's prefix, so one walk verifies them all:
- greedy: argmax;
- coupled: argmax under the noise of the position, so that the token is a function of prefix and seed;
- rejection: the paper's Algorithm 4; draft tokens are accepted or zeroed one by one, then one is drawn from the rest.

n: nodes, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from lp.digest import chain_digest
from lp.errors import UserError
from lp.sampling.node_sampling import ScoreRules, finite_argmax
from lp.sampling.noise import NO_NOISE, NoiseCache
from lp.sampling.params import SamplingParams, Verifier, is_greedy
from lp.sampling.processors import BranchProcessors
from lp.sampling.token_counts import TokenCounts
from lp.sampling.top_logits import INVALID_TOKEN
from lp.to_device import to_device

NOT_FINITE_REMEDY = "load it with dtype=float32 or bfloat16, or check its weights"


class NotFinite(UserError):
    """A model's logits are NaN or infinite. Ranks that share steps learn it alike, from each other's messages."""


class Sampler:
    """Greedy sampling, and what all samplers share.

    Args:
        processors: what changes the scores of this call, warpers included.

    Attributes:
        uses_drafts: whether a node's token depends on the draft tokens behind it.
        noise_key: (seed, sequence) of the noise that the text is sampled under, None without.
        full_vocabulary_temperature: the temperature where every token may be sampled; 0 for greedy sampling, or if
            warpers leave tokens out.
        rules: what it does to scores, for `lp.sampling.node_sampling`, which samples the nodes of all texts that have
            some by one call; None: the host has a part in every step, by `scores` and `sample`.
        noise: noise that the text is sampled under; None for none.
        counts: what penalties count; None where there are none, or the host counts.
        noisy_guesses: nodes that no walk can reach are sampled under the noise too, as the text they guess will be.
    """

    uses_drafts = False
    noise_key: tuple[int, int] | None = None
    full_vocabulary_temperature = 0.0
    rules: ScoreRules | None = None
    noise: NoiseCache | None = None
    counts: TokenCounts | None = None
    noisy_guesses = True

    def __init__(self, processors: BranchProcessors) -> None:
        self.processors = processors

    @property
    def prefix_free(self) -> bool:
        """Whether the host need not look at a node's prefix."""
        return self.rules is not None or self.processors.prefix_free

    @property
    def is_argmax(self) -> bool:
        """Whether it is the argmax of the model's own logits."""
        return type(self) is Sampler and not len(self.processors)

    @property
    def settings(self) -> dict[str, Any]:
        """What ranks must agree on, by name; the seed of rejection sampling is each rank's own."""
        seed, sequence = self.noise_key or (None, None)
        return {
            "sampling": type(self).__name__,
            "seed": seed,
            "sequence": sequence,
            "logits_processor": self.processors.settings(),
        }

    def scores(
        self, logits: torch.Tensor, branches: Sequence[Sequence[int] | None], text: Sequence[int]
    ) -> torch.Tensor:
        """Processed logits (n, V), before noise or draws; arguments as in `BranchProcessors`."""
        return self.processors(logits, branches, text)

    def sample(
        self,
        scores: torch.Tensor,
        positions: Sequence[int],
        branches: Sequence[Sequence[int] | None],
        drafts: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Tokens (n,) of nodes; INVALID_TOKEN where the scores are NaN or infinite.

        Args:
            scores: (n, V).
            positions: where the nodes are; a node's token is for the position behind it.
            branches: see `scores`; None for a node that no walk can reach.
            drafts: the draft tokens behind every node, in order; may be empty unless `uses_drafts`.
        """
        return finite_argmax(scores)

    def sample_last(self, logits: torch.Tensor, text: Sequence[int]) -> int:
        """The next token of a text, from the logits (1, V) of its last one."""
        scores = self.scores(logits, [[]], text)
        return int(self.sample(scores, [len(text) - 1], [[]], [[]]))

    def record(self, nodes: Sequence[int], sampled_at: Sequence[int]) -> None:
        """Called after every walk: of the nodes just sampled, these gave the text's next tokens."""


class CoupledSampler(Sampler):
    """argmax(scores + noise of the position): one seed gives one text, whatever is drafted.

    Args:
        processors: what changes the scores of this call.
        noise: the noise that this sequence is sampled under.
        noisy_guesses: nodes that no walk can reach are sampled under the noise too.
    """

    noise: NoiseCache

    def __init__(self, processors: BranchProcessors, noise: NoiseCache, noisy_guesses: bool = True) -> None:
        super().__init__(processors)
        self.noise = noise
        self.noisy_guesses = noisy_guesses
        self.noise_key = (noise.seed, noise.sequence)
        self.full_vocabulary_temperature = processors.full_vocabulary_temperature

    def sample(
        self,
        scores: torch.Tensor,
        positions: Sequence[int],
        branches: Sequence[Sequence[int] | None],
        drafts: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        rows = self.noise.rows([position + 1 for position in positions])
        if not self.noisy_guesses:
            rows = [NO_NOISE if branch is None else row for row, branch in zip(rows, branches, strict=True)]
        return finite_argmax(scores + self.noise.noise_SV.index_select(0, to_device(rows, self.noise.device)))


class RejectionSampler(Sampler):
    """The paper's Algorithm 4: equal to plain sampling in distribution, not token by token.

    Args:
        processors: what changes the scores of this call.
        generator: gives the rank's own draws.
    """

    uses_drafts = True

    def __init__(self, processors: BranchProcessors, generator: torch.Generator) -> None:
        super().__init__(processors)
        self.generator = generator
        self.full_vocabulary_temperature = processors.full_vocabulary_temperature

    def sample(
        self,
        scores: torch.Tensor,
        positions: Sequence[int],
        branches: Sequence[Sequence[int] | None],
        drafts: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        sampled = finite_argmax(scores)
        finite = (sampled != INVALID_TOKEN).tolist()
        for node, branch in enumerate(branches):
            if branch is not None and finite[node]:
                probabilities = scores[node].softmax(-1, dtype=torch.float64).cpu()
                sampled[node] = accept_or_resample(probabilities, drafts[node], self.generator)
        return sampled


def build_sampler(
    sampling: SamplingParams | None,
    processors: Iterable[LogitsProcessor],
    *,
    padding: Sequence[int] = (),
    sequence: int = 0,
    rank: int = 0,
    span: int = 1,
    noisy_guesses: bool = True,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Sampler:
    """The sampler of one call.

    Args:
        sampling: None is greedy; the seed of what draws must be drawn already.
        processors: the caller's, applied before the warpers of `sampling`.
        padding: left padding, for processors alone.
        sequence: index in the batch.
        rank: the rank that draws, for rejection sampling.
        span: positions that a step may span.
        noisy_guesses: see `CoupledSampler`.
        vocabulary: V, of the LM head.
        dtype, device: dtype and device of the logits.

    Raises:
        ValueError: a processor that can't be used branch by branch.
    """
    own = sampling.processors() if sampling else []
    applied = [*processors, *own]
    branch_processors = BranchProcessors(applied, padding)
    if sampling is not None and sampling.verifier is Verifier.REJECTION:
        assert sampling.seed is not None
        generator = torch.Generator().manual_seed(chain_digest(sampling.seed, [sequence, rank]))
        return RejectionSampler(branch_processors, generator)
    if sampling is None or is_greedy(sampling):
        sampler = Sampler(branch_processors)
    else:
        assert sampling.seed is not None
        wide = torch.promote_types(dtype, torch.float32)
        noise = NoiseCache(sampling.seed, sequence, vocabulary, span, device, wide)
        sampler = CoupledSampler(branch_processors, noise, noisy_guesses)
    sampler.rules = ScoreRules.of(applied, len(padding))
    if sampler.rules is not None and sampler.rules.counts:
        sampler.counts = TokenCounts(vocabulary, int(sampler.rules.numbers.first_counted), padding, device)
    return sampler


def accept_or_resample(probabilities: torch.Tensor, drafts: Sequence[int], generator: torch.Generator) -> int:
    """One token of this distribution, by the paper's Algorithm 4 for draft tokens proposed with certainty.

    Args:
        probabilities: (V,) float64 on the CPU; changed.
        drafts: different tokens, tried in order.
        generator: gives the uniform draws.
    """
    for draft in drafts:
        if draft >= len(probabilities):  # in a prompt: a model may embed more tokens than it can give
            continue
        if float(torch.rand((), generator=generator, dtype=torch.float64)) < float(probabilities[draft]):
            return draft
        probabilities[draft] = 0
        probabilities /= probabilities.sum()
    return int(torch.multinomial(probabilities, 1, generator=generator))


def check_sampled(token: int, step: int, position: int, sampler: Sampler) -> None:
    """Refuse to go on from scores that are NaN or infinite: argmax would name some token all the same.

    Args:
        token: sampled.
        step: number of the decode step.
        position: position whose scores they are.
        sampler: the request's, whose processors may have made them so.

    Raises:
        NotFinite: the decode step, the position, and the remedy.
    """
    if token != INVALID_TOKEN:
        return
    where = f"at step {step} (position {position}) are NaN or infinite"
    if changing := sampler.processors.changing:
        raise NotFinite(
            f"the scores {where}; they are the model's logits behind {', '.join(changing)}, which may overflow, or "
            f"together forbid every token: leave some of them out. If it fails without them, {NOT_FINITE_REMEDY}"
        )
    raise NotFinite(f"the model's logits {where}; {NOT_FINITE_REMEDY}")
