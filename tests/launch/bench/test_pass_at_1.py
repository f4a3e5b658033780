"""pass@1: what passes, what does not, and programs that must not harm the machine that judges them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from launch.bench.pass_at_1 import check_prompts, checks, judge
from launch.bench.pass_at_1.checks import final_number, function_program
from launch.bench.pass_at_1.execution import PASSED, check_limits, run_program
from launch.bench.records import load_records
from launch.bench.runs import ModelCache
from launch.bench.table_text import table_of
from launch.bench.totals import totals
from launch.benchmark import benchmark
from launch.data.prompts import Fields, Prompt, load_jsonl
from lp.errors import UserError
from tests.support.apps import Ran

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")

ADD = Prompt(
    task_id="add",
    text='import math\n\ndef add(a, b):\n    """a + b"""\n',
    fields={"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"},
)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("    return a + b\n", PASSED),
        ("    return a + b\n\ndef other():\n    (unfinished", PASSED),
        ("    return a - b\n", "AssertionError"),
        ("    return a +\n", "SyntaxError"),
        ("    retur", "NameError"),
        ("", "AssertionError"),
        ("Sure:\n```python\ndef add(a, b):\n    return int(math.fsum((a, b)))\n```\nThis adds.", PASSED),
    ],
)
def test_a_function_is_run_against_its_tests(text: str, outcome: str) -> None:
    """A model that writes on behind the function, or whole functions in a fence, would fail for its form."""
    assert judge("function", ADD, text).outcome == outcome


def test_assertions_are_run_behind_the_program() -> None:
    """MBPP's form: a program in a fence or none, and assertions."""
    prompt = Prompt(
        task_id="m", text="Double.", fields={"test_list": ["assert double(2) == 4", "assert double(0) == 0"]}
    )
    assert judge("asserts", prompt, "```\ndef double(x): return 2 * x\n```").passed
    assert judge("asserts", prompt, "def double(x): return 2 * x\n").passed
    assert judge("asserts", prompt, "def double(x): return x ** 2\ndouble = lambda x: 4").outcome == "AssertionError"
    assert not judge("asserts", prompt, "I can not.").passed


CLASS = Prompt(
    task_id="c",
    text='class Count:\n    """Counts."""\n',
    fields={
        "import_statement": ["import os"],
        "test": "import unittest\nclass CountTest(unittest.TestCase):\n"
        "    def test_next(self):\n        self.assertEqual(Count().next(), 1)\n",
        "test_classes": ["CountTest"],
    },
)


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("    def next(self):\n        return len(os.sep)\n", True),
        ("class Count:\n    def next(self):\n        return 1\n", True),
        ("    def next(self):\n        return 2\n", False),
        ("    def other(self):\n        return 1\n", False),
    ],
)
def test_a_class_is_run_against_its_unit_tests(text: str, passed: bool) -> None:
    """unittest reports failures instead of raising them: a class that fails its tests must not pass."""
    assert judge("class", CLASS, text).passed == passed


def test_a_class_without_tests_does_not_pass() -> None:
    """An empty suite is successful, as unittest sees it."""
    empty = {"test": "import unittest\nclass T(unittest.TestCase): pass\n", "test_classes": ["T"]}
    assert not judge("class", Prompt(task_id="c", text="class A: pass\n", fields=empty), "").passed


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9 * 2 = <<9*2=18>>18 dollars.\n#### 18", "18"),
        ("She earns $1,234.50 a day.", "1234.5"),
        ("It is 7.00.\nQuestion: What is 8?", "7"),
        ("#### -3\n\n5", "-3"),
        ("No number", None),
    ],
)
def test_the_final_number(text: str, number: str | None) -> None:
    """A base model goes on with a next question, whose numbers are no answer."""
    assert final_number(text) == number
    prompt = Prompt(task_id="g", text="?", reference="Because.\n#### 18")
    assert judge("number", prompt, text).passed == (number == "18")


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("while True: pass", "no end in 2 s"),
        ("import time; time.sleep(60)", "no end in 2 s"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append(' ' * 100_000_000 + str(len(x)))", "MemoryError"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "PermissionError"),
        ("import os; os._exit(0)", "ended by itself (exit code 0)"),
        ("import os; os.closerange(3, 99)", "ended by itself (exit code 1)"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "PermissionError"),
        ("import os, signal; os.kill(-1, signal.SIGKILL)", "PermissionError"),
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("open('f', 'wb').write(bytes(1 << 25))", "OSError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("import ctypes; ctypes.string_at(0)", "ended by itself (exit code -11)"),
        ("print('passed')\nimport sys\nsys.stdout.flush()\nraise ValueError", "ValueError"),
    ],
)
def test_a_program_cannot_harm_or_pass_by_accident(program: str, outcome: str) -> None:
    """An evaluation that hangs, fills the memory, dies with its program, or takes an early exit for success."""
    start = time.monotonic()
    seconds = 2 if "no end" in outcome else 40  # a busy machine is no fault of the program
    assert run_program(program, seconds=seconds, memory_bytes=512 << 20).outcome == outcome
    assert time.monotonic() - start < 50


def test_what_programs_need_still_works() -> None:
    """Limits so tight that right programs fail would lower every score."""
    program = """
import asyncio, dataclasses, decimal, threading, tempfile, typing
import numpy
@dataclasses.dataclass
class Point:
    x: "typing.ClassVar[int]" = 1
thread = threading.Thread(target=print, args=("x" * 1000,))
thread.start(); thread.join()
asyncio.run(asyncio.sleep(0))
open("mine.txt", "w").write("x")
with tempfile.TemporaryDirectory() as folder: open(folder + "/a", "w").close()
assert numpy.arange(3).sum() == 3
"""
    assert run_program(program).outcome == PASSED


def test_a_program_writes_in_its_own_folder_alone(tmp_path: Path) -> None:
    """A model that completes a clean-up function must not clean up the user's files."""
    victim = tmp_path / "thesis.tex"
    victim.write_text("years of work")
    if not check_limits():
        pytest.skip("a kernel without Landlock")
    for attack in (f"os.remove({str(victim)!r})", f"open({str(victim)!r}, 'w')", f"os.truncate({str(victim)!r}, 0)"):
        assert run_program(f"import os\n{attack}").outcome == "PermissionError"
    assert victim.read_text() == "years of work"


def test_a_program_ends_with_the_process_that_runs_it() -> None:
    """A benchmark that is killed must not leave endless loops behind."""
    body = "from launch.bench.pass_at_1.execution import run_program; run_program('while True: pass', 60)"
    with subprocess.Popen([sys.executable, "-c", body]) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        deadline = time.monotonic() + 30
        while not children.read_text().split() and time.monotonic() < deadline:
            time.sleep(0.05)
        (child,) = map(int, children.read_text().split())
        time.sleep(0.5)
        parent.send_signal(signal.SIGKILL)
    while Path(f"/proc/{child}").exists() and "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline, "the program goes on"
        time.sleep(0.05)


def test_the_environment_of_the_user_stays_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the hub lie there."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run_program("import os; assert 'HF_TOKEN' not in os.environ").outcome == PASSED


def test_equal_texts_share_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods with one text must not part because one of their runs missed the time limit."""
    seen: list[str] = []
    monkeypatch.setattr(checks, "run_program", lambda program: seen.append(program) or run_program(program))
    checks._outcome.cache_clear()
    assert [judge("function", ADD, "    return b + a\n").passed for _ in range(2)] == [True, True]
    assert seen == [function_program(ADD, "    return b + a\n")]


def test_data_without_tests_is_refused() -> None:
    """A night's run whose texts nothing can judge."""
    with pytest.raises(UserError, match=r"needs 'test' and 'entry_point'.*prompt a of f.jsonl.*task.path=null"):
        check_prompts("function", "humaneval", "f.jsonl", [Prompt(task_id="a", text="x", reference="y")])
    with pytest.raises(UserError, match="needs a task with a check, and that of task mtbench is None"):
        check_prompts(None, "mtbench", "f.jsonl", [])
    with pytest.raises(UserError, match="needs 'reference'"):
        check_prompts("number", "gsm8k", "f.jsonl", [Prompt(task_id="a", text="x", reference="no number")])


def test_records_as_they_were_published(tmp_path: Path) -> None:
    """MBPP and GSM8K call their parts otherwise; users would have to rewrite the files."""
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps({"text": "Add.", "code": "c", "task_id": 11, "test_list": ["a", "b"]}) + "\n")
    fields = Fields(prompt="{text}\n{test_list[0]}", reference="code", task_id="mbpp/{task_id}")
    (prompt,) = load_jsonl(path, None, fields)
    assert (prompt.task_id, prompt.text, prompt.reference) == ("mbpp/11", "Add.\na", "c")
    assert prompt.fields["test_list"] == ["a", "b"]
    with pytest.raises(UserError, match="no text under 'prompt'"):
        load_jsonl(path)


def test_the_table_has_pass_at_1_beside_plain(
    start_app: Callable[..., Ran], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Task quality of lookahead and plain, equal under greedy decoding, in one command; records of one that differs."""
    task = tmp_path / "t.jsonl"
    always = {"test": "def check(candidate): pass", "entry_point": "f"}
    never = {"test": "def check(candidate): raise ValueError", "entry_point": "f"}
    lines = [{"prompt": "def f():\n    '''x'''\n", "task_id": str(i), **test} for i, test in enumerate((always, never))]
    task.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # A tiny model's text is noise: what is behind the function's first line is cut off by its stop string.
    asked = ["model=hf", f"model.name={tiny_folder}", "model.dtype=float64", "W=4", "N=3", "G=4", "max_new_tokens=4"]
    asked += [
        "task=humaneval",
        f"task.path={task}",
        "methods=[lookahead,plain]",
        "pass_at_1=true",
        f"out={tmp_path / 'o'}",
    ]
    monkeypatch.setattr("launch.bench.pass_at_1.checks.BEHIND_FUNCTION", __import__("re").compile("(?s)^.*"))
    assert start_app(partial(benchmark, models=ModelCache()), "benchmark", *asked).code == 0
    records = load_records(tmp_path / "o")
    assert [record["check"]["passed"] for record in records] == [True, True, False, False]
    heads, table = table_of(totals(records))
    assert heads[-1] == "pass@1" and [line[-1] for line in table] == ["50.0% (1, +0)"] * 2
    records[0]["check"]["passed"] = False
    assert table_of(totals(records))[1][0][-1] == "0.0% (0, -1)"
    assert os.listdir(tmp_path / "o")
