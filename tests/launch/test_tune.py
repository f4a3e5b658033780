"""launch.tune: a table, a plot and a YAML that launch.generate decodes with; what more ranks would bring."""

from __future__ import annotations

import json
import random
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lp
from launch.bench.search import (
    ADAPTIVE,
    BUDGETS,
    PLAIN,
    SettingResult,
    ranks_that_pay,
    search,
    speed_of_ranks,
    time_settings,
)
from launch.tune import _commands, _conclusions, _speeds, tune
from lp.budget.step_times import StepTimes
from lp.commands import app_command
from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput, StepStats
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from lp.waits import Wait, heard_by
from tests.support.apps import Ran
from tests.support.tiny_models import tiny_model


def test_tune_writes_what_generate_loads(
    start_app: Callable[..., Any], launch_generate: Callable[..., Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """A YAML that generate refuses, or reads as another setting, makes the search worth nothing."""
    model = ["model=hf", f"model.name={tiny_folder}", "model.dtype=float64"]
    asked = (tune, "tune", *model, f"hydra.run.dir={tmp_path}", "max_new_tokens=12", "prompt='import os'")
    ran = start_app(*asked)
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / "tune.json").read_text())
    names = [setting["name"] for setting in found["settings"]]
    assert names[-2:] == [ADAPTIVE, PLAIN] and len(names) == len(BUDGETS) + 5 + 3
    best = max(found["settings"][:-3], key=lambda setting: setting["tokens_per_s"])
    assert names[-3] == best["name"] and f"best fixed: {best['name']}" in ran.out
    assert "experiment=tuned --config-dir" in ran.out and f"generate model=hf model.name={tiny_folder}" in ran.out
    assert re.search(r"adaptive reaches \d+\.\d+ of it", ran.out) and re.search(r"\d+ ranks? pays?", ran.out)
    assert all(name in ran.out for name in names) and "t(T) in ms" in ran.out
    assert (tmp_path / "tune.png").stat().st_size > 5000
    tuned = launch_generate(*model, "experiment=tuned", "--config-dir", str(tmp_path), "--cfg", "job")
    assert tuned.code == 0, tuned.err
    for key, name in (("W", "window_size"), ("N", "ngram_size"), ("G", "guess_set_size")):
        assert re.search(rf"^'?{key}'?: {best['config'][name]}$", tuned.out, re.M)  # YAML quotes N, which may mean no
    assert f"draft_depth: {best['config']['draft_depth']}\n" in tuned.out and "name: lookahead\n" in tuned.out
    done = launch_generate(
        *model,
        "experiment=tuned",
        "prompt=x",
        "max_new_tokens=9",
        "compare=true",
        "output=json",
        "--config-dir",
        str(tmp_path),
    )
    assert done.code == 0, done.err
    said = json.loads(done.out.splitlines()[-1])
    assert said["equal"] is True and said["G"] == best["config"]["guess_set_size"]
    lines = start_app(*asked, "output=json").out.splitlines()
    assert len(lines) == 1 and json.loads(lines[0]) == json.loads((tmp_path / "tune.json").read_text())


def test_the_pool_is_the_users(
    start_app: Callable[..., Ran], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every setting was measured with a pool of 16 MiB and the model's n-grams, whatever pool.* said."""
    built: list[lp.LookaheadConfig] = []

    def shortened(build: Callable[..., Any], plain: Any, adaptive: Any, *rest: Any) -> list[SettingResult]:
        built.append(adaptive.config)
        return search(build, plain, adaptive, *rest)

    monkeypatch.setattr("launch.tune.search", shortened)
    asked = [f"model.name={tiny_folder}", "model=hf", "prompt=x", "max_new_tokens=4", f"hydra.run.dir={tmp_path}"]
    ran = start_app(tune, "tune", *asked, "pool.mib=3", "pool.model_ngrams=off")
    assert ran.code == 0, ran.err
    tried = json.loads((tmp_path / "tune.json").read_text())["settings"]
    pools = [(each["config"]["pool_mib"], each["config"]["pool_model_ngrams"]) for each in tried if each["config"]]
    assert set(pools) == {(3, "off")} and (built[0].pool_mib, built[0].pool_model_ngrams) == (3, "off")
    assert (
        'pool:\n  mib: 3\n  model_ngrams: "off"\n  corpora: []\n'
        in (tmp_path / "experiment" / "tuned.yaml").read_text()
    )
    for pool, said in (("pool.scope=session", "pool.scope is 'session'"), ("pool.mib=0", "pool_mib is 0")):
        ran = start_app(tune, "tune", "model.name=./none", pool)
        assert (ran.code, ran.err.count("error: ")) == (2, 1) and said in ran.err


def test_a_prompt_without_room_does_not_end_the_search(
    start_app: Callable[..., Ran], tiny_folder: Path, tmp_path: Path
) -> None:
    """It would, after minutes of settings measured on the prompts before it, with nothing written."""
    task = tmp_path / "t.jsonl"
    task.write_text("".join(json.dumps({"prompt": "x = 1\n" * times}) + "\n" for times in (1, 500)))
    asked = [f"model.name={tiny_folder}", "model=hf", "task=humaneval", f"task.path={task}", "max_new_tokens=4"]
    ran = start_app(tune, "tune", *asked, f"hydra.run.dir={tmp_path}")
    assert ran.code == 0 and "1 of 2 prompts left out" in ran.err and (tmp_path / "tune.json").exists()


def test_tokens_are_those_of_the_step() -> None:
    """A window of N = 3 has two tokens a column; a plot of S by step tokens would flatter it."""
    config = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=2)
    decoder = lp.LookaheadDecoder(tiny_model(), config)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]

    def run(decoder: Decoder, ids: list[int]) -> GenerationOutput:
        return decoder.generate(ids, 30, eos_token_id=())

    (tried,) = time_settings({"one": config}, {"one": decoder}, run, [ids], 1, lambda value: value)
    assert tried.tokens_a_step == pytest.approx(run(decoder, ids).mean_tokens) and tried.tokens_a_step > 8


def test_of_several_ranks_nothing_is_said_of_more() -> None:
    """Step times of two ranks, read as those of one rank, promise speeds that one rank never had."""
    config = lp.LookaheadConfig()
    tried = [
        SettingResult(method=f"{n}", config=config, tokens=9, steps=3, step_tokens=24.0, decode_s=1.0)
        for n in range(len(BUDGETS))
    ]
    one, two = (_speeds(StepTimes.constant(0.01, 128), tried, ranks) for ranks in (1, 2))
    assert one is not None and two is None
    decoder: Any = _Fixed()
    decoder.explain = lambda: "t(T)"
    assert "1 rank pays" in _conclusions(decoder, tried, one)[-1] and not any(
        "pay" in line for line in _conclusions(decoder, tried, two)
    )


def _result(method: str, seconds: float) -> SettingResult:
    return SettingResult(method=method, config=None, tokens=90, steps=30, step_tokens=24.0, decode_s=seconds)


@pytest.mark.parametrize(("adaptive_s", "default_first"), [(1.1, False), (1.0, True), (0.9, True)])
def test_the_last_lines_can_be_pasted(adaptive_s: float, default_first: bool, tmp_path: Path) -> None:
    """The command decoded with the demo model, broke at a blank in the folder, and was slower than the default."""
    tried = [_result("fixed", 1.0), _result(ADAPTIVE, adaptive_s), _result(PLAIN, 2.0)]
    overrides = ["model=hf", "model.name='a (b)'", "limit=8", "+model.dtype=float64", "repeats=2"]
    folder = tmp_path / "a b"
    lines = _commands(tried, overrides, folder)
    model = ["model=hf", "model.name='a (b)'", "+model.dtype=float64"]
    commands = [shlex.split(line.partition(": ")[2].removeprefix(app_command("generate"))) for line in lines]
    assert commands[-1] == [*model, "experiment=tuned", "--config-dir", str(folder)]
    assert commands[:-1] == ([model] if default_first else [])
    assert lines[0].startswith("the default is as fast or faster, leave W, N, G out" if default_first else "use it")


def test_ctrl_c_ends_a_warm_up(
    start_app: Callable[..., Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first Ctrl-C, which a generation takes for itself, is lost."""
    honest = lp.LookaheadDecoder.generate

    def stopped(*args: Any, **options: Any) -> GenerationOutput:
        raise lp.Interrupted(honest(*args, **options), signal.SIGINT)

    monkeypatch.setattr(lp.LookaheadDecoder, "generate", stopped)
    monkeypatch.setattr("launch.tune.search", lambda build, *rest: pytest.fail("the search began"))
    model = ["model=hf", f"model.name={tiny_folder}", "prompt=x", f"hydra.run.dir={tmp_path}"]
    assert start_app(tune, "tune", *model).code == 130


def test_the_search_says_how_far_it_is() -> None:
    """Minutes without a word look like a hang: every run counts, and as many are announced as are made."""
    seen: list[Wait] = []

    class Heard:
        def begins(self, wait: Wait) -> None:
            seen.append(wait)

        def ends(self, wait: Wait) -> None: ...

    def run(decoder: Any, ids: list[int]) -> GenerationOutput:
        return GenerationOutput([1, 2], "length", [StepStats(5, 4, 1, 0.1, 0.0, 0.0)], decode_s=0.1)

    anyone: Any = None
    with heard_by(Heard()):
        search(lambda c: anyone, anyone, anyone, run, [[1], [2]], 3, lambda value: value, {})
    (wait,) = seen
    assert wait.done == wait.total == (len(BUDGETS) + 6 + 3) * 2 * 3


def test_ranks_choose_by_one_clock() -> None:
    """Ranks that go on from different settings wait for each other for ever."""

    def searched(context: ParallelContext) -> list[SettingResult]:
        def from_rank_0(value: Any) -> Any:
            return json.loads(context.share_text(json.dumps(value)) or "")

        def run(decoder: Any, ids: list[int]) -> GenerationOutput:
            took = random.random()
            return GenerationOutput([1, 2], "length", [StepStats(5, 4, 1, took, 0.0, 0.0)], decode_s=took)

        anyone: Any = None  # decoders are what `run` makes of them
        return search(lambda c: anyone, anyone, anyone, run, [[1], [2]], 1, from_rank_0, {})

    one, other = run_lockstep(2, searched)
    assert one == other and len(one) == len(BUDGETS) + 5 + 3


def test_more_ranks_pay_while_tokens_cost() -> None:
    """Ranks divide a step: they bring nothing where tokens are free, and no more than S allows where they are dear."""
    points = [(8.0, 2.5), (32.0, 4.0), (100.0, 5.0)]
    assert ranks_that_pay(speed_of_ranks(StepTimes.constant(0.01, 128), points)) == 1
    dear = speed_of_ranks(StepTimes((1, 128), (0.01, 0.5), 0.01), points)
    assert dear == sorted(dear) and ranks_that_pay(dear) > 4
    assert dear[0] == pytest.approx(
        max(s / (0.01 + 0.49 * (r - 1) / 127) for r, s in [(1, 1.0), (2, 1.5), (3, 1.79)]), rel=0.02
    )


def test_the_start_says_what_steps_take(launch_generate: Callable[..., Any], tiny_folder: Path) -> None:
    """Users can't know good W, N, G: what was chosen, and why, must be seen."""
    model = ["model=hf", f"model.name={tiny_folder}", "prompt=x", "max_new_tokens=9", "compare=false"]
    ran = launch_generate(*model, "verbose=true")
    assert ran.code == 0, ran.err
    assert re.search(r"adaptive budget up to W=16 N=2 G=184 depth=192; t\(T\) in ms 1:\d", ran.out)
    assert re.search(r"last text: 9 tokens in \d+ steps", ran.out)
    fixed = launch_generate(*model, "decoder=lookahead", "W=3", "G=4")
    assert "fixed budget W=3 N=2 G=4" in fixed.out and "last text" not in fixed.out
    assert "no steps yet" in lp.LookaheadDecoder.explain(_Fixed())  # type: ignore[arg-type]


class _Fixed:
    config = lp.LookaheadConfig(adaptive=False)
    step_times = _step_times = None
    _last: tuple[StepStats, ...] = ()
