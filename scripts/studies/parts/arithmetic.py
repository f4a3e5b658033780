"""Step times of a GPU by arithmetic: bytes, FLOPs, kernels. They are no measurement, but their constants are."""

from __future__ import annotations

from dataclasses import dataclass

from launch.bench.ceilings import Work
from lp.models.captured_step import BUCKETS

# Of a data sheet's figures, what the products of a captured step reach: measured on an H100 and an H200, a 7B in
# bfloat16, 64 rows for the first and 256 for the second (docs/experiments/gpu-results.md).
BANDWIDTH_SHARE = 0.7
FLOP_SHARE = 0.5
# Kernels of a layer of a captured step, fused layers with kernels of our own.
LAYER_KERNELS = 10
# What t(64) of that model takes beyond its products, by kernel: measured on both.
KERNEL_S = 3e-6
# Calls of the host a step, graphs among them, with sampling (docs/experiments/step-time.md).
# The time of one is assumed.
LAUNCHES = 3
LAUNCH_S = 5e-6


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's speeds by its data sheet, from which the time of a step is computed.

    Args:
        name: the maker's name, for tables.
        bytes_per_s: memory bandwidth.
        flop_per_s: speed of dense products in bfloat16.
    """

    name: str
    bytes_per_s: float
    flop_per_s: float


GPUS = {
    "h200": Gpu(name="H200 SXM", bytes_per_s=4.8e12, flop_per_s=989e12),
    "h100": Gpu(name="H100 SXM", bytes_per_s=3.35e12, flop_per_s=989e12),
    "a100": Gpu(name="A100 SXM 80GB", bytes_per_s=2.039e12, flop_per_s=312e12),
}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The forward pass of a step, in seconds.

    Args:
        weights: reading the weights and the cached tokens.
        flops: computing, which happens meanwhile: the longer of the two counts.
        kernels: starting and ending kernels, and the host's calls.
    """

    weights: float
    flops: float
    kernels: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole pass."""
        return max(self.weights, self.flops) + self.kernels

    @property
    def parts(self) -> dict[str, float]:
        """What the time goes to, by name."""
        bound = "weights" if self.weights >= self.flops else "FLOPs"
        return {bound: max(self.weights, self.flops), "kernels": self.kernels}

    @classmethod
    def of(cls, gpu: Gpu, work: Work, layers: int, num_tokens: int, prefix: int, texts: int = 1) -> StepTime:
        """Compute t(T), the time of a forward pass of T tokens, without having the GPU.

        Args:
            gpu: what the pass runs on.
            work: bytes and FLOPs of a pass of the model.
            layers: number of the model's layers, each of which starts LAYER_KERNELS kernels.
            num_tokens: T, of all texts; a captured step is padded to the next larger of a few sizes.
            prefix: number of cached tokens of each text.
            texts: how many take the step together.
        """
        padded = next((size for size in BUCKETS if size >= num_tokens), num_tokens)
        return cls(
            weights=work.moved_bytes(padded, texts * prefix) / (BANDWIDTH_SHARE * gpu.bytes_per_s),
            flops=work.flop(padded, prefix) / (FLOP_SHARE * gpu.flop_per_s),
            kernels=layers * LAYER_KERNELS * KERNEL_S + LAUNCHES * LAUNCH_S,
        )
