"""Result of `lp generate`: the texts, and how methods compare on them, as a table or as one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import lp
from lp.engine.output import GenerationOutput
from lp.sampling.params import is_greedy

from ..config.builders import ORACLE, PLAIN
from ..config.sampling import describe_sampling
from ..data.prompts import Prompt
from ..running.session import Session
from .alternation import Measured
from .compare import Difference
from .machine import device_name, machine_now, remarks
from .table_text import spread, verdict
from .terminal import empty_table, put
from .totals import Total


@dataclass
class Result:
    """The result of one prompt: its text, and with compare=true the measurements of all methods.

    Args:
        prompt: the prompt.
        prompt_tokens: number of tokens in the prompt.
        text: the generated text, or its beginning if Ctrl-C ended it.
        shown: output of the decoding that generated this text.
        measured: results of the methods, by method; empty if Ctrl-C came before the last method was measured.
        differences: one difference for each method whose tokens differ from plain decoding's, at its first such token.
    """

    prompt: Prompt
    prompt_tokens: int
    text: str
    shown: GenerationOutput
    measured: dict[str, Measured] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)


@dataclass
class TextReport:
    """The result of a run of `lp generate`: its setting, and the result of each prompt.

    Args:
        setting: model, device, decoder settings and the like by name, from `describe`.
        method: name of the decoder whose text is shown.
        sampling: how texts are sampled; None is greedy.
        results: the prompts that were begun, in order.
        interrupted: whether Ctrl-C or SIGTERM ended the run.
        partial: whether an error ended the run.
    """

    setting: dict[str, Any]
    method: str
    sampling: lp.SamplingParams | None = None
    results: list[Result] = field(default_factory=list)
    interrupted: bool = False
    partial: bool = False  # an error ended the run

    @property
    def finished(self) -> list[Result]:
        """Results of the prompts on which all methods were measured."""
        return [result for result in self.results if result.measured]

    @property
    def differences(self) -> list[tuple[Result, Difference]]:
        """Every difference of a method's tokens from plain decoding's, with the result of its prompt."""
        return [(result, difference) for result in self.results for difference in result.differences]

    @property
    def equal(self) -> bool | None:
        """Whether every method generated plain decoding's tokens.

        None if tokens were not compared, or need not be equal (rejection sampling).
        """
        return not self.differences if self.compared and not self.in_distribution else None

    @property
    def compared(self) -> bool:
        """Whether several methods ran, so that their tokens were compared."""
        return any(len(result.measured) > 1 for result in self.results)

    @property
    def in_distribution(self) -> bool:
        """Whether texts equal plain decoding's in distribution only, so that different tokens are no fault.

        Rejection sampling has this effect.
        """
        return self.sampling is not None and self.sampling.verifier is lp.Verifier.REJECTION

    def totals(self) -> list[Total]:
        """Totals of each method over the measured prompts.

        After Ctrl-C there is one more: the total of the texts that were shown but not measured.
        """
        names = dict.fromkeys(name for result in self.finished for name in result.measured)
        differences = None if self.equal is None else [difference for _, difference in self.differences]
        found = {
            name: Total.of_runs(name, [result.measured[name] for result in self.finished], differences)
            for name in names
        }
        found = {name: replace(total, plain=found.get(PLAIN)) for name, total in found.items()}
        unfinished = [result.shown for result in self.results if not result.measured]
        if not unfinished:
            return [*found.values()]
        cut = Total.of_runs(self.method, [Measured(output=output, decode_s=output.decode_s) for output in unfinished])
        return [*found.values(), replace(cut, interrupted=True)]


def describe(session: Session[Any]) -> dict[str, Any]:
    """The setting of a run by name, for table and JSON: model, device, ranks, decoder, sampling, machine.

    Args:
        session: the run's session. W, N and G are those of its lookahead decoder; without one they are left out.
    """
    config = session.config
    model = session.loaded.model
    decoders = {name: d for name, d in session.decoders.items() if isinstance(d, lp.LookaheadDecoder)}
    runners = [d.runner for d in session.decoders.values() if isinstance(d, lp.LookaheadDecoder | lp.PlainDecoder)]
    shapes = [decoder.config for name, decoder in decoders.items() if name in ("lookahead", "lookahead_auto")]
    return {
        "model": config.model.name,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "ranks": session.context.world_size,
        "exact": all(runner.exact for runner in runners),
        "attention": str(runners[0].attention) if runners else None,
        "bitwise": bool(runners) and all(runner.widths for runner in runners),
        "captured": bool(runners and runners[0].captured),
        **({"W": shapes[0].window_size, "N": shapes[0].ngram_size, "G": shapes[0].guess_set_size} if shapes else {}),
        "sampling": session.sampling and asdict(session.sampling),
        "stop_strings": config.stop_strings,
        "json_schema": config.json_schema,
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats if config.compare else 1,
        "machine": machine_now(session.context.device, session.context.world_size),
    }


def as_table(report: TextReport) -> Table:
    """The totals as a rich table, with a line for each method.

    Args:
        report: the run's result.
    """
    count = len(report.results)
    prompts = "1 prompt" if count == 1 else f"{count} prompts"
    title = f"{prompts}, {'greedy' if is_greedy(report.sampling) else 'sampled'}, decoding only"
    heads = ("method", "tokens", "steps", "S", "tokens/s", "vs plain", "output")
    table = empty_table(heads, ("method", "output"), title=title, title_style="bold")
    for totals in report.totals():
        speed = "-" if totals.speedup is None else f"{totals.speedup:.2f}x"
        counts = (str(totals.tokens), str(totals.steps))
        rates = (f"{totals.compression:.2f}", f"{totals.tokens_per_s:.1f}", speed)
        table.add_row(totals.method, *counts, *rates, _verdict(report, totals))
    return table


def _verdict(report: TextReport, totals: Total) -> str:
    if totals.interrupted:
        return "interrupted"
    if not report.compared:
        return "not compared"
    if totals.method == ORACLE:
        return "the reference"
    if report.in_distribution:
        return "equal in distribution only"
    return verdict(totals.prompts, totals.differing or 0, totals.near_ties)


def caption(report: TextReport) -> str:
    """The setting on one line, for below the table.

    Args:
        report: the run's result.
    """
    s = report.setting
    model = f"model {s['model']} ({s['parameters'] / 1e6:.1f} M parameters), {s['dtype']}, {s['device']}"
    parts = [model, f"threads: {s['threads']}", f"ranks: {s['ranks']}"]
    if s["attention"]:
        parts.append(f"attention: {s['attention']}")
    if s["bitwise"]:
        parts.append("bit for bit plain decoding's logits")
    if s["captured"]:
        parts.append("captured")
    if "W" in s:
        parts.append(f"W={s['W']} N={s['N']} G={s['G']}")
    if report.sampling is not None:
        parts.append(describe_sampling(report.sampling))
    if s["stop_strings"]:
        parts.append(f"stop strings: {s['stop_strings']}")
    if s["json_schema"]:
        parts.append(f"JSON schema: {s['json_schema']}")
    if not s["exact"]:
        parts.append("activations are quantised, so tokens may differ")
    if s["repeats"] > 1:
        parts.append(f"median of {s['repeats']} rounds")
    return ", ".join(parts)


def spreads(report: TextReport) -> list[str]:
    """A list with one line that names every method's least and largest speed-up; empty after a single round.

    Args:
        report: the run's result.
    """
    several = [totals for totals in report.totals() if len(totals.speedups) > 1]
    if not several:
        return []
    each = (f"{totals.method} {spread(totals.speedups)}" for totals in several)
    return [f"vs plain, least to most of {len(several[0].speedups)} rounds: {', '.join(each)}"]


def print_table(report: TextReport, console: Console) -> None:
    """Print where tokens differ from plain decoding's, then the table and the setting.

    Args:
        report: the run's result.
        console: where to print.
    """
    for result, at in report.differences:
        _print_line(f"{result.prompt.task_id}: {_sentence(at, report)}", console)
    console.print()
    put(as_table(report), console)
    for line in (*spreads(report), caption(report), *remarks([{"machine": report.setting["machine"]}])):
        _print_line(line, console)


def _sentence(at: Difference, report: TextReport) -> str:
    drawn = not is_greedy(report.sampling)
    scores = "scores (processed logits with noise)" if drawn else "processed logits" if report.sampling else "logits"
    gap = f"the two best {scores} are {at.gap:.3g} apart" if at.gap is not None else "the warpers leave one token"
    return (
        f"{at.method} differs from plain decoding at new token {at.position} ({at.token}, plain {at.plain_token}); "
        f"{gap}: {'a near-tie' if at.near_tie else 'NOT a near-tie'}"
    )


def _print_line(text: str, console: Console) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def as_json(report: TextReport) -> str:
    """The result of `lp generate` as one JSON object on one line, for output=json.

    Args:
        report: the run's result.
    """
    found = {
        **report.setting,
        "method": report.method,
        "equal": report.equal,
        "interrupted": report.interrupted,
        "partial": report.partial,
        "methods": {totals.method: _method(totals) for totals in report.totals() if not totals.interrupted},
        "prompts": [_prompt(result) for result in report.results],
    }
    return json.dumps(found, ensure_ascii=False)


def _method(totals: Total) -> dict[str, Any]:
    return {
        "prompts": totals.prompts,
        "tokens": totals.tokens,
        "steps": totals.steps,
        "S": totals.compression,
        "decode_s": totals.decode_s,
        "tokens_per_s": totals.tokens_per_s,
        "rounds_s": totals.rounds_s,
        "equal": None if totals.differing is None else not totals.differing,
        "differing": totals.differing,
        "near_ties": None if totals.differing is None else totals.near_ties,
    }


def _prompt(result: Result) -> dict[str, Any]:
    return {
        "task_id": result.prompt.task_id,
        "prompt_tokens": result.prompt_tokens,
        "text": result.text,
        "shown": _run(result.shown, result.shown.decode_s),
        "methods": {name: _run(run.output, run.decode_s) for name, run in result.measured.items()},
        "differences": [asdict(difference) for difference in result.differences],
    }


def _run(output: GenerationOutput, decode_s: float) -> dict[str, Any]:
    return {
        "tokens": len(output.tokens),
        "steps": output.steps,
        "S": output.compression,
        "prefill_s": output.prefill_s,
        "decode_s": decode_s,
        "finish_reason": output.finish_reason,
        "resumed": output.resumed,
    }
