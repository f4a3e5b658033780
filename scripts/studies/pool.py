"""S, step tokens and host time of the pool, its ablations and its peers, on replayed texts.

    python scripts/tables.py pool texts.jsonl results.jsonl --study equal_budget
    python scripts/tables.py pool texts.jsonl results.jsonl --study ablation --limit 20 --max-new-tokens 128 \
        --tasks humaneval mtbench

The texts are those of `tables.py texts`. One line of results a text and method, written as it is measured; what is
there already of the same model, --num-tokens and --max-new-tokens is not measured again, so a run may be interrupted.
Each result tells whether the tokens equal the text's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lp

from .harness import (
    PAPER,
    Method,
    Result,
    Row,
    Table,
    TextStudy,
    budget_config,
    compression,
    counts,
    grouped,
    option,
    step_tokens,
    values,
)
from .parts.replay import load_texts

Build = Callable[[Any], lp.Decoder]


def lookahead(num_tokens: int, **switches: Any) -> Build:
    """The default decoder, whose pool drafts so that a step has at most this many tokens."""
    config = budget_config(num_tokens, **switches)
    return lambda model: lp.LookaheadDecoder(model, config)


def lookahead_window(num_tokens: int, window: int, ngram: int) -> Build:
    """A decoder whose step has `window` x (`ngram` - 1) window nodes; drafts fill it up to `num_tokens` tokens."""
    guesses = (num_tokens - max(window * (ngram - 1), 1)) // (ngram - 1)
    return lookahead(num_tokens, window_size=window, ngram_size=ngram, guess_set_size=guesses)


def without(switch: str) -> lp.Ablation:
    """The ablation that switches one idea of the pool off and leaves all others on."""
    values: dict[str, Any] = {switch: False}
    return lp.Ablation(**values)


def paper(**switches: Any) -> Build:
    return lambda model: lp.LookaheadDecoder(model, lp.PaperConfig(**(PAPER | switches)))


def recycling(num_tokens: int) -> Build:
    return lambda model: lp.LookaheadDecoder(model, lp.RecyclingConfig(nodes=num_tokens - 1))


def equal_budget(num_tokens: int) -> dict[str, Build]:
    """The pool and token recycling with the step tokens of the paper's method."""
    return {
        "lookahead_paper": paper(),
        f"lookahead {num_tokens}": lookahead(num_tokens),
        f"token_recycling {num_tokens}": recycling(num_tokens),
    }


def scaling(num_tokens: int) -> dict[str, Build]:
    """Pools of more and more step tokens: how S grows with them."""
    return {f"lookahead {count}": lookahead(count) for count in (25, 100, 50, 200, 400)}


def ablation(num_tokens: int) -> dict[str, Build]:
    """Pools with each idea switched off in turn, and with other windows: what each is worth."""
    switches = ["prompt_ngrams", "prompt_logits", "output_ngrams", "window_ngrams", "position_guesses"]
    switches += ["renoise", "learn", "window_noise"]
    builds = {f"all, {num_tokens} tokens": lookahead(num_tokens)}
    builds |= {f"without {name}": lookahead(num_tokens, ablation=without(name)) for name in switches}
    no_text = lp.Ablation(prompt_ngrams=False, output_ngrams=False)
    builds["without text n-grams"] = lookahead(num_tokens, ablation=no_text)
    builds["without top-k logits"] = lookahead(num_tokens, ablation=lp.Ablation(num_logits=0))
    builds |= {f"K = {k}": lookahead(num_tokens, ablation=lp.Ablation(num_logits=k)) for k in (4, 32)}
    builds |= {f"depth {depth}": lookahead(num_tokens, draft_depth=depth) for depth in (4, 12)}
    windows = ((0, 2), (16, 2), (8, 3), (7, 5))
    builds |= {f"W = {w}, N = {n}": lookahead_window(num_tokens, w, n) for w, n in windows}
    return builds | {"lookahead_paper": paper(), "lookahead_paper, no text": paper(prompt_ngrams=False)}


STUDIES = {"equal_budget": equal_budget, "scaling": scaling, "ablation": ablation}


@dataclass(kw_only=True)
class Pool(TextStudy):
    """Compares decoders on known texts: S, step tokens and host time of each."""

    texts: Path = option(help="JSONL of tables.py texts")
    results: Path = option(help="JSONL to write, or to go on with")
    study: str = option("equal_budget", choices=[*STUDIES])
    num_tokens: int = option(46, "most tokens a step, the last generated one included")
    tasks: list[str] = option([], "all without it")
    temperatures: list[float] = option([0.0, 0.3, 0.8])
    only: list[str] = option([], "methods of the study; all without it")
    limit: int = option(80, "texts of a task and temperature")
    SHARED = ("model", "dtype", "max_new_tokens")

    def shared(self) -> dict[str, Any]:
        return super().shared() | {"most_tokens": self.num_tokens}  # num_tokens of a result is what all steps had

    def rows(self) -> Iterable[Row]:
        for text in load_texts(self.texts):
            is_asked = text.index < self.limit and text.temperature in self.temperatures
            if is_asked and text.task in (self.tasks or [text.task]):
                yield text.row

    def methods(self) -> Mapping[str, Method]:
        builds = STUDIES[self.study](self.num_tokens)
        return {name: self.decodes(builds[name], result=self.compared) for name in self.only or builds}

    def compared(self, output: lp.GenerationOutput, row: Row) -> Result:
        """The result of one text: its counts and host time, and whether its tokens equal the known ones."""
        host_us = 1e6 * median(step.host_s for step in output.step_stats)
        equal = output.tokens == row.item.tokens[: self.max_new_tokens]
        return counts(output) | {"host_us": host_us, "equal": equal}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        """A table of S @ tokens a step: a line for each method, a column for each task and temperature."""
        columns = sorted(grouped(results, "task", "temperature"))
        heads = [f"{task}, T = {temperature:g}" for task, temperature in columns]
        lines = []
        for name, of in grouped(results, "method").items():
            by_column = grouped(of, "task", "temperature")
            cells = [_cell(by_column.get(column, [])) for column in columns]
            lines.append((name, *cells, f"{median(values(of, 'host_us')):.0f}"))
        differing = sum(not result["equal"] for result in results)
        title = f"{len(results)} results, {differing} of them with other tokens than plain decoding's"
        yield Table(("method", *heads, "host, us"), lines, title)


def _cell(of: list[Result]) -> str:
    return f"{compression(of):.2f} @{step_tokens(of):.0f}" if of else ""
