"""Judge whether a generated text solves its task: by running a program with the task's tests, or by its final number.

A task's key `check` names the kind of test. Each kind needs certain fields in the data set's records:

- function (HumanEval): the text continues a function; `test` defines check(candidate), `entry_point` names the
  function;
- asserts (MBPP): the text holds a program; `test_list` has assertions;
- class (ClassEval): the text holds a class; `test` has unittest classes, `test_classes` their names;
- number (GSM8K): the text's final number must equal that of `reference`.
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
    """Whether one text solves its task, and if not, why.

    Args:
        passed: whether it solves the task.
        outcome: "passed", or what went wrong, as in "AssertionError", "no end in 10 s" or "answered 7".
    """

    passed: bool
    outcome: str


def function_program(prompt: Prompt, text: str) -> str:
    """Make the program that tests a completed function, as HumanEval does: prompt, generated body, tests.

    If the text has a code fence (```), as a chat's answer does, all code in its first fence is the body. Otherwise the
    text is cut where the function's body ends.

    Args:
        prompt: the beginning of the function, with fields "test" and "entry_point".
        text: the generated text.
    """
    fenced = FENCE.search(text)
    # The prompt's docstring is a body, so what the fence has replaces the function and keeps the imports.
    body = f"\n{fenced[1]}" if fenced else BEHIND_FUNCTION.split(text, maxsplit=1)[0]
    return f"{prompt.text}{body}\n\n{prompt.fields['test']}\ncheck({prompt.fields['entry_point']})\n"


def asserts_program(prompt: Prompt, text: str) -> str:
    """Make the program that tests an answer by assertions, as MBPP does: the answer's code, setup code, assertions.

    The answer's code is the content of the text's first code fence (```), or the whole text if it has no fence.

    Args:
        prompt: the question, with the field "test_list" and perhaps "test_setup_code".
        text: the generated text.
    """
    setup = prompt.fields.get("test_setup_code") or ""
    return "\n".join([_code(text), setup, *prompt.fields["test_list"]]) + "\n"


def class_program(prompt: Prompt, text: str) -> str:
    """Make the program that tests a class by unit tests, as ClassEval does: imports, class, tests.

    The class is taken from the text's first code fence (```), or from the whole text if it has no fence. If no class is
    defined there, the text is taken to continue the prompt.

    Args:
        prompt: the beginning of the class, with fields "test" and "test_classes", and perhaps "import_statement".
        text: the generated text.
    """
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
    """The number that a text gives as its answer, as in "1250.5" for "... #### 1,250.50"; None without a number.

    The answer is the first number after "####". If there is none, it is the last number before another question begins.

    Args:
        text: a generated text, or a reference.
    """
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
    """Judge whether a generated text solves its prompt's task; all kinds but "number" run a program with the tests.

    Args:
        kind: kind of test, one of CHECKS.
        prompt: the prompt, with the fields that this kind of test needs.
        text: the generated text, without the prompt.
    """
    if kind == "number":
        number = final_number(text)
        passed = number is not None and number == final_number(prompt.reference or "")
        return Verdict(passed=passed, outcome=PASSED if passed else f"answered {number}")
    outcome = _outcome(PROGRAMS[kind](prompt, text))
    return Verdict(passed=outcome == PASSED, outcome=outcome)


@functools.lru_cache(maxsize=64)
def _outcome(program: str) -> str:
    """The outcome of a program, run once even if several methods wrote it: a time limit must not fail one of them."""
    return run_program(program).outcome


def check_prompts(kind: str | None, task: str, where: str, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that lack tests or references, before a model generates texts that nobody can judge.

    Args:
        kind: kind of test, one of CHECKS; None for a task without one, which is refused.
        task: the task's name.
        where: file or data set of the prompts, for messages.
        prompts: the prompts.

    Raises:
        ValueError: the task has no kind of test or an unknown one, or a prompt lacks a field that this kind needs.
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
