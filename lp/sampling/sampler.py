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
    """Raised where a model's logits, or the scores made of them, are NaN or infinite.

    Ranks that share steps raise it together, since each learns it from the other ranks' messages.
    """


class Sampler:
    """Greedy sampling, and the interface of all samplers: the next token of every node of a step, from its logits.

    Args:
        processors: logits processors of this call, warpers included.

    Attributes:
        uses_drafts: whether a node's token depends on the draft tokens behind it.
        noise_key: (seed, sequence) of the noise that the text is sampled under; None: there is no noise.
        full_vocabulary_temperature: the temperature where every token may be sampled; 0 for greedy sampling, or if
            processors leave tokens out.
        rules: the processors as `lp.sampling.node_sampling` takes them, which samples nodes of several texts by one
            call; None: the host takes part in every step, by `scores` and `sample`.
        noise: noise that the text is sampled under; None: there is none.
        counts: token counts for the penalties in `rules`; None: there are none.
        noisy_guesses: sample nodes that verification cannot reach under the noise, too: as the text that they guess
            will be sampled.
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
        """Whether the host need not know the tokens before a node: no processor looks at them, or `rules` does so."""
        return self.rules is not None or self.processors.prefix_free

    @property
    def is_argmax(self) -> bool:
        """Whether a node's token is the argmax of the model's own logits: greedy sampling without processors."""
        return type(self) is Sampler and not len(self.processors)

    @property
    def settings(self) -> dict[str, Any]:
        """Sampling settings by name, which ranks compare before a call; each rank has its own rejection seed."""
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
        """Logits of the nodes behind the processors, before any noise or draw: (n, V).

        Args:
            logits: (n, V).
            branches: tokens of every node behind the last one of `text`, up to and with the node itself; None for
                a node that verification cannot reach.
            text: token ids of the prompt and of the generated tokens.
        """
        return self.processors(logits, branches, text)

    def sample(
        self,
        scores: torch.Tensor,
        positions: Sequence[int],
        branches: Sequence[Sequence[int] | None],
        drafts: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Sampled token of every node, int64 (n,); INVALID_TOKEN where its scores are NaN or infinite.

        Args:
            scores: (n, V), as `scores` gave them.
            positions: absolute position of each node; the sampled token is for the position behind it.
            branches: see `scores`; None for a node that verification cannot reach.
            drafts: draft tokens behind every node, in the order in which they are tried; may be empty unless
                `uses_drafts`.
        """
        return finite_argmax(scores)

    def sample_last(self, logits: torch.Tensor, text: Sequence[int]) -> int:
        """The next token of a text, where a pass gave the logits of its last token alone, as a prefill does.

        Args:
            logits: (1, V).
            text: token ids of the prompt and of the generated tokens.
        """
        scores = self.scores(logits, [[]], text)
        return int(self.sample(scores, [len(text) - 1], [[]], [[]]))

    def record(self, nodes: Sequence[int], sampled_at: Sequence[int]) -> None:
        """Called after the verification of every step, for samplers that keep log probabilities of accepted tokens.

        Args:
            nodes: the nodes that were sampled in this step, in the order of `scores`.
            sampled_at: nodes whose sampled tokens are the text's next tokens, in order.
        """


class CoupledSampler(Sampler):
    """Samples by argmax(scores + noise of the position): one seed gives one text, whatever is drafted.

    Args:
        processors: logits processors of this call, warpers included.
        noise: noise of this sequence's positions.
        noisy_guesses: sample nodes that verification cannot reach under the noise, too.
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
    """Samples by the paper's Algorithm 4: the text equals that of plain sampling in distribution, not token by token.

    Args:
        processors: logits processors of this call, warpers included.
        generator: random numbers of this rank.
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
    """The sampler for one sequence of a call.

    Args:
        sampling: None is greedy. A seed must be set unless it is greedy.
        processors: the caller's logits processors, applied before the warpers of `sampling`.
        padding: token ids of the prompt's left padding, which processors see and the model does not.
        sequence: index of the sequence in the batch.
        rank: this rank, for rejection sampling, where each rank draws by itself.
        span: how many positions a step may span.
        noisy_guesses: see `CoupledSampler`.
        vocabulary: V, how many tokens the LM head has.
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
    """Accept one of a node's draft tokens, or draw another token: the paper's Algorithm 4 for drafts of probability 1.

    Args:
        probabilities: (V,) float64 on the CPU, of the token behind the node; changed.
        drafts: the different draft tokens behind the node, tried in order.
        generator: gives the uniform draws.

    Returns:
        The token, distributed as `probabilities`.
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
    """Refuse to go on with a token whose scores were NaN or infinite.

    Args:
        token: sampled token; INVALID_TOKEN is refused.
        step: number of the decode step, for the message.
        position: absolute position of the node, for the message.
        sampler: the request's sampler; the message names processors that may be at fault.

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
