"""How a row chooses its token: logits processors with each branch's own prefix, then argmax or a draw.

Every rule gives a row the model's own distribution, so one walk verifies them all:
- greedy: argmax;
- coupled: argmax under the noise of the position, so that the token is a function of prefix and seed;
- rejection: the paper's Algorithm 4, drafts accepted or zeroed one by one, then a draw from what is left.

n: rows, V: vocabulary, L: tokens of a prefix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import transformers as tf
from transformers import LogitsProcessor, PreTrainedModel

from lp.digest import chain_digest
from lp.models.loader import vocabulary_size
from lp.models.probe import NOT_FINITE
from lp.sampling.noise import NoiseCache
from lp.sampling.params import SamplingParams, Verifier

INVALID_TOKEN = (1 << 21) - 1  # the token of a node whose scores are NaN or infinite; messages have 21 bits a token
# Functions of the scores alone: one call does for rows of any prefix.
PREFIX_FREE = (
    tf.TemperatureLogitsWarper,
    tf.TopKLogitsWarper,
    tf.TopPLogitsWarper,
    tf.MinPLogitsWarper,
    tf.TypicalLogitsWarper,
    tf.EpsilonLogitsWarper,
    tf.EtaLogitsWarper,
    tf.SuppressTokensLogitsProcessor,
    tf.InfNanRemoveLogitsProcessor,
    tf.LogitNormalization,
    *((tf.TopHLogitsWarper,) if hasattr(tf, "TopHLogitsWarper") else ()),  # not every release of the range has it
)
# Functions of (prefix, scores) row by row: one call a depth, since prefixes of one depth have one length.
BY_PREFIX = (
    tf.RepetitionPenaltyLogitsProcessor,
    tf.NoRepeatNGramLogitsProcessor,
    tf.NoBadWordsLogitsProcessor,
    tf.SequenceBiasLogitsProcessor,
    tf.MinLengthLogitsProcessor,
    tf.MinNewTokensLengthLogitsProcessor,
    tf.ForcedBOSTokenLogitsProcessor,
    tf.ForcedEOSTokenLogitsProcessor,
    tf.ExponentialDecayLengthPenalty,
    tf.SuppressTokensAtBeginLogitsProcessor,
    tf.AlternatingCodebooksLogitsProcessor,
    tf.WatermarkLogitsProcessor,
)


def check_processors(processors: Iterable[LogitsProcessor]) -> list[LogitsProcessor]:
    """Refuse, by name, a processor that may not be a function of one branch's (prefix, scores) alone.

    Raises:
        ValueError: its name and the remedy.
    """
    processors = list(processors)
    for processor in processors:
        # It fails where no token is in a row's green list, which is likelier among rows that are never chosen.
        failing = isinstance(processor, tf.WatermarkLogitsProcessor) and processor.seeding_scheme == "selfhash"
        known = isinstance(processor, (*PREFIX_FREE, *BY_PREFIX)) and not failing
        if not known and not getattr(processor, "per_branch", False):
            raise ValueError(
                f"the logits processor {type(processor).__name__} is not known to work branch by branch; if its result "
                "depends on (input_ids, scores) of each row alone, set per_branch = True on it"
            )
    return processors


class Sampler:
    """The token every row chooses: argmax of the processed logits, plus the position's noise when sampling.

    Args:
        processors: applied in this order, the warpers of `sampling` included.
        noise: of this sequence for coupled sampling, or the generator of rejection sampling; None chooses greedily.
        padding: what processors see before the text.
        guess_noise: rows that verify nothing guess under the noise too, as the text they guess for will be chosen.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        noise: NoiseCache | torch.Generator | None,
        padding: Sequence[int] = (),
        guess_noise: bool = True,
    ) -> None:
        self.processors, self.noise, self.padding = list(processors), noise, list(padding)
        self.guess_noise = guess_noise
        # What rows that verify nothing keep of the processors.
        self.temperature = math.prod(p.temperature for p in processors if isinstance(p, tf.TemperatureLogitsWarper))
        self.prefix_free = all(isinstance(processor, PREFIX_FREE) for processor in self.processors)

    @classmethod
    def build(
        cls,
        sampling: SamplingParams | None,
        processors: Iterable[LogitsProcessor],
        padding: Sequence[int],
        sequence: int,
        rank: int,
        reach: int,
        guess_noise: bool,
        model: PreTrainedModel,
    ) -> Sampler:
        """The chooser of one call.

        Args:
            sampling: None is greedy; its seed must be drawn already.
            processors: the caller's, applied before the warpers of `sampling`.
            padding: left padding, for processors alone.
            sequence: index in the batch.
            rank: of the drawing rank, for rejection sampling.
            reach: positions a step may span.
            guess_noise: as in the constructor.
            model: for its vocabulary, dtype and device.

        Raises:
            ValueError: a processor that can't be used branch by branch.
        """
        made = check_processors(processors)
        if sampling is None:
            return cls(made, None, padding)
        made += sampling.processors()
        assert sampling.seed is not None
        if sampling.verifier is Verifier.REJECTION:
            mixed = chain_digest(sampling.seed, [sequence, rank])  # a row's owner alone draws for it
            return cls(made, torch.Generator().manual_seed(mixed), padding)
        dtype = torch.promote_types(model.dtype, torch.float32)
        noise = NoiseCache(sampling.seed, sequence, vocabulary_size(model), reach, model.device, dtype)
        return cls(made, noise, padding, guess_noise)

    def __repr__(self) -> str:
        """What ranks must agree on."""
        seed = (self.noise.seed, self.noise.sequence) if isinstance(self.noise, NoiseCache) else type(self.noise)
        return f"Sampler({[(type(p).__name__, plain_settings(vars(p))) for p in self.processors]}, {seed})"

    def choose(
        self,
        logits: torch.Tensor,
        positions: Sequence[int],
        branches: Sequence[Sequence[int] | None],
        drafts: Sequence[Sequence[int]],
        text: Sequence[int],
    ) -> torch.Tensor:
        """Tokens (n,) of these rows.

        Args:
            logits: (n, V).
            positions: of the row itself; the token is for the one after it.
            branches: what follows the text up to each row; None for a row that only guesses and skips processors.
            drafts: the tokens that may follow each row, for rejection sampling.
            text: prompt and generated tokens, whose last is the first branch token's parent.
        """
        return self.pick(self.scores(logits, branches, text), positions, branches, drafts)

    def scores(
        self, logits: torch.Tensor, branches: Sequence[Sequence[int] | None], text: Sequence[int]
    ) -> torch.Tensor:
        """Processed logits (n, V), before noise or draws."""
        if not self.processors:
            return logits
        return self._processed(logits.to(torch.promote_types(logits.dtype, torch.float32)), branches, text)

    def pick(
        self,
        scores: torch.Tensor,
        positions: Sequence[int],
        branches: Sequence[Sequence[int] | None],
        drafts: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Tokens (n,) of rows with these scores; INVALID_TOKEN where they are NaN or infinite."""
        if isinstance(self.noise, torch.Generator):
            return self._rejection(scores, branches, drafts, self.noise)
        if self.noise is not None:
            noise = self.noise.rows([position + 1 for position in positions])
            if not self.guess_noise:
                noise[[row for row, branch in enumerate(branches) if branch is None]] = 0
            scores = scores + noise
        return _best(scores)

    @property
    def rejects(self) -> bool:
        """Whether a row's choice depends on the drafts behind it."""
        return isinstance(self.noise, torch.Generator)

    @property
    def heat(self) -> float:
        """The temperature, where tokens are sampled from all there are; else 0."""
        others = any(not isinstance(processor, tf.TemperatureLogitsWarper) for processor in self.processors)
        return 0.0 if self.noise is None or others else self.temperature

    @property
    def noise_key(self) -> tuple[int, int] | None:
        """(seed, sequence) of the noise under which text is chosen, if it is."""
        return (self.noise.seed, self.noise.sequence) if isinstance(self.noise, NoiseCache) else None

    def _rejection(
        self,
        scores: torch.Tensor,
        branches: Sequence[Sequence[int] | None],
        drafts: Sequence[Sequence[int]],
        generator: torch.Generator,
    ) -> torch.Tensor:
        chosen = _best(scores)
        sound = (chosen != INVALID_TOKEN).tolist()
        for row in (row for row, branch in enumerate(branches) if branch is not None and sound[row]):
            chosen[row] = accept_or_resample(scores[row].softmax(-1, dtype=torch.float64).cpu(), drafts[row], generator)
        return chosen

    def _processed(
        self, scores: torch.Tensor, branches: Sequence[Sequence[int] | None], text: Sequence[int]
    ) -> torch.Tensor:
        out = scores / self.temperature
        for rows in self._groups(branches):
            prefixes = torch.tensor([self._prefix(text, branches[row]) for row in rows], device=scores.device)
            at = torch.tensor(rows, device=scores.device)
            part = scores[at]
            for processor in self.processors:
                part = processor(prefixes, part)
            out[at] = part
        return out

    def _prefix(self, text: Sequence[int], branch: Sequence[int] | None) -> list[int]:
        return [text[-1]] if self.prefix_free else [*self.padding, *text, *(branch or ())]

    def _groups(self, branches: Sequence[Sequence[int] | None]) -> list[list[int]]:
        """Verifying rows that one call can do: all of them, or those of one depth."""
        groups: dict[int, list[int]] = {}
        for row, branch in enumerate(branches):
            if branch is not None:
                groups.setdefault(0 if self.prefix_free else len(branch), []).append(row)
        return list(groups.values())

    def keep(self, reads: Sequence[int], slots: Sequence[int]) -> None:
        """Told after the walk: of the rows just read, by slot, these chose the text's next tokens. Kept in `scores`."""


def check_sampled(token: int, step: int, position: int) -> None:
    """Refuse to go on from scores that are NaN or infinite: argmax would name some token all the same.

    Raises:
        ValueError: the decode step, the position, and the remedy.
    """
    if token == INVALID_TOKEN:
        raise ValueError(f"the model's logits at step {step} (position {position}) are NaN or infinite; {NOT_FINITE}")


def _best(scores: torch.Tensor) -> torch.Tensor:
    """The argmax of every row, which a NaN wins; INVALID_TOKEN where it is NaN or infinite."""
    chosen = scores.argmax(-1)
    return chosen.masked_fill(~(scores.gather(-1, chosen[:, None])[:, 0] < math.inf), INVALID_TOKEN)


def pack_top_logits(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best tokens of every row, best first, packed: int64 (n, k), token << 32 | bits of its float32 score."""
    top = scores.float().topk(min(k, scores.shape[-1]))
    values = top.values.nan_to_num(-math.inf, math.inf, -math.inf)
    return top.indices << 32 | values.view(torch.int32).long() & 0xFFFFFFFF


def accept_or_resample(probabilities: torch.Tensor, drafts: Sequence[int], generator: torch.Generator) -> int:
    """One token of this distribution, by the paper's Algorithm 4 for drafts that are certain of themselves.

    Args:
        probabilities: (V,) float64 on the CPU; changed.
        drafts: different tokens, tried in order.
        generator: of the uniform draws.
    """
    for draft in drafts:
        if float(torch.rand((), generator=generator, dtype=torch.float64)) < float(probabilities[draft]):
            return draft
        probabilities[draft] = 0
        probabilities /= probabilities.sum()
    return int(torch.multinomial(probabilities, 1, generator=generator))


def plain_settings(values: Any) -> Any:
    """What of a processor's settings reads the same on every rank: no objects, whose names may hold addresses."""
    if isinstance(values, dict):
        return sorted((str(key), plain_settings(value)) for key, value in values.items())
    if isinstance(values, torch.Tensor):  # a watermark's table has a million elements
        if values.numel() <= 1024:
            return values.tolist()
        return hashlib.sha256(values.detach().cpu().flatten().view(torch.uint8).numpy()).hexdigest()
    if isinstance(values, np.ndarray | np.generic):
        return values.tolist()
    if isinstance(values, list | tuple | set | frozenset):
        return [plain_settings(value) for value in (sorted(values) if isinstance(values, set | frozenset) else values)]
    return values if isinstance(values, int | float | str | None) else type(values).__name__
