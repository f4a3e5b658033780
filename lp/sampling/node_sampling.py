"""Computes scores and samples tokens of draft-tree nodes with tensor operations, several sequences in one call.

The sampling settings of a sequence are a row of numbers in a tensor. So one call, or one step recorded as a CUDA graph,
serves sequences with different settings. Each operation gives what transformers' processor of the same name gives: bit
for bit on a CPU; up to the last bit on a GPU, where torch replaces division by a number by multiplication with its
inverse. Logits processors that numbers can't describe go through `lp.sampling.processors`.

n: sampled nodes, Q: sequences, V: vocabulary, T: tokens of the forward pass, U: different tokens that came before a
node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property, partial
from typing import NamedTuple

import torch
import transformers as tf
from transformers import LogitsProcessor

from lp.sampling.penalties import CountPenalty
from lp.sampling.processors import PREFIX_FREE, plain_settings
from lp.sampling.token_counts import GENERATED, PROMPT
from lp.sampling.top_logits import INVALID_TOKEN

KthBest = Callable[[torch.Tensor, int], torch.Tensor]  # of scores (n, V) the k best, best first: (n, k)


class Operation(IntFlag):
    """Flags for the operations on scores that a sampling call computes; those that no sequence needs are left out."""

    NONE = 0
    COUNTS = 1
    REPETITION = 2
    TEMPERATURE = 4
    TOP_K = 8
    TOP_P = 16
    MIN_P = 32


COUNTING = Operation.COUNTS | Operation.REPETITION  # what looks at the tokens before a node


class Numbers(NamedTuple):
    """One sequence's sampling settings as a row of numbers; the defaults change nothing.

    Attributes:
        first_counted: position of the first token that counts as generated, for `presence` and `frequency`.
        presence: amount subtracted once from the logit of each token that was generated already.
        frequency: amount subtracted from a token's logit for each time that the token was generated already.
        repetition: transformers' repetition_penalty; 1 is no penalty.
        temperature: number that scores are divided by.
        top_k: number of likeliest tokens that are kept; 0 keeps all.
        one_minus_top_p: 1 - top_p: the least likely tokens are dropped that together have at most this probability; -1
            drops none.
        min_p: tokens are dropped if their probability is below this fraction of the likeliest token's probability.
    """

    first_counted: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    temperature: float = 1.0
    top_k: float = 0.0
    one_minus_top_p: float = -1.0
    min_p: float = 0.0

    @property
    def operations(self) -> Operation:
        """The operations that these settings need if a sampling call serves this sequence alone."""
        asked = {
            Operation.COUNTS: self.presence or self.frequency,
            Operation.REPETITION: self.repetition != 1,
            Operation.TEMPERATURE: self.temperature != 1,
            Operation.TOP_K: self.top_k,
            Operation.TOP_P: self.one_minus_top_p >= 0,
            Operation.MIN_P: self.min_p,
        }
        return Operation(sum(operation for operation, is_asked in asked.items() if is_asked))


NUM_NUMBERS = len(Numbers())


@dataclass(frozen=True)
class ScoreRules:
    """One sequence's logits processors in a form that a single call can apply to nodes of several sequences.

    Attributes:
        numbers: settings of the processors that `Numbers` has fields for.
        before, after: the other processors, which look at scores alone. They are applied before and after the
            processors that `numbers` describes.
    """

    numbers: Numbers
    before: tuple[LogitsProcessor, ...] = ()
    after: tuple[LogitsProcessor, ...] = ()

    @classmethod
    def of(cls, processors: Iterable[LogitsProcessor], padding: int = 0) -> ScoreRules | None:
        """Convert one sequence's logits processors to ScoreRules; None if they can't be converted.

        They can't if a processor looks at the tokens before a node, unless it is a known penalty, or if the processors
        come in an order that ScoreRules can't express. The host then applies the processors in every step.

        Args:
            processors: the sequence's processors, in the order in which they are applied.
            padding: number of left padding tokens of the prompt, which penalties count and positions do not.
        """
        before: list[LogitsProcessor] = []
        after: list[LogitsProcessor] = []
        numbers: dict[str, float] = {}
        last = -1  # place of the last one that is said in numbers, in the order in which these are applied
        for processor in processors:
            own = _numbers_of(processor, padding)
            place = -1 if own is None else Numbers._fields.index([*own][-1])
            if own is not None and place > last and not after:
                numbers |= own
                last = place
            elif type(processor) in PREFIX_FREE:
                (after if numbers else before).append(processor)
            else:
                return None
        return cls(Numbers(**numbers), tuple(before), tuple(after))

    @cached_property
    def operations(self) -> Operation:
        """The operations that `numbers` needs if a sampling call serves this sequence alone."""
        return self.numbers.operations

    @property
    def counts(self) -> bool:
        """Whether some penalty of the sequence needs to know how often each token came before a node."""
        return bool(self.operations & COUNTING)

    @cached_property
    def functions_key(self) -> str:
        """Names and settings of the processors in `before` and `after` as one string; "" if there are none.

        One sampling call can serve only sequences with equal keys.
        """
        if not (self.before or self.after):
            return ""
        described = [[(type(p).__name__, plain_settings(vars(p))) for p in part] for part in (self.before, self.after)]
        return repr(described)


def _numbers_of(processor: LogitsProcessor, padding: int) -> dict[str, float] | None:
    """A processor's settings as fields of `Numbers`, in the order of these; None: there are no fields for them."""
    settings = vars(processor)
    if settings.get("filter_value", -math.inf) != -math.inf or settings.get("min_tokens_to_keep", 1) != 1:
        return None
    if type(processor) is CountPenalty and processor.last is None and processor.prompt_tokens >= padding:
        first = processor.prompt_tokens - padding
        return {"first_counted": first, "presence": processor.presence, "frequency": processor.frequency}
    if type(processor) is tf.RepetitionPenaltyLogitsProcessor and settings.get("prompt_ignore_length") is None:
        return {"repetition": processor.penalty}
    if type(processor) is tf.TemperatureLogitsWarper:
        return {"temperature": processor.temperature}
    if type(processor) is tf.TopKLogitsWarper:
        return {"top_k": min(processor.top_k, 1 << 31)}  # more than any vocabulary: 2**64 is no tensor's number
    if type(processor) is tf.TopPLogitsWarper:
        return {"one_minus_top_p": 1 - processor.top_p}
    if type(processor) is tf.MinPLogitsWarper:
        return {"min_p": processor.min_p}
    return None


class CallRules(NamedTuple):
    """What one sampling call computes, apart from its sequences' own numbers such as temperatures.

    It decides which captured step (recorded as a CUDA graph) can serve the call.

    Attributes:
        operations: all operations that the call's sequences need.
        most_k: upper bound on the sequences' top_k, a power of 2; 0: no sequence has a top_k.
        functions_key: `ScoreRules.functions_key`, equal for all sequences of the call.
        noise: whether Gumbel noise is added to scores before the argmax.
    """

    operations: Operation
    most_k: int
    functions_key: str
    noise: bool

    @classmethod
    def of(cls, rules: Sequence[ScoreRules], noise: bool) -> CallRules:
        """Combine the score rules of several sequences, so that one call can sample the draft-tree nodes of them all.

        Args:
            rules: the rules of each sequence; their `functions_key` must be equal, their numbers may differ.
            noise: whether Gumbel noise is added for some of the sequences.
        """
        operations = Operation.NONE
        for own in rules:
            operations |= own.operations
        largest = int(max(own.numbers.top_k for own in rules))
        most_k = 1 << (largest - 1).bit_length() if largest else 0
        return cls(operations, most_k, rules[0].functions_key, noise)

    @property
    def counts(self) -> bool:
        """Whether a penalty of some sequence needs to know how often each token came before a node."""
        return bool(self.operations & COUNTING)

    @property
    def shardable(self) -> bool:
        """Whether a rank that holds only a part of the LM head can process its part of the scores by itself.

        For top_k it still needs the k best scores over the whole vocabulary.
        """
        within = Operation.TEMPERATURE | Operation.TOP_K
        return not (self.functions_key or self.operations & ~within)

    def serves(self, other: CallRules) -> bool:
        """Whether a step captured with these rules (recorded as a CUDA graph) can serve a call with other rules.

        It may do more work than the call needs.

        Args:
            other: the rules of that call.
        """
        operations = self.operations & other.operations == other.operations
        noise = self.noise or not other.noise
        return operations and noise and self.most_k >= other.most_k and self.functions_key == other.functions_key


@dataclass
class NodeSampling:
    """All that one call needs to sample its draft-tree nodes: rules, and tensors of settings, token counts and noise.

    n: nodes, V: vocabulary.

    Attributes:
        rules: which operations the call computes.
        functions: rules of any sequence of the call; only `before` and `after` are used, which are equal for all
            sequences.
        numbers: float64 (n, NUM_NUMBERS), for each node the `Numbers` of its sequence; a single row if the call serves
            one sequence.
        reachable: bool (n, 1), whether verification may reach the node; for other nodes, logits are only divided by the
            temperature. None: it may reach all nodes.
        counts: int32 (n, V), how often each token came before each node, in the form of `lp.sampling.token_counts`;
            None: no sequence has a penalty.
        columns: int64 (U,), the token ids that the columns of `counts` stand for, which is then (n, U); other tokens
            came before no node. None: `counts` has a column for each token of the vocabulary.
        noise_SV: Gumbel noise (S, V), a row for each of S positions; None: no noise is added.
        noise_rows: int64 (n,), the row of `noise_SV` for each node; None: node i uses row i.
    """

    rules: CallRules
    functions: ScoreRules
    numbers: torch.Tensor
    reachable: torch.Tensor | None
    counts: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    noise_SV: torch.Tensor | None = None
    noise_rows: torch.Tensor | None = None

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the scores of every node from its logits, and sample a token for it.

        Args:
            logits: (n, V), a row for each of n nodes, a column for each token of the vocabulary.

        Returns:
            Scores (n, V) before noise, and the sampled tokens, int64 (n,).
        """
        scores = self.scores(logits)
        return scores, finite_argmax(self.noisy(scores))

    def noisy(self, scores: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Add the Gumbel noise to scores, if there is any, so that the argmax over the vocabulary is the sampled token.

        Args:
            scores: (n, any number of tokens), the scores of n nodes without noise.
            first: token id of the first column, if `scores` has only a part of the vocabulary.
        """
        if self.noise_SV is None:
            return scores
        noise = self.noise_SV[:, first : first + scores.shape[1]]
        return scores + (noise if self.noise_rows is None else noise.index_select(0, self.noise_rows))

    def scores(self, logits: torch.Tensor, best: KthBest | None = None) -> torch.Tensor:
        """Apply the call's operations, such as penalties and warpers, to logits; no noise is added.

        Args:
            logits: (n, V), a row for each of n nodes; or only a part of the vocabulary, if the call's rules are
                `shardable`.
            best: function (scores, k) -> the k best scores of each node over the whole vocabulary, (n, k), best first.
                None: `logits` has the whole vocabulary.

        Returns:
            Scores in the shape of `logits`, float32 or wider; `logits` itself if the call has no operation.
        """
        functions = self.functions
        operations = self.rules.operations
        if not (operations or functions.before or functions.after):
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        number = partial(self._column, dtype=wide.dtype)
        scores = _applied(functions.before, wide)
        if self.rules.counts:
            scores = self._penalised(scores)
        if operations & Operation.TEMPERATURE:
            scores = scores / number("temperature")
        if operations & Operation.TOP_K:
            scores = self._top_k(scores, number("top_k"), best or _best)
        if operations & Operation.TOP_P:
            scores = _top_p(scores, number("one_minus_top_p"))
        if operations & Operation.MIN_P:
            probabilities = scores.softmax(-1)
            unlikely = probabilities < number("min_p") * probabilities.amax(-1, keepdim=True)
            scores = scores.masked_fill(unlikely, -math.inf)
        scores = _applied(functions.after, scores)
        only_temperature = operations == Operation.TEMPERATURE and not (functions.before or functions.after)
        if self.reachable is None or only_temperature:
            return scores
        return torch.where(self.reachable, scores, wide / self._temperature(wide.dtype))

    def _penalised(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V) behind the penalties."""
        assert self.counts is not None
        operations = self.rules.operations
        number = partial(self._column, dtype=scores.dtype)
        changed = scores if self.columns is None else scores.index_select(1, self.columns)
        if operations & Operation.COUNTS:
            counted = (self.counts & (PROMPT - 1)).to(scores.dtype)
            changed = changed - number("frequency") * counted - number("presence") * (counted > 0)
        if operations & Operation.REPETITION:
            penalty = number("repetition")
            penalised = torch.where(changed < 0, changed * penalty, changed / penalty)
            changed = torch.where(self.counts > 0, penalised, changed)
        return changed if self.columns is None else scores.index_copy(1, self.columns, changed)

    def _column(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One field of `Numbers` for every node's text, (n or 1, 1)."""
        column = Numbers._fields.index(name)
        return self.numbers[:, column : column + 1].to(dtype)

    def _temperature(self, dtype: torch.dtype) -> torch.Tensor:
        """Product of all temperatures, (n or 1, 1)."""
        others = [*self.functions.before, *self.functions.after]
        fixed = math.prod(p.temperature for p in others if type(p) is tf.TemperatureLogitsWarper)
        product: torch.Tensor = self._column("temperature", torch.float64) * fixed
        return product.to(dtype)

    def _top_k(self, scores: torch.Tensor, top_k: torch.Tensor, best: KthBest) -> torch.Tensor:
        values = best(scores, self.rules.most_k)
        kth = values.gather(1, (top_k.long() - 1).clamp(0, values.shape[1] - 1).expand(len(values), 1))
        return scores.masked_fill((scores < kth) & (top_k > 0), -math.inf)


def _applied(processors: Iterable[LogitsProcessor], scores: torch.Tensor) -> torch.Tensor:
    """The scores behind functions of the scores alone."""
    for processor in processors:
        no_prefixes = torch.zeros(len(scores), 1, dtype=torch.int64, device=scores.device)
        processed: torch.Tensor = processor(no_prefixes, scores)
        scores = processed
    return scores


def _best(scores: torch.Tensor, k: int) -> torch.Tensor:
    return scores.topk(min(k, scores.shape[-1])).values


def _top_p(scores: torch.Tensor, one_minus_top_p: torch.Tensor) -> torch.Tensor:
    ascending, tokens = scores.sort(descending=False)
    left_out = ascending.softmax(-1).cumsum(-1) <= one_minus_top_p
    left_out[:, -1] = False
    return scores.masked_fill(left_out.scatter(1, tokens, left_out), -math.inf)


def counts_at_nodes(
    counts_nV: torch.Tensor, tokens_T: torch.Tensor, generated_T: torch.Tensor, visible_nT: torch.Tensor
) -> torch.Tensor:
    """Add to each node's token counts, which penalties need, the tokens of the forward pass that the node sees.

    Args:
        counts_nV: int32 (n, V), for each node the counts of the tokens before the forward pass; changed in place.
        tokens_T: int64 (T,), token ids of the forward pass; ids from V on are not counted.
        generated_T: bool (T,), whether each token counts as generated; otherwise it counts as a token of the prompt.
        visible_nT: bool (n, T), whether each node sees each token of the forward pass.

    Returns:
        The changed counts, int32 (n, V).
    """
    vocabulary = counts_nV.shape[1]
    ones_T = torch.where(generated_T, GENERATED, PROMPT).to(torch.int32)
    ones_T = ones_T.masked_fill(tokens_T >= vocabulary, 0)  # a model may embed more tokens than it can give
    index_nT = tokens_T.clamp(max=vocabulary - 1).expand(len(counts_nV), -1)
    return counts_nV.scatter_add_(1, index_nT, visible_nT * ones_T)


def finite_argmax(scores: torch.Tensor) -> torch.Tensor:
    """Token with the best score at each node, int64 (n,); INVALID_TOKEN if that score is NaN or +inf.

    Args:
        scores: (n, V), a row for each of n nodes, a column for each token of the vocabulary.
    """
    best = scores.argmax(-1)
    return best.masked_fill(~(scores.gather(-1, best[:, None])[:, 0] < math.inf), INVALID_TOKEN)
