"""`python -m launch.generate`: continue prompts, show the text as it comes, and say how it compares.

Every prompt is run once to be shown; with compare=true the methods are then measured in alternation, unseen, so that
writing to a terminal is in no figure. `--cfg job` shows the keys.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TextIO

import lp
from lp.engine.interrupts import sigterm_raises
from lp.engine.output import GenerationOutput

from .bench.compare import alternate, differences
from .bench.prompts import Prompt
from .bench.table import console_on
from .cli import start
from .report import Report, Result, as_json, describe, print_table
from .schema import Config, Output
from .session import WARM_UP_TOKENS, Session, open_session
from .stream import Pen, on_rank_0, show, shows_colours

SHOWN_PROMPT_LINES = 8


def generate(config: Config) -> None:
    """The app.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM came; everything that was generated has been shown.
        ValueError: a user error.
    """
    session = open_session(config)
    report = Report(setting=describe(session), method=next(iter(session.decoders)), sampling=session.sampling)
    aside = sys.stderr if config.output is Output.json else sys.stdout  # JSON has stdout to itself
    with on_rank_0(session.context, aside) as text, on_rank_0(session.context, sys.stdout) as table:
        pen = Pen(text, shows_colours(text))
        try:
            with sigterm_raises():
                _continue_all(session, pen, report)
        except KeyboardInterrupt:
            report.interrupted = True
            pen.note("")
            session.context.close()
            raise
        finally:
            if report.results:
                _show(report, config, table)


def _continue_all(session: Session[Config], pen: Pen, report: Report) -> None:
    if session.config.stream:
        pen.legend()
    one = [(0, session.prompts[0])]  # too long, it has an error that counts its tokens
    prompts = session.fitting() if len(session.prompts) > 1 else one
    alternate(_runs(session, session.encode(prompts[0][1]), WARM_UP_TOKENS), 1)
    _explain(session, report.method, pen, 0)
    for _, prompt in prompts:
        with _marked(pen, report):
            _continue(session, prompt, pen, report)


@contextlib.contextmanager
def _marked(pen: Pen, report: Report) -> Iterator[None]:
    """A text that an error cuts off must not look like a finished one."""
    try:
        yield
    except Exception:
        report.partial = True
        pen.aside("\n[partial: the run failed here]\n")
        raise


def _runs(session: Session, ids: list[int], tokens: int) -> dict[str, Callable[[], GenerationOutput]]:
    return {name: partial(session.run, decoder, ids, tokens) for name, decoder in session.decoders.items()}


def _continue(session: Session[Config], prompt: Prompt, pen: Pen, report: Report) -> None:
    """Show one prompt's continuation, then measure it."""
    config, ids = session.config, session.encode(prompt)
    chosen = session.decoders[report.method]
    _head(prompt, len(ids), pen, config)
    continued = partial(session.run_once, chosen, ids, config.max_new_tokens)
    text, shown, interruption = show(continued, session.loaded.tokenizer, ids, pen, config.stream)
    result = Result(prompt=prompt, prompt_tokens=len(ids), text=text, shown=shown)
    report.results.append(result)
    if config.verbose:
        _explain(session, report.method, pen, 1)
    if interruption:
        raise interruption
    if config.compare:
        _compare(session, ids, pen, result)
    else:
        result.measured = alternate({report.method: lambda: shown}, 1)


def _explain(session: Session, method: str, pen: Pen, line: int) -> None:
    """What the decoder may take, at the start; or what it took."""
    decoder = session.decoders[method]
    if isinstance(decoder, lp.LookaheadDecoder):
        pen.aside(decoder.explain().splitlines()[line] + "\n")


def _head(prompt: Prompt, tokens: int, pen: Pen, config: Config) -> None:
    pen.aside(f"\n=== {prompt.task_id} ({tokens} tokens)\n")
    if config.show_prompt:
        lines = prompt.text.split("\n")
        skipped = "[...]\n" * (len(lines) > SHOWN_PROMPT_LINES)
        pen.aside(skipped + "\n".join(lines[-SHOWN_PROMPT_LINES:]))


def _compare(session: Session[Config], ids: list[int], pen: Pen, result: Result) -> None:
    pen.note("measuring, in alternation: " + ", ".join(session.decoders))
    tokens = session.config.max_new_tokens
    measured = alternate(_runs(session, ids, tokens), session.config.repeats)
    if not session.in_distribution:
        outputs = {name: run.output for name, run in measured.items()}
        plain = session.oracle_tokens(ids, tokens, outputs)
        new = {name: output.tokens for name, output in outputs.items()}
        result.differences = differences(session.loaded.model, ids, new, plain, session.sampling)
    result.measured = measured  # last: what Ctrl-C leaves uncompared must not be taken for equal
    pen.note("")


def _show(report: Report, config: Config, file: TextIO) -> None:
    if config.output is Output.json:
        print(as_json(report), file=file)
    else:
        print_table(report, console_on(file, 100))


if __name__ == "__main__":
    start("generate", sys.argv[1:])
