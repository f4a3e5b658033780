"""What a captured step asks of the GPU, by kind of sampling: `python -m tests.support.simulated_cuda.counts` prints it.

A step is what lies between two calls of `on_tokens`, so that the first one, which follows the prefill, is left out. The
model has two layers: what a commit launches grows with them.
"""

from __future__ import annotations

import copy
import itertools
import random

import torch

import lp
from tests.support.simulated_cuda.events import KINDS, Events
from tests.support.simulated_cuda.install import simulated_cuda
from tests.support.simulated_cuda.simulation import SimulatedCuda
from tests.support.tiny_models import drawn_text, tiny_model

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
NEW = 24
SAMPLING: dict[str, lp.SamplingParams | None] = {
    "greedy": None,
    "coupled": lp.SamplingParams(temperature=0.8, seed=3),
    "top-k": lp.SamplingParams(temperature=0.8, top_k=20, seed=3),
    "top-p": lp.SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    "repetition penalty": lp.SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=3),
}


def steps_of(gpu: SimulatedCuda, decoder: lp.LookaheadDecoder, sampling: lp.SamplingParams | None) -> list[Events]:
    """The events of every step of a text, once all its sizes are captured: what a captured step asks of the GPU."""
    ids = drawn_text(random.Random("counts"), 30)
    decoder.generate(ids, NEW, sampling)
    seen: list[Events] = []
    decoder.generate(ids, NEW, sampling, on_tokens=lambda tokens, step: seen.append(Events(gpu.events)))
    return [Events(after - before) for before, after in itertools.pairwise(seen)]


def most(steps: list[Events]) -> tuple[int, ...]:
    """The worst of the steps: how often one waits, launches, and copies from pageable memory, at most."""
    return tuple(max(step.total(kind) for step in steps) for kind in KINDS)


def captured_decoder() -> lp.LookaheadDecoder:
    """A decoder of a tiny Llama on the simulated GPU, whose steps are captured as graphs."""
    return lp.LookaheadDecoder(copy.deepcopy(tiny_model()).to("cuda"), CONFIG, capture="graph")


def row(name: str, figures: tuple[int, ...]) -> str:
    """A line of the printed table: a kind of sampling and its counts."""
    return f"{name:20}" + "".join(f"{figure:>10}" for figure in figures)


def main() -> None:
    torch.set_num_threads(1)
    with simulated_cuda() as gpu:
        decoder = captured_decoder()
        measured = {name: steps_of(gpu, decoder, sampling) for name, sampling in SAMPLING.items()}
    print(f"{'in one step, at most':20}" + "".join(f"{kind:>10}" for kind in KINDS))
    for name, steps in measured.items():
        print(row(name, most(steps)))
    for name, steps in measured.items():
        together = Events()
        for step in steps:
            together.update(step)
        print(f"\n{name}: a step on average, of {len(steps)}\n{together.table(len(steps))}")


if __name__ == "__main__":
    main()
