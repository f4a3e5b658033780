"""The tail of a captured step: from the logits of its nodes to the message, as a graph of its own.

B: tokens of the step's bucket, N: nodes that a message has room for, V: vocabulary size, K: top-k logits of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lp.engine.sharded_sampling import ShardedSampling
from lp.models.graph_recorder import GraphRecorder
from lp.parallel.message import BEST, DIGEST, HEADER, LENGTH, SAMPLED_SHIFT, STOP, MessageShape, Sampled, best_logits
from lp.sampling.sampler import Sampler
from lp.sampling.top_logits import pack_top_logits


class _Inputs(NamedTuple):
    """The parts of a block of int64s, on the host or on the device, that the tail reads.

    Attributes:
        known: header and words of the message, (HEADER + N,).
        nodes_B: the node of each row of logits; N for padding.
        reachable_B: whether a walk may reach it.
        noise_rows_B: the rows of the noise buffer that it is sampled with.
    """

    known: Any
    nodes_B: Any
    reachable_B: Any
    noise_rows_B: Any

    @classmethod
    def parts(cls, block: Any, num_nodes: int) -> _Inputs:
        """Views of a block, an array or a tensor."""
        known = HEADER + num_nodes
        return cls(block[:known], *block[known:].reshape(3, -1))


class CapturedTail:
    """Samples the nodes of one bucket's step, and fills in the message.

    Args:
        recorder: of the step.
        logits_BV: that the step leaves.
        sampler: of a generation; those of later ones are alike, and use the same noise buffer.
        shape: of the message.
        num_logits: top-k logits that are taken, at most K.
        compared: ranks compare the best logits of `c`.
        to_host: copy the message to the host too: there is no other rank.
        sharded: what samples on the ranks of a replica; None where the model is whole.

    Attributes:
        message: (P,) int64, on the device.
        on_host: the same in pinned memory, once the device is done; None if it is not copied.
        heads: as of `ShardedSampling`, on the device; None without one.
    """

    def __init__(
        self,
        recorder: GraphRecorder,
        logits_BV: torch.Tensor,
        sampler: Sampler,
        shape: MessageShape,
        num_logits: int,
        compared: bool,
        to_host: bool,
        sharded: ShardedSampling | None,
    ) -> None:
        device = logits_BV.device
        bucket = len(logits_BV)
        pinned = device.type == "cuda"
        self.num_nodes = shape.nodes
        size = HEADER + shape.nodes + 3 * bucket
        host = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._inputs = _Inputs.parts(host.numpy(), shape.nodes)
        self._inputs.nodes_B[:] = shape.nodes
        block = torch.zeros(size, dtype=torch.int64, device=device)
        inputs = _Inputs.parts(block, shape.nodes)
        self.message = torch.zeros(shape.size, dtype=torch.int64, device=device)
        self.on_host = torch.zeros(shape.size, dtype=torch.int64, pin_memory=pinned) if to_host else None
        self.heads: torch.Tensor | None = None
        # One more node, which takes what padding samples.
        words = torch.zeros(shape.nodes + 1, dtype=torch.int64, device=device)
        top_logits = torch.zeros(shape.nodes + 1, shape.num_logits, dtype=torch.int64, device=device)
        parts = self.message.split([HEADER, shape.nodes, shape.nodes * shape.num_logits])

        def tail() -> None:
            block.copy_(host, non_blocking=True)
            flags = None
            reachable_B = inputs.reachable_B != 0
            if sharded:
                known = inputs.known[DIGEST : LENGTH + 1]
                sampled, flags, self.heads = sharded.sample_all(
                    known, logits_BV, reachable_B, inputs.noise_rows_B, num_logits
                )
            else:
                scores, tokens = sampler.sample_all(logits_BV, reachable_B, inputs.noise_rows_B)
                top = pack_top_logits(scores, num_logits) if num_logits else top_logits[:0]
                sampled = Sampled(tokens, top, best_logits(logits_BV) if compared else None)
            words[: shape.nodes] = inputs.known[HEADER:]
            words.index_copy_(
                0, inputs.nodes_B, words.index_select(0, inputs.nodes_B) | sampled.tokens << SAMPLED_SHIFT
            )
            parts[0].copy_(inputs.known[:HEADER])
            parts[1].copy_(words[: shape.nodes])
            if sampled.best is not None:
                parts[0][BEST:] = sampled.best
            if flags is not None:
                parts[0][STOP : LENGTH + 1] = flags
            if num_logits:
                top_logits[:, : sampled.top_logits.shape[1]].index_copy_(0, inputs.nodes_B, sampled.top_logits)
                parts[2].copy_(top_logits[: shape.nodes].flatten())
            if self.on_host is not None:
                self.on_host.copy_(self.message, non_blocking=True)

        self._run = recorder.record(tail)

    def run(
        self, known: np.ndarray, nodes: Sequence[int], reachable: Sequence[bool], noise_rows: Sequence[int]
    ) -> torch.Tensor:
        """The message (P,), on the device, which may still be at it.

        Args:
            known: as `_Inputs` has it.
            nodes: of the first rows of logits; the others are padding.
            reachable, noise_rows: of these nodes.
        """
        inputs = self._inputs
        inputs.known[:] = known
        inputs.nodes_B[: len(nodes)] = nodes
        inputs.nodes_B[len(nodes) :] = self.num_nodes
        inputs.reachable_B[: len(nodes)] = reachable
        inputs.noise_rows_B[: len(noise_rows)] = noise_rows
        self._run()
        return self.message
