"""Records of a benchmark added up: a line for each setting and method, and tables of such lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..builders import ORACLE, PLAIN
from .records import Record, digest

HIDDEN = ("decoder", "methods", "chat", "parameters")  # settings that tables leave out: long, or implied by others


@dataclass(frozen=True, kw_only=True)
class Total:
    """A method's prompts under one setting, added up.

    Args:
        records: of the file, one a prompt.
        plain_passed: prompts that plain decoding solved in the same run; None where it did not run, or none was judged.
        plain_tokens_per_s: of plain decoding in the same run: of `plain`, or where that did not run of the oracle, as
            in records from before there was `plain`; None if neither did.
    """

    records: list[Record]
    plain_tokens_per_s: float | None
    plain_passed: int | None = None

    @property
    def method(self) -> str:
        return str(self.records[0]["method"])

    @property
    def task(self) -> str:
        return str(self.records[0]["task"])

    @property
    def setting(self) -> dict[str, Any]:
        return dict(self.records[0]["settings"])

    @property
    def guess_set_size(self) -> int | None:
        """G; a run whose methods have their own has it by method."""
        size = self.setting["G"]
        return size.get(self.method.partition("@")[0]) if isinstance(size, dict) else size

    @property
    def hardware(self) -> str:
        """Of every record, which a run that was resumed elsewhere has several of."""
        return "; ".join(dict.fromkeys(record["hardware"] for record in self.records))

    @property
    def prompts(self) -> int:
        return len(self.records)

    @property
    def tokens(self) -> int:
        return sum(record["tokens"] for record in self.records)

    @property
    def steps(self) -> int:
        return sum(record["steps"] for record in self.records)

    @property
    def compression(self) -> float:
        """S: tokens a step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed, without the prefill."""
        return self.tokens / sum(record["decode_s"] for record in self.records)

    @property
    def tokens_a_step(self) -> float:
        """Mean step tokens of rank 0."""
        return sum(record["tokens_a_step"] * record["steps"] for record in self.records) / max(self.steps, 1)

    @property
    def speedup(self) -> float | None:
        """Against plain decoding of the same run."""
        return self.tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s else None

    @property
    def differing(self) -> int | None:
        """Prompts whose tokens are not the oracle's; None where nothing was promised or compared."""
        equal = [record["equal"] for record in self.records]
        return None if None in equal else equal.count(False)

    def quality(self, name: str, key: str | None = None) -> float | None:
        """Mean over prompts of a figure that quality=true adds; None where it was not asked for."""
        found = [record["quality"][name] for record in self.records if record.get("quality")]
        values = [value if key is None else value[key] for value in found if value is not None]
        values = [value for value in values if value is not None]
        return fmean(values) if values else None

    @property
    def passed(self) -> int | None:
        """Prompts whose text solves its task; None where nothing was judged."""
        checks = [record.get("check") for record in self.records]
        return None if None in checks else sum(check["passed"] for check in checks if check)

    @property
    def pass_at_1(self) -> float | None:
        """Share of the prompts whose text solves its task."""
        return None if self.passed is None else self.passed / self.prompts

    def figures(self) -> dict[str, Any]:
        """For a line of JSON or CSV."""
        judged = {} if self.passed is None else {"passed": self.passed, "pass_at_1": self.pass_at_1}
        return {
            "method": self.method,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "steps": self.steps,
            "S": self.compression,
            "tokens_per_s": self.tokens_per_s,
            "speedup": self.speedup,
            "tokens_a_step": self.tokens_a_step,
            "differing": self.differing,
            **judged,
        }


def totals(records: Iterable[Record]) -> list[Total]:
    """One for each setting and method, in the order in which they first come."""
    grouped: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        grouped.setdefault(digest(record["settings"]), {}).setdefault(record["method"], []).append(record)
    found = []
    for methods in grouped.values():
        plain = methods.get(PLAIN) or methods.get(ORACLE)
        alone = Total(records=plain, plain_tokens_per_s=None) if plain else None
        speed, passed = (alone.tokens_per_s, alone.passed) if alone else (None, None)
        found += [
            Total(records=of_method, plain_tokens_per_s=speed, plain_passed=passed) for of_method in methods.values()
        ]
    return found


def varying(found: Sequence[Total]) -> list[str]:
    """The settings in which they differ, which a table has to show."""
    names = dict.fromkeys(name for total in found for name in total.setting)
    return [name for name in names if len({digest(total.setting.get(name)) for total in found}) > 1]


def shown(found: Sequence[Total]) -> list[str]:
    """The settings that a table has a column for."""
    return [name for name in varying(found) if name not in HIDDEN]


def ordered(found: Sequence[Total]) -> list[Total]:
    """By the settings in which they differ, numbers by size."""
    names = varying(found)

    def key(total: Total) -> list[tuple[bool, float, str]]:
        values = [total.setting.get(name) for name in names]
        return [(False, value, "") if isinstance(value, int | float) else (True, 0, short(value)) for value in values]

    return sorted(found, key=key)


def common(found: Sequence[Total]) -> dict[str, Any]:
    """The settings that all of them share."""
    differ = varying(found)
    return {name: value for name, value in found[0].setting.items() if name not in differ}


def table_of(found: Sequence[Total]) -> tuple[list[str], list[list[str]]]:
    """Heads and lines of a table: the settings in which they differ, the figures of HEADS, pass@1 if it was judged."""
    names = shown(found)
    heads, lines = [*names, *HEADS], [cells(total, names) for total in found]
    if any(total.passed is not None for total in found):
        heads.append("pass@1")
        lines = [[*line, solved(total)] for line, total in zip(lines, found, strict=True)]
    return heads, lines


def solved(total: Total) -> str:
    """pass@1 in a cell, with how many prompts more or less than plain decoding solves."""
    if total.passed is None:
        return "-"
    of_all = f"{total.pass_at_1:.1%} ({total.passed}"
    return of_all + (")" if total.plain_passed is None else f", {total.passed - total.plain_passed:+d})")


def cells(total: Total, names: Sequence[str]) -> list[str]:
    """A line of a table: the settings named, then the figures of HEADS."""
    speed = f"{total.speedup:.2f}x" if total.speedup else "-"
    output = {None: "-", 0: "equal"}.get(total.differing, f"differs on {total.differing} of {total.prompts}")
    return [
        *(short(total.setting.get(name)) for name in names),
        total.method,
        str(total.prompts),
        str(total.tokens),
        f"{total.compression:.2f}",
        f"{total.tokens_a_step:.1f}",
        f"{total.tokens_per_s:.1f}",
        speed,
        output,
    ]


HEADS = ("method", "prompts", "tokens", "S", "tokens a step", "tokens/s", "vs plain", "output")


def short(value: Any) -> str:
    """A setting in a cell."""
    if isinstance(value, dict):
        return " ".join(f"{key}={short(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ",".join(map(short, value))
    return "null" if value is None else str(value)


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    head = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def caption(found: Sequence[Total]) -> str:
    """The machine and what all lines share, in one line."""
    hidden = ("decoder", "methods", "quality", "attention", "capture", "repeats", "chat", "parameters")
    shared = {key: value for key, value in common(found).items() if key not in hidden}
    if isinstance(size := common(found).get("parameters"), int):
        shared["model"] = f"{shared['model']} ({size / 1e6:.1f} M parameters)"
    machines = "; ".join(dict.fromkeys(total.hardware for total in found))
    torch = "; ".join(dict.fromkeys(record["versions"]["torch"] for total in found for record in total.records))
    shown = {key: value for key, value in shared.items() if value not in (None, [], False)}
    parts = [machines, f"torch {torch}", *_attention(found), *(f"{key} {short(value)}" for key, value in shown.items())]
    return ", ".join(parts)


def _attention(found: Sequence[Total]) -> list[str]:
    """What computed attention, in words, with the methods where they differ; records of old say nothing of it."""
    methods: dict[str, list[str]] = {}
    for total in found:
        for record in total.records:
            if name := record.get("attention"):
                methods.setdefault(name, []).append(total.method)
    if len(methods) == 1:
        return [f"attention {name}" for name in methods]
    return [f"attention of {' and '.join(dict.fromkeys(of))}: {name}" for name, of in methods.items()]
