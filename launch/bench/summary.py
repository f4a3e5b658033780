"""Records of a benchmark added up: a line for each setting and method, and tables of such lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from ..config.builders import ORACLE, PLAIN
from ..config.schema import SHAPE_KEYS
from .machine import remarks
from .records import Record, digest

HIDDEN = ("methods", "chat", "parameters")  # settings that tables leave out: long, or implied by others
DECODER = "decoder."  # begins the names of the decoder's own settings


@dataclass(frozen=True, kw_only=True)
class Total:
    """A method's prompts under one setting, added up.

    Args:
        records: of the file, one a prompt.
        plain: the same prompts by plain decoding; None where it did not run.
        plain_tokens_per_s: of plain decoding in the same run: of `plain`, or where that did not run of the oracle, as
            in records from before there was `plain`; None if neither did.
    """

    records: list[Record]
    plain_tokens_per_s: float | None
    plain: Total | None = None

    @property
    def method(self) -> str:
        return str(self.records[0]["method"])

    @property
    def task(self) -> str:
        return str(self.records[0]["task"])

    @property
    def setting(self) -> dict[str, Any]:
        """As in the records, the decoder's own as decoder.KEY; its W, N and G are the run's."""
        setting = dict(self.records[0]["settings"])
        decoder = setting.pop("decoder", None) or {}
        return setting | {f"{DECODER}{key}": value for key, value in decoder.items() if key not in SHAPE_KEYS}

    @property
    def guess_set_size(self) -> int | None:
        """G; a run whose methods have their own has it by method."""
        size = self.setting["G"]
        return size.get(self.method.partition("@")[0]) if isinstance(size, dict) else size

    @property
    def hardware(self) -> str:
        """Hardware of every record: a run that was resumed elsewhere has several."""
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
        """Against plain decoding of the same run: the median round's, which lies between their least and most."""
        if self.speedups:
            return median(self.speedups)
        return self.tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s else None

    @property
    def accepted(self) -> dict[int, int]:
        """Steps by the number of draft tokens that they accepted."""
        found: dict[int, int] = {}
        for record in self.records:
            for length, count in (record.get("accepted") or {}).items():
                found[int(length)] = found.get(int(length), 0) + count
        return found

    def a_step(self, name: str) -> float:
        """Mean of a figure of `split` over all steps and ranks; 0 where records do not say."""
        splits = [(record["steps"], record["split"]) for record in self.records if record.get("split")]
        sums = sum(steps * fmean(each[name] for each in split) for steps, split in splits)
        return sums / max(self.steps, 1)

    @property
    def rates(self) -> list[float]:
        """Tokens/s of every round; empty where records do not say."""
        rounds = [record.get("rounds_s") or [] for record in self.records]
        return [self.tokens / sum(times) for times in zip(*rounds, strict=False)]

    @property
    def speedups(self) -> list[float]:
        """Against plain decoding, round by round; empty for plain decoding itself."""
        if self.plain is None or self.plain.method == self.method:
            return []
        return [rate / plain for rate, plain in zip(self.rates, self.plain.rates, strict=False)]

    @property
    def peak_bytes(self) -> int | None:
        """Most memory of a rank; None where records do not say."""
        return max((record.get("peak_bytes") or 0 for record in self.records), default=0) or None

    @property
    def differing(self) -> int | None:
        """Prompts whose tokens are not the oracle's; None where nothing was promised or compared."""
        equal = [record["equal"] for record in self.records]
        return None if None in equal else equal.count(False)

    @property
    def near_ties(self) -> int:
        """How many differing outputs part from plain decoding where rounding lets either token win."""
        differences = [record.get("difference") for record in self.records]
        return sum(bool(each and each["near_tie"]) for each in differences)

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
            "tokens_per_s_of_rounds": self.rates,
            "speedup_of_rounds": self.speedups,
            "tokens_a_step": self.tokens_a_step,
            "peak_bytes": self.peak_bytes,
            "differing": self.differing,
            "near_ties": None if self.differing is None else self.near_ties,
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
        speed = alone.tokens_per_s if alone else None
        found += [Total(records=of_method, plain_tokens_per_s=speed, plain=alone) for of_method in methods.values()]
    return found


def varying(found: Sequence[Total]) -> list[str]:
    """The settings in which they differ, which a table has to show."""
    settings = [total.setting for total in found]
    names = dict.fromkeys(name for setting in settings for name in setting)
    # What one decoder has and another has not is said by their names.
    having = {name: [each for each in settings if name in each or not name.startswith(DECODER)] for name in names}
    return [name for name in names if len({digest(each.get(name)) for each in having[name]}) > 1]


def shown(found: Sequence[Total]) -> list[str]:
    """The settings that a table has a column for: those of HIDDEN too if lines of two settings look alike without."""
    names = varying(found)
    brief = [name for name in names if name not in HIDDEN]
    lines = {(*(short(total.setting.get(name)) for name in brief), total.method) for total in found}
    return brief if len(lines) == len(found) else names


def ordered(found: Sequence[Total]) -> list[Total]:
    """Totals in the order of the settings in which they differ, numbers by size."""
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
    """Heads and lines of a table: the settings in which they differ, the figures of HEADS, of MORE what there is."""
    names = shown(found)
    more = {head: [cell(total) for total in found] for head, cell in MORE.items()}
    more = {head: column for head, column in more.items() if {*column} != {"-"}}
    lines = [[*cells(total, names), *of_line] for total, *of_line in zip(found, *more.values(), strict=True)]
    return [*names, *HEADS, *more], lines


def verdict(prompts: int, differing: int, near_ties: int) -> str:
    """The cell of a table: how many texts are not plain decoding's, and for how many of them rounding is no excuse.

    Args:
        prompts: that were compared.
        differing: how many outputs part from plain decoding's.
        near_ties: how many of the differing outputs part where the two best scores tie within rounding.
    """
    if not differing:
        return "equal"
    if near_ties == differing:
        return f"{differing} of {prompts} part at near-ties"
    beside = f", {near_ties} at near-ties" if near_ties else ""
    return f"differs on {differing} of {prompts}{beside}"


def spread(values: Sequence[float]) -> str:
    """Least and most of several rounds in a cell; one round has none."""
    return f"{min(values):.2f}-{max(values):.2f}x" if len(values) > 1 else "-"


def peak(total: Total) -> str:
    """Most memory in a cell."""
    return "-" if total.peak_bytes is None else f"{total.peak_bytes / (1 << 20):,.0f}"


def solved(total: Total) -> str:
    """pass@1 in a cell, with how many prompts more or less than plain decoding solves."""
    if total.passed is None:
        return "-"
    of_all = f"{total.pass_at_1:.1%} ({total.passed}"
    plain = total.plain.passed if total.plain else None
    return of_all + (")" if plain is None else f", {total.passed - plain:+d})")


def cells(total: Total, names: Sequence[str]) -> list[str]:
    """A line of a table: the settings named, then the figures of HEADS."""
    speed = f"{total.speedup:.2f}x" if total.speedup else "-"
    output = "-" if total.differing is None else verdict(total.prompts, total.differing, total.near_ties)
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


# By head, what a table has where its records say it.
MORE: dict[str, Callable[[Total], str]] = {
    "of rounds": lambda total: spread(total.speedups),
    "peak MiB": peak,
    "pass@1": solved,
}
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
    hidden = ("methods", "gguf", "quality", "attention", "capture", "repeats", "chat", "parameters")
    shared = {key: value for key, value in common(found).items() if key not in hidden and not key.startswith(DECODER)}
    if isinstance(size := common(found).get("parameters"), int):
        shared["model"] = f"{shared['model']} ({size / 1e6:.1f} M parameters)"
    machines = "; ".join(dict.fromkeys(total.hardware for total in found))
    torch = "; ".join(dict.fromkeys(record["versions"]["torch"] for total in found for record in total.records))
    shown = {key: value for key, value in shared.items() if value not in (None, [], False)}
    parts = [machines, f"torch {torch}", *_attention(found), *(f"{key} {short(value)}" for key, value in shown.items())]
    return ", ".join(parts)


def notes(found: Sequence[Total]) -> list[str]:
    """Lines under a table: how often was measured, and what speaks against its times."""
    rounds = {len(record.get("rounds_s") or []) for total in found for record in total.records} - {0}
    counts = " or ".join(map(str, sorted(rounds)))
    said = "one round, so its times have no known spread; repeats=3 gives one"
    lines = [said if rounds == {1} else f"medians of {counts} rounds, with least and most"] if rounds else []
    return lines + remarks([record for total in found for record in total.records])


def _attention(found: Sequence[Total]) -> list[str]:
    """What computed attention, in words, with the methods where they differ; records of old say nothing of it."""
    methods: dict[str, list[str]] = {}
    for total in found:
        for record in total.records:
            if name := record.get("attention"):
                name += f", captured by {record['captured']}" if record.get("captured") else ""
                methods.setdefault(name, []).append(total.method)
    if len(methods) == 1:
        return [f"attention {name}" for name in methods]
    return [f"attention of {' and '.join(dict.fromkeys(of))}: {name}" for name, of in methods.items()]
