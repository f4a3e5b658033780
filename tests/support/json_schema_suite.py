"""The public JSON-Schema-Test-Suite as a judge of grammars: a folder that LP_JSON_SCHEMA_SUITE names.

LP_JSON_SCHEMA_SUITE=... python -m tests.support.json_schema_suite [llguidance]

With `llguidance`, its own compiler of schemas is judged instead of ours.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import llguidance

from lp.errors import UserError
from lp.sampling.language_checks import byte_tokenizer
from lp.sampling.schema_grammar import schema_to_lark
from tests.support.grammar_texts import Texts

FOLDER = os.environ.get("LP_JSON_SCHEMA_SUITE", "")
DRAFT = "tests/draft2020-12"
VERDICTS = ("right", "not taken", "wrong: taken", "wrong: refused")
REMARKS = "format.json"  # takes what violates a format, which optional/format refuses


@dataclass
class Judged:
    """One test of the suite, and what the compiler under test made of it.

    Attributes:
        file: the test's file, within the draft's folder.
        name: names of the case and of the test in it.
        verdict: "right", "not taken" (the schema), "wrong: taken" or "wrong: refused" (the instance).
        why: the error's text where the schema is not taken.
    """

    file: str
    name: str
    verdict: str
    why: str = ""


class OwnTexts:
    """Tells which texts a schema has by llguidance's own compiler, to be compared with ours.

    Args:
        schema: JSON text of the schema.

    Raises:
        UserError: it does not take the schema.
    """

    def __init__(self, schema: str) -> None:
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
            self._start = llguidance.LLMatcher(byte_tokenizer(), grammar, log_level=0)
        except ValueError as error:
            raise UserError(str(error)) from error
        if self._start.is_error():
            raise UserError(self._start.get_error())

    def has(self, text: str) -> bool:
        """Whether a text follows it to its end."""
        matcher = self._start.deep_copy()
        tokens = list(text.encode())
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def our_texts(schema: str) -> Texts:
    """Tells which texts a schema has by our compiler."""
    return Texts(schema_to_lark(schema))


def judged(folder: Path, texts_of: Callable[[str], Texts | OwnTexts] = our_texts) -> Iterator[Judged]:
    """Judge every test of a folder, with its instance written by json.dumps."""
    root = folder / DRAFT
    for path in sorted(root.rglob("*.json")):
        file = str(path.relative_to(root))
        for case in json.loads(path.read_text(encoding="utf-8")):
            texts: Texts | OwnTexts | None = None
            why = ""
            try:
                texts = texts_of(json.dumps(case["schema"]))
            except UserError as error:
                why = str(error)
            for test in case["tests"]:
                name = f"{case['description']}: {test['description']}"
                if texts is None and "no text follows it" not in why:
                    yield Judged(file, name, "not taken", why)
                    continue
                taken = texts is not None and texts.has(json.dumps(test["data"]))
                wrong = "wrong: taken" if taken else "wrong: refused"
                yield Judged(file, name, "right" if taken == test["valid"] else wrong)


def group_of(each: Judged) -> str:
    """Required tests, optional ones of formats, and other optional ones, which are counted apart."""
    if not each.file.startswith("optional/"):
        return "required"
    return "optional formats" if "/format/" in each.file else "other optional"


def main() -> None:
    """Print shares, and what is wrong."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    remarks = 0
    for each in judged(Path(FOLDER), OwnTexts if sys.argv[1:] == ["llguidance"] else our_texts):
        counts[group_of(each)][each.verdict] += 1
        if each.verdict.startswith("wrong"):
            print(f"{each.file}: {each.name}: {each.verdict}")
            remarks += each.file == REMARKS and each.verdict == "wrong: refused"
    for group, verdicts in counts.items():
        total = sum(verdicts.values())
        shares = ", ".join(f"{name} {verdicts[name]} ({verdicts[name] / total:.1%})" for name in VERDICTS)
        print(f"{group}: {total} tests: {shares}")
    print(f"required, wrong: refused: {remarks} of them are violations of formats that {REMARKS} calls remarks")


if __name__ == "__main__":
    main()
