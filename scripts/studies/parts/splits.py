"""What a split of GPUs into replicas would reach, by arithmetic: step times of a part of the model, and its sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from launch.bench.ceilings import Work
from lp.models.captured_step import BUCKETS

from .arithmetic import Gpu, StepTime
from .gpu_projection import LogLaw, StepEstimate

MEMORY_SHARE = 0.9  # of a GPU's memory, that weights may take: assumed
ELEMENT_BYTES = 2  # of bfloat16


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The time of one sum over the ranks of a replica.

    Args:
        base_s: whatever its size.
        hop_s: for each of the steps of a ring; 0 where every rank reads all others at once.
        bytes_per_s: of a link.
        ring: twice as many steps as there are other ranks, of a part each; or one step, of all others' tensors.
    """

    base_s: float
    hop_s: float
    bytes_per_s: float
    ring: bool

    def seconds(self, ranks: int, nbytes: float) -> float:
        """Seconds to sum a tensor of so many bytes over the ranks."""
        if ranks == 1:
            return 0.0
        if self.ring:
            return self.base_s + 2 * (ranks - 1) * (self.hop_s + nbytes / ranks / self.bytes_per_s)
        return self.base_s + (ranks - 1) * nbytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, as far as a step's time depends on it.

    Args:
        work: of the whole model.
        layers, hidden: of it.
    """

    work: Work
    layers: int
    hidden: int

    def part(self, tp: int) -> Work:
        """Work of one of tp ranks."""
        work = self.work
        return replace(
            work,
            weight_bytes=work.weight_bytes // tp,
            kv_token_bytes=work.kv_token_bytes // tp,
            token_flop=work.token_flop // tp,
            head_flop=work.head_flop // tp,
            key_flop=work.key_flop // tp,
        )


@dataclass(frozen=True, kw_only=True)
class Split(StepEstimate):
    """A split of the GPUs with the step tokens that are best there.

    Args:
        lp, tp: replicas, and ranks of each.
    """

    lp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What steps run on.

    Args:
        gpu: each of them.
        memory_bytes: of each.
        sums: over the ranks of a replica.
        host_s: a step, of one replica, and what each further one adds to it.
    """

    gpu: Gpu
    memory_bytes: float
    sums: Sum
    host_s: tuple[float, float]

    def step(self, shape: Shape, lp: int, tp: int, budget: int, prefix: int) -> dict[str, float]:
        """Seconds of a step's parts."""
        parts = StepTime.of(self.gpu, shape.part(tp), shape.layers, budget, prefix).parts
        padded = next((size for size in BUCKETS if size >= budget), budget)
        count = 2 * shape.layers + 2  # with the embeddings' and the vocabulary's
        parts["sums"] = count * self.sums.seconds(tp, padded * shape.hidden * ELEMENT_BYTES)
        parts["host"] = self.host_s[0] + self.host_s[1] * (lp - 1) if budget > 1 else 0.0
        return parts

    def fits(self, shape: Shape, tp: int) -> bool:
        """Whether a rank's part has room."""
        return shape.work.weight_bytes / tp <= MEMORY_SHARE * self.memory_bytes

    def best(self, shape: Shape, law: LogLaw, lp: int, tp: int, prefix: int) -> Split:
        """The split with the step tokens that give most tokens a second; one token is plain decoding."""
        found = [
            Split(
                lp=lp,
                tp=tp,
                budget=budget,
                compression=1.0 if budget == 1 else min(law.compression(lp * budget), lp * budget),
                parts=self.step(shape, lp, tp, budget, prefix),
            )
            for budget in BUCKETS
        ]
        return max(found, key=lambda split: split.tokens_per_s)

    def splits(self, shape: Shape, law: LogLaw, gpus: int, prefix: int) -> Iterator[Split]:
        """All splits of so many GPUs whose parts have room, from LP alone to TP alone."""
        for tp in (size for size in range(1, gpus + 1) if gpus % size == 0):
            if self.fits(shape, tp):
                yield self.best(shape, law, gpus // tp, tp, prefix)
