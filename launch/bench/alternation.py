"""Run methods in alternation on one prompt, so that a machine that becomes slower or faster does so for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lp.engine.output import GenerationOutput
from lp.waits import Wait, waiting

from .machine import PeakMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The output and times of one method on one prompt, over all rounds.

    Args:
        output: output of the first round.
        decode_s: median over the rounds of the seconds of decoding, without the prefill.
        rounds_s: these seconds for every round.
        peak_bytes: most memory that any round took on this rank; 0 where memory was not measured.
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
    """Run every method once a round; each round begins with the next method, so that drift hits all alike.

    Args:
        methods: by name, a function that runs the method once.
        rounds: how often every method runs.
        peak: measures the memory of every run; None measures none.
        wait: progress display, which counts the runs; None for none.

    Returns:
        By name, the method's output and times.
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
    """Run every method once unmeasured, so that no figure includes compiling, capturing or first allocations.

    Args:
        methods: by name, a function that runs the method once; few tokens are enough.
    """
    with waiting("warming up, so that no figure has what a first run does once", len(methods), "runs") as wait:
        alternate(methods, 1, wait=wait)


def _measured(runs: Sequence[GenerationOutput], peak_bytes: int) -> Measured:
    times_s = tuple(run.decode_s for run in runs)
    return Measured(output=runs[0], decode_s=median(times_s), rounds_s=times_s, peak_bytes=peak_bytes)
