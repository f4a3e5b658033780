"""Applies logits processors to the nodes of a draft tree, to each node with the prefix of its own branch.

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
    """Refuse logits processors whose result for a node may depend on more than the node's own prefix and scores.

    A draft tree has several branches, which a processor must not mix. Transformers' processors that are known to work
    branch by branch are accepted, and any other with the attribute `per_branch = True`.

    Args:
        processors: the caller's processors, in the order in which they are applied.

    Returns:
        The processors as a list.

    Raises:
        ValueError: a processor is not accepted; the message names it and the remedy.
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
    """Applies the logits processors of one call to nodes of different draft-tree branches at once.

    A lookahead step also has nodes that verification cannot reach and that only guess n-grams. Their logits are only
    divided by the temperature.

    Args:
        processors: applied in this order, warpers included.
        padding: token ids of the prompt's left padding, which processors see and the model does not.

    Attributes:
        temperature: product of the temperatures of all temperature warpers; 1.0 if there is none.
        full_vocabulary_temperature: equal to `temperature` if all processors are temperature warpers, so that any token
            may be sampled; otherwise 0.0.
        prefix_free: whether all processors look at the scores alone. A subclass of one of transformers' processors
            counts as one that may look at the prefix.
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
        """Class names of the processors that may turn finite logits into NaN or infinite scores, for error messages."""
        return [type(processor).__name__ for processor in self._processors if type(processor) not in KEEP_FINITE]

    def settings(self) -> list[Any]:
        """List (class name, settings as plain data) of each processor, so that ranks can compare them before a call."""
        return [(type(processor).__name__, plain_settings(vars(processor))) for processor in self._processors]

    def __call__(
        self, logits: torch.Tensor, branches: Sequence[Sequence[int] | None], text: Sequence[int]
    ) -> torch.Tensor:
        """Apply the processors to the logits of a step's nodes.

        Args:
            logits: (n, V).
            branches: tokens of every node behind the last one of `text`, up to and with the node itself; None for
                a node that verification cannot reach, which gets the temperature alone.
            text: token ids of the prompt and of the generated tokens.

        Returns:
            Scores (n, V), float32 or wider; without processors the logits themselves.
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
        """The tokens that all nodes have before them; moved to the device once, as there may be many."""
        return [*self._padding, *text] if self._sees_prefix else [text[-1]]

    def _own_prefix(self, branch: Sequence[int] | None) -> list[int]:
        """The tokens of a node's branch behind the shared prefix, up to and with the node."""
        return list(branch or ()) if self._sees_prefix else []

    def _groups(self, branches: Sequence[Sequence[int] | None]) -> list[list[int]]:
        """Groups of nodes that one call of a processor serves: nodes of one depth, or all where no processor sees
        prefixes.
        """
        groups: dict[int, list[int]] = {}
        for node, branch in enumerate(branches):
            if branch is not None:
                groups.setdefault(len(branch) if self._sees_prefix else 0, []).append(node)
        return list(groups.values())


def plain_settings(values: Any, within: tuple[int, ...] = ()) -> Any:
    """Convert a setting of a processor to plain data, equal on ranks with equal settings, so that ranks can compare it.

    An object becomes its class name, since its repr may contain an address. A large tensor becomes a hash.

    Args:
        values: a setting, or a collection of settings.
        within: `id` of each collection that `values` is nested in. Where a collection contains itself, "..." is put.
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
