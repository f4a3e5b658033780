"""Logits processors on the nodes of a step, each with the prefix of its own branch.

n: nodes, V: vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import transformers as tf
from transformers import LogitsProcessor

from lp.errors import UserError
from lp.sampling.grammar import GrammarProcessor
from lp.to_device import to_device

# Functions of the scores alone: one call serves nodes of any prefix. A subclass may look at the prefix.
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
    tf.TopHLogitsWarper,
)
# Of these, those whose best score is finite where that of the logits is, within the limits of lp.SamplingParams.
KEEP_FINITE = (
    tf.TemperatureLogitsWarper,
    tf.TopKLogitsWarper,
    tf.TopPLogitsWarper,
    tf.MinPLogitsWarper,
    tf.TypicalLogitsWarper,
)
# Functions of each node's (prefix, scores): one call a depth, since the prefixes of one depth have one length.
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
LARGEST_PLAIN_TENSOR = 1024  # elements; of larger ones, such as a watermark's table, ranks compare a digest


def check_processors(processors: Iterable[LogitsProcessor]) -> list[LogitsProcessor]:
    """Refuse, by name, a processor that may not be a function of one branch's (prefix, scores) alone.

    Raises:
        ValueError: its name and the remedy.
    """
    checked = list(processors)
    for processor in checked:
        # This watermark fails where no token is in a node's green list, which is likelier among rejected draft tokens.
        failing = isinstance(processor, tf.WatermarkLogitsProcessor) and processor.seeding_scheme == "selfhash"
        known = isinstance(processor, (*PREFIX_FREE, *BY_PREFIX)) and not failing
        if not known and not getattr(processor, "per_branch", False):
            raise UserError(
                f"the logits processor {type(processor).__name__} is not known to work branch by branch; if its result "
                "depends on (input_ids, scores) of each row alone, set per_branch = True on it"
            )
    return checked


class BranchProcessors:
    """The logits processors of one call, applied to nodes of different branches at once.

    Args:
        processors: applied in this order, warpers included.
        padding: left padding of the prompt, which processors see and the model does not.

    Attributes:
        temperature: product of the temperatures: all that is applied to a node that no walk can reach.
        full_vocabulary_temperature: the same where nothing else is applied; 0 where other processors are.
        prefix_free: whether every processor is a function of the scores alone: one of transformers' own, and not a
            subclass, so that its settings say what it does.
    """

    def __init__(self, processors: Iterable[LogitsProcessor], padding: Sequence[int] = ()) -> None:
        self._processors = check_processors(processors)
        self._padding = list(padding)
        temperatures = [p.temperature for p in self._processors if type(p) is tf.TemperatureLogitsWarper]
        self.temperature = math.prod(temperatures)
        self.full_vocabulary_temperature = self.temperature if len(temperatures) == len(self._processors) else 0.0
        self.prefix_free = all(type(processor) in PREFIX_FREE for processor in self._processors)
        self._sees_prefix = any(type(p) not in (*PREFIX_FREE, GrammarProcessor) for p in self._processors)

    def __len__(self) -> int:
        return len(self._processors)

    @property
    def changing(self) -> list[str]:
        """Names of those that may make infinite scores of finite ones: all but those that only leave tokens out."""
        return [type(processor).__name__ for processor in self._processors if type(processor) not in KEEP_FINITE]

    def settings(self) -> list[Any]:
        """Names and settings, in a form that reads the same on every rank."""
        return [(type(processor).__name__, plain_settings(vars(processor))) for processor in self._processors]

    def __call__(
        self, logits: torch.Tensor, branches: Sequence[Sequence[int] | None], text: Sequence[int]
    ) -> torch.Tensor:
        """Scores (n, V), in float32 or wider; the logits themselves where there are no processors.

        Args:
            logits: (n, V).
            branches: the tokens behind the text's last one, up to and with the node, for every node; None for a node
                that no walk can reach, which gets the temperature alone.
            text: prompt and generated tokens.
        """
        if not self._processors:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores: torch.Tensor = wide / self.temperature
        shared = to_device(self._shared_prefix(text), scores.device)
        for nodes in self._groups(branches):
            own_prefixes = to_device([self._own_prefix(branches[node]) for node in nodes], scores.device)
            prefixes = torch.cat([shared.expand(len(nodes), -1), own_prefixes], -1)
            index = to_device(nodes, scores.device)
            processed = wide[index]
            for processor in self._processors:
                if isinstance(processor, GrammarProcessor):
                    own = [list(branches[node] or ()) for node in nodes]
                    processed = processor.of_branches([*self._padding, *text], own, processed)
                else:
                    processed = processor(prefixes, processed)
            scores[index] = processed
        return scores

    def _shared_prefix(self, text: Sequence[int]) -> list[int]:
        """The tokens that all nodes have before them; converted once, as there may be many."""
        return [*self._padding, *text] if self._sees_prefix else [text[-1]]

    def _own_prefix(self, branch: Sequence[int] | None) -> list[int]:
        """The tokens of a node's branch behind the shared prefix, up to and with the node."""
        return list(branch or ()) if self._sees_prefix else []

    def _groups(self, branches: Sequence[Sequence[int] | None]) -> list[list[int]]:
        """Nodes that one call serves: all that can be reached, or those of one depth."""
        groups: dict[int, list[int]] = {}
        for node, branch in enumerate(branches):
            if branch is not None:
                groups.setdefault(len(branch) if self._sees_prefix else 0, []).append(node)
        return list(groups.values())


def plain_settings(values: Any, within: tuple[int, ...] = ()) -> Any:
    """What of a processor's settings reads the same on every rank: no objects, whose names may hold addresses.

    Args:
        values: any of them.
        within: identities of the collections that they are in, which one of them may hold again.
    """
    if isinstance(values, dict | set | frozenset | list | tuple):
        return "..." if id(values) in within else _plain_collection(values, (*within, id(values)))
    if isinstance(values, torch.Tensor):
        return _plain_tensor(values)
    if isinstance(values, np.ndarray | np.generic):
        return values.tolist()
    return values if isinstance(values, int | float | str | None) else type(values).__name__


def _plain_collection(values: Any, within: tuple[int, ...]) -> list[Any]:
    if isinstance(values, dict):
        return sorted(((str(key), plain_settings(value, within)) for key, value in values.items()), key=repr)
    plain = [plain_settings(value, within) for value in values]
    return sorted(plain, key=repr) if isinstance(values, set | frozenset) else plain


def _plain_tensor(values: torch.Tensor) -> Any:
    if values.layout != torch.strided:
        parts = values.to_sparse_coo().coalesce()
        return [list(values.shape), _plain_tensor(parts.indices()), _plain_tensor(parts.values())]
    if values.numel() <= LARGEST_PLAIN_TENSOR:
        return values.tolist()
    return hashlib.sha256(values.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
