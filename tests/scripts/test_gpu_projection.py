"""R GPUs over one by arithmetic: step times by hand, what limits, the law of S, and the table made of them."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import lp
from launch.bench.ceilings import Work
from launch.bench.projection import Projection
from launch.data.shapes import shape_config, sketch
from lp.engine.output import StepStats
from scripts.studies import harness, main
from scripts.studies.parts.arithmetic import GPUS, Gpu, StepTime
from scripts.studies.parts.gpu_projection import GpuLine, LogLaw
from scripts.studies.scaling_projection import ScalingProjection
from tests.conftest import ROOT
from tests.support.tiny_models import tiny_model

BEGIN, END = "<!-- scaling_projection -->", "<!-- end of scaling_projection -->"
WORK = Work(weight_bytes=900, kv_token_bytes=1, token_flop=6, head_flop=1, key_flop=0)


def test_step_times_by_hand() -> None:
    """100 bytes and 10 operations a second of the data sheet; 3 layers; a step of 3 tokens is captured as one of 4."""
    gpu = Gpu(name="slow", bytes_per_s=100, flop_per_s=10)
    few = StepTime.of(gpu, WORK, 3, 1, 16)
    assert few.weights == pytest.approx((900 + 17) / 70) and few.flops == pytest.approx(7 / 5)
    assert few.kernels == pytest.approx(3 * 10 * 3e-6 + 15e-6) and few.seconds == few.weights + few.kernels
    many = StepTime.of(gpu, WORK, 3, 15, 16)
    assert many.flops == pytest.approx(16 * 7 / 5) and many.seconds == many.flops + many.kernels
    assert (*few.parts, *many.parts) == ("weights", "kernels", "FLOPs", "kernels")
    assert StepTime.of(gpu, WORK, 3, 3, 16) == StepTime.of(gpu, WORK, 3, 4, 16)


def test_a_7b_on_an_h200() -> None:
    """The weights of 13.2 GB take 3.93 ms; 64 tokens hide behind them, 512 do not."""
    config = shape_config("llama2_7b")
    work = Work.of(sketch(config, "bfloat16"))
    times = [StepTime.of(GPUS["h200"], work, config.num_hidden_layers, size, 0) for size in (1, 64, 512)]
    assert [round(1e3 * time.weights, 2) for time in times[:1]] == [3.93]
    assert [max(time.parts, key=lambda name: time.parts[name]) for time in times] == ["weights", "weights", "FLOPs"]


def line(ranks: int, compression: float, **parts: float) -> GpuLine:
    return GpuLine(ranks=ranks, budget=64, compression=compression, parts={"weights": 3.0, "host": 1.0} | parts)


def test_what_limits() -> None:
    """One GPU by its step; more by S where it is further from twice than the step from as long, else by what grew."""
    one = line(1, 2.0)
    assert (one.limit(None), one.largest, one.tokens_per_s, one.step_tokens) == ("weights", "weights, 75%", 0.5, 64)
    assert line(2, 2.5).limit(one) == "S" == line(2, 2.5, host=3.3).limit(one)  # 2 / 1.25 = 1.6, and 6.3 / 4
    assert line(2, 2.5, host=3.5).limit(one) == "host"
    assert line(2, 2.5, gather=2.5, host=1.1).limit(one) == "gather"
    assert line(4, 2.5, host=3.5).limit(one) == "S"


def test_the_law_is_a_line_over_the_logarithm() -> None:
    law = LogLaw.fitted([(64, 4.0), (128, 4.5), (512, 5.5)])
    assert (law.start, law.doubling) == (pytest.approx(1.0), pytest.approx(0.5))
    assert law.compression(256) == pytest.approx(5.0)
    assert str(law) == "S = 1.00 + 0.50 log2(tokens a step)"
    assert LogLaw.of([line(1, 3.0)]) == LogLaw(start=3.0, doubling=0.0)
    with pytest.raises(ValueError, match="points is empty"):
        LogLaw.fitted([])


def test_host_time_is_the_slowest_ranks_least() -> None:
    """Host time of a step is the slowest rank's in its least disturbed run: one run's hiccup must not count."""

    def output(*host_s: float) -> lp.GenerationOutput:
        return lp.GenerationOutput([1], "length", [StepStats(7, 0, 0, 9.0, 9.0, each) for each in host_s])

    config = lp.LookaheadConfig(window_size=2, ngram_size=2, guess_set_size=4)
    projection = Projection(
        decoder=lp.LookaheadDecoder(tiny_model(), config), decode=lambda decoder: decoder.generate([1], 1), ranks=2
    )
    runs = [[output(1, 8), output(3, 5)], [output(50, 4), output(2, 60)]]
    assert projection.slowest_host_s(runs) == 3.5


def test_the_tables_and_their_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every run at every temperature, each measured once whatever the GPU; marked as arithmetic."""
    results, figure, page = tmp_path / "runs.jsonl", tmp_path / "figure.png", tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    args = ["scaling_projection", str(results), "--ranks", "1,2", "--budget", "4", "--alone", "2", "--paper", "8,16"]
    args += ["--limit", "1", "--max-new-tokens", "4", "--rounds", "1", "--figure", str(figure), "--page", str(page)]
    printed = []
    for gpu in ("h200", "a100"):
        main([*args, "--gpu", gpu])
        printed.append(capsys.readouterr().out)
    rows = [json.loads(row) for row in results.read_text().splitlines()]
    runs = [("plain", 1, 1), ("paper", 1, 8), ("paper", 1, 16), ("lookahead", 1, 2), ("lookahead", 1, 4)]
    each = [(*run, temperature) for run in [*runs, ("lookahead", 2, 4)] for temperature in (0.0, 0.8)]
    for part, key in ((rows[: len(each)], "steps"), (rows[len(each) :], "host_s")):
        assert [(row["method"], row["ranks"], row["budget"], row["temperature"]) for row in part] == each
        assert all(row[key] > 0 for row in part)
    assert figure.stat().st_size and all("By arithmetic: " in text for text in printed)
    tables = [[row for row in text.splitlines() if row.startswith(("| 1 |", "| 2 |"))] for text in printed]
    assert len(tables[0]) == 4 and "| 1.00 x | 100.0% |" in tables[0][0]
    study = ScalingProjection(results=results, ranks=[1, 2], budget=4, alone=[2], paper=[8, 16])
    found = [row | {"host_s": 1e-3, "payload_bytes": 99} for row in rows[: len(each)]]
    first, second = (replace(study, gpu=gpu).series(found)[0.8]["lookahead"] for gpu in ("h200", "a100"))
    assert first[2].parts["weights"] < second[2].parts["weights"] and first[2].parts["host"] == 1e-3
    assert first[0].parts["gather"] == 0 < first[2].parts["gather"] < 1e-4
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\nBy arithmetic: A100") and text.endswith(f"{END}\nafter\n")
    assert tables[1][3] in text and tables[0][3] not in text and "old" not in text


def test_one_gpu_is_what_others_are_compared_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["scaling_projection", str(tmp_path / "none.jsonl"), "--ranks", "2"])
    assert "--ranks is [2]; it needs 1" in capsys.readouterr().err


def test_the_page_is_made_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own command, on a copy: a run, a link or a constant that is new must be so in the page too."""
    page = ROOT / "docs" / "experiments" / "scaling.md"
    copy = tmp_path / "scaling.md"
    copy.write_bytes(page.read_bytes())
    (command,) = re.findall(r"scripts/tables.py (scaling_projection (?:.*\\\n)*.*)", page.read_text())
    words = shlex.split(command.replace("\\\n", ""))
    words[words.index("--page") + 1] = str(copy)
    words[words.index("--figure") + 1] = str(tmp_path / "figure.png")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(harness, "load", None)  # nothing is left to be measured
    main(words)
    assert copy.read_bytes() == page.read_bytes()
