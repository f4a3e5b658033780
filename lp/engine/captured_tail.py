"""The tail of a captured step: from the logits of its nodes to the messages of its texts, as a graph of its own.

B: tokens of the step's bucket, Q: texts that a step may have, N: nodes that a message has room for, V: vocabulary size,
K: top-k logits of a node, F: rows of noise that a step fills, C: counts that it adds to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from lp.draft.layout import StepLayout
from lp.engine.sharded_sampling import ShardedSampling
from lp.models.captured_step import StepTensors
from lp.models.graph_recorder import GraphRecorder
from lp.parallel.message import (
    DIGEST,
    HEADER,
    LENGTH,
    STOP,
    Header,
    MessageShape,
    Sampled,
    best_logits,
    known_part,
    write,
)
from lp.sampling.node_sampling import NUM_NUMBERS, CallRules, NodeSampling, Numbers, ScoreRules, counts_at_nodes
from lp.sampling.noise import NO_NOISE, fill_noise
from lp.sampling.sampler import Sampler
from lp.sampling.top_logits import pack_top_logits

FILLED = 16  # of F, for each text; what is more, as in a text's first step, is filled before the step
COUNTED = 16  # of C, the same


class SamplerMemory(NamedTuple):
    """Memory of the device that samplers keep from step to step, for Q texts.

    Attributes:
        noise_SV: rows of noise (`lp.sampling.noise`); None where no text is sampled under noise.
        counts_QV: how often each token came in each text (`lp.sampling.token_counts`); None where nothing is counted.
    """

    noise_SV: torch.Tensor | None
    counts_QV: torch.Tensor | None


class TailShape(NamedTuple):
    """What a tail has room for.

    Attributes:
        texts: Q.
        message: one text's message.
        num_logits: top-k logits that are taken of a node, at most K.
        compared: ranks compare the best logits of each `c`; else there is no other rank, and the messages are copied to
            the host too.
    """

    texts: int
    message: MessageShape
    num_logits: int
    compared: bool


class TextInTail(NamedTuple):
    """What a tail does for one text.

    Attributes:
        place: where among Q its message, its noise and its counts are.
        sampler: says what the text asks for, and which noise and counts are missing.
        layout: the nodes of its step.
        header: what its message begins with.
        text: prompt and generated tokens.
        first_row: where the logits have `c`; its other sampled nodes follow.
        first_token: where the pass has its first token.
    """

    place: int
    sampler: Sampler
    layout: StepLayout
    header: Header
    text: Sequence[int]
    first_row: int
    first_token: int


class _Inputs(NamedTuple):
    """The parts of a block of int64s, on the host or on the device, that the tail reads.

    Attributes:
        known: header and words of the messages, (Q, HEADER + N).
        numbers: what each text asks for, float64 (Q, NUM_NUMBERS).
        first_rows_Q: row of each text's `c`.
        nodes_B: the node of each row of logits, as `write` takes it.
        places_B: its text.
        reachable_B: whether a walk may reach it.
        noise_rows_B: the row of the noise buffer that it is sampled with.
        generated_B: whether each token of the step counts as generated.
        filled_F2: rows of noise to fill, and their keys; -1 for none.
        counted_C2: indices of the flattened counts, and what to add there.
    """

    known: Any
    numbers: Any
    first_rows_Q: Any
    nodes_B: Any
    places_B: Any
    reachable_B: Any
    noise_rows_B: Any
    generated_B: Any
    filled_F2: Any
    counted_C2: Any

    @classmethod
    def sizes(cls, texts: int, nodes: int, bucket: int) -> list[int]:
        """Number of int64s that every part has, in order."""
        return [
            texts * (HEADER + nodes),
            texts * NUM_NUMBERS,
            texts,
            *[bucket] * 5,
            2 * FILLED * texts,
            2 * COUNTED * texts,
        ]

    @classmethod
    def parts(cls, block: Any, texts: int, nodes: int, bucket: int) -> _Inputs:
        """Views of a block, an array or a tensor."""
        ends = itertools.accumulate(cls.sizes(texts, nodes, bucket), initial=0)
        flat = cls._make(block[start:end] for start, end in itertools.pairwise(ends))
        float64 = torch.float64 if isinstance(block, torch.Tensor) else np.float64
        return flat._replace(
            known=flat.known.reshape(texts, -1),
            numbers=flat.numbers.view(float64).reshape(texts, -1),
            filled_F2=flat.filled_F2.reshape(-1, 2),
            counted_C2=flat.counted_C2.reshape(-1, 2),
        )


class CapturedTail:
    """Samples the nodes of one bucket's step, and writes the messages.

    Args:
        recorder: records the work of the step.
        step: what the step reads.
        logits_BV: logits that the step leaves.
        rules: what its call does to scores.
        functions: one text's rules, for the functions that all texts have alike.
        memory: where noise and counts are kept.
        shape: what it has room for.
        sharded: what samples on the ranks of a replica, for one text; None where the model is whole.

    Attributes:
        messages: (Q, P) int64, on the device.
        on_host: the same in pinned memory, once the device is done; None if they are not copied.
        heads: see `ShardedSampling`; they lie on the device; None without one.
    """

    def __init__(
        self,
        recorder: GraphRecorder,
        step: StepTensors,
        logits_BV: torch.Tensor,
        rules: CallRules,
        functions: ScoreRules,
        memory: SamplerMemory,
        shape: TailShape,
        sharded: ShardedSampling | None,
    ) -> None:
        device = logits_BV.device
        bucket = len(logits_BV)
        texts, message, num_logits, compared = shape
        pinned = device.type == "cuda"
        self.rules = rules
        self.shape = message
        size = sum(_Inputs.sizes(texts, message.nodes, bucket))
        host = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._inputs = _Inputs.parts(host.numpy(), texts, message.nodes, bucket)
        block = torch.zeros(size, dtype=torch.int64, device=device)
        inputs = _Inputs.parts(block, texts, message.nodes, bucket)
        self.messages = torch.zeros(texts, message.size, dtype=torch.int64, device=device)
        self.on_host: torch.Tensor | None = None
        if not compared:
            self.on_host = torch.zeros(texts, message.size, dtype=torch.int64, pin_memory=pinned)
        self.heads: torch.Tensor | None = None
        self._padding = texts * message.nodes  # a node that is none
        self._stage([])

        def tail() -> None:
            block.copy_(host, non_blocking=True)
            sampling = _sampling(inputs, step, rules, functions, memory)
            if sharded:
                known = inputs.known[0, DIGEST : LENGTH + 1]
                sampled, flags, self.heads = sharded.sample_all(known, logits_BV, sampling, num_logits)
                inputs.known[0, STOP : LENGTH + 1] = flags
            else:
                scores, tokens = sampling.sample(logits_BV)
                top = pack_top_logits(scores, num_logits) if num_logits else tokens.new_zeros(len(tokens), 0)
                best = best_logits(logits_BV, inputs.first_rows_Q) if compared else None
                sampled = Sampled(tokens, top, best)
            write(self.messages, inputs.known, inputs.nodes_B, sampled, message)
            if self.on_host is not None:
                self.on_host.copy_(self.messages, non_blocking=True)

        self._run = recorder.record(tail)

    def run(self, texts: Sequence[TextInTail]) -> None:
        """Sample these texts, and write their messages."""
        noted = self._stage(texts)
        self._run()
        for note in noted:  # not before: what fails until here leaves the samplers as they were
            note()

    def _stage(self, texts: Sequence[TextInTail]) -> list[Callable[[], None]]:
        """Fill in the block for these texts; all else is padding.

        Returns:
            What to call once the tail has run: samplers note what it has computed for them.
        """
        inputs = self._inputs
        inputs.nodes_B[:] = self._padding
        inputs.places_B[:] = 0
        inputs.filled_F2[:] = -1, 0
        inputs.counted_C2[:] = 0
        if not texts:
            inputs.numbers[:] = Numbers()
        filled: list[tuple[int, int]] = []
        counted: list[tuple[int, int]] = []
        noted: list[Callable[[], None]] = []
        for own in texts:
            layout, sampler = own.layout, own.sampler
            assert sampler.rules is not None
            nodes = layout.sampled_nodes
            rows = slice(own.first_row, own.first_row + len(nodes))
            reachable = layout.reachable[nodes]
            inputs.known[own.place] = known_part(own.header, layout, self.shape)
            inputs.numbers[own.place] = sampler.rules.numbers
            inputs.first_rows_Q[own.place] = own.first_row
            inputs.nodes_B[rows] = own.place * self.shape.nodes + nodes
            inputs.places_B[rows] = own.place
            inputs.reachable_B[rows] = reachable
            if self.rules.noise:
                inputs.noise_rows_B[rows] = NO_NOISE
            if sampler.noise is not None:
                positions = [position + 1 for position in layout.sampled_positions]
                missing = sampler.noise.missing(positions)
                if len(missing) > FILLED:
                    sampler.noise.fill([sampler.noise], [positions])
                else:
                    filled += missing
                    noted.append(partial(sampler.noise.filled, positions))
                inputs.noise_rows_B[rows] = noise_rows(sampler, positions, reachable)
            if sampler.counts is not None:
                at = layout.step_positions
                counted += sampler.counts.uncounted(own.text, int(at[0]), COUNTED)
                noted.append(partial(sampler.counts.counted, int(at[0])))
                tokens = slice(own.first_token, own.first_token + len(at))
                inputs.generated_B[tokens] = at >= sampler.counts.first_generated
        inputs.filled_F2[: len(filled)] = np.array(filled, np.int64).reshape(-1, 2)
        inputs.counted_C2[: len(counted)] = np.array(counted, np.int64).reshape(-1, 2)
        return noted


def noise_rows(sampler: Sampler, positions: Sequence[int], reachable: np.ndarray) -> list[int]:
    """The rows of noise that a text's sampled nodes are sampled with.

    Args:
        sampler: the text's sampler, which has noise.
        positions: where the tokens to be sampled will be.
        reachable: bool, whether a walk may reach the node.
    """
    assert sampler.noise is not None
    rows = sampler.noise.rows_of(positions)
    if sampler.noisy_guesses:
        return rows
    return [row if reached else NO_NOISE for row, reached in zip(rows, reachable.tolist(), strict=True)]


def _sampling(
    inputs: _Inputs, step: StepTensors, rules: CallRules, functions: ScoreRules, memory: SamplerMemory
) -> NodeSampling:
    """How the step's nodes are sampled, by what the block has."""
    places_B = inputs.places_B
    sampling = NodeSampling(
        rules,
        functions,
        inputs.numbers if len(inputs.numbers) == 1 else inputs.numbers.index_select(0, places_B),
        inputs.reachable_B[:, None] != 0,
    )
    if rules.counts:
        assert memory.counts_QV is not None
        indices, ones = inputs.counted_C2.unbind(1)
        memory.counts_QV.view(-1).index_add_(0, indices, ones.to(torch.int32))
        visible_BB = step.visible_BB.index_select(0, step.logits_indices_B)
        counts_BV = memory.counts_QV.index_select(0, places_B)
        sampling.counts = counts_at_nodes(counts_BV, step.tokens_B, inputs.generated_B != 0, visible_BB)
    if rules.noise:
        assert memory.noise_SV is not None
        rows, keys = inputs.filled_F2.unbind(1)
        fill_noise(memory.noise_SV, rows.contiguous(), keys.contiguous())
        sampling.noise_SV = memory.noise_SV
        sampling.noise_rows = inputs.noise_rows_B
    return sampling
