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
        decode_s: seconds of decoding without the prefill, the median over the rounds.
        rounds_s: seconds of decoding without the prefill, in each round.
        peak_bytes: peak memory of this rank over all rounds; 0 where memory was not measured.
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
    """Run every method once per round, each round beginning with another method, so that drift hits all alike.

    Args:
        methods: functions that run a method once, by the method's name.
        rounds: how often every method runs.
        peak: measures the peak memory of each method; None: memory is not measured.
        wait: progress display that counts the finished runs; None: nothing is displayed.

    Returns:
        Each method's first output, its times and its peak memory, by name.
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
    """Run every method once unmeasured, so that no figure includes compiling, graph capture or first allocations.

    Args:
        methods: functions that run a method once, by the method's name; generating a few tokens is enough.
    """
    with waiting("warming up, so that no figure has what a first run does once", len(methods), "runs") as wait:
        alternate(methods, 1, wait=wait)


def _measured(runs: Sequence[GenerationOutput], peak_bytes: int) -> Measured:
    times_s = tuple(run.decode_s for run in runs)
    return Measured(output=runs[0], decode_s=median(times_s), rounds_s=times_s, peak_bytes=peak_bytes)
