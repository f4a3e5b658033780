"""`lp generate`: continue prompts and show the text as it comes; with compare=true, measure how methods compare.

Every prompt is decoded once to be shown. With compare=true the methods then decode it again in alternation without
printing, so that no figure includes the time of writing to a terminal. `--help` lists the keys.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TextIO

import lp
from lp.engine.inputs import prompt_ids
from lp.engine.interrupts import sigterm_raises
from lp.engine.output import GenerationOutput
from lp.waits import waiting

from .bench.alternation import alternate, warm_up
from .bench.compare import differences
from .bench.generate_result import Result, TextReport, as_json, describe, print_table
from .bench.terminal import console_on
from .cli import start
from .config.builders import ORACLE
from .config.schema import Config, TextOutput
from .data.prompts import Prompt
from .running.once import on_rank_0
from .running.session import WARM_UP_TOKENS, Session, check_forgets, open_session
from .text.stream import Pen, show, shows_colours

SHOWN_PROMPT_LINES = 8


def generate(config: Config) -> None:
    """Continue prompts, show each text as it comes, and with compare=true measure and compare methods on them.

    Args:
        config: this job's config.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM came; all text that was generated until then has been shown.
        ValueError: a value of the config is wrong, or the model cannot be loaded; the message names the remedy.
    """
    if config.compare:
        check_forgets(config, "compare=true")
    session = open_session(config)
    report = TextReport(setting=describe(session), method=next(iter(session.decoders)), sampling=session.sampling)
    output = config.output
    files = {
        "text": sys.stderr if output is TextOutput.json else sys.stdout,
        "aside": sys.stdout if output is TextOutput.table else sys.stderr,
        "report": sys.stderr if output is TextOutput.text else sys.stdout,
    }
    with contextlib.ExitStack() as stack:
        text, aside, table = (stack.enter_context(on_rank_0(session.context, file)) for file in files.values())
        pen = Pen(text, shows_colours(text), aside)
        try:
            with sigterm_raises():
                _continue_all(session, pen, report)
        except KeyboardInterrupt:
            report.interrupted = True
            session.context.close()
            raise
        finally:
            if report.results:
                _show(report, config, table)


def _continue_all(session: Session[Config], pen: Pen, report: TextReport) -> None:
    if session.config.stream:
        pen.legend()
    if len(session.prompts) > 1:
        prompts = session.fitting()
    else:
        prompts = [*enumerate(session.prompts)]
        prompt_ids(session.loaded.model, session.encode(session.prompts[0]))  # too long, its error counts its tokens
    if session.config.compare:
        warm_up(_runs(session, session.encode(prompts[0][1]), WARM_UP_TOKENS))
    _explain(session, report.method, pen, 0)
    for _, prompt in prompts:
        with _marked(pen, report):
            _continue(session, prompt, pen, report)


@contextlib.contextmanager
def _marked(pen: Pen, report: TextReport) -> Iterator[None]:
    """Mark a text that an error cuts off, so that nobody takes it for a finished one."""
    try:
        yield
    except Exception:
        report.partial = True
        pen.aside("\n[partial: the run failed here]\n")
        raise


def _runs(session: Session, ids: list[int], tokens: int) -> dict[str, Callable[[], GenerationOutput]]:
    return {name: partial(session.run, decoder, ids, tokens) for name, decoder in session.decoders.items()}


def _continue(session: Session[Config], prompt: Prompt, pen: Pen, report: TextReport) -> None:
    """Decode one prompt and show its text, then measure the methods on it if compare=true."""
    config, ids = session.config, session.encode(prompt)
    chosen = session.decoders[report.method]
    _head(prompt, len(ids), pen)
    continued = partial(session.run_once, chosen, ids, config.max_new_tokens)
    end_of_prompt = partial(_show_end, prompt, pen)
    text, shown, interruption = show(continued, session.loaded.tokenizer, ids, pen, config.stream, end_of_prompt)
    result = Result(prompt=prompt, prompt_tokens=len(ids), text=text, shown=shown)
    report.results.append(result)
    if config.verbose:
        _explain(session, report.method, pen, 1)
    if interruption:
        raise interruption
    if config.compare:
        _compare(session, ids, result)
    else:
        result.measured = alternate({report.method: lambda: shown}, 1)


def _explain(session: Session, method: str, pen: Pen, line: int) -> None:
    """Print a line of a lookahead decoder's `explain()`: line 0 is its token budget, line 1 how the budget was used."""
    decoder = session.decoders[method]
    if isinstance(decoder, lp.LookaheadDecoder):
        pen.aside(decoder.explain().splitlines()[line] + "\n")


def _head(prompt: Prompt, tokens: int, pen: Pen) -> None:
    pen.aside(f"\n=== {prompt.task_id} ({tokens} tokens)\n")


def _show_end(prompt: Prompt, pen: Pen) -> None:
    lines = prompt.text.split("\n")
    skipped = "[...]\n" if len(lines) > SHOWN_PROMPT_LINES else ""
    pen.aside(skipped + "\n".join(lines[-SHOWN_PROMPT_LINES:]))


def _compare(session: Session[Config], ids: list[int], result: Result) -> None:
    tokens, rounds = session.config.max_new_tokens, session.config.repeats
    runs = _runs(session, ids, tokens)
    with waiting(f"measuring in alternation: {', '.join(runs)}", len(runs) * rounds, "runs") as wait:
        measured = alternate(runs, rounds, wait=wait)
    if not session.in_distribution:
        outputs = {name: run.output for name, run in measured.items()}
        with waiting(f"comparing tokens with decoder={ORACLE}"):
            plain = session.oracle_tokens(ids, tokens, outputs)
            new = {name: output.tokens for name, output in outputs.items()}
            how = session.sampling, session.config.model.kv_dtype
            result.differences = differences(session.loaded.model, ids, new, plain, *how)
    result.measured = measured  # last: what Ctrl-C leaves uncompared must not be taken for equal


def _show(report: TextReport, config: Config, file: TextIO) -> None:
    if config.output is TextOutput.json:
        print(as_json(report), file=file)
    else:
        print_table(report, console_on(file, 100))


if __name__ == "__main__":
    start("generate", sys.argv[1:])
