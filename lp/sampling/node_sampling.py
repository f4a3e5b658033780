"""Scores and sampled tokens of nodes as tensor operations, by one call for several texts.

A text's settings are data, a row of numbers: so one call, and one captured step, serves texts with different settings.
Every operation is that of transformers' processor of the same name: on a CPU bit for bit, on a GPU to the last bit,
where torch divides by a number by multiplying with its inverse. Processors that numbers cannot stand for go through
`lp.sampling.processors`.

n: sampled nodes, Q: texts, V: vocabulary, T: tokens of the pass, U: different tokens that came in some text.
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
    """Operations on scores that a call has to do, as flags: what no text of the call asks for is left out."""

    NONE = 0
    COUNTS = 1
    REPETITION = 2
    TEMPERATURE = 4
    TOP_K = 8
    TOP_P = 16
    MIN_P = 32


COUNTING = Operation.COUNTS | Operation.REPETITION  # what looks at the tokens before a node


class Numbers(NamedTuple):
    """One text's sampling settings as a row of numbers; the defaults change nothing.

    Attributes:
        first_counted: position of the first token that counts as generated, for `presence` and `frequency`.
        presence: subtracted once from the logit of each token that was generated.
        frequency: subtracted from a token's logit for each time that it was generated.
        repetition: transformers' repetition_penalty.
        temperature: scores are divided by it.
        top_k: the k likeliest tokens are kept; 0 keeps all.
        one_minus_top_p: the least likely tokens that together have at most this probability are left out; -1: none.
        min_p: tokens less likely than this share of the likeliest one's probability are left out.
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
        """The operations that these settings need, in a call for this text alone."""
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
    """One text's logits processors in a form that one call can apply to nodes of several texts.

    Attributes:
        numbers: settings of the processors that `Numbers` has a field for.
        before, after: other processors, functions of the scores alone, which are applied before and behind these.
    """

    numbers: Numbers
    before: tuple[LogitsProcessor, ...] = ()
    after: tuple[LogitsProcessor, ...] = ()

    @classmethod
    def of(cls, processors: Iterable[LogitsProcessor], padding: int = 0) -> ScoreRules | None:
        """Rules of a text; None if one of its processors has to be applied by the host, as it looks at prefixes.

        Args:
            processors: the text's processors, in the order in which they are applied.
            padding: tokens of the prompt's left padding, which penalties count and positions do not.
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
        """The operations that the numbers need, in a call for this text alone."""
        return self.numbers.operations

    @property
    def counts(self) -> bool:
        """Whether a penalty needs to know how often each token came before a node."""
        return bool(self.operations & COUNTING)

    @cached_property
    def functions_key(self) -> str:
        """Names and settings of the processors in `before` and `after`, equal for all texts of a call; "" if none."""
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
        return {"top_k": processor.top_k}
    if type(processor) is tf.TopPLogitsWarper:
        return {"one_minus_top_p": 1 - processor.top_p}
    if type(processor) is tf.MinPLogitsWarper:
        return {"min_p": processor.min_p}
    return None


class CallRules(NamedTuple):
    """What a call does to scores, whatever its texts' numbers are: decides which captured step can do the call.

    Attributes:
        operations: operations that some text of the call asks for.
        most_k: the largest top_k that a text may have, a power of 2; 0: none has a top_k.
        functions_key: `ScoreRules.functions_key`, equal for all texts of the call.
        noise: whether Gumbel noise is added to scores before the argmax.
    """

    operations: Operation
    most_k: int
    functions_key: str
    noise: bool

    @classmethod
    def of(cls, rules: Sequence[ScoreRules], noise: bool) -> CallRules:
        """Rules of one call that samples nodes of these texts.

        Args:
            rules: each text's rules, all with an equal `functions_key`.
            noise: whether Gumbel noise is added for some of them.
        """
        operations = Operation.NONE
        for own in rules:
            operations |= own.operations
        largest = int(max(own.numbers.top_k for own in rules))
        most_k = 1 << (largest - 1).bit_length() if largest else 0
        return cls(operations, most_k, rules[0].functions_key, noise)

    @property
    def counts(self) -> bool:
        """Whether some text's penalty needs to know how often each token came before a node."""
        return bool(self.operations & COUNTING)

    @property
    def shardable(self) -> bool:
        """Whether a rank with a part of the LM head can process that part's scores, given the k best of all."""
        within = Operation.TEMPERATURE | Operation.TOP_K
        return not (self.functions_key or self.operations & ~within)

    def serves(self, other: CallRules) -> bool:
        """Whether a step that was captured for these rules can do a call with other rules, perhaps with more work.

        Args:
            other: rules of the call to be done.
        """
        operations = self.operations & other.operations == other.operations
        noise = self.noise or not other.noise
        return operations and noise and self.most_k >= other.most_k and self.functions_key == other.functions_key


@dataclass
class NodeSampling:
    """All that one call needs to sample its nodes: the rules, and tensors with each node's settings, counts and noise.

    Attributes:
        rules: operations of the call.
        functions: rules of any text of the call, for `before` and `after`, which are equal for all.
        numbers: float64 (n, NUM_NUMBERS), `Numbers` of every node's text; (1, NUM_NUMBERS) in a call for one text.
        reachable: bool (n, 1), nodes that verification may reach; the others get the temperature alone. None: all are.
        counts: int32 (n, V), how often each token came before each node, as `lp.sampling.token_counts` counts; None
            where no text has a penalty.
        columns: int64 (U,), the only tokens that came before any node: `counts` has a column for each of them, (n, U).
            None: it has all V.
        noise_SV: Gumbel noise, a row for each position; None: none is added.
        noise_rows: int64 (n,), row of each node's noise; None: row i is node i's.
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
        """Scores (n, V), and the sampled token of every node, int64 (n,), from its logits.

        Args:
            logits: (n, V).
        """
        scores = self.scores(logits)
        return scores, finite_argmax(self.noisy(scores))

    def noisy(self, scores: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Scores with the Gumbel noise added: the argmax over the vocabulary is the sampled token.

        Args:
            scores: (n, any number of tokens), before noise.
            first: token id of the first column, where `scores` has a part of the vocabulary.
        """
        if self.noise_SV is None:
            return scores
        noise = self.noise_SV[:, first : first + scores.shape[1]]
        return scores + (noise if self.noise_rows is None else noise.index_select(0, self.noise_rows))

    def scores(self, logits: torch.Tensor, best: KthBest | None = None) -> torch.Tensor:
        """Scores (n, V), before noise: float32 or wider; the logits themselves where the call has no operation.

        Args:
            logits: (n, V), or a part of the vocabulary where the call's rules are `shardable`.
            best: (scores, k) -> the k best scores of every node over the whole vocabulary, (n, k), best first; None:
                `logits` has all of it.
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
    """Add to each node's counts the tokens of the pass that the node sees, as penalties need them: int32 (n, V).

    Args:
        counts_nV: int32 (n, V), counts of the tokens before the pass; changed.
        tokens_T: int64 (T,), the pass's tokens; ids from V on are not counted.
        generated_T: bool (T,), True: the token counts as generated; False: as the prompt's.
        visible_nT: bool (n, T), the tokens of the pass that each node sees.
    """
    vocabulary = counts_nV.shape[1]
    ones_T = torch.where(generated_T, GENERATED, PROMPT).to(torch.int32)
    ones_T = ones_T.masked_fill(tokens_T >= vocabulary, 0)  # a model may embed more tokens than it can give
    index_nT = tokens_T.clamp(max=vocabulary - 1).expand(len(counts_nV), -1)
    return counts_nV.scatter_add_(1, index_nT, visible_nT * ones_T)


def finite_argmax(scores: torch.Tensor) -> torch.Tensor:
    """The token of every node: argmax of its scores, int64 (n,); INVALID_TOKEN where it would be by NaN or +inf.

    Args:
        scores: (n, V).
    """
    best = scores.argmax(-1)
    return best.masked_fill(~(scores.gather(-1, best[:, None])[:, 0] < math.inf), INVALID_TOKEN)
