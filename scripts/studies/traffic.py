"""More replicas, or more ranks a text: the split of GPUs that is fastest for a text under given traffic, by arithmetic.

    python scripts/tables.py traffic docs/experiments/results/scaling-projection/runs.jsonl --requests 1,4,16,64
    python scripts/tables.py traffic RUNS --shapes llama2_70b --prompt-tokens 4000 --new-tokens 500

GPUs are split into equal servers, each of lp replicas of the model of tp ranks. Requests come evenly to the servers,
and each has as many texts under way as it needs to keep up. Step times, sums, S and host time are those of `splits`,
host time once for each text; the gather is that of `known_links`. While a server reads a prompt, its texts wait. A
text is as fast as its server's steps are then; queues of requests that come in bursts are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from launch.bench.projection import Link
from launch.config.schema import known_links
from launch.data.shapes import SHAPES
from lp.models.captured_step import BUCKETS

from .harness import Result, Study, Table, option
from .parts.arithmetic import GPUS, StepTime
from .parts.gpu_projection import LogLaw
from .splits import Machine, Shape, Split, fitted, nccl_ring

MOST_TEXTS = 256  # of a server, at a time
NODE_BYTES = 137  # of a message, a node: as scaling_projection recorded them
HEADS = (
    *("requests/s", "fastest: servers x (lp x tp)", "texts", "tokens", "S", "tokens/s"),
    *("LP = TP = 1", "LP alone", "TP alone"),
)


@dataclass(frozen=True)
class Traffic:
    """What users ask for.

    Args:
        requests_per_s: requests that come in a second.
        prompt_tokens: tokens of a prompt that are not cached.
        new_tokens: tokens of an answer.
    """

    requests_per_s: float
    prompt_tokens: int
    new_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache of a text that is half done."""
        return self.prompt_tokens + self.new_tokens // 2


@dataclass(frozen=True, kw_only=True)
class Serving(Split):
    """Servers that keep up with traffic.

    Args:
        servers: how many there are.
        texts: how many each server has under way.
        decoding: share of its time in which prompts are not read.
    """

    servers: int
    texts: int
    decoding: float

    @property
    def text_tokens_per_s(self) -> float:
        """Tokens a second of each text."""
        return self.tokens_per_s * self.decoding


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """GPUs that can be split in several ways.

    Args:
        machine: what steps run on.
        link: between the replicas of a server.
        shape: the model.
        law: S by tokens of a step.
        gpus: how many there are.
    """

    machine: Machine
    link: Link
    shape: Shape
    law: LogLaw
    gpus: int

    def prompt_s(self, tp: int, tokens: int) -> float:
        """Seconds of a server for a prompt, which each of its replicas reads."""
        part = replace(self.shape.part(tp), head_flop=0)
        read = StepTime.of(self.machine.gpu, part, self.shape.layers, tokens, 0).seconds
        return read + self.machine.sums_s(self.shape, tp, tokens)

    def serving(self, servers: int, lp: int, tp: int, traffic: Traffic) -> Serving | None:
        """The servers with as few texts at a time as keep up; None where none do."""
        rate = traffic.requests_per_s / servers
        decoding = 1 - rate * self.prompt_s(tp, traffic.prompt_tokens)
        for texts in range(1, MOST_TEXTS + 1):
            longest = traffic.prompt_tokens + traffic.new_tokens
            if decoding <= 0 or not self.machine.fits(self.shape, tp, texts * longest):
                return None
            found = [self.step(servers, lp, tp, texts, budget, decoding, traffic) for budget in BUCKETS]
            fastest = max(found, key=lambda each: each.text_tokens_per_s)
            if texts * fastest.text_tokens_per_s >= rate * traffic.new_tokens:
                return fastest
        return None

    def step(
        self, servers: int, lp: int, tp: int, texts: int, budget: int, decoding: float, traffic: Traffic
    ) -> Serving:
        """A step of so many texts, each with `budget` tokens on each replica; 1 is plain decoding."""
        parts = self.machine.step(self.shape, lp, tp, budget, traffic.cached_tokens, texts)
        if budget > 1:
            parts["gather"] = self.link.all_gather_s(lp, texts * budget * NODE_BYTES)
        compression = 1.0 if budget == 1 else max(min(self.law.compression(lp * budget), lp * budget), 1.0)
        return Serving(
            servers=servers,
            lp=lp,
            tp=tp,
            texts=texts,
            budget=budget,
            compression=compression,
            parts=parts,
            decoding=decoding,
        )

    def ways(self, traffic: Traffic) -> Iterator[Serving]:
        """All splits that keep up, those of many servers first."""
        divisors = [size for size in range(1, self.gpus + 1) if self.gpus % size == 0]
        for ranks in divisors:
            for tp in (size for size in divisors if ranks % size == 0):
                if found := self.serving(self.gpus // ranks, ranks // tp, tp, traffic):
                    yield found


@dataclass(kw_only=True)
class TrafficStudy(Study):
    """Finds the split that is fastest for a text, for each number of requests a second."""

    runs: Path = option(help="JSONL of scaling_projection")
    requests: list[float] = option([0.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], "a second, of all users")
    prompt_tokens: int = option(1024, "of a request, that are not cached")
    new_tokens: int = option(256, "of an answer")
    temperature: float = option(0.8, "of the runs")
    gpu: str = option("h200", choices=[*GPUS])
    memory_gb: float = option(141.0, "of each GPU")
    gpus: int = option(8)
    shapes: str = option("llama2_7b,llama2_70b", f"of {', '.join(SHAPES)}")

    def heading(self) -> str:
        about = f"T = {self.temperature:g}, prompts of {self.prompt_tokens} tokens, answers of {self.new_tokens}"
        return f"By arithmetic: {self.gpus} x {GPUS[self.gpu].name}, bfloat16, {about}."

    def tables(self, results: list[Result]) -> Iterable[Table]:
        law, (host_s, further_s) = fitted(self.runs, self.temperature, self.gpus)
        gpu, memory = GPUS[self.gpu], 1e9 * self.memory_gb
        machine = Machine(gpu=gpu, memory_bytes=memory, sums=nccl_ring(), host_s=(host_s, further_s))
        link = Link(**vars(known_links()["nvlink"]))
        asked = [Traffic(each, self.prompt_tokens, self.new_tokens) for each in self.requests]
        for name in self.shapes.split(","):
            fleet = Fleet(machine=machine, link=link, shape=Shape.named(name), law=law, gpus=self.gpus)
            yield Table(HEADS, [cells(traffic, [*fleet.ways(traffic)]) for traffic in asked], name)


def cells(traffic: Traffic, ways: list[Serving]) -> list[str]:
    """A row of the table: the fastest way, beside servers of one rank, and one server of all GPUs, LP or TP alone."""
    head = f"{traffic.requests_per_s:g}"
    if not ways:
        return [head, "none keeps up", *["-"] * (len(HEADS) - 2)]
    best = max(ways, key=lambda way: way.text_tokens_per_s)
    split = f"{best.servers} x ({best.lp} x {best.tp})"
    row = [head, split, str(best.texts), str(best.budget), f"{best.compression:.2f}", f"{best.text_tokens_per_s:.0f}"]
    by_split = {(way.lp, way.tp): way for way in ways}
    gpus = best.servers * best.lp * best.tp
    others = [by_split.get(split) for split in ((1, 1), (gpus, 1), (1, gpus))]
    return row + [f"{way.text_tokens_per_s:.0f}" if way else "cannot" for way in others]
