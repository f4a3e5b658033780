"""docs/experiments/results.md is made of its records; the tables of a report, its plots and its file."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.bench.plots import _colours, _is_line, _without_overlaps, heat_map
from launch.bench.records import RecordFile, digest, load_records
from launch.bench.report import main, read_lines, write_report
from launch.bench.scaling_lines import PROJECTED, Line, errors, measured_lines
from launch.bench.table_text import HEADS, caption, cells, notes, ordered, table_of, varying
from launch.bench.totals import Total, totals
from scripts.studies import results
from tests.conftest import ROOT

PNG = b"\x89PNG"


def test_the_page_is_made_of_its_records() -> None:
    """A figure edited by hand, or records measured again without the page."""
    written = results.PAGE.read_text(encoding="utf-8")
    assert results.page() == written, "run python scripts/tables.py results"
    assert "2 x86-64 cores, torch 2.13.0" in written and "**projected**" in written


@pytest.mark.parametrize("model", ["wide", "demo"])
def test_a_projection_of_two_ranks_is_near_what_was_measured(model: str) -> None:
    """What the page says of the runs that it shows."""
    found = errors(read_lines(ROOT / "docs" / "experiments" / "results" / f"scaling-{model}" / "scaling.csv"))
    assert found.keys() == {("lookahead", 2)} and all(abs(error) <= 0.2 for error in found.values())


def _record(index: int, method: str, setting: dict[str, Any], steps: int, seconds: float) -> dict[str, Any]:
    settings = {"model": "m", "parameters": 1_000_000, "ranks": 1, "decoder": {}, "methods": [], **setting}
    return {
        "index": index, "method": method, "prompt_digest": digest(index), "task": setting["task"], "settings": settings,
        "tokens": 100, "steps": steps, "decode_s": seconds, "prefill_s": 0.1, "tokens_a_step": float(setting["W"]),
        "accepted": {"0": steps}, "equal": True, "hardware": "a machine", "versions": {"torch": "1"},
    }  # fmt: skip


def _write(folder: Path, settings: list[dict[str, Any]]) -> None:
    for number, setting in enumerate(settings):
        file = RecordFile(folder / f"{number}.jsonl", ["lookahead", "plain"])
        for index in range(2):
            ours = _record(index, "lookahead", setting, 100 // setting["W"], 4.0 / setting["W"])
            file.append([ours, _record(index, "plain", setting, 100, 4.0)])
        file.close()


def test_records_from_before_plain_keep_their_speed_ups() -> None:
    """The oracle was what they were held against; where both ran, `plain` is."""
    setting = {"task": "a", "W": 2, "N": 2, "G": 4}
    speeds = {"lookahead": 1.0, "autoregressive": 4.0, "plain": 2.0}
    records = [_record(0, method, setting, 10, seconds) for method, seconds in speeds.items()]
    assert [total.speedup for total in totals(records[:2])] == [4.0, 1.0]
    assert [total.speedup for total in totals(records)] == [2.0, 0.5, 1.0]


def test_totals_of_a_sweep(tmp_path: Path) -> None:
    """Rows of different settings must not be added up, and 16 comes behind 4."""
    _write(tmp_path, [{"task": "a", "W": w, "N": 3, "G": w} for w in (16, 2, 4)])
    found = ordered(totals(load_records(tmp_path)))
    assert varying(found) == ["W", "G"] and [t.setting["W"] for t in found] == [2, 2, 4, 4, 16, 16]
    ours = found[4]
    assert (ours.prompts, ours.tokens, ours.steps, ours.compression, ours.speedup) == (2, 200, 12, 200 / 12, 16.0)
    assert ours.differing == 0 and found[5].speedup == 1.0
    assert dict(zip(("W", *HEADS), cells(ours, ["W"]), strict=True))["vs plain"] == "16.00x"


def test_a_table_has_the_spread_of_its_rounds() -> None:
    """A ratio of one round each was 11.4x in one run and 3.4x in the next, with nothing to say so."""
    setting = {"task": "a", "W": 2, "N": 2, "G": 4}
    ours = [_record(index, "lookahead", setting, 50, 1.0) | {"rounds_s": [1.0, 2.0, 4.0]} for index in range(2)]
    plain = [_record(index, "plain", setting, 100, 4.0) | {"rounds_s": [4.0, 4.0, 6.0]} for index in range(2)]
    heads, (line, other) = table_of(totals([*ours, *plain]))
    assert heads[-1] == "of rounds" and line[-1] == "1.50-4.00x" and line[heads.index("vs plain")] == "2.00x"
    assert other[-1] == "-", "plain decoding against itself"
    assert notes(totals([*ours, *plain])) == ["medians of 3 rounds, with least and most"]
    once = [record | {"rounds_s": [1.0]} for record in [*ours, *plain]]
    assert table_of(totals(once))[0][-1] == "output" and "one round" in notes(totals(once))[0]
    old = [{key: value for key, value in record.items() if key != "rounds_s"} for record in ours]
    assert notes(totals(old)) == [], "records that do not say"


def test_a_busy_machine_is_named() -> None:
    """Times of a machine that others keep busy pass for its own."""

    def said(**machine: Any) -> list[str]:
        record = _record(0, "plain", {"task": "a", "W": 2, "N": 2, "G": 4}, 100, 1.0)
        quiet = {"cores": 8, "load": 1.1, "ranks": 1, "threads": 1, "gpus": 0}
        return notes(totals([record | {"machine": quiet | machine}]))

    assert said() == [] and said(load=4.2, threads=4) == [] and said(load=None) == []
    assert "load average of 3.2 on 8 cores" in said(load=4.2)[0]
    assert "16 ranks shared 8 cores" in said(ranks=16, load=15.0)[0]
    assert said(ranks=8, load=8.0, gpus=8) == [] and "8 ranks shared 4 GPUs" in said(ranks=8, load=8.0, gpus=4)[0]


def test_two_settings_never_look_alike() -> None:
    """A sweep over a key of the decoder, or of methods, gave lines that nobody could tell apart."""
    base = {"task": "a", "W": 2, "N": 2, "G": 4}

    def table(*settings: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
        return table_of(totals([_record(0, "lookahead", base | setting, 50, 1.0) for setting in settings]))

    names = {"name": "lookahead", "window_size": 2}
    heads, lines = table({"decoder": names | {"draft_depth": 4}}, {"decoder": names | {"draft_depth": 8}})
    assert heads[0] == "decoder.draft_depth" and [line[0] for line in lines] == ["4", "8"]
    heads, lines = table({"decoder": names | {"draft_depth": 4}}, {"decoder": {"name": "suffix", "order": 3}})
    assert heads[:2] == ["decoder.name", "method"], "keys of one decoder alone say nothing"
    heads, lines = table({"methods": ["lookahead"]}, {"methods": ["lookahead", "plain"]})
    assert heads[0] == "methods" and lines[0] != lines[1]


MEASURED = """
import torch
from launch.bench.machine import PeakMemory
peak = PeakMemory(torch.device("cpu"))
peak.restart()
large = torch.ones(64 << 20, dtype=torch.uint8)
with_large = peak.bytes()
del large
peak.restart()
assert 0 < peak.bytes() <= with_large - (60 << 20)
again = torch.ones(64 << 20, dtype=torch.uint8)
assert peak.bytes() >= with_large - (8 << 20) and len(again)
"""


def test_peak_memory_is_that_of_a_run() -> None:
    """The peak of the process's life instead would give every method that of the largest before it."""
    # In a process of its own: one that has run other tests has freed memory, which stays resident and is used again.
    subprocess.run([sys.executable, "-c", MEASURED], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize(
    ("settings", "plots"),
    [
        (
            [{"task": "a", "W": w, "N": n, "G": 4} for w in (2, 4, 8) for n in (2, 3)],
            {"heat_map.png", "step_tokens.png"},
        ),
        ([{"task": task, "W": 2, "N": 2, "G": 2} for task in ("a", "b")], {"by_task.png"}),
    ],
)
def test_a_report_is_one_file_with_everything(tmp_path: Path, settings: list[dict[str, Any]], plots: set[str]) -> None:
    """Opened on a train: no address to fetch, every picture inside, what was set beside what was found."""
    _write(tmp_path, settings)
    written = write_report(tmp_path)
    assert {path.name for path in written} == plots | {"report.html"}
    assert all(path.read_bytes().startswith(PNG) for path in written if path.suffix == ".png")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == len(plots) and "a machine" in page
    assert not re.search(r"(src|href)=[\"'](?!data:)|https?://|<script", page)
    with pytest.raises(ValueError, match="holds no records"):
        write_report(tmp_path / "nowhere")


def test_a_report_is_drawn_again_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What report.html names under each figure is there where lp is installed: scripts/ is not."""
    _write(tmp_path, [{"task": "a", "W": 2, "N": 2, "G": 2}])
    main([str(tmp_path)])
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    assert f"python -m launch.bench.report {tmp_path}" in (tmp_path / "report.html").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "nowhere")])
    assert "holds no records" in capsys.readouterr().err


def test_a_report_says_what_is_best_and_how_to_get_it_again(tmp_path: Path) -> None:
    """A figure without its command, commit and date is not one that a paper can cite."""
    file = RecordFile(tmp_path / "0.jsonl", ["lookahead", "jacobi", "plain"])
    for index in range(2):
        came = {
            "origin": {"command": f"lp benchmark W={index}", "commit": "abc1234"},
            "time": f"2026-01-0{index + 1}T10",
        }
        speeds = {"lookahead": 1.0, "jacobi": 2.0, "plain": 4.0}
        setting = {"task": "a", "W": 2, "N": 2, "G": 2}
        file.append([_record(index, name, setting, 10, speed) | came for name, speed in speeds.items()])
    file.close()
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "lookahead, 4.00x plain decoding (one round, no known spread)" in page
    (line,) = re.findall(r'<tr class="best">(.*?)</tr>', page)
    assert "<td>lookahead</td>" in line
    assert "<td>lp benchmark W=1</td><td>abc1234</td><td>2026-01-02</td>" in page
    assert page.count("<figcaption>") == page.count("<img ") and "prefers-color-scheme: dark" in page


def test_a_report_shows_accepted_lengths_and_where_time_goes(tmp_path: Path) -> None:
    """Records have both, which nobody reads out of JSON; every figure lies there as PNG and SVG."""
    setting = {"task": "a", "W": 2, "N": 2, "G": 4}
    file = RecordFile(tmp_path / "0.jsonl", ["lookahead", "plain"])
    ours = _record(0, "lookahead", setting, 50, 1.0) | {"accepted": {"0": 20, "1": 25, "40": 5}, "split": [_split(4)]}
    ours["rounds_s"] = [1.0, 2.0]
    file.append([ours, _record(0, "plain", setting, 100, 4.0) | {"split": [_split(1)], "rounds_s": [4.0, 4.0]}])
    file.close()
    assert [path.name for path in write_report(tmp_path)] == ["by_task.png", "accepted.png", "time.png", "report.html"]
    assert {path.stem for path in tmp_path.glob("*.svg")} == {path.stem for path in tmp_path.glob("*.png")}
    total = totals(load_records(tmp_path))[0]
    assert total.accepted == {0: 20, 1: 25, 40: 5} and total.a_step("forward_ms") == 8


@pytest.mark.parametrize("values", [[0.25, 2.0], [0.5, 0.8], [3.0, 1.5]])
def test_a_heat_map_is_white_where_nothing_is_gained(values: list[float]) -> None:
    """Its darkest colour said 0.9x on one map and 3x on the next."""
    look = _colours(values)
    assert look["norm"](1.0) == pytest.approx(0.5) and look["norm"](min(values)) >= 0 and look["norm"](max(values)) <= 1
    assert look["norm"](2.0) - 0.5 == pytest.approx(0.5 - look["norm"](0.5))


def test_a_report_of_projections_alone(tmp_path: Path) -> None:
    """launch.scaling ranks=[] project=true has no records."""
    source = ROOT / "docs" / "experiments" / "results" / "scaling-demo"
    for name in ("scaling.csv", "scaling.md"):
        (tmp_path / name).write_text((source / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert [path.name for path in write_report(tmp_path)] == ["speedup.png", "step_time.png", "report.html"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2 and "cores, torch" in page


def _split(num_tokens: float) -> dict[str, float]:
    return {"num_tokens": num_tokens, "forward_ms": 2 * num_tokens, "exchange_ms": 1.0, "host_ms": 0.5}


def test_measured_lines_are_means_over_steps() -> None:
    """A short prompt must not weigh as much as a long one, nor a method of one rank count as one of two."""
    setting = {"task": "a", "W": 2, "N": 2, "G": 4, "ranks": 2}
    records = [
        _record(index, method, setting, steps, seconds) | {"split": splits}
        for index, steps in ((0, 10), (1, 30))
        for method, seconds, splits in (
            ("lookahead", 1.0, [_split(4 + 4 * index), _split(6)]),
            ("lookahead@1", 2.0, [_split(9)]),
            ("plain", 4.0, [_split(1)]),
        )
    ]
    both, alone, plain = measured_lines(records)
    assert [(line.ranks, line.W, line.speedup) for line in (both, alone, plain)] == [
        (2, 2, 4.0), (1, 2, 2.0), (1, None, 1.0)
    ]  # fmt: skip
    assert (both.num_tokens, both.forward_ms) == ((10 * 6 + 30 * 8) / 40, (10 * 10 + 30 * 14) / 40)
    assert (both.exchange_ms, both.host_ms, alone.num_tokens) == (1.0, 0.5, 9)


def test_projections_that_lie_on_each_other_are_one_line() -> None:
    """Three links of the same speed were three lines, of which one was seen."""

    def series(link: str | None, *speedups: float) -> list[Line]:
        figures = dict(tokens_per_s=1.0, compression=1.0, num_tokens=1.0, forward_ms=1.0, exchange_ms=0.0, host_ms=0.0)
        kind = PROJECTED if link else "measured"
        common: dict[str, Any] = dict(method="lookahead", kind=kind, link=link, W=0, G=1, **figures)
        return [Line(ranks=2**at, speedup=speedup, **common) for at, speedup in enumerate(speedups)]

    given = [
        series(None, 1.0, 1.5),
        series("nvlink", 1.0, 1.5),
        series("pcie", 1.01, 1.5),
        series("gloo", 1.0, 1.4),
        [],
    ]
    found = _without_overlaps(given)
    assert [*found] == ["lookahead", "lookahead, nvlink = pcie (projected)", "lookahead, gloo (projected)"]
    assert [*found.values()] == [given[0], given[1], given[3]]


def test_lines_have_their_methods_g() -> None:
    """By method where these had their own defaults; a table's caption has all of them."""
    setting = {"task": "a", "W": 2, "N": 2, "ranks": 2}
    sizes = {"lookahead": 104, "lookahead_auto": 184}
    methods = (*sizes, "lookahead@1", "plain")
    records = [
        _record(0, method, setting | {"G": size}, 10, 1.0) | {"split": [_split(4)]}
        for size in (sizes, 7)
        for method in methods
    ]
    assert [line.G for line in measured_lines(records)] == [104, 184, 104, None, 7, 7, 7, None]
    assert "G lookahead=104 lookahead_auto=184" in caption(totals(records[:4]))


def test_a_heat_map_shows_the_best_of_several_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last one instead would be read as all that W and N can do."""
    texts: list[str] = []
    save = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(save, lambda self, path, **_: texts.extend(text.get_text() for text in self.axes[0].texts))
    records = [
        _record(0, "lookahead", {"task": "a", "W": 2, "N": 2, "G": g}, 50, s) for g, s in ((2, 2.0), (4, 1.0), (8, 4.0))
    ]
    plain = Total(method="plain", tokens=25, decode_s=1.0)
    heat_map([Total.of_records([record], plain) for record in records], "", tmp_path / "map.png")
    assert texts == ["4.00\nG=4"] * 2, "in the PNG and the SVG"


def test_scaling_lines_survive_their_csv() -> None:
    """A column read as text would be sorted, or plotted, as text."""
    for path in (ROOT / "docs" / "experiments" / "results").glob("*/scaling.csv"):
        for line in read_lines(path):
            assert isinstance(line.ranks, int) and isinstance(line.tokens_per_s, float) and line.num_tokens > 0
            assert (line.link is None) == (line.kind == "measured") and line.cells()[0] == line.method


def test_points_of_other_shapes_are_no_line() -> None:
    """Between W and G of one launch and those of the next there is nothing that was measured."""
    figures = dict(tokens_per_s=1.0, compression=1.0, num_tokens=1.0, forward_ms=1.0, exchange_ms=0.0, host_ms=0.0)
    common: dict[str, Any] = dict(method="lookahead", kind="measured", link=None, speedup=1.0, **figures)
    one, two = Line(ranks=1, W=4, G=4, **common), Line(ranks=2, W=4, G=4, **common)
    assert _is_line([one, two])
    assert not _is_line([one, replace(two, W=8)]) and not _is_line([one, replace(two, G=8)])
    assert not _is_line([one, one])  # one method in two launches
