"""`lp tune`: find the fastest W, N, G on this machine, and compare them with the adaptive decoder.

It measures how long steps of each size take and how many tokens a step generates (S). It writes tune.json, tune.png and
experiment/tuned.yaml into the run folder; `lp generate model=... experiment=tuned --config-dir FOLDER` decodes with the
best fixed setting. Its last lines have that command, and say where the default is no slower.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from rich.table import Table

import lp
from lp.budget.step_times import StepTimes
from lp.commands import app_command
from lp.waits import waiting

from .bench.alternation import warm_up
from .bench.plots import tune_plot
from .bench.search import BUDGETS, SettingResult, ranks_that_pay, search, speed_of_ranks
from .bench.terminal import console_on, empty_table, put
from .cli import start
from .config.builders import PLAIN, measured, shape_and_pool
from .config.sampling import describe_sampling, seeded
from .config.schema import POOL_KEYS, Output, TuneConfig
from .running.session import WARM_UP_TOKENS, Session, check_forgets, checked, open_model


def tune(config: TuneConfig) -> None:
    """Search for the fastest W, N, G on this machine, print the result, and write it where `lp generate` finds it.

    Args:
        config: this job's config.

    Raises:
        ValueError: a value of the config is wrong, or the model cannot be loaded; the message names the remedy.
    """
    session = _open(config)
    context = session.context
    model = session.loaded.model
    plain = session.decoders[PLAIN]
    ids = [session.encode(prompt) for _, prompt in session.fitting()]

    def build(shape: lp.LookaheadConfig) -> lp.LookaheadDecoder:
        attention = config.attention.name, config.attention.capture
        settings = *attention, None, config.exact, config.model.kv_dtype
        decoder = measured(lp.LookaheadDecoder(model, shape, context, *settings))
        warm_up({"warm-up": partial(session.run, decoder, ids[0], WARM_UP_TOKENS)})  # Ctrl-C ends it too
        return decoder

    pool = {field: value for field, value in shape_and_pool(config).items() if field in POOL_KEYS}
    adaptive = build(lp.LookaheadConfig(adaptive=True, **pool))
    run = partial(session.run, tokens=config.max_new_tokens)
    assert adaptive.step_times is not None
    tried = search(build, plain, adaptive, run, ids, config.repeats, session.of_rank_0, pool)
    found: dict[str, Any] = {
        "step_times": asdict(adaptive.step_times),
        "settings": [t.as_dict() for t in tried],
        "ranks": _speeds(adaptive.step_times, tried, context.world_size),
    }
    if not context.is_main:
        return
    folder = Path(HydraConfig.get().runtime.output_dir)
    dtype = str(model.dtype).removeprefix("torch.")
    where = f"{config.model.name}, {dtype}, {model.device}, ranks: {context.world_size}"
    title = f"{len(ids)} prompts of {config.task.name}, {where}, {describe_sampling(session.sampling)}"
    console = console_on(sys.stdout, 110)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    try:
        if config.output is Output.json:
            print(json.dumps(found), flush=True)
        else:
            put(_table(tried, title), console)
            for line in _conclusions(adaptive, tried, found["ranks"]):
                say(line)
    finally:  # a reader that has left, or a disk that is full, must not take the minutes of the search with it
        _write(folder, found, tried)
    free = tried[-2]
    at = (free.tokens_a_step, free.compression)
    with waiting("drawing"):
        picture = tune_plot(adaptive.step_times, _by_budget(tried), at, title, folder / "tune.png")
    if config.output is not Output.json:
        for line in _commands(tried, HydraConfig.get().overrides.task, folder):
            say(line)
        say(f"figure: {picture}")


def _open(config: TuneConfig) -> Session[TuneConfig]:
    prompts, sampling, builders = checked(config, [PLAIN])
    check_forgets(config, "lp tune")
    lp.LookaheadConfig(**shape_and_pool(config))  # refused before the model is loaded
    context, loaded = open_model(config)
    return Session(
        config=config,
        context=context,
        loaded=loaded,
        decoders={PLAIN: builders[PLAIN](loaded.model, context)},
        sampling=seeded(sampling, context),
        prompts=prompts,
    )


def _by_budget(tried: list[SettingResult]) -> list[tuple[float, float]]:
    """(step tokens, S) of the settings without a lookahead window, which differ in G alone."""
    return [(t.tokens_a_step, t.compression) for t in tried[: len(BUDGETS)]]


def _speeds(step_times: StepTimes, tried: list[SettingResult], ranks: int) -> list[float] | None:
    """Tokens/s of 1, 2, ... ranks, estimated from one rank's step times; None where the run had several ranks."""
    return speed_of_ranks(step_times, _by_budget(tried)) if ranks == 1 else None


def _table(tried: list[SettingResult], title: str) -> Table:
    heads = ("setting", "tokens a step", "S", "tokens/s", "vs plain")
    table = empty_table(heads, ("setting",), title=title, title_style="bold")
    plain = tried[-1].tokens_per_s
    for index, t in enumerate(tried):
        if index == len(tried) - 3:
            table.add_section()
        speed = t.tokens_per_s
        table.add_row(
            t.method, f"{t.tokens_a_step:.1f}", f"{t.compression:.2f}", f"{speed:.1f}", f"{speed / plain:.2f}x"
        )
    return table


def _conclusions(adaptive: lp.LookaheadDecoder, tried: list[SettingResult], speeds: list[float] | None) -> list[str]:
    best, free, _ = tried[-3:]
    lines = [
        adaptive.explain().splitlines()[0],
        f"best fixed: {best.method}; adaptive reaches {free.tokens_per_s / best.tokens_per_s:.3f} of it, side by side",
    ]
    if speeds:
        count = ranks_that_pay(speeds)
        pays = "1 rank pays" if count == 1 else f"{count} ranks pay"
        by_ranks = ", ".join(f"{speed:.0f}" for speed in speeds[: count + 1])
        lines.append(f"from t(T) and S, without the exchange, {pays} ({by_ranks} tokens/s on 1, 2, ...)")
    return lines


def _commands(tried: list[SettingResult], overrides: Sequence[str], folder: Path) -> list[str]:
    """How to decode with what was found, with the model that was measured: first the default, where it is no slower.

    Args:
        tried: the results, of which the last three are the best fixed setting, the adaptive decoder and plain decoding.
        overrides: this run's own, as Hydra read them.
        folder: the folder that has experiment/tuned.yaml.
    """
    best, free, _ = tried[-3:]
    model = [shlex.quote(each) for each in overrides if re.split("[.=]", each.lstrip("+"))[0] == "model"]
    generate = " ".join([app_command("generate"), *model])
    tuned = f"{generate} experiment=tuned --config-dir {shlex.quote(str(folder))}"
    if free.tokens_per_s < best.tokens_per_s:
        return [f"use it: {tuned}"]
    return [f"the default is as fast or faster, leave W, N, G out: {generate}", f"the best fixed setting: {tuned}"]


def _write(folder: Path, found: dict[str, Any], tried: list[SettingResult]) -> None:
    (folder / "tune.json").write_text(json.dumps(found), encoding="utf-8")
    best = tried[-3].config
    assert best is not None
    (folder / "experiment").mkdir(parents=True, exist_ok=True)
    (folder / "experiment" / "tuned.yaml").write_text(
        "# @package _global_\n# The best fixed setting that `lp tune` found.\n"
        "defaults:\n  - override /decoder: lookahead\n\n"
        f"W: {best.window_size}\nN: {best.ngram_size}\nG: {best.guess_set_size}\n"
        f"pool:\n  mib: {best.pool_mib}\n  model_ngrams: {json.dumps(best.pool_model_ngrams)}\n"
        f"  corpora: {json.dumps(list(best.corpora))}\n"
        f"decoder:\n  draft_depth: {best.draft_depth}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    start("tune", sys.argv[1:])
