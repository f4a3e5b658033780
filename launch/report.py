"""What a run found, as a table for people and as one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import lp
from lp.engine.output import GenerationOutput

from .bench.compare import Difference, Measured
from .bench.prompts import Prompt
from .builders import PLAIN
from .session import Session


@dataclass
class Result:
    """One prompt.

    Args:
        prompt: what was continued.
        prompt_tokens: its length.
        text: the continuation, as far as it got.
        shown: the run that made it.
        measured: by method; empty if Ctrl-C came before the last one had ended.
        differences: where methods left plain decoding.
    """

    prompt: Prompt
    prompt_tokens: int
    text: str
    shown: GenerationOutput
    measured: dict[str, Measured] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)


@dataclass
class Report:
    """A run: how it was made and what came of each prompt."""

    setting: dict[str, Any]
    method: str
    sampling: lp.SamplingParams | None = None
    results: list[Result] = field(default_factory=list)
    interrupted: bool = False
    partial: bool = False  # an error ended the run

    @property
    def finished(self) -> list[Result]:
        """The prompts that were measured."""
        return [result for result in self.results if result.measured]

    @property
    def differences(self) -> list[tuple[Result, Difference]]:
        """All of them, with their prompts."""
        return [(result, difference) for result in self.results for difference in result.differences]

    @property
    def equal(self) -> bool | None:
        """Whether every method gave the tokens of plain decoding; None if that was not compared, or not promised."""
        return not self.differences if self.compared and not self.in_distribution else None

    @property
    def compared(self) -> bool:
        """Whether several methods ran."""
        return any(len(result.measured) > 1 for result in self.results)

    @property
    def in_distribution(self) -> bool:
        """Whether texts are equal in distribution only: nothing follows from tokens that differ."""
        return self.sampling is not None and self.sampling.verifier is lp.Verifier.REJECTION

    def rows(self) -> list[Row]:
        """One for each method, over the measured prompts, and one for a run that Ctrl-C cut short."""
        names = dict.fromkeys(name for result in self.finished for name in result.measured)
        rows = [self._row(name) for name in names]
        unfinished = [(result.shown, result.shown.decode_s) for result in self.results if not result.measured]
        if unfinished:
            rows.append(replace(_total(self.method, unfinished), interrupted=True))
        return rows

    def _row(self, name: str) -> Row:
        runs = [result.measured[name] for result in self.finished]
        row = _total(name, [(run.output, run.decode_s) for run in runs])
        row.differing = sum(difference.method == name for _, difference in self.differences)
        return row


@dataclass
class Row:
    """A method's totals over prompts."""

    method: str
    prompts: int
    tokens: int
    steps: int
    decode_s: float
    differing: int = 0
    interrupted: bool = False

    @property
    def compression(self) -> float:
        """S: tokens a step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed, without the prefill."""
        return self.tokens / self.decode_s if self.decode_s else 0.0


def _total(method: str, runs: Iterable[tuple[GenerationOutput, float]]) -> Row:
    outputs, times_s = zip(*runs, strict=True)
    tokens, steps = sum(len(o.tokens) - o.resumed for o in outputs), sum(o.steps for o in outputs)
    return Row(method=method, prompts=len(outputs), tokens=tokens, steps=steps, decode_s=sum(times_s))


def describe(session: Session[Any]) -> dict[str, Any]:
    """The setting a figure was measured in; W, N, G are those of the lookahead decoder, if it runs."""
    config, model = session.config, session.loaded.model
    setting = {"model": config.model.name, "parameters": model.num_parameters(), "dtype": _short(model.dtype)}
    setting |= {"device": _device(model.device), "threads": torch.get_num_threads()}
    setting |= {"ranks": session.context.world_size}
    runners = [decoder.runner for decoder in session.decoders.values() if isinstance(decoder, lp.LookaheadDecoder)]
    setting |= {"exact": all(runner.exact for runner in runners)}
    setting |= {"attention": str(runners[0].attention) if runners else None}
    setting |= {"captured": bool(runners and runners[0].captured)}
    lookahead = next((d for name, d in session.decoders.items() if name in ("lookahead", "lookahead_auto")), None)
    if isinstance(lookahead, lp.LookaheadDecoder):
        shape = lookahead.config
        setting |= {"W": shape.window_size, "N": shape.ngram_size, "G": shape.guess_set_size}
    setting |= {"sampling": session.sampling and asdict(session.sampling), "stop_strings": config.stop_strings}
    return setting | {"max_new_tokens": config.max_new_tokens, "repeats": config.repeats}


def describe_sampling(sampling: lp.SamplingParams | None) -> str:
    """The temperature, the seed, the verifier, and what else is not as by default."""
    if sampling is None:
        return "greedy"
    always = ("temperature", "seed", "verifier")
    values = asdict(sampling)
    shown = [name for name in values if name in always or values[name] != asdict(lp.SamplingParams())[name]]
    return "sampled with " + " ".join(f"{name}={'null' if values[name] is None else values[name]}" for name in shown)


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_table(report: Report) -> Table:
    """The totals, one row a method."""
    count = len(report.results)
    table = Table(box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.title = f"{count} prompt{'s' * (count != 1)}, {'sampled' if report.sampling else 'greedy'}, decoding only"
    for name in ("method", "tokens", "steps", "S", "tokens/s", "vs plain", "output"):
        table.add_column(name, justify="left" if name in ("method", "output") else "right", no_wrap=True)
    rows = report.rows()
    plain = next((row.tokens_per_s for row in rows if row.method == PLAIN), 0.0)
    for row in rows:
        speed = f"{row.tokens_per_s / plain:.2f}x" if plain else "-"
        figures = (str(row.tokens), str(row.steps), f"{row.compression:.2f}", f"{row.tokens_per_s:.1f}", speed)
        table.add_row(row.method, *figures, _verdict(report, row))
    return table


def _verdict(report: Report, row: Row) -> str:
    if row.interrupted:
        return "interrupted"
    if not report.compared:
        return "not compared"
    if row.method == PLAIN:
        return "the reference"
    if report.in_distribution:
        return "equal in distribution only"
    return f"differs on {row.differing} of {row.prompts}" if row.differing else "equal"


def caption(report: Report) -> str:
    """The setting in one line."""
    s = report.setting
    shape = f"W={s['W']} N={s['N']} G={s['G']}, " if "W" in s else ""
    model = f"model {s['model']} ({s['parameters'] / 1e6:.1f} M parameters), {s['dtype']}, {s['device']}"
    rounded = "activations are quantised, so tokens may differ, " * (not s["exact"])
    chosen = f"{describe_sampling(report.sampling)}, " * (report.sampling is not None)
    stops = f"stop strings: {s['stop_strings']}, " * bool(s["stop_strings"])
    attention = f", attention: {s['attention']}{', captured' * s['captured']}" * bool(s["attention"])
    where = f"{model}, threads: {s['threads']}, ranks: {s['ranks']}{attention}"
    return f"{where}, {shape}{chosen}{stops}{rounded}median of {s['repeats']}"


def print_table(report: Report, console: Console) -> None:
    """The places where tokens differ, then the table and the setting."""
    for result, at in report.differences:
        _print_line(f"{result.prompt.task_id}: {_sentence(at, report)}", console)
    console.print()
    console.print(as_table(report))
    _print_line(caption(report), console)


def _sentence(at: Difference, report: Report) -> str:
    scores = "logits" if report.sampling is None else "scores (processed logits with noise)"
    gap = f"the two best {scores} are {at.gap:.3g} apart" if at.gap is not None else "the warpers leave one token"
    return (
        f"{at.method} differs from plain decoding at new token {at.position} ({at.token}, plain {at.plain_token}); "
        f"{gap}: {'a near-tie' if at.near_tie else 'NOT a near-tie'}"
    )


def _print_line(text: str, console: Console) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def as_json(report: Report) -> str:
    """The same as one JSON object on one line."""
    methods = {row.method: _method(row, report) for row in report.rows() if not row.interrupted}
    prompts = [_prompt(result) for result in report.results]
    head = {
        **report.setting,
        "method": report.method,
        "equal": report.equal,
        "interrupted": report.interrupted,
        "partial": report.partial,
    }
    return json.dumps({**head, "methods": methods, "prompts": prompts}, ensure_ascii=False)


def _method(row: Row, report: Report) -> dict[str, Any]:
    figures = {"prompts": row.prompts, "tokens": row.tokens, "steps": row.steps, "S": row.compression}
    equal = None if report.equal is None else not row.differing
    return {**figures, "decode_s": row.decode_s, "tokens_per_s": row.tokens_per_s, "equal": equal}


def _prompt(result: Result) -> dict[str, Any]:
    methods = {name: _run(run.output, run.decode_s) for name, run in result.measured.items()}
    head = {"task_id": result.prompt.task_id, "prompt_tokens": result.prompt_tokens, "text": result.text}
    differences = [asdict(difference) for difference in result.differences]
    shown = _run(result.shown, result.shown.decode_s)
    return {**head, "shown": shown, "methods": methods, "differences": differences}


def _run(output: GenerationOutput, decode_s: float) -> dict[str, Any]:
    figures = {"tokens": len(output.tokens), "steps": output.steps, "S": output.compression}
    times = {"prefill_s": output.prefill_s, "decode_s": decode_s}
    return {**figures, **times, "finish_reason": output.finish_reason, "resumed": output.resumed}
