"""The public JSON-Schema-Test-Suite as a judge of grammars: a folder that LP_JSON_SCHEMA_SUITE names.

LP_JSON_SCHEMA_SUITE=... python -m tests.json_schema_suite
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lp.errors import UserError
from lp.sampling.schema_grammar import schema_to_lark
from tests.grammar_texts import Texts

FOLDER = os.environ.get("LP_JSON_SCHEMA_SUITE", "")
DRAFT = "tests/draft2020-12"


@dataclass
class Judged:
    """One test of the suite.

    Attributes:
        file: within the draft's folder.
        name: of the case and of the test.
        verdict: "right", "not taken" (the schema), "wrong: taken" or "wrong: refused" (the instance).
        why: the schema is not taken.
    """

    file: str
    name: str
    verdict: str
    why: str = ""


def judged(folder: Path) -> Iterator[Judged]:
    """Every test, its instance as json.dumps writes it."""
    root = folder / DRAFT
    for path in sorted(root.rglob("*.json")):
        file = str(path.relative_to(root))
        for case in json.loads(path.read_text(encoding="utf-8")):
            texts: Texts | None = None
            why = ""
            try:
                texts = Texts(schema_to_lark(json.dumps(case["schema"]))[0])
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


def main() -> None:
    """Print shares, and what is wrong."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in judged(Path(FOLDER)):
        parts = {"required": not each.file.startswith("optional/"), "optional formats": "/format/" in each.file}
        group = next((name for name, is_one in parts.items() if is_one), "other optional")
        counts[group][each.verdict] += 1
        if each.verdict.startswith("wrong"):
            print(f"{each.file}: {each.name}: {each.verdict}")
    for group, verdicts in counts.items():
        total = sum(verdicts.values())
        shares = ", ".join(f"{name} {count} ({count / total:.1%})" for name, count in verdicts.items())
        print(f"{group}: {total} tests: {shares}")


if __name__ == "__main__":
    main()
