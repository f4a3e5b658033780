"""The page of results, which it writes from the records of the benchmark and the scaling app beside it.

    python scripts/tables.py results             # the page
    python scripts/tables.py results --measure   # measure everything again first, about ten minutes on two cores

Needs a clone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from launch.bench.records import load_records
from launch.bench.report import read_lines
from launch.bench.scaling_lines import errors, scaling_table
from launch.bench.summary import caption, markdown, notes, ordered, short, table_of
from launch.bench.totals import Total, totals

from .harness import Command, option
from .places import PLACES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / PLACES["results"]
DATA = ROOT / "docs" / "experiments" / "results"
MEASURED = ("greedy", "sampled", "sweep", "scaling-wide", "scaling-demo")  # folders; the others are of other tables
QUALITY = ("method", "perplexity", "distinct-1", "distinct-2", "distinct-4", "texts that differ from plain decoding's")
SWEEP = "NPROC=2 bash torchrun.sh launch.benchmark -m experiment=demo_sweep"

INTRODUCTION = """# Results

Made by `python scripts/tables.py results` from the records in `docs/experiments/results/`; a test makes it again and
compares. With `--measure` it measures them again first. The machine is small and shared, two virtual cores: take ratios
within a table, which alternates its methods prompt by prompt, and not seconds across tables.
"""

SCALING = """Ranks that wait for each other lose more to other work on the machine than one process does: on a busy one,
earlier projections of two ranks were off by +34 to +98 %. These are of one run, with nothing else started by us.
"""


def page() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for folder, title, text in (
        ("greedy", "Methods, greedy", "All write the same text, of the same quality, below."),
        ("sampled", "Methods, sampled at T = 0.8", "The same noise for all of them, so again the same text."),
        ("sweep", "A sweep on two ranks", f"`{SWEEP}`"),
    ):
        found = ordered(totals(load_records(DATA / folder)))
        parts += [f"## {title}\n", f"{text}\n", _methods(found), "\n".join([caption(found), *notes(found)]) + "\n"]
        if folder == "greedy":
            parts.append(markdown(QUALITY, map(_quality, found)))
    return "\n".join([*parts, _scaling()])


def _methods(found: list[Total]) -> str:
    return markdown(*table_of(found))


def _quality(total: Total) -> list[str]:
    figures = [total.quality("perplexity"), *(total.quality("distinct", n) for n in "124")]
    differing = sum(record["quality"]["differs_at"] is not None for record in total.records)
    return [total.method, *("-" if value is None else f"{value:.3f}" for value in figures), short(differing)]


def _scaling() -> str:
    parts = ["## Scaling, measured and projected\n", SCALING]
    for folder in sorted(path.parent for path in DATA.glob("*/scaling.csv")):
        lines = read_lines(folder / "scaling.csv")
        setting = (folder / "scaling.md").read_text(encoding="utf-8").split("\n\n")[1].strip()
        parts += [markdown(*scaling_table(lines)), f"{setting}\n"]
        for (method, ranks), error in errors(lines).items():
            parts.append(f"{method} on {ranks} ranks, gloo: projected speed-up {error:+.1%} off the measured one.\n")
    return "\n".join(parts)


def measure() -> None:
    """Replace the records, one thread a rank; they keep the commands, which name no path of this machine."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def call(*command: str, folder: Path = ROOT, **variables: str) -> None:
        subprocess.run(command, cwd=folder, env=environment | variables, check=True)

    folders = [DATA / name for name in MEASURED]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    ours = "lookahead_auto,lookahead,lookahead_paper,token_recycling,prompt_lookup"
    methods = f"methods=[{ours},hf_prompt_lookup,hf_generate,plain]"
    benchmark = [sys.executable, "-m", "launch.benchmark", "output=json", "limit=4", "max_new_tokens=64", "repeats=3"]
    call(*benchmark, methods, "quality=true", "out=docs/experiments/results/greedy")
    call(*benchmark, methods, "sampling=sample", "sampling.temperature=0.8", "out=docs/experiments/results/sampled")
    sweep = SWEEP.removeprefix("NPROC=2 ").split()
    call(*sweep, "output=json", "out=docs/experiments/results/sweep", NPROC="2", PYTHON=sys.executable, LP_SETUP="skip")

    scaling = [sys.executable, "-m", "launch.scaling", "project=true", "ranks=[2]"]
    scaled = "lookahead,lookahead@1,plain"
    with tempfile.TemporaryDirectory() as parent:
        call(sys.executable, str(ROOT / "scripts" / "wide_model.py"), f"{parent}/wide")
        options = ["model=hf", "model.name=wide", "limit=1", "max_new_tokens=24", "W=15", "N=5", "G=15", "repeats=3"]
        options += ["projected_ranks=[1,2]", "weak=false", f"methods=[{scaled}]", "out=scaling-wide"]
        call(*scaling, *options, folder=Path(parent))
        shutil.copytree(Path(parent) / "scaling-wide", DATA / "scaling-wide")
    options = ["limit=2", "max_new_tokens=48", "W=8", "G=40", "repeats=5", "projected_ranks=[1,2,4,8,16]"]
    call(*scaling, *options, f"methods=[{scaled},transformers_tp]", "out=docs/experiments/results/scaling-demo")
    for path in [path for folder in folders for path in folder.rglob("*")]:
        if path.suffix in {".png", ".svg"} or path.name == "report.html":
            path.unlink()


@dataclass(kw_only=True)
class Results(Command):
    """Writes the page."""

    measure: bool = option(False, "measure the records again first")

    def run(self) -> None:
        if self.measure:
            measure()
        PAGE.write_text(page(), encoding="utf-8")
        print(PAGE.read_text(encoding="utf-8"))
