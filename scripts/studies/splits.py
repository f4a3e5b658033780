"""The fastest split of 8 GPUs into replicas (lp x tp), for GPUs nobody has run: by arithmetic, no measurement.

    python scripts/tables.py splits docs/experiments/results/scaling-projection/runs.jsonl
    python scripts/tables.py splits RUNS --gpu h100 --memory-gb 80 --temperature 0   # of the same runs

Step times are those of scaling_projection, of a part of the model. A sum over a replica is a ring of NCCL's on NVLink,
by the figures of `known_links`; or one step in which each rank reads all others (torch's symmetric memory), whose
5 us are assumed. S and host time are lines fitted to the runs of scaling_projection: S over log2(tokens a step), host
time over the number of replicas. Beside that host time, a shorter one that is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from launch.bench.ceilings import Work
from launch.config.schema import known_links
from launch.data.shapes import SHAPES, shape_config, sketch
from lp.errors import UserError
from lp.models.captured_step import BUCKETS

from .harness import Result, Study, Table, option, read_results
from .parts.arithmetic import GPUS, Gpu, StepTime
from .parts.gpu_projection import LogLaw, StepEstimate

ASSUMED_HOST_S = 0.2e-3  # of a step
HEADS = (
    *("model", "sums", "host", "fastest lp x tp", "tokens a replica", "S", "step ms", "sums ms", "tokens/s"),
    *("TP alone", "LP alone", "over the better"),
)
MEMORY_SHARE = 0.9  # of a GPU's memory, that weights may take: assumed
ELEMENT_BYTES = 2  # of bfloat16


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A model of how long one sum over the ranks of a replica takes.

    Args:
        base_s: seconds that a sum of any size takes.
        hop_s: seconds that each step of a ring adds; 0 where every rank reads all others at once.
        bytes_per_s: speed of the link between two GPUs.
        ring: True: parts go round in twice as many steps as there are other ranks; False: each rank reads all others.
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


def nccl_ring() -> Sum:
    """NCCL's ring on NVLink."""
    nvlink = known_links()["nvlink"]
    return Sum(base_s=1e-6 * nvlink.base_us, hop_s=1e-6 * nvlink.hop_us, bytes_per_s=1e9 * nvlink.gb_s, ring=True)


ONE_STEP = Sum(base_s=5e-6, hop_s=0.0, bytes_per_s=450e9, ring=False)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, as far as a step's time depends on it.

    Args:
        work: bytes and FLOPs of a pass of the whole model.
        layers: number of layers.
        hidden: hidden size, which sets how many bytes a sum has.
    """

    work: Work
    layers: int
    hidden: int

    @classmethod
    def named(cls, name: str) -> Shape:
        """The model that launch/data/shapes has by this name, in bfloat16."""
        config = shape_config(name)
        work = Work.of(sketch(config, "bfloat16"))
        return cls(work=work, layers=config.num_hidden_layers, hidden=config.hidden_size)

    def part(self, tp: int) -> Work:
        """Bytes and FLOPs of a pass on one of tp ranks, which divide the model evenly."""
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
    """The estimate for GPUs that are split into lp replicas of tp ranks, with the step tokens that are best there.

    Args:
        lp: number of replicas.
        tp: number of ranks that hold one replica.
    """

    lp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs that steps run on, and what their sums and hosts cost.

    Args:
        gpu: speeds of each GPU.
        memory_bytes: memory of each GPU, which a rank's part of the model must fit.
        sums: how long the ranks of a replica take to sum a tensor.
        host_s: the host's seconds a step with one replica, and those that each further replica adds.
    """

    gpu: Gpu
    memory_bytes: float
    sums: Sum
    host_s: tuple[float, float]

    def step(self, shape: Shape, lp: int, tp: int, budget: int, prefix: int, texts: int = 1) -> dict[str, float]:
        """Estimate a step of texts that have `budget` tokens each: seconds by name of what it spends them on."""
        tokens = texts * budget
        parts = StepTime.of(self.gpu, shape.part(tp), shape.layers, tokens, prefix, texts).parts
        padded = next((size for size in BUCKETS if size >= tokens), tokens)
        parts["sums"] = self.sums_s(shape, tp, padded)
        parts["host"] = texts * (self.host_s[0] + self.host_s[1] * (lp - 1)) if budget > 1 else 0.0
        return parts

    def sums_s(self, shape: Shape, tp: int, num_tokens: int) -> float:
        """Seconds of all sums of a pass of so many tokens over the ranks of a replica."""
        count = 2 * shape.layers + 2  # with the embeddings' and the vocabulary's
        return count * self.sums.seconds(tp, num_tokens * shape.hidden * ELEMENT_BYTES)

    def fits(self, shape: Shape, tp: int, cached_tokens: int = 0) -> bool:
        """Whether a tp-th part of the model's weights, and of so many cached tokens, has room on each GPU."""
        nbytes = shape.work.weight_bytes + cached_tokens * shape.work.kv_token_bytes
        return nbytes / tp <= MEMORY_SHARE * self.memory_bytes

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


@dataclass(kw_only=True)
class Splits(Study):
    """Finds the fastest split of the GPUs for each model, way to sum, and host time."""

    runs: Path = option(help="JSONL of scaling_projection")
    temperature: float = option(0.8, "of the runs")
    gpu: str = option("h200", choices=[*GPUS])
    memory_gb: float = option(141.0, "of each GPU")
    gpus: int = option(8)
    shapes: str = option("llama2_7b,codellama_34b,llama2_70b", f"of {', '.join(SHAPES)}")
    prefix: int = option(1024, "cached tokens")

    def tables(self, results: list[Result]) -> Iterable[Table]:
        law, (host_s, further_s) = fitted(self.runs, self.temperature, self.gpus)
        measured = f"{1e3 * host_s:.2f} ms + {1e6 * further_s:.0f} us a further replica"
        hosts = {measured: (host_s, further_s), f"{1e3 * ASSUMED_HOST_S:g} ms": (ASSUMED_HOST_S, 0.0)}
        lines = []
        for name in self.shapes.split(","):
            shape = Shape.named(name)
            for kind, sums in (("ring", nccl_ring()), ("one step", ONE_STEP)):
                for host, times_s in hosts.items():
                    memory = 1e9 * self.memory_gb
                    machine = Machine(gpu=GPUS[self.gpu], memory_bytes=memory, sums=sums, host_s=times_s)
                    lines.append(cells(name, kind, host, [*machine.splits(shape, law, self.gpus, self.prefix)]))
        title = f"By arithmetic: {self.gpus} x {GPUS[self.gpu].name}, bfloat16, {self.prefix} cached tokens, {law}."
        yield Table(HEADS, lines, title)


def fitted(path: Path, temperature: float, gpus: int) -> tuple[LogLaw, tuple[float, float]]:
    """The law of S, and a step's host seconds with one replica and of each further one, by runs of scaling_projection.

    Args:
        path: the file of the runs.
        temperature: the one to take.
        gpus: host times of no more ranks than these are taken.

    Raises:
        UserError: it has too few.
    """
    runs = [run for run in read_results(path) if run["method"] == "lookahead" and run["temperature"] == temperature]
    compressions = [(run["ranks"] * run["budget"], run["tokens"] / run["steps"]) for run in runs if "steps" in run]
    shared = {run["budget"] for run in runs if run["ranks"] > 1}  # one rank was tried with others too
    times = [
        (run["ranks"], run["host_s"])
        for run in runs
        if "host_s" in run and run["ranks"] <= gpus and run["budget"] in shared
    ]
    if not compressions or len({ranks for ranks, _ in times}) < 2:
        raise UserError(
            f"{path} has no runs at T = {temperature:g} of 1 and more ranks, up to --gpus ({gpus}); "
            "make them with scripts/tables.py scaling_projection"
        )
    further_s, host_s = np.polyfit([ranks - 1 for ranks, _ in times], [seconds for _, seconds in times], 1).tolist()
    return LogLaw.fitted(compressions), (host_s, further_s)


def cells(name: str, sums: str, host: str, splits: list[Split]) -> list[str]:
    """A row of the table: the fastest split, beside LP alone and TP alone."""
    best = max(splits, key=lambda split: split.tokens_per_s)
    pure = {True: None, False: None} | {split.tp == 1: split for split in splits if 1 in (split.lp, split.tp)}
    others = [split.tokens_per_s for split in pure.values() if split]
    row = [name, sums, host, f"{best.lp} x {best.tp}", str(best.budget), f"{best.compression:.2f}"]
    row += [f"{1e3 * best.step_s:.2f}", f"{1e3 * best.parts['sums']:.2f}", f"{best.tokens_per_s:.0f}"]
    row += [f"{split.tokens_per_s:.0f}" if split else "no room" for split in (pure[False], pure[True])]
    return [*row, f"{best.tokens_per_s / max(others):.2f} x"]
