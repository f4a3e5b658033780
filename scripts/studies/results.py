"""The page of results, which it writes from the records of the benchmark and the scaling app beside it.

    python scripts/tables.py results                            # the page
    python scripts/tables.py results --measure                  # measure all again first; half an hour on two cores
    python scripts/tables.py results --measure --only sweep     # a part of it

Needs a clone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.bench.records import load_records
from launch.bench.report import read_lines
from launch.bench.scaling_lines import errors, scaling_table
from launch.bench.table_text import caption, markdown, notes, ordered, table_of
from launch.bench.totals import Total, totals
from lp.errors import UserError

from .harness import Command, option
from .places import PLACES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / PLACES["results"]
DATA = ROOT / "docs" / "experiments" / "results"
# Folders; the others are of other tables. Those of a real model are measured with the one of LP_REAL_MODEL.
MEASURED = ("real-greedy", "real-sampled", "greedy", "sampled", "sweep", "scaling-wide", "scaling-demo")
SWEEP = "NPROC=2 bash torchrun.sh launch.benchmark -m experiment=demo_sweep"

INTRODUCTION = """# Results

Made by `python scripts/tables.py results` from the records in `docs/experiments/results/`; a test makes it again and
compares. With `--measure` it measures them again first. The machine is small and shared, two virtual cores: take ratios
within a table, which alternates its methods prompt by prompt, and not seconds across tables. On a CPU each further
token of a step costs time: `lookahead`, which fixes up to 120 tokens a step, pays for them, and `lookahead_auto`, the
default, takes fewer. On a GPU they cost little ([gpu-results.md](gpu-results.md)).
"""

SCALING = """Ranks that wait for each other lose more to other work on the machine than one process does: on a busy one,
earlier projections of two ranks were off by +34 to +98 %. These are of one run, with nothing else started by us.
"""


def page() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for folder, title, text in (
        ("real-greedy", "A real model, greedy", "All write the same text."),
        ("real-sampled", "A real model, sampled at T = 0.8", "The same noise for all of them, so again the same text."),
        (
            "greedy",
            "The demo model, greedy",
            "All write the same text, of the same quality, in the last columns. It soon loops.",
        ),
        ("sampled", "The demo model, sampled at T = 0.8", "The same noise for all of them, so again the same text."),
        ("sweep", "A sweep on two ranks", f"`{SWEEP}`"),
    ):
        found = ordered(totals(load_records(DATA / folder)))
        parts += [f"## {title}\n", f"{text}\n", _methods(found), "\n".join([caption(found), *notes(found)]) + "\n"]
    return "\n".join([*parts, _scaling()])


def _methods(found: list[Total]) -> str:
    return markdown(*table_of(found))


def _scaling() -> str:
    parts = ["## Scaling, measured and projected\n", SCALING]
    for folder in sorted(path.parent for path in DATA.glob("*/scaling.csv")):
        lines = read_lines(folder / "scaling.csv")
        setting = (folder / "scaling.md").read_text(encoding="utf-8").split("\n\n")[1].strip()
        parts += [markdown(*scaling_table(lines)), f"{setting}\n"]
        for (method, ranks), error in errors(lines).items():
            parts.append(f"{method} on {ranks} ranks, gloo: projected speed-up {error:+.1%} off the measured one.\n")
    return "\n".join(parts)


def measure(names: Sequence[str] = MEASURED) -> None:
    """Replace records, one thread a rank; they keep the commands, which name no path of this machine.

    Args:
        names: folders of records, of MEASURED.

    Raises:
        ValueError: a real model is asked for, and LP_REAL_MODEL names none.
    """
    real = os.environ.get("LP_REAL_MODEL")
    if real is None and any(name.startswith("real") for name in names):
        raise UserError("LP_REAL_MODEL names no model; set it as scripts/real_model.sh says, or give --only")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def call(*command: str, folder: Path = ROOT, **variables: str) -> None:
        subprocess.run(command, cwd=folder, env=environment | variables, check=True)

    ours = "lookahead_auto,lookahead,lookahead_paper,token_recycling,prompt_lookup"
    methods = f"methods=[{ours},hf_prompt_lookup,hf_generate,plain]"
    benchmark = [sys.executable, "-m", "launch.benchmark", "output=json", "max_new_tokens=64", "repeats=3"]
    demo, sampled = ["limit=4", methods], ["sampling=sample", "sampling.temperature=0.8"]
    scaling = [sys.executable, "-m", "launch.scaling", "project=true", "ranks=[2]"]
    scaled = "lookahead,lookahead@1,plain"

    if real is not None and not Path(real).is_dir():
        raise UserError(
            f"LP_REAL_MODEL is {real!r}, which is no folder; run scripts/real_model.sh, and set what it says"
        )
    for name in names:
        shutil.rmtree(DATA / name, ignore_errors=True)
        out = f"out={(DATA / name).relative_to(ROOT)}"
        with tempfile.TemporaryDirectory() as parent:  # models are named by their folders there
            if name.startswith("real"):
                assert real
                folder = Path(parent, "SmolLM2-135M-Instruct")
                folder.symlink_to(Path(real).resolve())
                options = ["limit=6", methods, "model=hf", f"model.name={folder.name}", f"out={name}"]
                call(*benchmark, *options, *(sampled if name == "real-sampled" else []), folder=Path(parent))
                shutil.copytree(Path(parent, name), DATA / name)
            elif name == "greedy":
                call(*benchmark, *demo, "quality=true", out)
            elif name == "sampled":
                call(*benchmark, *demo, *sampled, out)
            elif name == "sweep":
                sweep = SWEEP.removeprefix("NPROC=2 ").split()
                call(*sweep, "output=json", out, NPROC="2", PYTHON=sys.executable, LP_SETUP="skip")
            elif name == "scaling-wide":
                call(sys.executable, str(ROOT / "scripts" / "wide_model.py"), f"{parent}/wide")
                options = ["model=hf", "model.name=wide", "limit=1", "max_new_tokens=24", "W=15", "N=5", "G=15"]
                options += ["repeats=3", "projected_ranks=[1,2]", "weak=false", f"methods=[{scaled}]", f"out={name}"]
                call(*scaling, *options, folder=Path(parent))
                shutil.copytree(Path(parent, name), DATA / name)
            else:
                options = ["limit=2", "max_new_tokens=48", "W=8", "G=40", "repeats=5", "projected_ranks=[1,2,4,8,16]"]
                call(*scaling, *options, f"methods=[{scaled},transformers_tp]", out)
        for path in (DATA / name).rglob("*"):
            if path.suffix in {".png", ".svg"} or path.name == "report.html":
                path.unlink()


@dataclass(kw_only=True)
class Results(Command):
    """Writes the page."""

    measure: bool = option(False, "measure the records again first")
    only: list[str] = option([*MEASURED], "which of them", choices=MEASURED)

    def run(self) -> None:
        if self.measure:
            measure(self.only)
        PAGE.write_text(page(), encoding="utf-8")
        print(PAGE.read_text(encoding="utf-8"))
