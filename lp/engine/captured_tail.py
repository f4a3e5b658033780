"""The sampling part of a captured decode step, its "tail": a CUDA graph that is replayed after the forward pass.

The first graph of a step is the forward pass, which leaves the logits of the draft tree's nodes. The tail samples a
token at each node and writes the messages to other ranks. A node is a token of the step's tree of draft tokens and
window guesses; its root `c` is the newest token of the sequence.
B: tokens of the step's bucket (its size, padding included), Q: sequences that a step may have, N: nodes that a message
has room for, P: int64s of a message, V: vocabulary size, K: top-k logits of a node, F: rows of noise that a step fills,
C: token counts that it adds to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from lp.engine.sharded_sampling import ShardedSampling
from lp.engine.step_sampler import StepSequence, noise_rows
from lp.models.captured_step import StepTensors
from lp.models.graph_recorder import GraphRecorder
from lp.parallel.message import (
    DIGEST,
    HEADER,
    LENGTH,
    STOP,
    MessageShape,
    Sampled,
    best_logits,
    known_part,
    write,
)
from lp.sampling.node_sampling import NUM_NUMBERS, CallRules, NodeSampling, Numbers, ScoreRules, counts_at_nodes
from lp.sampling.noise import NO_NOISE, fill_noise
from lp.sampling.top_logits import pack_top_logits

FILLED = 16  # rows of noise a text that the graph can fill; if more are missing, all are filled before it runs
COUNTED = 16  # tokens a text that the graph can count; if more are missing, all are counted before it runs


class SamplerMemory(NamedTuple):
    """Device memory for the samplers of up to Q sequences, at fixed addresses that a CUDA graph can read and write.

    Attributes:
        noise_SV: Gumbel noise, (S, V): each of the S rows is the noise for one position of one sequence
            (`lp.sampling.noise`). None: no sequence is sampled under noise.
        counts_QV: int32 (Q, V), how often each token of the vocabulary occurs in each sequence, for penalties
            (`lp.sampling.token_counts`). None: no sequence has such a penalty.
    """

    noise_SV: torch.Tensor | None
    counts_QV: torch.Tensor | None


class TailShape(NamedTuple):
    """Sizes that the sampling part of a captured step (its "tail") is recorded for; other sizes need another recording.

    Attributes:
        texts: Q, most sequences that the step has.
        message: size of the message that is written for one sequence.
        num_logits: how many top-k logits of each node go into a message, at most K.
        compared: True if several ranks share the step: messages then have the largest logits of each sequence's newest
            token, which ranks compare. False on one rank, where the graph copies the messages to the host instead.
    """

    texts: int
    message: MessageShape
    num_logits: int
    compared: bool


class _Inputs(NamedTuple):
    """Inputs of the graph: views of one block of int64s, which the host fills and the graph copies to the device.

    Attributes:
        known: header and words of the messages, all that is known before the forward pass: (Q, HEADER + N).
        numbers: each text's sampling settings as `Numbers`, float64 (Q, NUM_NUMBERS).
        first_rows_Q: row of the logits that belongs to each text's `c`.
        nodes_B: by row of the logits, where `write` puts the sampled token: place * N + node; Q * N for padding.
        places_B: by row of the logits, the place of its text.
        reachable_B: by row of the logits, 1 if verification may accept the node's token, else 0.
        noise_rows_B: by row of the logits, the row of the noise that it is sampled with.
        generated_B: by token of the step, 1 if penalties count it as generated, else 0.
        filled_F2: rows of noise to fill, with their keys; row -1 fills nothing.
        counted_C2: indices into the flattened `counts_QV`, with what to add there.
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
        """Number of int64s in each field, in the order of the fields.

        Args:
            texts: Q.
            nodes: N.
            bucket: B.
        """
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
        """The fields as views of a block of int64s, an array or a tensor; arguments are those of `sizes`."""
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
    """A CUDA graph that samples the draft-tree nodes of a decode step, and writes the messages to other ranks.

    It is recorded for steps of one size, and replayed after the graph of the forward pass, so that the host need not
    launch each sampling kernel by itself.

    Args:
        recorder: records the graph, into the same memory pool as the graphs of the model's steps.
        step: input tensors of the forward pass.
        logits_BV: tensor in which the forward pass leaves its logits.
        rules: the operations on scores (penalties, temperature, warpers) that the graph applies.
        functions: score rules of any one of the sequences, for their `before` and `after` processors, which are the
            same in all sequences.
        memory: device memory that keeps noise and token counts from step to step.
        shape: sizes that the graph has room for.
        sharded: samples logits that tensor parallelism divides among ranks, for one sequence; None: this rank has
            whole logits.

    Attributes:
        messages: the messages, int64 (Q, P), on the device.
        on_host: the messages in pinned host memory, valid once the device is done; None if several ranks share steps.
        heads: see `ShardedSampling.heads`, on the device; None without `sharded`.
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
        self._stage([], [])

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

    def run(self, texts: Sequence[StepSequence], places: Sequence[int]) -> None:
        """Sample the sequences of a step whose forward pass was launched just before; the results are in `messages`.

        Args:
            texts: the sequences, at most Q.
            places: the row in memory of each sequence's message, noise and token counts, 0 to Q - 1.
        """
        noted = self._stage(texts, places)
        self._run()
        for note in noted:  # not before: what fails until here leaves the samplers as they were
            note()

    def _stage(self, texts: Sequence[StepSequence], places: Sequence[int]) -> list[Callable[[], None]]:
        """Fill the host's block for these texts; the rest of it becomes padding.

        Returns:
            Functions to call once the graph was launched: they tell the samplers which noise and counts it computes.
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
        for own, place in zip(texts, places, strict=True):
            layout, sampler = own.layout, own.sampler
            assert sampler.rules is not None
            nodes = layout.sampled_nodes
            rows = slice(own.first_row, own.first_row + len(nodes))
            reachable = layout.reachable[nodes]
            inputs.known[place] = known_part(own.header, layout, self.shape)
            inputs.numbers[place] = sampler.rules.numbers
            inputs.first_rows_Q[place] = own.first_row
            inputs.nodes_B[rows] = place * self.shape.nodes + nodes
            inputs.places_B[rows] = place
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


def _sampling(
    inputs: _Inputs, step: StepTensors, rules: CallRules, functions: ScoreRules, memory: SamplerMemory
) -> NodeSampling:
    """What samples the nodes of the step, from the device's copy of the block."""
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
