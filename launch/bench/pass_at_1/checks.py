"""Whether a text solves its task: the program that its tests make of it, or the number that it ends with.

The kinds, which a task names in `check`, and the fields of a record that they need, as the sets publish them:

- function (HumanEval): the text goes on behind the prompt; `test` defines check(candidate), `entry_point` names it;
- asserts (MBPP): the text holds a program; `test_list` has assertions;
- class (ClassEval): the text holds a class; `test` has unittest classes, `test_classes` their names;
- number (GSM8K): the text's final number is the reference's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lp.errors import UserError

from ...data.prompts import Prompt
from .execution import PASSED, run_program

FENCE = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL)
# Where Codex's evaluation, and all after it, end the body of a function.
BEHIND_FUNCTION = re.compile(r"\n(?:class|def|#|@|if|print|assert|```)")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
NEXT_QUESTION = re.compile(r"\n\s*(?:Question|Q):")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether one text solves its task, and why not.

    Args:
        passed: whether it solves its task.
        outcome: "passed", or what went wrong.
    """

    passed: bool
    outcome: str


def function_program(prompt: Prompt, text: str) -> str:
    """The program that tests a completed function, cut behind its body, or taken whole from a chat's fence."""
    fenced = FENCE.search(text)
    # The prompt's docstring is a body, so what the fence has replaces the function and keeps the imports.
    body = f"\n{fenced[1]}" if fenced else BEHIND_FUNCTION.split(text, maxsplit=1)[0]
    return f"{prompt.text}{body}\n\n{prompt.fields['test']}\ncheck({prompt.fields['entry_point']})\n"


def asserts_program(prompt: Prompt, text: str) -> str:
    """The program that tests an answer by its asserts: the code of the first fence, or the whole text."""
    setup = prompt.fields.get("test_setup_code") or ""
    return "\n".join([_code(text), setup, *prompt.fields["test_list"]]) + "\n"


def class_program(prompt: Prompt, text: str) -> str:
    """The class in the first fence, or that of the text, or the prompt with the text behind it; then its unit tests."""
    code = _code(text)
    if not re.search(r"^class ", code, re.MULTILINE):
        code = prompt.text + text
    imports = "\n".join(prompt.fields.get("import_statement") or [])
    names = [name.strip() for name in prompt.fields["test_classes"]]  # ClassEval_97 has one with a space
    run = f"""
import unittest as _unittest
_load = _unittest.defaultTestLoader.loadTestsFromTestCase
_result = _unittest.TestResult()
_unittest.TestSuite(_load(globals()[name]) for name in {names!r}).run(_result)
assert _result.testsRun and _result.wasSuccessful()
"""
    return f"{imports}\n{code}\n\n{prompt.fields['test']}\n{run}"


def final_number(text: str) -> str | None:
    """The number behind ####, or the last one before another question begins, without separators; None for none."""
    answer = NEXT_QUESTION.split(text, maxsplit=1)[0]
    marked = answer.partition("####")[2]
    found = NUMBER.findall(marked)[:1] or NUMBER.findall(answer)[-1:]
    if not found:
        return None
    number = found[0].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _code(text: str) -> str:
    fenced = FENCE.search(text)
    return fenced[1] if fenced else text


PROGRAMS: Mapping[str, Callable[[Prompt, str], str]] = {
    "function": function_program,
    "asserts": asserts_program,
    "class": class_program,
}
FIELDS: Mapping[str, Sequence[str]] = {
    "function": ("test", "entry_point"),
    "asserts": ("test_list",),
    "class": ("test", "test_classes"),
}
CHECKS = (*PROGRAMS, "number")


def judge(kind: str, prompt: Prompt, text: str) -> Verdict:
    """Whether the text solves the prompt's task.

    Args:
        kind: one of CHECKS.
        prompt: with the fields that the kind needs.
        text: what a model wrote behind the prompt.
    """
    if kind == "number":
        number = final_number(text)
        passed = number is not None and number == final_number(prompt.reference or "")
        return Verdict(passed=passed, outcome=PASSED if passed else f"answered {number}")
    outcome = _outcome(PROGRAMS[kind](prompt, text))
    return Verdict(passed=outcome == PASSED, outcome=outcome)


@functools.lru_cache(maxsize=64)
def _outcome(program: str) -> str:
    """Methods that wrote the same text share one run, whose time limit one of them might else have missed."""
    return run_program(program).outcome


def check_prompts(kind: str | None, task: str, where: str, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts whose texts cannot be judged.

    Args:
        kind: how the task is judged, one of CHECKS; None where it says nothing of that.
        task: its name.
        where: the prompts come from, a file or a data set.
        prompts: all of them.

    Raises:
        ValueError: the task has no kind, or one that does not exist, or prompts lack what it needs.
    """
    if kind not in CHECKS:
        known = ", ".join(CHECKS)
        raise UserError(
            f"pass_at_1 needs a task with a check, and that of task {task} is {kind}; take task=humaneval, mbpp, "
            f"classeval or gsm8k, or set task.check to one of {known}"
        )
    for prompt in prompts:
        missing = [name for name in FIELDS.get(kind, ()) if not prompt.fields.get(name)]
        missing += ["reference"] if kind == "number" and final_number(prompt.reference or "") is None else []
        if missing:
            raise UserError(
                f"pass_at_1 of task {task} needs {' and '.join(map(repr, missing))}, which prompt {prompt.task_id} of "
                f"{where} has not; give the set's own JSONL with its tests as task.path, or task.path=null for the hub"
            )
