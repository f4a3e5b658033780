"""Methods run in alternation on one prompt, so that drift of the machine hits all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lp.engine.output import GenerationOutput
from lp.waits import Wait, waiting

from .machine import PeakMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The run of one method on one prompt.

    Args:
        output: what the first round gave.
        decode_s: median of the rounds, in seconds.
        rounds_s: seconds of every round.
        peak_bytes: most memory of any round on this rank; 0 where nobody asked.
    """

    output: GenerationOutput
    decode_s: float
    rounds_s: tuple[float, ...] = ()
    peak_bytes: int = 0


def alternate(
    methods: Mapping[str, Callable[[], GenerationOutput]],
    rounds: int,
    peak: PeakMemory | None = None,
    wait: Wait | None = None,
) -> dict[str, Measured]:
    """Run every method once a round, each round beginning with another one, so that drift of the machine hits all.

    Args:
        methods: what runs a method once, by name.
        rounds: how often every method runs.
        peak: asked for the memory of every run.
        wait: counts the runs.
    """
    names = list(methods)
    outputs: dict[str, list[GenerationOutput]] = {name: [] for name in names}
    peaks = dict.fromkeys(names, 0)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if peak:
                peak.restart()
            outputs[name].append(methods[name]())
            peaks[name] = max(peaks[name], peak.bytes() if peak else 0)
            if wait:
                wait.done += 1
    return {name: _measured(runs, peaks[name]) for name, runs in outputs.items()}


def warm_up(methods: Mapping[str, Callable[[], GenerationOutput]]) -> None:
    """Run every method once, on few tokens."""
    with waiting("warming up, so that no figure has what a first run does once", len(methods), "runs") as wait:
        alternate(methods, 1, wait=wait)


def _measured(runs: Sequence[GenerationOutput], peak_bytes: int) -> Measured:
    times_s = tuple(run.decode_s for run in runs)
    return Measured(output=runs[0], decode_s=median(times_s), rounds_s=times_s, peak_bytes=peak_bytes)
