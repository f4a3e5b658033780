"""Projections run the very steps of ranks, one rank at a time; scaling lines tell measured from projected."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

import launch.scaling
import lp
from launch.bench.projection import Link, Projected, Projection
from launch.bench.report import read_lines
from launch.bench.runs import Bench
from launch.bench.scaling_lines import MEASURED, Line, errors, errors_of_runs, medians, projected_lines, with_efficiency
from launch.config.schema import ScalingConfig
from lp.commands import app_command
from lp.engine.batch_step import BatchStep
from lp.engine.output import StepStats
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import LockstepGroup, run_lockstep
from tests.support.apps import Ran
from tests.support.tiny_models import tiny_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
CONFIG = lp.LookaheadConfig(window_size=6, ngram_size=4, guess_set_size=6)
LINK = Link(base_us=10, hop_us=2, gb_s=1, source="made up")


def _decode(decoder: lp.LookaheadDecoder) -> lp.GenerationOutput:
    return decoder.generate(IDS, 24)


def _projection(model: Any, ranks: int, config: lp.LookaheadConfig = CONFIG) -> Projection:
    return Projection(decoder=lp.LookaheadDecoder(model, config), decode=_decode, ranks=ranks)


def test_a_link_is_alpha_and_beta() -> None:
    assert LINK.all_gather_s(1, 1000) == 0
    assert LINK.all_gather_s(2, 1000) == pytest.approx(13e-6)
    assert LINK.all_gather_s(5, 1000) == pytest.approx(22e-6)


def test_one_rank_computes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once would time each other, and all runs of one rank in a row would have its weather."""
    ran: list[tuple[int, int]] = []
    projection = _projection(tiny_model(), 3)
    run = BatchStep.run

    def watched(self: BatchStep, *args: Any) -> Any:
        ran.append((threading.get_ident(), self.context.rank))
        return run(self, *args)

    monkeypatch.setattr(BatchStep, "run", watched)
    assert projection.recorded and {rank for _, rank in ran} == {0, 1, 2}
    steps = len(ran) // 3
    ran.clear()
    for _ in range(2):
        projection.run()
    assert ran == [(threading.get_ident(), rank) for _ in range(2) for rank in range(3) for _ in range(steps)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sampling", [None, lp.SamplingParams(temperature=0.9, seed=5)])
def test_shares_are_those_of_ranks(ranks: int, sampling: lp.SamplingParams | None) -> None:
    """The tokens, steps, step tokens and bytes of a real group of ranks, or its time is another group's."""
    model, given = tiny_model(), list[int]()

    def decode(decoder: lp.LookaheadDecoder) -> lp.GenerationOutput:
        return decoder.generate(IDS, 24, sampling)

    def body(context: ParallelContext) -> lp.GenerationOutput:
        decoder = lp.LookaheadDecoder(model, CONFIG, context)
        if context.is_main:
            group = Weighed(0, ranks, shared=context.ranks.shared, given=given)  # type: ignore[attr-defined]
            decoder.context = ParallelContext(world_size=ranks, ranks=group, steps=group)
        return decode(decoder)

    projection = Projection(decoder=lp.LookaheadDecoder(model, CONFIG), decode=decode, ranks=ranks)
    real, runs = run_lockstep(ranks, body), [projection.run(), projection.run()]
    for run in runs:
        assert [output.tokens for output in run] == [real[0].tokens] * ranks
        assert [_step_tokens(output) for output in run] == [_step_tokens(output) for output in real]
    found = projection.summed(runs)
    assert (found.ranks, found.tokens, found.steps) == (ranks, len(real[0].tokens), real[0].steps)
    largest = [max(sizes) for sizes in zip(*map(_step_tokens, real), strict=True)]
    assert found.num_tokens == pytest.approx(sum(largest) / found.steps)
    assert 0 < found.compute_s == found.forward_s + found.host_s and found.payload_bytes == given[-1]
    assert found.decode_s(LINK) == found.compute_s + found.steps * LINK.all_gather_s(ranks, found.payload_bytes)


@dataclass(frozen=True)
class Weighed(LockstepGroup):
    """Notes the bytes that a rank gives."""

    given: list[int] = field(default_factory=list)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        self.given.append(row.nbytes)
        return super().all_gather(row)


def _step_tokens(output: lp.GenerationOutput) -> list[int]:
    return [step.num_tokens for step in output.step_stats]


def test_ranks_merge_late_when_they_are_recorded_too() -> None:
    """Where the pool is full, proposals differ otherwise, and no run is the recorded one again."""
    late: list[bool] = []

    def decode(decoder: lp.LookaheadDecoder) -> lp.GenerationOutput:
        late.append(decoder.merges_late)
        return _decode(decoder)

    decoder = lp.LookaheadDecoder(tiny_model(), CONFIG)
    decoder.merges_late = True
    Projection(decoder=decoder, decode=decode, ranks=2).run()
    assert late == [True] * 4


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    """A step lasts as long as its slowest rank by medians: the slowest of all runs would be the unluckiest one."""

    def output(*steps: tuple[float, float]) -> lp.GenerationOutput:
        return lp.GenerationOutput([1], "length", [StepStats(7, 0, 0, forward, 9.0, host) for forward, host in steps])

    quick, slow, late = output((1, 1), (4, 1)), output((3, 2), (1, 5)), output((50, 50), (1, 5))
    found = _projection(tiny_model(), 2).summed([[quick, slow], [quick, late], [quick, slow]])
    assert (found.forward_s, found.host_s, found.compute_s) == (3 + 1, 2 + 5, 11)


def test_a_second_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="project kv_sync=recompute"):
        _projection(
            tiny_model(), 2, lp.LookaheadConfig(adaptive=False, ablation=lp.Ablation(kv_sync=lp.KVSync.BROADCAST))
        )


def _projected(ranks: int, compute_s: float) -> Projected:
    return Projected(
        ranks=ranks,
        tokens=100,
        steps=50,
        compute_s=compute_s,
        forward_s=compute_s,
        host_s=0,
        num_tokens=9,
        payload_bytes=0,
    )


def test_efficiency_is_of_the_same_method_on_one_rank() -> None:
    """In a launch of several ranks the single one is NAME@1: against plain decoding, a method that is slower there
    looked as if it scaled badly."""
    figures = {"kind": MEASURED, "link": None, "W": 4, "G": 4, "tokens_per_s": 1.0, "compression": 2.0}
    figures |= {"num_tokens": 9.0, "forward_ms": 1.0, "exchange_ms": 0.0, "host_ms": 0.0}
    speedups = {("lookahead", 2): 0.8, ("lookahead@1", 1): 0.5, ("plain", 1): 1.0, ("jacobi", 2): 0.6}
    lines = [Line(method=name, ranks=ranks, speedup=x, **figures) for (name, ranks), x in speedups.items()]
    assert [line.efficiency for line in with_efficiency(lines)] == pytest.approx([0.8, 1.0, 1.0, 0.3])


def test_efficiency_is_over_the_same_shape() -> None:
    """Launches of several sizes have a NAME@1 each: that of the last one was the base of all."""
    figures = {"kind": MEASURED, "link": None, "tokens_per_s": 1.0, "compression": 2.0}
    figures |= {"num_tokens": 9.0, "forward_ms": 1.0, "exchange_ms": 0.0, "host_ms": 0.0}

    def efficiencies(*found: tuple[str, int, int, float]) -> list[float | None]:
        lines = [Line(method=name, ranks=r, W=w, G=w, speedup=x, **figures) for name, r, w, x in found]
        return [line.efficiency for line in with_efficiency(lines)]

    two = ("lookahead", 2, 16, 1.0), ("lookahead@1", 1, 16, 0.8)
    weak = efficiencies(*two, ("lookahead", 4, 32, 1.2), ("lookahead@1", 1, 32, 0.4))
    assert weak == pytest.approx([1.0 / 0.8 / 2, 1.0, 1.2 / 0.4 / 4, 1.0])
    strong = efficiencies(*two, ("lookahead", 4, 16, 1.8), ("lookahead@1", 1, 16, 1.0))
    assert strong == pytest.approx([1.0 / 0.9 / 2, 1.0, 1.8 / 0.9 / 4, 1.0])
    single = efficiencies(("lookahead", 1, 16, 0.5), ("lookahead", 2, 32, 0.8))
    assert single == pytest.approx([1.0, 0.8]), "of weak scaling, the launch of one rank"


def test_lines_add_up_prompts_and_say_what_they_are() -> None:
    free = {"free": Link(base_us=0, hop_us=0, gb_s=1, source="")}
    lines = [
        line
        for ranks, seconds in ((1, 1.0), (2, 0.6))
        for line in projected_lines(
            [_projected(ranks, seconds), _projected(ranks, 3 * seconds)], free, 25.0, False, (4, 6)
        )
    ]
    one, two = with_efficiency(lines)
    assert (one.tokens_per_s, one.speedup, one.compression) == (50.0, 2.0, 2.0)
    assert two.speedup == pytest.approx(2 / 0.6) and two.efficiency == pytest.approx(1 / 1.2)
    assert "**projected**, free" in two.cells() and two.series == "lookahead, free (projected)"
    assert errors(lines) == {}
    measured = replace(two, kind=MEASURED, link=None, speedup=2.0)
    assert errors([*lines, measured], "free") == {("lookahead", 2): pytest.approx(two.speedup / 2 - 1)}
    assert errors([*lines, replace(measured, W=8)], "free") == {}  # weak scaling was measured, strong projected


def test_runs_are_medians_with_every_error() -> None:
    """The figures of three runs, one of them disturbed; and how far each was off, not only the best."""
    free = {"free": Link(base_us=0, hop_us=0, gb_s=1, source="")}
    runs = []
    for seconds, measured in ((1.0, 1.0), (1.1, 2.2), (5.0, 1.0)):
        (line,) = projected_lines([_projected(2, seconds)], {"gloo": free["free"]}, 50.0, False, (4, 6))
        runs.append([line, replace(line, kind=MEASURED, link=None, speedup=measured)])
    projected, measured_line = medians(runs)
    assert projected.tokens_per_s == pytest.approx(100 / 1.1) and measured_line.speedup == 1.0
    assert errors_of_runs(runs) == {("lookahead", 2): [pytest.approx(x) for x in (1.0, 2 / 1.1 / 2.2 - 1, -0.6)]}
    assert medians(runs[:1]) == runs[0] and errors_of_runs([runs[0][:1]]) == {}


@pytest.fixture
def scale(start_app: Callable[..., Ran], tiny_folder: Path) -> Callable[..., Ran]:
    """launch.scaling with a tiny model."""
    asked = ["model=hf", f"model.name={tiny_folder}", "W=4", "N=3", "G=4", "max_new_tokens=8", "limit=1"]
    return lambda *overrides: start_app(launch.scaling.scaling, "scaling", *asked, *overrides)


def test_a_projection_is_marked_everywhere(scale: Callable[..., Ran], tmp_path: Path) -> None:
    """A projected figure that reads like a measured one is a lie."""
    ran = scale("ranks=[]", "project=true", "projected_ranks=[1,2]", f"out={tmp_path}")
    assert ran.code == 0, ran.err
    lines = read_lines(tmp_path / "scaling.csv")
    assert len(lines) == 16 and all(line.kind == "projected" and line.link for line in lines)
    weak = [line for line in lines if line.link == "nvlink, weak"]
    assert [(line.ranks, line.W, line.G) for line in weak] == [(1, 4, 4), (2, 8, 8)]
    table = (tmp_path / "scaling.md").read_text()
    assert table.count("**projected**") == 16 and table.count("**projected**") == ran.out.count("**projected**")
    assert {"speedup.png", "step_time.png"} <= {path.name for path in tmp_path.iterdir()}
    assert ran.out.rstrip().endswith(f"written to {tmp_path}") and '{"' not in ran.out  # JSON only when asked for


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["ranks=[]"], "leaves nothing to do"),
        (["ranks=[0]"], "ranks is 0"),
        (["runs=0"], "runs is 0"),
        (["methods=[nonsense]"], "methods has 'nonsense'"),
        (["methods=[nonsense]", "ranks=[]", "project=true"], "methods has 'nonsense'"),
        (
            ["ranks=[]", "project=true", "~links.nvlink", "~links.pcie", "~links.infiniband", "~links.gloo"],
            "links is empty with project=true",
        ),
        (
            ["ranks=[2,1]", "methods=[transformers_tp]"],
            "ranks has 1, on which none of methods=['transformers_tp'] runs",
        ),
        (["ranks=[1]", "project=true", "pool.scope=session"], "take pool.scope=request"),
    ],
)
def test_user_errors(scale: Callable[..., Ran], overrides: list[str], said: str) -> None:
    ran = scale(*overrides)
    assert (ran.code, ran.err.count("error: ")) == (2, 1) and said in ran.err


def test_nodes_that_cannot_run_it(scale: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Found after the model is loaded on all nodes, it would have cost minutes."""
    monkeypatch.setenv("NNODES", "2")
    assert "RDZV_ENDPOINT is '' with 2 nodes" in scale().err
    monkeypatch.setenv("RDZV_ENDPOINT", "localhost:1")
    monkeypatch.setenv("NPROC", "1")
    assert "ranks has 3" in scale("ranks=[1,3]", "parallel.timeout_s=1").err  # how long node 0 would wait for node 1


def test_a_projected_rank_has_the_threads_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, scale: Callable[..., Ran], tmp_path: Path
) -> None:
    """All cores for a rank that has half of them in a launch: projected 82 % too fast."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads: list[int] = []

    def project_all(config: ScalingConfig, bench: Bench) -> list[Line]:
        threads.append(torch.get_num_threads())
        return []

    for name, stand_in in (("project_all", project_all), ("splits_of", lambda config: []), ("report", lambda *_: None)):
        monkeypatch.setattr(launch.scaling, name, stand_in)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for ranks in ("[]", "[1,2]", "[8]"):
            scale(f"ranks={ranks}", "project=true", f"out={tmp_path}")
        assert threads == [4, 2, 1] and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_several_runs_are_reported_one_by_one(
    monkeypatch: pytest.MonkeyPatch, scale: Callable[..., Ran], tmp_path: Path
) -> None:
    """One run may be near by luck: all are shown, and their median."""
    projected: list[int] = []

    def project_all(config: ScalingConfig, bench: Bench) -> list[Line]:
        projected.append(config.runs)
        return project(config, bench)

    project = launch.scaling.project_all
    monkeypatch.setattr(launch.scaling, "project_all", project_all)
    ran = scale("ranks=[]", "project=true", "projected_ranks=[2]", "weak=false", "runs=2", f"out={tmp_path / 'twice'}")
    assert ran.code == 0 and projected == [2, 2], ran.err
    lines = read_lines(tmp_path / "twice" / "scaling.csv")
    off = {("lookahead", 2): [0.02, -0.1, 0.04]}
    for table in (True, False):
        launch.scaling.report(lines, off, "made up", tmp_path, table)
    said = "lookahead on 2 ranks: projected +2.0%, -10.0%, +4.0% off the measured speed-up in 3 runs, by 4.0% in the"
    assert said in (tmp_path / "scaling.md").read_text() and len(lines) == 4
    launch.scaling.report(lines, {("lookahead", 2): [0.02]}, "made up", tmp_path, False)
    assert "projected +2.0% off the measured speed-up.\n" in (tmp_path / "scaling.md").read_text()


def test_records_of_an_earlier_setting_are_not_mixed_in(
    monkeypatch: pytest.MonkeyPatch, scale: Callable[..., Ran], tmp_path: Path
) -> None:
    """Two lines that look alike, and an efficiency over the wrong one."""
    monkeypatch.setattr(launch.scaling, "relaunch", lambda *_: None)
    folder = tmp_path / "ranks-1"
    folder.mkdir()
    for tokens in (6, 8):
        row = {"index": 0, "method": "lookahead", "prompt_digest": "x", "settings": {"max_new_tokens": tokens}}
        (folder / f"{tokens}.jsonl").write_text(json.dumps(row) + "\n")
    ran = scale("ranks=[1]", f"out={tmp_path}")
    assert ran.code == 2 and "has records of other settings too" in ran.err and "give another out=" in ran.err


def test_what_a_launch_would_refuse_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, scale: Callable[..., Ran], tmp_path: Path
) -> None:
    """Hours of measurements, and then an error that was to be seen at the start."""
    monkeypatch.setattr(launch.scaling, "relaunch", lambda *_: pytest.fail("launched"))
    for overrides, said in (
        (["ranks=[1]", "task=humaneval", f"task.path={tmp_path}/none"], "has no file"),
        (["ranks=[1]", "sampling=sample", "sampling.temperature=-1"], "temperature"),
        (["ranks=[1,2]", "tp=[1,2]", "quality=true"], "quality=true needs the whole model"),
        (["ranks=[1]", "pass_at_1=true"], "needs a task with a check"),
    ):
        ran = scale(*overrides)
        assert ran.code == 2 and said in ran.err, overrides


@pytest.mark.slow
def test_a_folder_of_another_setting_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, scale: Callable[..., Ran], tmp_path: Path
) -> None:
    """The run measured all world sizes, then found that its records lie beside others. The same setting goes on."""
    launched: list[int] = []
    assert scale("ranks=[1]", "methods=[lookahead,plain]", f"out={tmp_path}").code == 0
    monkeypatch.setattr(launch.scaling, "relaunch", lambda ranks, *_: launched.append(ranks))
    ran = scale("ranks=[1]", "methods=[lookahead,plain]", f"out={tmp_path}", "max_new_tokens=9")
    assert ran.code == 2 and "has records with max_new_tokens=8, and this run has 9" in ran.err and not launched
    assert scale("ranks=[1]", "methods=[lookahead,plain]", f"out={tmp_path}").code == 0 and launched == [1]


def test_ranks_do_not_scale(scale: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun every rank would launch ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    ran = scale()
    assert ran.code == 2 and f"start it alone: {app_command('scaling')}" in ran.err


def test_one_rank_runs_what_one_rank_can(
    monkeypatch: pytest.MonkeyPatch, scale: Callable[..., Ran], tmp_path: Path
) -> None:
    """A method that needs two ranks is left out where there is one; keys of scaling do not reach the benchmark."""
    monkeypatch.setenv("NPROC", "2")
    asked: list[tuple[int, list[str]]] = []

    def relaunch(ranks: int, app: str, overrides: list[str], place: Sequence[str]) -> None:
        assert place == ("--standalone",)
        asked.append((ranks, overrides))
        if len(asked) == 2:
            raise SystemExit(3)

    monkeypatch.setattr(launch.scaling, "relaunch", relaunch)
    methods = "methods=[lookahead,lookahead_auto,plain,transformers_tp]"
    keys = ("ranks=[1,2]", "weak=false", "links.gloo.hop_us=9", f"out={tmp_path}")
    assert scale(*keys, methods).code == 3
    assert "methods=[lookahead,lookahead_auto,plain]" in asked[0][1] and methods in asked[1][1]
    asked.clear()
    assert scale(*keys).code == 3
    assert "methods=[lookahead,lookahead_auto,plain]" in asked[0][1]
    assert "methods=[lookahead,lookahead_auto,plain]" in asked[1][1]  # transformers_tp only if asked
    assert all(
        "W=4" in overrides and not [o for o in overrides if o.startswith(("weak", "ranks", "links"))]
        for _, overrides in asked
    )


def _folder(overrides: list[str]) -> Path:
    """The folder of the records, as Hydra reads it in the launched benchmark."""
    (out,) = (each for each in OverridesParser.create().parse_overrides(overrides) if each.key_or_group == "out")
    return Path(str(out.value()))


def test_a_folder_may_have_any_name(monkeypatch: pytest.MonkeyPatch, scale: Callable[..., Ran], tmp_path: Path) -> None:
    """The launched benchmark refused its own out=, or swept over the two halves of a path with a comma."""
    asked: list[list[str]] = []

    def relaunch(ranks: int, app: str, overrides: list[str], place: Sequence[str]) -> None:
        asked.append(overrides)
        raise SystemExit(3)

    monkeypatch.setattr(launch.scaling, "relaunch", relaunch)
    folder = tmp_path / "a,b (1)=c"
    assert scale("ranks=[1]", f"out='{folder}'").code == 3
    assert _folder(asked[0]) == folder / "ranks-1"


def test_plain_decoding_alone_is_launched_where_it_was_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, scale: Callable[..., Ran], tmp_path: Path
) -> None:
    """Speed-ups were over plain decoding beside idle ranks that had its cores: 0.66 x of plain decoding read 1.18 x."""
    asked: list[tuple[int, str]] = []

    def relaunch(ranks: int, app: str, overrides: list[str], place: Sequence[str]) -> None:
        asked.append((ranks, next(each for each in overrides if each.startswith("methods="))))
        out = _folder(overrides)
        out.mkdir(parents=True)
        names = asked[-1][1].removeprefix("methods=[").removesuffix("]").split(",")
        for name in names:
            seconds = {("plain", 1): 1.0, ("plain", 2): 2.0, ("lookahead", 2): 1.6}[name, ranks]
            setting = {"task": "a", "W": 4, "N": 3, "G": 4, "ranks": ranks, "tp": 1, "dtype": "float32"}
            row = {
                "index": 0, "prompt_digest": "x", "method": name, "task": "a", "tokens": 8, "steps": 4, "accepted": {},
                "settings": setting | {"methods": names, "model": "m", "parameters": 1e6}, "decode_s": seconds,
                "equal": None, "tokens_a_step": 1.0, "rounds_s": [seconds, 1.25 * seconds],
                "versions": {"torch": "1"}, "hardware": "2 cores", "machine": {},
                "split": [{"num_tokens": 1.0, "forward_ms": 1.0, "exchange_ms": 0.0, "host_ms": 0.0}],
            }  # fmt: skip
            with (out / "records.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    monkeypatch.setattr(launch.scaling, "relaunch", relaunch)
    monkeypatch.chdir(tmp_path)
    ran = scale("ranks=[2]", "methods=[lookahead,plain]", f"hydra.run.dir={tmp_path / 'run'}")
    assert ran.code == 0, ran.err
    assert asked == [(1, "methods=[plain]"), (2, "methods=[lookahead,plain]")]
    assert f"the same command with out={tmp_path / 'run'} goes on" in ran.err
    plain, both, beside = read_lines(tmp_path / "run" / "scaling.csv")
    assert [line.speedup for line in (plain, both, beside)] == pytest.approx([1.0, 1 / 1.6, 0.5])
    assert [line.speedup_in_launch for line in (plain, both, beside)] == pytest.approx([1.0, 2 / 1.6, 1.0])
    assert (both.least, both.most) == pytest.approx((1 / 1.6 / 1.25, 1 / 1.6))
    table = (tmp_path / "run" / "scaling.md").read_text()
    assert "plain, in a launch of 2" in table and "| vs plain of the launch |" in table
    assert "one device with nothing else running, 8.0 tokens/s" in table
    assert "vs plain of the launch: over plain decoding in the same launch, 4.0 with 2 ranks" in table
