"""launch.benchmark from its arguments to its records, resumed, swept, and killed at random moments."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version
from transformers import AutoTokenizer, PreTrainedModel

import launch.running.hydra_app
import lp
from launch.bench.baselines import BASELINES, BaselineOptions, register_baseline
from launch.bench.record_settings import settings_of
from launch.bench.records import load_records
from launch.bench.runs import ModelCache, open_bench
from launch.bench.table_text import caption, shown, table_of
from launch.bench.totals import totals
from launch.benchmark import benchmark
from launch.config.builders import draft_configs
from launch.config.schema import BenchmarkConfig
from launch.running.session import on_main
from lp.engine.decoder import Decoder
from lp.engine.interrupts import Terminated
from lp.models.loader import Loaded, load
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.conftest import LONG
from tests.support.apps import Ran, with_template

SMALL = ["model=hf", "model.dtype=float64", "W=4", "N=3", "G=4", "max_new_tokens=16", "limit=3"]
METHODS = ["lookahead", "plain", "prompt_lookup"]
TIMED = ("prefill_s", "decode_s", "rounds_s", "tokens_per_s", "time", "split", "peak_bytes", "machine")
ASKED = ("origin",)  # the command, which names another folder


@pytest.fixture
def bench(start_app: Callable[..., Ran], tiny_folder: Path, tmp_path: Path) -> Callable[..., Ran]:
    """launch.benchmark with a tiny model in float64, its records in `tmp_path`/out unless out= is given."""

    def start(*overrides: str) -> Ran:
        keys = {override.split("=")[0] for override in overrides}
        defaults = [*SMALL, f"out={tmp_path / 'out'}", f"model.name={tiny_folder}"]
        defaults = [default for default in defaults if default.split("=")[0] not in keys]
        return start_app(partial(benchmark, models=ModelCache()), "benchmark", *overrides, *defaults)

    return start


def _untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in TIMED + ASKED} for record in records]


def test_records_and_the_table_say_what_computed_attention(bench: Callable[..., Ran], tmp_path: Path) -> None:
    """Figures of a backend that `auto` fell back from would pass for those of the one that was meant."""
    ran = bench("methods=[lookahead,autoregressive]", "limit=1")
    records = load_records(tmp_path / "out")
    assert [record["attention"] for record in records] == ["flash", "transformers' sdpa"]
    assert "attention of lookahead: flash, attention of autoregressive: transformers' sdpa" in ran.out
    assert [record["captured"] for record in records] == [None, None]
    records[0]["captured"] = "graph"
    assert "attention of lookahead: flash, captured by graph" in caption(totals(records))
    old = [{key: value for key, value in record.items() if key != "attention"} for record in records]
    assert "attention" not in caption(totals(old))


def test_what_runs_on_rank_0_is_built_there_alone(
    start_app: Callable[..., Ran], tiny_folder: Path, tmp_path: Path
) -> None:
    """Every rank would measure step times while the others do, and hold a cache and graphs that nobody uses."""
    configs: list[BenchmarkConfig] = []
    asked = [*SMALL, f"model.name={tiny_folder}", f"out={tmp_path}", "methods=[lookahead,lookahead@1,plain]"]
    start_app(configs.append, "benchmark", *asked)
    loaded = load(str(tiny_folder), "float64")

    class LoadedModel(ModelCache):
        def __init__(self, context: ParallelContext) -> None:
            self.context = context

        def open(self, config: BenchmarkConfig) -> tuple[ParallelContext, Loaded]:
            return self.context, loaded

    benches = run_lockstep(2, lambda context: open_bench(configs[0], LoadedModel(context)))
    assert [[*bench.decoders] for bench in benches] == [["lookahead", "lookahead@1", "plain"], ["lookahead"]]


OWN_SIZES = {"lookahead": 104, "lookahead_auto": 184, "lookahead_paper": 15}


@pytest.mark.parametrize(
    ("asked", "methods", "shown", "of_decoder"),
    [
        ([], [*OWN_SIZES, "plain"], OWN_SIZES, 104),
        ([], ["lookahead", "lookahead@1", "prompt_lookup"], 104, 104),
        (["decoder=lookahead_auto"], ["lookahead_auto"], 184, 184),
        (["decoder=lookahead_paper"], ["lookahead_paper"], 15, 15),
        (["decoder=lookahead", "G=9"], ["lookahead", "plain"], 9, 9),
        (["G=7"], [*OWN_SIZES, "plain"], 7, 7),
        ([], ["plain"], None, 104),
    ],
)
def test_records_say_which_g_was_used(
    start_app: Callable[..., Ran], asked: list[str], methods: list[str], shown: Any, of_decoder: int
) -> None:
    """Where none is given, every method has its own default; a figure under another one's would be a lie."""
    configs: list[BenchmarkConfig] = []
    ran = start_app(configs.append, "benchmark", *asked, f"methods=[{','.join(methods)}]")
    assert ran.code == 0, ran.err
    found = settings_of(configs[0], methods, None, 1, 1)
    assert (found["G"], found["decoder"]["guess_set_size"]) == (shown, of_decoder)


def test_every_method_has_the_pool_that_the_records_name(start_app: Callable[..., Ran]) -> None:
    """pool.* reached the chosen decoder alone: the one beside it was measured with defaults under the same settings."""
    configs: list[BenchmarkConfig] = []
    names = ["lookahead", "lookahead_auto", "prompt_lookup"]
    asked = ["W=4", "pool.mib=64", "pool.model_ngrams=off", "pool.scope=session"]
    assert start_app(configs.append, "benchmark", *asked).code == 0
    drafting: dict[str, Any] = draft_configs(configs[0], names)
    for name in names[:2]:
        found = drafting[name]
        assert found.window_size == 4, name
        assert (found.pool_mib, found.pool_model_ngrams, found.pool_scope) == (64, "off", "session"), name
    assert settings_of(configs[0], names, None, 1, 1)["decoder"]["pool_mib"] == 64


def test_records_of_other_pools_are_others(start_app: Callable[..., Ran]) -> None:
    """Beside a chosen decoder that has no pool: a run with another one went on from the first one's records."""
    configs: list[BenchmarkConfig] = []
    for asked in ([], ["pool.mib=64"], ["pool.model_ngrams=off"]):
        assert start_app(configs.append, "benchmark", "decoder=prompt_lookup", *asked).code == 0
    names = ["prompt_lookup", "lookahead_auto@1", "plain"]
    default, *others = [settings_of(config, names, None, 1, 1) for config in configs]
    assert "pool" not in default and [other["pool"]["mib"] for other in others] == [64, 16]
    assert others[1]["pool"]["model_ngrams"] == "off"
    assert all("pool" not in settings_of(config, [names[0], names[2]], None, 1, 1) for config in configs)
    assert start_app(configs.append, "benchmark", "decoder=lookahead", "pool.mib=64").code == 0
    found = settings_of(configs[-1], ["lookahead", "lookahead_auto"], None, 1, 1)
    assert "pool" not in found and found["decoder"]["pool_mib"] == 64, "the chosen decoder's settings name it"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, for what only counts them."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


def test_records_of_another_device_or_backend_are_others(start_app: Callable[..., Ran], gpus: None) -> None:
    """A sweep over them kept the first job's records as those of the second: figures of a CPU under a GPU's name."""
    configs: list[BenchmarkConfig] = []
    for asked in ([], ["model.device=cpu"], ["model.device=cuda:1", "parallel.backend=gloo"]):
        assert start_app(configs.append, "benchmark", *asked).code == 0
    found = [[settings_of(config, ["plain"], None, ranks, 1) for config in configs] for ranks in (1, 2, 3)]
    assert [[(each["device"], each.get("backend")) for each in of_ranks] for of_ranks in found] == [
        [("cuda", None), ("cpu", None), ("cuda", None)],
        [("cuda", "nccl"), ("cpu", "gloo"), ("cuda", "gloo")],
        [("cuda", "gloo"), ("cpu", "gloo"), ("cuda", "gloo")],
    ]
    context = ParallelContext(0, 2, 0, torch.device("cpu"), "gloo")
    run = settings_of(configs[0], ["plain"], None, 2, 1, context)
    assert (run["device"], run["backend"]) == ("cpu", "gloo"), "what the ranks chose, whatever the config asks for"


def test_a_backend_that_an_earlier_job_chose(start_app: Callable[..., Ran], tiny_folder: Path, tmp_path: Path) -> None:
    """The jobs of a sweep share a group of processes: the second backend's figures were those of the first one."""
    configs: list[BenchmarkConfig] = []
    asked = [*SMALL, f"model.name={tiny_folder}", f"out={tmp_path}", "methods=[plain]", "parallel.backend=nccl"]
    start_app(configs.append, "benchmark", *asked)
    given = ParallelContext(0, 2, 0, torch.device("cpu"), "gloo"), load(str(tiny_folder), "float64")

    class LoadedModel(ModelCache):
        def open(self, config: BenchmarkConfig) -> tuple[ParallelContext, Loaded]:
            return given

    with pytest.raises(lp.UserError, match=r"parallel\.backend is 'nccl', but the ranks have met with 'gloo'"):
        open_bench(configs[0], LoadedModel())


def test_tables_show_device_and_backend_where_lines_need_them(bench: Callable[..., Ran], tmp_path: Path) -> None:
    """A sweep over ranks would have a column of backends, "null" and "gloo"; old records have neither setting."""
    assert bench("limit=1", "methods=[plain]").code == 0
    record = load_records(tmp_path / "out")[0]
    assert record["settings"]["device"] == "cpu" and "backend" not in record["settings"]

    def columns(*places: dict[str, Any]) -> list[str]:
        return shown(totals([record | {"settings": record["settings"] | place} for place in places]))

    assert columns({"ranks": 1}, {"ranks": 2, "backend": "gloo"}) == ["ranks"]
    assert columns({"backend": "gloo"}, {"backend": "nccl"}) == ["backend"]
    assert columns({"device": "cpu"}, {"device": "cuda"}) == ["device"]
    old = record | {"settings": {key: value for key, value in record["settings"].items() if key != "device"}}
    assert table_of(totals([old]))[0] == table_of(totals([record]))[0] and caption(totals([old]))
    assert shown(totals([old, record])) == ["device"], "lines that would look alike"
    assert "device" not in caption(totals([record])), "the hardware says it"


def test_records_hold_what_was_measured_and_on_what(bench: Callable[..., Ran], tmp_path: Path) -> None:
    """A figure without its setting is worth nothing a week later."""
    ran = bench()
    assert ran.code == 0, ran.err
    records = load_records(tmp_path / "out")
    assert [(record["index"], record["method"]) for record in records] == [(i, m) for i in range(3) for m in METHODS]
    for record in records:
        assert record["tokens"] == 16 and record["equal"] is True and record["difference"] is None
        lengths = {int(length): count for length, count in record["accepted"].items()}
        assert sum(lengths.values()) == record["steps"]
        assert sum((length + 1) * count for length, count in lengths.items()) >= record["tokens"]
        assert record["S"] == record["tokens"] / record["steps"] and record["prefill_s"] > 0
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["decode_s"])
        assert (record["settings"]["W"], record["settings"]["ranks"], record["settings"]["dtype"]) == (4, 1, "float64")
        assert {"torch", "transformers", "lp"} <= {*record["versions"]} and record["hardware"].endswith(" cores")
        assert len(record["split"]) == 1 and record["split"][0]["forward_ms"] > 0
    assert "vs plain" in ran.out and "equal" in ran.out and f"records: {tmp_path}" in ran.out and "{" not in ran.out
    again = bench("output=json")
    last = json.loads(again.out)
    assert "9 records kept in " in again.err and "0 prompts to measure" in again.err
    assert [line["method"] for line in last["methods"]] == METHODS and last["settings"]["G"] == 4
    assert last["methods"][1]["speedup"] == 1.0 and last["methods"][0]["S"] > 1
    assert len(bench("output=json", "limit=1").out.splitlines()) == 1


def test_a_new_baseline_is_one_registration(bench: Callable[..., Ran], tmp_path: Path) -> None:
    """A table, an app or a message that lists baselines by hand would not know it."""
    assert "'toy'; it must be one of" in bench("methods=[toy]").err

    @register_baseline("toy")
    def build(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
        return lp.AutoregressiveDecoder(model)

    try:
        ran = bench("methods=[toy,plain]", "limit=1")
    finally:
        del BASELINES["toy"]
    assert ran.code == 0, ran.err
    toy, plain = load_records(tmp_path / "out")
    assert (toy["method"], toy["equal"], toy["text"]) == ("toy", True, plain["text"])
    assert toy["steps"] == toy["tokens"] == 16


def test_a_second_run_measures_only_what_is_missing(bench: Callable[..., Ran], tmp_path: Path) -> None:
    bench("limit=2")
    before = load_records(tmp_path / "out")
    assert bench("limit=3").code == 0
    records = load_records(tmp_path / "out")
    assert records[: len(before)] == before and len(records) == 9
    assert bench("limit=3").code == 0 and load_records(tmp_path / "out") == records
    assert bench("limit=2", "max_new_tokens=5").code == 0  # other settings have a file of their own
    assert len([*(tmp_path / "out").iterdir()]) == 2


def test_other_prompts_are_not_mixed_in(bench: Callable[..., Ran], tmp_path: Path) -> None:
    task = tmp_path / "t.jsonl"
    task.write_text('{"prompt": "import os"}\n')
    assert bench("task=humaneval", f"task.path={task}").code == 0
    task.write_text('{"prompt": "import sys"}\n')
    ran = bench("task=humaneval", f"task.path={task}")
    assert ran.code == 2 and "has records of another prompt 0" in ran.err


def _benchmark(arguments: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)  # as in the process of the tests: records of another number are other records
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["app", *arguments])
        launch.running.hydra_app.run(partial(benchmark, models=ModelCache()), "benchmark")


@pytest.mark.parametrize("kills", [3 if LONG else 1])
def test_killed_at_random_moments(bench: Callable[..., Ran], tmp_path: Path, tiny_folder: Path, kills: int) -> None:
    """SIGKILL leaves no time to say goodbye: no record may be lost, none written twice."""
    asked = [*SMALL[:-1], "limit=5", f"model.name={tiny_folder}"]
    killed, rng = tmp_path / "killed", random.Random(os.getpid())
    server = multiprocessing.get_context("forkserver")  # a fork of this process has its threads' locks, not its threads
    server.set_forkserver_preload([__name__])
    seen = 0
    for _ in range(kills):
        process = server.Process(target=_benchmark, args=([*asked, f"out={killed}"],))
        process.start()
        while process.is_alive() and not any(file.stat().st_size > seen for file in killed.glob("*")):
            time.sleep(0.001)
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.join(60)
        assert process.exitcode in (-signal.SIGKILL, 0)  # 0: it was done already
        seen = next(killed.glob("*")).stat().st_size
    assert bench("limit=5", f"out={killed}").code == 0 and bench("limit=5").code == 0
    assert _untimed(load_records(killed)) == _untimed(load_records(tmp_path / "out"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_an_interrupted_benchmark_keeps_finished_prompts(
    bench: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """Its table looked like that of all prompts, and a script that asked it to end by SIGTERM read a Ctrl-C."""
    import launch.benchmark as module

    measure, calls = module._measure, iter(range(2))

    def interrupted(*args: Any) -> Any:
        if next(calls, None) is None:
            signal.raise_signal(number)
        return measure(*args)

    monkeypatch.setattr(module, "_measure", interrupted)
    ran = bench("output=json")
    found = json.loads(ran.out)
    assert ran.code == code and found["methods"][0]["prompts"] == 2 and found["interrupted"] is True
    assert ran.err.endswith("interrupted: 2 of 3 prompts; the same command measures the rest\n")
    assert len(load_records(tmp_path / "out")) == 6
    calls = iter(())
    ran = bench(f"hydra.run.dir={tmp_path / 'a run'}", "out=null", "limit=1")
    assert ran.err.endswith(
        f"interrupted: 0 of 1 prompts; the same command with out='{tmp_path}/a run' measures the rest\n"
    )
    calls = iter(range(9))
    ran = bench("output=json")
    assert ran.code == 0 and json.loads(ran.out)["interrupted"] is False and "interrupted:" not in ran.err


def test_every_method_runs_beside_the_others(bench: Callable[..., Ran], tmp_path: Path, tiny_folder: Path) -> None:
    """All in one table, each with its own settings, sampled alike."""
    names = ["lookahead_paper", "lookahead", "lookahead@1", "token_recycling", "prompt_lookup", "plain"]
    names += ["autoregressive", "hf_generate", "hf_static"]
    if Version(tf.__version__) >= Version("5.18"):  # before, they are refused
        names += ["hf_prompt_lookup", "hf_assisted"]
    asked = ["decoder=lookahead_paper", f"methods=[{','.join(names)}]", f"draft={tiny_folder}", "sampling=sample"]
    ran = bench(*asked, "sampling.temperature=0.7", "limit=1")
    assert ran.code == 0, ran.err
    records = load_records(tmp_path / "out")
    assert [record["method"] for record in records] == names and all(record["equal"] for record in records)
    assert len({record["text"] for record in records}) == 1 and records[0]["settings"]["decoder"]["window_size"] == 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["methods=[lookahead,nonsense]"], "methods has 'nonsense'; it must be one of lookahead_auto, "),
        (["methods=[hf_generate@1]"], "@1 behind ours runs it on one rank"),
        (["methods=[lookahead,lookahead]"], "name each once"),
        (["methods=[hf_assisted]"], "give draft=<folder or hub name>"),
        (["methods=[transformers_tp]"], "launch with NPROC=2 or more"),
        (["methods=[accelerate_pp]"], "needs two; torch sees"),
        (["parallel.nproc=0"], "parallel.nproc is 0"),
        (["repeats=2", "pool.scope=session"], "take repeats=1, or pool.scope=request"),
        (
            ["repeats=2", "pool.scope=session", "decoder=prompt_lookup", "methods=[lookahead_auto]"],
            "take repeats=1, or pool.scope=request",
        ),
        (
            ["repeats=1", "pool.scope=session", "pool.file=p.pool", "methods=[lookahead,lookahead_auto]"],
            "pool.file is 'p.pool' for lookahead and lookahead_auto",
        ),
        (["methods=[plain,hf_generate]", "model.kv_dtype=int8"], "'hf_generate' has no cache of model.kv_dtype=int8"),
        (["task.ids=[]"], "task.ids is [], which leaves no prompt"),
        (["task=mbpp", "task.path=nowhere", "task.hub=null"], "task mbpp has no file nowhere"),
    ],
)
def test_user_errors(bench: Callable[..., Ran], overrides: list[str], said: str) -> None:
    ran = bench(*overrides)
    assert (ran.code, ran.err.count("error: ")) == (2, 1) and said in ran.err


def test_what_fails_on_rank_0_alone_fails_on_all() -> None:
    """Else rank 0 goes on to the next job of a sweep, and the others take its words for those of this one."""

    def body(context: lp.ParallelContext) -> tuple[int | None, str]:
        made = on_main(context, lambda: context.rank + 7)
        try:
            on_main(context, lambda: int("x"))
        except ValueError as error:
            return made, str(error)
        return made, ""

    said = "invalid literal for int() with base 10: 'x'"
    assert run_lockstep(3, body) == [(7, said), (None, said), (None, said)]


def test_ctrl_c_on_rank_0_ends_the_others() -> None:
    """They would wait for its word until its connection breaks, and say that a rank was lost."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    def body(context: lp.ParallelContext) -> type[BaseException]:
        with pytest.raises(KeyboardInterrupt) as caught:
            on_main(context, interrupted)
        return caught.type

    assert run_lockstep(3, body) == [KeyboardInterrupt, Terminated, Terminated]


def test_tokens_are_held_against_the_oracle(bench: Callable[..., Ran], tmp_path: Path, wrong_plain: None) -> None:
    """`plain` runs the code that it would be the judge of: a fault of the engine must not pass as equal."""
    assert bench("limit=1").code == 0
    ours, plain, copying = load_records(tmp_path / "out")
    assert plain["equal"] is False and plain["difference"]["position"] == 5
    assert ours["equal"] is copying["equal"] is True
    assert bench("limit=1", "methods=[plain,autoregressive]", f"out={tmp_path / 'named'}").code == 0
    assert [record["equal"] for record in load_records(tmp_path / "named")] == [False, True]
    assert bench("limit=1", "methods=[prompt_lookup]", f"out={tmp_path / 'alone'}").code == 0
    assert load_records(tmp_path / "alone")[0]["equal"] is None, "nothing was compared"


@pytest.mark.usefixtures("wrong_prompt_lookup")
def test_quality_says_where_a_method_parts_and_what_it_wrote(bench: Callable[..., Ran], tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    task = tmp_path / "t.jsonl"
    task.write_text(json.dumps({"prompt": "import os\n", "reference": "import sys"}) + "\n")
    assert bench("quality=true", "task=humaneval", f"task.path={task}").code == 0
    ours, plain, wrong = load_records(tmp_path / "out")
    assert ours["quality"] == plain["quality"] and ours["quality"]["differs_at"] is None
    assert wrong["equal"] is False and wrong["quality"]["differs_at"] == 5 and wrong["quality"]["near_tie"] is False
    at = wrong["difference"]
    assert at["plain_logit"] > at["logit"] and at["gap"] > 0
    assert wrong["quality"]["perplexity"] != ours["quality"]["perplexity"] > 1
    assert set(ours["quality"]["rouge"]) == {"rouge1", "rouge2", "rougeL"}
    assert totals([wrong])[0].quality("rouge", "rouge1") is not None and totals([wrong])[0].differing == 1


def test_a_question_is_asked_in_the_models_template(
    bench: Callable[..., Ran], tmp_path: Path, tiny_folder: Path
) -> None:
    """A chat model that is not addressed as such writes something else; code to complete is no question."""
    task = tmp_path / "t.jsonl"
    task.write_text('{"prompt": "hello"}\n')
    chatty = with_template(tiny_folder, tmp_path / "chatty", "Q: {{ messages[0]['content'] }} A:")
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    said = []
    for name, chat in [(chatty, "true"), (chatty, "false"), (tiny_folder, "true")]:
        asked = ["task=gsm8k", f"task.chat={chat}", f"task.path={task}", "methods=[plain]", "output=json"]
        assert bench(*asked, f"model.name={name}", f"out={tmp_path / str(len(said))}").code == 0
        said.append(load_records(tmp_path / str(len(said)))[0]["prompt_tokens"])
    assert said == [len(tokenizer("Q: hello A:")["input_ids"]), *[len(tokenizer("hello")["input_ids"])] * 2]


def test_prompts_without_room_are_left_out(bench: Callable[..., Ran], tmp_path: Path) -> None:
    """One text too long must not end a night's run, nor be passed over in silence."""
    task = tmp_path / "t.jsonl"
    task.write_text("".join(json.dumps({"prompt": "x = 1\n" * times}) + "\n" for times in (1, 500, 2)))
    ran = bench("task=humaneval", f"task.path={task}")
    assert ran.code == 0 and "1 of 3 prompts left out: as long as the model's context of 256" in ran.err
    assert [record["index"] for record in load_records(tmp_path / "out")][::3] == [0, 2]
    task.write_text(json.dumps({"prompt": "x = 1\n" * 500}) + "\n")
    ran = bench("task=humaneval", f"task.path={task}", f"out={tmp_path / 'none'}")
    assert ran.code == 2 and "none of 1 prompts is shorter than the model's context of 256" in ran.err


def test_prompts_of_a_length(bench: Callable[..., Ran], tmp_path: Path, tiny_folder: Path) -> None:
    """A prompt of the wrong length would answer another question; a chat's end would be cut."""
    task = tmp_path / "t.jsonl"
    task.write_text("".join(json.dumps({"prompt": f"x = {i}\n"}) + "\n" for i in range(30)))
    asked = ["task=humaneval", f"task.path={task}", "limit=2", "methods=[plain]", "output=json"]
    ran = bench(*asked, "prompt_tokens=50")
    assert ran.code == 0 and {record["prompt_tokens"] for record in load_records(tmp_path / "out")} == {50}
    ran = bench(*asked, "prompt_tokens=0")
    assert ran.code == 2 and "prompt_tokens is 0" in ran.err and "try 2048" in ran.err
    ran = bench("task=gsm8k", f"task.path={task}", "prompt_tokens=50")
    assert ran.code == 2 and "chat template" in ran.err and "task.chat=false" in ran.err


def test_a_sweep_goes_on_behind_a_failed_job(
    bench: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight hours into a sweep, one bad corner must not take the rest with it."""
    monkeypatch.setenv("LP_RUN_DIR", str(tmp_path / "sweep"))
    ran = bench("-m", "W=2,-1,3", "limit=1", "out=null")
    assert ran.code == 2 and "job 2 failed with exit code 2: " in ran.err and "1 failed; " in ran.err
    again = bench("-m", "W=2,1", "limit=1", "out=null", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert again.code == 0, again.err  # what failed then is not said again
    found = totals(load_records(tmp_path / "sweep"))
    assert sorted({total.setting["W"] for total in found}) == [1, 2, 3]
    table = ran.out[ran.out.rindex("  W ") :]
    assert [line.split()[:2] for line in table.splitlines() if line[:3] in ("  2", "  3")] == [
        [str(width), method] for width in (2, 3) for method in METHODS
    ]
