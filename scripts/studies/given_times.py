"""How fast the adaptive budget and fixed settings are over plain decoding by step times that are given.

    python scripts/tables.py given_times --model FOLDER --tasks humaneval.jsonl gsm8k.jsonl --limit 6 \\
      --clock 1:1.17 20:2.17 54:2.56 200:4.23 --fixed 7,5,7,192

The budget decides by these times, and the time of the steps that it takes is added up by them: what it does on a device
that is not at hand, without the noise of a busy machine and without what captures and the first texts cost there.
"x plain" is by totals, "least" that of the text that gains least. Steps are as they would be, so the tokens are the
model's own: a model of 135 M parameters on a CPU is enough to judge decisions by a GPU's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lp
from lp.budget.step_times import StepTimes
from lp.errors import UserError

from .harness import (
    Method,
    Result,
    Row,
    Table,
    TextStudy,
    compression,
    counts,
    grouped,
    option,
    step_tokens,
    task_rows,
    total,
)

ADAPTIVE = "adaptive"
HEADS = ("set", "T", "method", "S", "tokens a step", "plain steps", "x plain", "least")


def step_times(clock: Sequence[str], plain: float | None) -> StepTimes:
    """Step times of the command line.

    Args:
        clock: "tokens:time" each, ascending from 1 token.
        plain: time of a plain step; None: that of 1 token.

    Raises:
        ValueError: they are no step times.
    """
    try:
        pairs = [each.split(":") for each in clock]
        sizes, times = [int(size) for size, _ in pairs], [float(time) for _, time in pairs]
        return StepTimes(tuple(sizes), tuple(times), times[0] if plain is None else plain)
    except (ValueError, IndexError) as error:
        wanted = "give tokens:time from 1 token on, as in --clock 1:1.17 20:2.17 54:2.56"
        raise UserError(f"--clock is {' '.join(clock)!r}; {wanted} ({error})") from None


def fixed_config(setting: str) -> lp.LookaheadConfig:
    """A setting of the command line.

    Args:
        setting: "W,N,G,depth".

    Raises:
        ValueError: it is none.
    """
    try:
        w, n, g, depth = map(int, setting.split(","))
    except ValueError:
        raise UserError(f"--fixed has {setting!r}; give W,N,G,depth, as in --fixed 7,5,7,192") from None
    return lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g, draft_depth=depth)


def taken_s(steps: Iterable[lp.StepStats], times: StepTimes) -> float:
    """What steps take by these times."""
    return sum(times.plain_s if step.idle else times.step_s(step.num_tokens) for step in steps)


@dataclass(kw_only=True)
class GivenTimes(TextStudy):
    """Decodes prompts by the adaptive budget and by fixed settings, and counts time by the clock that is given."""

    results: Path | None = option(None, "JSONL to write, or to go on with")
    tasks: list[Path] = option([], "JSONL of prompts")
    limit: int = option(6, "first prompts of every task")
    temperatures: list[float] = option([0.0, 0.8])
    clock: list[str] = option(["1:1", "54:1.26", "200:1.98"], "tokens:time each, from 1 token on")
    plain: float | None = option(None, "time of a plain step (default: that of 1 token)")
    fixed: list[str] = option([], "fixed settings beside the adaptive budget, as W,N,G,depth")
    max_new_tokens: int = option(96)
    SHARED = (*TextStudy.SHARED, "clock", "plain")

    def rows(self) -> Iterable[Row]:
        return task_rows(self.tasks, self.limit, self.temperatures, "--tasks")

    def methods(self) -> Mapping[str, Method]:
        times = step_times(self.clock, self.plain)

        def result(output: lp.GenerationOutput, row: Row) -> Result:
            plain_steps = sum(step.idle for step in output.step_stats)
            return counts(output) | {"plain_steps": plain_steps, "taken": taken_s(output.step_stats, times)}

        def decodes(**options: Any) -> Method:
            return self.decodes(partial(lp.LookaheadDecoder, **options), result=result)

        found = {ADAPTIVE: decodes(step_times=times)}
        for config in map(fixed_config, self.fixed):
            shape = f"W={config.window_size} N={config.ngram_size} G={config.guess_set_size}"
            found[f"{shape} depth={config.draft_depth}"] = decodes(config=config)
        return found

    def check(self, row: Row, results: list[Result]) -> None:
        """Refuse texts that depend on the method."""
        for result in results:
            if result["text"] != results[0]["text"]:
                raise RuntimeError(f"text {row.key}: {result['method']} has other tokens")

    def tables(self, results: list[Result]) -> Iterable[Table]:
        plain = step_times(self.clock, self.plain).plain_s
        lines = []
        for (task, temperature, method), of in grouped(results, "task", "temperature", "method").items():
            least = min(plain * each["tokens"] / each["taken"] for each in of)
            lines.append(
                (
                    task,
                    f"{temperature:g}",
                    method,
                    f"{compression(of):.2f}",
                    f"{step_tokens(of):.0f}",
                    f"{total(of, 'plain_steps') / total(of, 'steps'):.0%}",
                    f"{plain * total(of, 'tokens') / total(of, 'taken'):.2f}",
                    f"{least:.2f}",
                )
            )
        yield Table(HEADS, lines)
