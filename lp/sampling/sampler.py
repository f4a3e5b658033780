"""Samplers: choose the token of every node of a decode step from its processed logits.

Every sampler draws a node's token from the model's own distribution, given the node's prefix, so one walk verifies them
all:
- greedy: argmax;
- coupled: argmax with the position's noise added, so that the token is a function of prefix and seed;
- rejection: the paper's Algorithm 4. Each draft token is accepted, or its probability is set to zero; if none is
  accepted, a token is drawn from the rest.

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
    """Raised if a model's logits, or the scores computed from them, are NaN or infinite.

    Ranks that share steps raise it together, since each learns it from the other ranks' messages.
    """


class Sampler:
    """Greedy sampler, and base class of all samplers: chooses the next token of every node of a step from its logits.

    Args:
        processors: logits processors of this call, warpers included.

    Attributes:
        uses_drafts: whether a node's sampled token depends on the draft tokens that follow the node.
        noise_key: (seed, sequence) that the Gumbel noise is made from; None: no noise is used.
        full_vocabulary_temperature: the temperature, if sampling can give every token of the vocabulary; 0 for greedy
            sampling, or if processors exclude tokens.
        rules: the processors in a form with which one call samples nodes of several sequences. None: there is no such
            form, so the host runs `scores` and `sample` in every step.
        noise: the Gumbel noise of this sequence; None: no noise is used.
        counts: token counts that the penalties in `rules` need; None: no penalty needs them.
        noisy_guesses: whether noise is also added at nodes that verification cannot reach. Such nodes guess n-grams,
            and with noise they guess the text that will be sampled.
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
        """Whether the host need not know the tokens before a node: no processor or only `rules` looks at them."""
        return self.rules is not None or self.processors.prefix_free

    @property
    def is_argmax(self) -> bool:
        """Whether a node's token is the argmax of the model's own logits: greedy sampling without processors."""
        return type(self) is Sampler and not len(self.processors)

    @property
    def settings(self) -> dict[str, Any]:
        """Sampling settings by name, which ranks compare before a call to check that they are equal.

        Seeds of rejection sampling are left out, since each rank has its own.
        """
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
        """Apply the logits processors to the logits of nodes, before noise is added or a token is drawn.

        Args:
            logits: (n, V), a row for each of n nodes, a column for each token of the vocabulary.
            branches: a list for each node, with the tokens after `text` up to and including the node; None if
                verification cannot reach the node.
            text: token ids of the prompt and of the generated tokens.

        Returns:
            Scores (n, V).
        """
        return self.processors(logits, branches, text)

    def sample(
        self,
        scores: torch.Tensor,
        positions: Sequence[int],
        branches: Sequence[Sequence[int] | None],
        drafts: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Sample a token for every node, int64 (n,); INVALID_TOKEN if a node's scores are NaN or infinite.

        Args:
            scores: (n, V), a row for each of n nodes, as the method `scores` returns them.
            positions: absolute position of each node; its sampled token is for the next position.
            branches: see `scores`; None if verification cannot reach the node.
            drafts: a list for each node, with the draft tokens that may follow it, in the order in which they are
                tried. It may be empty unless `uses_drafts`.
        """
        return finite_argmax(scores)

    def sample_last(self, logits: torch.Tensor, text: Sequence[int]) -> int:
        """Sample a sequence's next token from the logits of its last token, such as after a prefill.

        Args:
            logits: (1, V), V being the size of the vocabulary.
            text: token ids of the prompt and of the generated tokens.
        """
        scores = self.scores(logits, [[]], text)
        return int(self.sample(scores, [len(text) - 1], [[]], [[]]))

    def record(self, nodes: Sequence[int], sampled_at: Sequence[int]) -> None:
        """Hook that runs after each step's verification, for samplers that keep log probabilities of accepted tokens.

        Args:
            nodes: the nodes that were sampled in this step, in the order of the rows of `scores`.
            sampled_at: the nodes among these whose sampled tokens are the sequence's next tokens, in order.
        """


class CoupledSampler(Sampler):
    """Samples the argmax of scores plus the position's noise: one seed gives one text, whatever the draft tokens are.

    Args:
        processors: logits processors of this call, warpers included.
        noise: Gumbel noise at the positions of this sequence.
        noisy_guesses: whether noise is also added at nodes that verification cannot reach.
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
    """Samples by the paper's Algorithm 4: the text equals plain sampling in distribution, not token by token.

    Args:
        processors: logits processors of this call, warpers included.
        generator: this rank's random number generator.
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
    """Build the sampler for one sequence of a call.

    Args:
        sampling: the sequence's sampling parameters, with a seed unless decoding is greedy. None: greedy decoding.
        processors: the caller's logits processors, applied before the warpers of `sampling`.
        padding: token ids of the prompt's left padding, which processors see and the model does not.
        sequence: index of the sequence in the batch.
        rank: this rank's number; in rejection sampling each rank draws from its own generator.
        span: most positions that one step may span.
        noisy_guesses: whether noise is also added at nodes that verification cannot reach; see `Sampler`.
        vocabulary: V, the number of tokens that the LM head scores.
        dtype, device: dtype and device of the logits.

    Raises:
        ValueError: a processor can't be applied branch by branch.
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
    """Accept one of a node's draft tokens, or draw another token, by the paper's Algorithm 4.

    Draft tokens count as proposed with probability 1.

    Args:
        probabilities: (V,) float64 on the CPU, the probabilities of the token after the node; changed in place.
        drafts: the draft tokens after the node, all different, in the order in which they are tried.
        generator: random number generator for the draws.

    Returns:
        The token, distributed according to `probabilities`.
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
    """Stop with an error if a token was sampled from scores that were NaN or infinite.

    Args:
        token: the sampled token; INVALID_TOKEN raises the error.
        step: number of the decode step, for the message.
        position: absolute position of the node, for the message.
        sampler: the request's sampler; the message names its processors that may be at fault.

    Raises:
        NotFinite: the message has the decode step, the position and the remedy.
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
