"""The commands of the pages that a newcomer follows run as they are written, with small limits.

Left out is what needs a GPU or a download, a keyboard, or an installation; what a user has to bring is made here:
prompts, a file of code.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT, Processes
from tests.support.apps import save_tiny_model

PAGES = [ROOT / "README.md", ROOT / "docs" / "guide" / "benchmark.md", ROOT / "docs" / "experiments" / "reproduce.md"]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:\w+=\S+ )*(?:bash torchrun\.sh|python -m launch|python scripts)[^`]*)`")
ELSEWHERE = ("model=hf", "model=codellama", "task.path=null", "pip install")  # of the hub, or too large for a CPU
UNFINISHED = ("APP", "/...", "NAME", "FOLDER", "runs.jsonl", "deepspeed", "gguf")  # the last two are to be compiled
MODELS = "/models/"  # where the pages have a user's models
OF_LARGE_MODELS = ("experiment=paper", "experiment=long_texts")
# Keys that keep a command of each app small; those it sets itself are replaced.
SMALL = {
    "generate": ["limit=1", "max_new_tokens=8", "repeats=1"],
    "benchmark": ["limit=1", "max_new_tokens=8", "repeats=1"],
    "scaling": ["limit=1", "max_new_tokens=8", "repeats=1", "ranks=[1,2]", "projected_ranks=[1,2]"],
    "tune": ["limit=1", "max_new_tokens=8"],
}
# Tools take a model of the user's, which is made here, and options.
OF_TOOLS = {"doctor": [], "ngrams": ["--tokens", "400", "--beginnings", "1"]}
QUICK = "lp generate prompt_file=my.py decoder=lookahead W=7 N=5 G=7 max_new_tokens=256"


@dataclass(frozen=True)
class Command:
    """A line of a page: what it sets in the environment, and its words."""

    page: str
    line: str
    env: dict[str, str]
    words: list[str]

    @property
    def app(self) -> str | None:
        """The app of launch/ that it starts; None for a script."""
        for start in (["lp"], ["bash", "torchrun.sh"], ["python", "-m"]):
            if self.words[: len(start)] == start:
                name = self.words[len(start)] if len(self.words) > len(start) else "generate"
                return name.removeprefix("launch.")
        return None

    @property
    def runs_here(self) -> bool:
        """Whether it needs neither a GPU, nor a download, nor a person."""
        text = " ".join(self.words)
        if any(word in text for word in ELSEWHERE + UNFINISHED) or self.app == "chat":
            return False
        return not any(name in text for name in OF_LARGE_MODELS) or "model=demo" in text


def commands() -> list[Command]:
    """Every command of the pages that starts something of ours."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
        for line in dict.fromkeys([*lines, *INLINE.findall(BLOCK.sub("", text))]):
            words = shlex.split(line, comments=True)
            env = {}
            while words and re.match(r"[A-Z_]+=", words[0]):
                key, _, value = words.pop(0).partition("=")
                env[key] = value
            if words and words[0] in ("lp", "bash", "python"):
                found.append(Command(page.name, line, env, words))
    return found


RUN = [command for command in commands() if command.runs_here]


def small(command: Command) -> list[str]:
    """Its words for this interpreter, with small limits."""
    words = command.words
    if words[0] == "lp":
        words = ["python", "-m", "lp", *words[1:]]
    if command.app is None:
        # A script: its options are argparse's, of which the last one counts.
        some = ["--limit", "1", "--max-new-tokens", "8"] if "tables.py" in words[1] and "--limit" in words else []
        return [sys.executable, str(ROOT / words[1]), *words[2:], *some]
    if words[:2] == ["bash", "torchrun.sh"]:
        words = ["bash", str(ROOT / "torchrun.sh"), *(words[2:] or ["launch.generate"])]
    else:
        words = [sys.executable, *words[1:]]
    if command.app in OF_TOOLS:
        return [*words, *OF_TOOLS[command.app]]
    limits = SMALL[command.app]
    given = {limit.partition("=")[0] for limit in limits}
    return [*(word for word in words if word.partition("=")[0] not in given), *limits]


def test_the_pages_have_commands() -> None:
    """A pattern that finds nothing would let every command rot."""
    assert {command.page for command in RUN} == {page.name for page in PAGES}
    assert QUICK in [command.line.partition("   #")[0] for command in RUN]
    assert len(RUN) >= 15 and {"generate", "benchmark", "scaling", "tune"} <= {c.app for c in RUN}


def run(command: Command, folder: Path, processes: Processes) -> None:
    """Run it in a folder that has what a user brings."""
    (folder / "my.py").write_text("def fibonacci(n):\n")
    tests = {"test": "def check(candidate): pass", "entry_point": "f", "canonical_solution": "    pass"}
    record = {"task_id": "a", "prompt": "def f():\n    '''x'''\n", "reference": "    pass", **tests}
    (folder / "humaneval.jsonl").write_text(json.dumps(record) + "\n")
    env = command.env | {"LP_SETUP": "skip", "PYTHON": sys.executable, "LP_RUN_DIR": str(folder / "run")}
    env |= {"LP_DATA": str(folder)} if "LP_DATA" in command.env else {}
    words = small(command)
    if any(word.startswith(MODELS) for word in words):
        save_tiny_model(folder / "model")
        words = [str(folder / "model") if word.startswith(MODELS) else word for word in words]
    ran = processes.run(words, env, timeout_s=500, cwd=folder)
    assert ran.returncode == 0, f"{command.page}: {command.line}\n{ran.stdout[-1500:]}\n{ran.stderr[-1500:]}"


def test_a_command_runs(tmp_path: Path, processes: Processes) -> None:
    """The first thing that a user copies out of README."""
    (command,) = (command for command in RUN if command.line.startswith(QUICK))
    run(command, tmp_path, processes)
    assert os.listdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN, ids=lambda command: f"{command.page}-{command.line[:60]}")
def test_every_command_runs(command: Command, tmp_path: Path, processes: Processes) -> None:
    """A page whose command fails as it is written loses its reader."""
    if "quality=true" in command.words:
        pytest.importorskip("rouge_score")
    run(command, tmp_path, processes)
