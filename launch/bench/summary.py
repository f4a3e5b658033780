"""Tables of a benchmark: a line for each setting and method, and what all lines share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .machine import remarks
from .records import digest
from .totals import DECODER, Total

HIDDEN = ("methods", "chat", "parameters")  # settings that tables leave out: long, or implied by others


def varying(found: Sequence[Total]) -> list[str]:
    """The settings in which totals differ, which a table has to show."""
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
    """The settings that all totals share."""
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
        prompts: how many prompts were compared.
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
    """The cell with the most memory of a rank, in MiB."""
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
    """A setting as a table's cell shows it."""
    if isinstance(value, dict):
        return " ".join(f"{key}={short(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ",".join(map(short, value))
    return "null" if value is None else str(value)


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
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
