"""The paper's scaling figure: S by log2 of the step tokens for N = 3..8, with its analytic model fitted, and ours.

    python scripts/tables.py scaling_law results.jsonl figure.png --task data/humaneval.jsonl --limit 4

The paper's method runs with W = G (lookahead_paper), ours without a window at the same step tokens. Each line of the
file is one setting on all prompts; what it has is not run again. S does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lp
from launch.bench.plots import LEGEND, figure, look
from lp.errors import UserError

from .harness import Method, PromptStudy, Result, Row, Table, option, sampling_at

OURS = 0  # in place of N


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """S of one setting of the paper's decoder as it was measured, which the model is fitted to.

    Args:
        drafts: b, n-grams verified a step.
        depth: gamma, their draft tokens, N - 1.
        compression: S, tokens a step.
    """

    drafts: int
    depth: int
    compression: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceModel:
    """The paper's analytic model (arXiv 2402.02057, section 4): S of any number and length of drafted n-grams.

    Of f steps one finds good n-grams, the others add one token.

    Args:
        alpha: probability that a draft token is accepted.
        f: number of steps among which one finds good n-grams.
    """

    alpha: float
    f: float

    def expected_tokens(self, drafts: int, depth: int) -> float:
        """E[tokens] of a step that verifies good n-grams, the bonus token included (equation 4)."""
        powers = self.alpha ** np.arange(1, depth + 1)
        return float(depth + 1 - ((1 - powers) ** drafts).sum())

    def compression(self, drafts: int, depth: int) -> float:
        """S: f - 1 steps of one token each to one of E[tokens] (section 4.2)."""
        return (self.f - 1 + self.expected_tokens(drafts, depth)) / self.f

    @classmethod
    def fitted(cls, runs: Iterable[Observed]) -> AcceptanceModel:
        """The alpha and f whose S comes closest to the runs', in the mean square of its logarithm.

        For every alpha of a grid the best f is found on another; both are then made finer around the best.

        Raises:
            ValueError: no runs.
        """
        runs = list(runs)
        if not runs:
            raise UserError("no runs were given, and a model of two numbers needs at least two of them; measure some")
        alphas = np.linspace(0, 1, 101)
        inverses = np.linspace(0.01, 1, 100)  # of f, in (0, 1]
        for width in (0.01, 1e-3, 1e-4):
            errors = _errors(runs, alphas, inverses)
            best_alpha, best_inverse = np.unravel_index(errors.argmin(), errors.shape)
            alpha = alphas[best_alpha]
            inverse = inverses[best_inverse]
            alphas = np.clip(alpha + width * np.linspace(-1, 1, 41), 0, 1)
            inverses = np.clip(inverse + width * np.linspace(-1, 1, 41), 1e-4, 1)
        return cls(alpha=float(alpha), f=float(1 / inverse))

    def error(self, runs: Iterable[Observed]) -> float:
        """Root of the mean square of log(S of the model / S measured)."""
        return float(np.sqrt(_errors(list(runs), np.array([self.alpha]), np.array([1 / self.f]))[0, 0]))


def _errors(runs: list[Observed], alphas: np.ndarray, inverses: np.ndarray) -> np.ndarray:
    """Mean square of the logarithm's error for every pair of alpha and 1 / f: what the fit makes least."""
    total = np.zeros((len(alphas), len(inverses)))
    for run in runs:
        tokens = [AcceptanceModel(alpha=a, f=1).expected_tokens(run.drafts, run.depth) for a in alphas]
        model = 1 + (np.array(tokens)[:, None] - 1) * inverses[None]
        total += np.log(model / run.compression) ** 2
    return total / len(runs)


@dataclass(kw_only=True)
class ScalingLaw(PromptStudy):
    """Measures S of each setting over all prompts, and fits the paper's model to them."""

    results: Path = option(help="JSONL to write, or to go on with")
    figure: Path = option(help="PNG to draw")
    limit: int | None = option(4, "first prompts of the task")
    max_new_tokens: int = option(128)
    temperature: float = option(0.0)
    ngrams: list[int] = option([3, 4, 5, 6, 7, 8])
    widths: list[int] = option([1, 2, 4, 8, 16, 32], "W = G")
    guesses: list[int] = option([4, 8, 16, 32, 64, 128, 256], "G of ours")

    def shared(self) -> dict[str, Any]:
        task = self.task.name if self.task else "builtin"
        shared = {"model": self.model, "task": task, "prompts": len(self.prompts)}
        return shared | {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}

    def rows(self) -> Iterable[Row]:
        """A row for each setting: N and W of the paper's method, then ours by G."""
        settings = [(n, width) for n in self.ngrams for width in self.widths] + [(OURS, size) for size in self.guesses]
        return [Row({"N": n, "size": size}) for n, size in settings]

    def methods(self) -> Mapping[str, Method]:
        return {"": self.measured}

    def measured(self, row: Row) -> Result:
        """S and step tokens of one setting over all prompts."""
        n, size = row.key["N"], row.key["size"]
        config: lp.LookaheadConfig | lp.PaperConfig
        if n == OURS:
            config = lp.LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=size)
        else:
            config = lp.PaperConfig(window_size=size, ngram_size=n, guess_set_size=size)
        decoder = lp.LookaheadDecoder(self.loaded.model, config)
        sampling = sampling_at(self.temperature)
        prompts = enumerate(self.ids(prompt.text) for prompt in self.prompts)
        outputs = [decoder.generate(ids, self.max_new_tokens, sampling, sequence=index) for index, ids in prompts]
        steps = sum(output.steps for output in outputs)
        step_tokens = sum(step.num_tokens for output in outputs for step in output.step_stats)
        tokens = sum(len(output.tokens) for output in outputs)
        return {"S": tokens / steps, "tokens_a_step": step_tokens / steps}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        paper = _observed([result for result in results if result["N"] != OURS])
        model = AcceptanceModel.fitted(paper)
        title = f"all N: alpha {model.alpha:.3f}, f {model.f:.2f}, error of log S {model.error(paper):.3f}"
        lines = [
            (
                f"N={result['N']} W=G={result['size']}" if result["N"] else f"ours G={result['size']}",
                f"{result['tokens_a_step']:.1f}",
                f"{result['S']:.2f}",
            )
            for result in sorted(results, key=lambda each: (each["N"], each["tokens_a_step"]))
        ]
        yield Table(("setting", "tokens a step", "S"), lines, title)

    def draw(self, results: list[Result], path: Path) -> None:
        """Draw the measured points and the lines of the fitted model, a colour for each N."""
        title = f"{self.model}, {len(self.prompts)} prompts, T = {self.temperature:g}"
        with figure(path, title, 3.4) as (drawn, (axes,)):
            for index, n in enumerate(sorted({result["N"] for result in results} - {OURS})):
                sizes = sorted((r for r in results if r["N"] == n), key=lambda r: r["tokens_a_step"])
                model = AcceptanceModel.fitted(_observed(sizes))
                step_tokens = [result["tokens_a_step"] for result in sizes]
                points = look(index, f"N={n}: alpha {model.alpha:.2f}, f {model.f:.1f}")
                axes.plot(step_tokens, [result["S"] for result in sizes], **points | {"linestyle": "none"})
                axes.plot(step_tokens, [model.compression(r["size"], n - 1) for r in sizes], color=points["color"])
            ours = sorted((r for r in results if r["N"] == OURS), key=lambda r: r["tokens_a_step"])
            if ours:
                line = look(7, "the pool, no window") | {"marker": "*"}
                axes.plot([r["tokens_a_step"] for r in ours], [r["S"] for r in ours], **line)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set(xlabel="tokens a step (log scale)", ylabel="S (generated tokens a step)")
            drawn.legend(**LEGEND)


def _observed(results: list[Result]) -> list[Observed]:
    return [Observed(drafts=r["size"], depth=r["N"] - 1, compression=r["S"]) for r in results]
