"""`python -m launch.benchmark`: methods on the prompts of a task, a row a prompt and method, resumed where it stopped.

Methods alternate prompt by prompt, so that drift of the machine hits all alike. Those that share no step with other
ranks run on rank 0 alone while the others wait. `--cfg job` shows the keys.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console

from lp.engine.output import GenerationOutput
from lp.errors import UserError

from .app import INTERRUPTED
from .bench.compare import Measured, alternate
from .bench.prompts import Prompt
from .bench.records import RecordFile, Row, digest
from .bench.summary import totals
from .bench_session import Bench, KeptModel, on_main, open_bench
from .bench_table import Watch, print_totals, summary
from .cli import start
from .schema import BenchmarkConfig, Output
from .session import WARM_UP_TOKENS
from .stream import on_rank_0


def benchmark(config: BenchmarkConfig, kept: KeptModel | None = None) -> float | None:
    """The app.

    Args:
        config: of this job.
        kept: the model, from job to job; None is this process's.

    Returns:
        Tokens/s of the first method, which a sweeper may maximise.

    Raises:
        SystemExit: 130 after Ctrl-C, when every prompt that was finished is on the disk and in the table.
        ValueError: a user error.
    """
    bench = open_bench(config, kept or _kept_model())
    file = on_main(bench.context, partial(RecordFile, bench.path, list(bench.runs)))
    interrupted = False
    try:
        _measure_all(bench, file)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        best = _show(bench, file) if file and file.rows else None
        if file:
            file.close()
    if interrupted:
        bench.context.close()
        raise SystemExit(INTERRUPTED)
    return best


@functools.cache
def _kept_model() -> KeptModel:
    """The model that the jobs of a sweep in this process share."""
    return KeptModel()


def _measure_all(bench: Bench, file: RecordFile | None) -> None:
    todo = _todo(bench, bench.of_rank_0(file.done if file else None))
    if todo:
        _warm_up(bench, todo[0][1])
    if file and file.rows:
        print(f"{len(file.rows)} records kept in {bench.path}; {len(todo)} prompts to measure", file=sys.stderr)
    with Watch(bench.context.is_main, len(todo), file.rows if file else []) as watch:
        for index, prompt in todo:
            measured, shares = _measure(bench, prompt)
            rows = on_main(bench.context, partial(_written, bench, file, index, prompt, measured, shares))
            watch.advance(rows or [])


def _written(
    bench: Bench,
    file: RecordFile | None,
    index: int,
    prompt: Prompt,
    measured: dict[str, Measured],
    shares: dict[str, Any],
) -> list[Row]:
    """A prompt's rows, which are on the disk."""
    assert file
    rows = bench.rows(index, prompt, measured, shares)
    file.append(rows)
    return rows


def _todo(bench: Bench, done: dict[str, str]) -> list[tuple[int, Prompt]]:
    """The prompts without rows, of those that fit."""
    for index, prompt in enumerate(bench.prompts):
        if done.get(str(index), digest(prompt.text)) != digest(prompt.text):
            raise UserError(f"{bench.path} has rows of another prompt {index}; give another out=, or the same task")
    return [(index, prompt) for index, prompt in bench.fitting() if str(index) not in done]


def _warm_up(bench: Bench, prompt: Prompt) -> None:
    alternate(_runs(bench, prompt, WARM_UP_TOKENS), 1)


def _runs(bench: Bench, prompt: Prompt, tokens: int) -> dict[str, Callable[[], GenerationOutput]]:
    ids = bench.encode(prompt)
    return {name: partial(once, ids, tokens) for name, once in bench.runs.items()}


def _measure(bench: Bench, prompt: Prompt) -> tuple[dict[str, Measured], dict[str, list[dict[str, float]]]]:
    """What every method did, and how its steps' time was split on each rank."""
    measured = alternate(_runs(bench, prompt, bench.config.max_new_tokens), bench.config.repeats)
    return measured, {name: bench.shares(name, result.output) for name, result in measured.items()}


def _show(bench: Bench, file: RecordFile) -> float:
    """The table and where the records are, or with output=json the same as one JSON object."""
    found = totals(file.rows)
    with on_rank_0(bench.context, sys.stdout) as out:
        if bench.config.output is Output.json:
            print(json.dumps({**summary(found), "rows": str(file.path)}, ensure_ascii=False), file=out, flush=True)
        else:
            console = Console(file=out)
            print_totals(found, console if console.is_terminal else Console(file=out, width=120))
            print(f"records: {file.path}", file=out, flush=True)
    return found[0].tokens_per_s


if __name__ == "__main__":
    start("benchmark", sys.argv[1:])
