"""Write docs/results.md from the rows in docs/results/, which launch.benchmark and launch.scaling wrote.

python scripts/results.py            # the page
bash scripts/results.sh              # measure everything again first, about ten minutes on two cores
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.bench.records import load_rows
from launch.bench.report import read_lines
from launch.bench.scaling import HEADS as SCALING_HEADS
from launch.bench.scaling import errors
from launch.bench.summary import HEADS, Total, caption, cells, markdown, ordered, short, totals, varying

ROOT = Path(__file__).resolve().parent.parent
PAGE, DATA = ROOT / "docs" / "results.md", ROOT / "docs" / "results"
HIDDEN = ("decoder", "methods", "chat", "parameters")
QUALITY = ("method", "perplexity", "distinct-1", "distinct-2", "distinct-4", "texts that part from plain decoding's")


def page() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for folder, title, text in (
        ("greedy", "Methods, greedy", "What each writes is the same text; so is its quality, below."),
        ("sampled", "Methods, sampled at T = 0.8", "The same noise for all of them, so again the same text."),
        ("sweep", "A sweep on two ranks", "`NPROC=2 bash torchrun.sh launch.benchmark -m experiment=demo_sweep`"),
    ):
        found = ordered(totals(load_rows(DATA / folder)))
        parts += [f"## {title}\n", f"{text}\n", _methods(found), f"{caption(found)}\n"]
        if folder == "greedy":
            parts += [markdown(QUALITY, map(_quality, found))]
    return "\n".join([*parts, _scaling()])


INTRODUCTION = """# Results

Made by `scripts/results.py` from the rows in `docs/results/`; a test makes it again and compares.
`bash scripts/results.sh` measures them anew. The machine is small and shared, two virtual cores: take ratios within a
table, which alternates its methods prompt by prompt, and not seconds across tables.
"""


SCALING = """Ranks that wait for each other lose more to other work on the machine than one process does: on a busy one,
earlier projections of two ranks were off by +34 to +98 %. These are of one run, with nothing else started by us.
"""


def _methods(found: list[Total]) -> str:
    names = [name for name in varying(found) if name not in HIDDEN]
    return markdown((*names, *HEADS), [cells(total, names) for total in found])


def _quality(total: Total) -> list[str]:
    figures = [total.quality("perplexity"), *(total.quality("distinct", n) for n in "124")]
    parted = sum(row["quality"]["parts_at"] is not None for row in total.rows)
    return [total.method, *("-" if value is None else f"{value:.3f}" for value in figures), short(parted)]


def _scaling() -> str:
    parts = ["## Scaling, measured and projected\n", SCALING]
    for folder in sorted(path.parent for path in DATA.glob("*/scaling.csv")):
        lines = read_lines(folder / "scaling.csv")
        setting = (folder / "scaling.md").read_text(encoding="utf-8").split("\n\n")[1].strip()
        parts += [markdown(SCALING_HEADS, [line.cells() for line in lines]), f"{setting}\n"]
        for (method, ranks), error in errors(lines).items():
            parts.append(f"{method} on {ranks} ranks, gloo: projected speed-up {error:+.1%} off the measured one.\n")
    return "\n".join(parts)


def main() -> None:
    """Replace the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
