"""`lp benchmark`: measure methods on the prompts of a task, with a record for each; an interrupted run can continue.

Methods alternate prompt by prompt, so that drift of the machine hits all alike. A method whose steps the ranks do not
share runs on rank 0 alone, while the others wait. `--cfg job` shows the keys.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from lp.engine.interrupts import sigterm_raises
from lp.engine.output import GenerationOutput
from lp.errors import UserError

from .bench.alternation import Measured, alternate, warm_up
from .bench.compare import Difference
from .bench.machine import PeakMemory
from .bench.records import Record, RecordFile, digest
from .bench.runs import Bench, ModelCache, open_bench
from .bench.terminal import ProgressBar, console_on, print_totals, summary
from .bench.totals import totals
from .cli import start
from .config.schema import BenchmarkConfig, Output
from .data.prompts import Prompt
from .running.jobs import out_override
from .running.once import on_rank_0
from .running.session import WARM_UP_TOKENS, on_main


def benchmark(config: BenchmarkConfig, models: ModelCache | None = None) -> float | None:
    """Measure methods on the prompts of a task, write a record for each prompt and method, and print the totals.

    Args:
        config: this job's config.
        models: keeps the loaded model for the next job of a sweep; None takes the cache that all jobs of this process
            share.

    Returns:
        Tokens/s of the first method, which a sweeper may maximise; None on ranks other than 0.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM came; the records of all finished prompts are on the disk and in the
            printed table.
        ValueError: a value of the config is wrong, or the model cannot be loaded; the message names the remedy.
    """
    bench = open_bench(config, models or _shared_model())
    file = on_main(bench.context, partial(RecordFile, bench.path, list(bench.runs)))
    todo: list[tuple[int, Prompt]] = []
    interrupted = False
    try:
        with sigterm_raises():
            todo += _todo(bench, bench.of_rank_0(file.done if file else None))
            _measure_all(bench, file, todo)
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        best = _show(bench, file, interrupted) if file and file.records else None
        if file:
            file.close()
        if interrupted:
            _say_interrupted(bench, file, todo)
            bench.context.close()
    return best


@functools.cache
def _shared_model() -> ModelCache:
    """The cache through which the jobs of a sweep in this process share one loaded model."""
    return ModelCache()


def _measure_all(bench: Bench, file: RecordFile | None, todo: list[tuple[int, Prompt]]) -> None:
    if todo:
        warm_up(_runs(bench, todo[0][1], WARM_UP_TOKENS))
    if file and file.records:
        print(f"{len(file.records)} records kept in {bench.path}; {len(todo)} prompts to measure", file=sys.stderr)
    with ProgressBar(bench.context.is_main, len(todo), file.records if file else []) as bar:
        for index, prompt in todo:
            measured, shares = _measure(bench, prompt)
            found = bench.compared(prompt, measured)
            records = on_main(bench.context, partial(_write, bench, file, index, prompt, measured, shares, found))
            bar.advance(records or [])


def _write(
    bench: Bench,
    file: RecordFile | None,
    index: int,
    prompt: Prompt,
    measured: dict[str, Measured],
    shares: dict[str, Any],
    found: list[Difference] | None,
) -> list[Record]:
    """Put a prompt's records on the disk and return them."""
    assert file
    records = bench.records(index, prompt, measured, shares, found)
    file.append(records)
    return records


def _todo(bench: Bench, done: dict[str, str]) -> list[tuple[int, Prompt]]:
    """The prompts that fit the model's context and have no records yet, each with its index."""
    for index, prompt in enumerate(bench.prompts):
        if done.get(str(index), digest(prompt.text)) != digest(prompt.text):
            raise UserError(f"{bench.path} has records of another prompt {index}; give another out=, or the same task")
    return [(index, prompt) for index, prompt in bench.fitting() if str(index) not in done]


def _say_interrupted(bench: Bench, file: RecordFile | None, todo: list[tuple[int, Prompt]]) -> None:
    """Tell the user how many prompts have records, and how to measure the rest; rank 0 alone, which has the file."""
    if file:
        prompts = {*file.done, *(index for index, _ in todo)}
        out = "" if bench.config.out else f" with {out_override(file.path.parent)}"
        said = f"interrupted: {len(file.done)} of {len(prompts)} prompts; the same command{out} measures the rest"
        print(said, file=sys.stderr, flush=True)


def _runs(bench: Bench, prompt: Prompt, tokens: int) -> dict[str, Callable[[], GenerationOutput]]:
    ids = bench.encode(prompt)
    return {name: partial(once, ids, tokens) for name, once in bench.runs.items()}


def _measure(bench: Bench, prompt: Prompt) -> tuple[dict[str, Measured], dict[str, list[dict[str, float]]]]:
    """Run every method on one prompt: its measurement by method, and by method the mean step times of each rank."""
    peak = PeakMemory(bench.context.device)
    measured = alternate(_runs(bench, prompt, bench.config.max_new_tokens), bench.config.repeats, peak)
    return measured, {name: bench.shares(name, result) for name, result in measured.items()}


def _show(bench: Bench, file: RecordFile, interrupted: bool) -> float:
    """Print the table and the records' path, or with output=json a JSON object; return the first method's tokens/s."""
    found = totals(file.records)
    with on_rank_0(bench.context, sys.stdout) as out:
        if bench.config.output is Output.json:
            shown = {**summary(found), "records": str(file.path), "interrupted": interrupted}
            print(json.dumps(shown, ensure_ascii=False), file=out, flush=True)
        else:
            print_totals(found, console_on(out, 160))
            print(f"records: {file.path}", file=out, flush=True)
    return found[0].tokens_per_s


if __name__ == "__main__":
    start("benchmark", sys.argv[1:])
