"""Text of a benchmark's tables: a line for each setting and method, and captions with the settings of all lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .machine import remarks
from .quality import ROUGE
from .records import digest
from .totals import DECODER, Total

HIDDEN = ("methods", "chat", "parameters", "backend")  # settings that tables leave out: long, or implied by others


def varying(found: Sequence[Total]) -> list[str]:
    """Names of the settings in which totals differ, as in ["W", "ranks"]: columns that a table may need.

    Args:
        found: totals of methods under settings.
    """
    settings = [total.setting for total in found]
    names = dict.fromkeys(name for setting in settings for name in setting)
    # What one decoder has and another has not is said by their names.
    having = {name: [each for each in settings if name in each or not name.startswith(DECODER)] for name in names}
    return [name for name in names if len({digest(each.get(name)) for each in having[name]}) > 1]


def shown(found: Sequence[Total]) -> list[str]:
    """Names of the settings that get a column in a table.

    Settings in HIDDEN, which are long or implied by others, get a column only if two lines would look alike without it.

    Args:
        found: totals, one for each line.
    """
    names = varying(found)
    brief = [name for name in names if name not in HIDDEN]
    lines = {(*(short(total.setting.get(name)) for name in brief), total.method) for total in found}
    return brief if len(lines) == len(found) else names


def ordered(found: Sequence[Total]) -> list[Total]:
    """The totals sorted by the settings in which they differ; numbers by size, others by their text.

    Args:
        found: totals of methods under settings.
    """
    names = varying(found)

    def key(total: Total) -> list[tuple[bool, float, str]]:
        values = [total.setting.get(name) for name in names]
        return [(False, value, "") if isinstance(value, int | float) else (True, 0, short(value)) for value in values]

    return sorted(found, key=key)


def common(found: Sequence[Total]) -> dict[str, Any]:
    """The settings that all totals share, by name.

    Args:
        found: totals of methods under settings.
    """
    differ = varying(found)
    return {name: value for name, value in found[0].setting.items() if name not in differ}


def table_of(found: Sequence[Total]) -> tuple[list[str], list[list[str]]]:
    """Make the column heads and the lines of a table.

    A column for each setting that differs comes first, then the figures that every table has (HEADS), then those of
    MORE that at least one line has.

    Args:
        found: totals, one for each line.
    """
    names = shown(found)
    more = {head: [cell(total) for total in found] for head, cell in MORE.items()}
    more = {head: column for head, column in more.items() if {*column} != {"-"}}
    lines = [[*cells(total, names), *of_line] for total, *of_line in zip(found, *more.values(), strict=True)]
    return [*names, *HEADS, *more], lines


def verdict(prompts: int, differing: int, near_ties: int) -> str:
    """The cell that compares a method's texts with plain decoding's: "equal", or "2 of 20 part at near-ties".

    The latter says that 2 of 20 texts differ, and that rounding explains where each of them first differs.

    Args:
        prompts: how many prompts were compared.
        differing: number of prompts on which the texts differ.
        near_ties: how many of these first differ where the two best scores are so close that rounding decides.
    """
    if not differing:
        return "equal"
    if near_ties == differing:
        return f"{differing} of {prompts} part at near-ties"
    beside = f", {near_ties} at near-ties" if near_ties else ""
    return f"differs on {differing} of {prompts}{beside}"


def spread(values: Sequence[float]) -> str:
    """The cell with the least and most speed-up over several rounds, as in "1.72-1.80x"; "-" for a single round.

    Args:
        values: the speed-up of each round.
    """
    return f"{min(values):.2f}-{max(values):.2f}x" if len(values) > 1 else "-"


def peak(total: Total) -> str:
    """The cell with the peak memory of the rank that took most, in MiB, as in "1,234"; "-" where it was not measured.

    Args:
        total: the line's totals.
    """
    return "-" if total.peak_bytes is None else f"{total.peak_bytes / (1 << 20):,.0f}"


def solved(total: Total) -> str:
    """The cell of pass@1, as in "42.0% (21, +1)": 42% or 21 prompts are solved, one more than plain decoding solves.

    Without plain decoding it is "42.0% (21)"; where texts were not judged, "-".

    Args:
        total: the line's totals.
    """
    if total.passed is None:
        return "-"
    of_all = f"{total.pass_at_1:.1%} ({total.passed}"
    plain = total.plain.passed if total.plain else None
    return of_all + (")" if plain is None else f", {total.passed - plain:+d})")


def quality(total: Total, name: str, *keys: str) -> str:
    """The cell of a quality figure's means over the prompts, as in "0.431" or "0.310/0.112/0.280"; "-" without any.

    Args:
        total: the line's totals.
        name: the figure: "perplexity", "distinct" or "rouge".
        keys: names of its parts, as in "rougeL"; none for a figure without parts.
    """
    means = [total.quality(name, key) for key in keys or (None,)]
    return "-" if {*means} == {None} else "/".join("-" if mean is None else f"{mean:.3f}" for mean in means)


def cells(total: Total, names: Sequence[str]) -> list[str]:
    """The cells of a line: the values of some settings, then the figures that every table has (HEADS).

    Args:
        total: the line's totals.
        names: the settings that have a column.
    """
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
    "perplexity": lambda total: quality(total, "perplexity"),
    "distinct-1/2/4": lambda total: quality(total, "distinct", "1", "2", "4"),  # n-grams: 1 is no repetition
    "ROUGE-1/2/L": lambda total: quality(total, "rouge", *ROUGE),
}
HEADS = ("method", "prompts", "tokens", "S", "tokens a step", "tokens/s", "vs plain", "output")


def short(value: Any) -> str:
    """A setting's value as text for a cell: lists as "1,2", dicts as "a=1 b=2", None as "null".

    Args:
        value: the value.
    """
    if isinstance(value, dict):
        return " ".join(f"{key}={short(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ",".join(map(short, value))
    return "null" if value is None else str(value)


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown, as a string.

    Args:
        heads: heads of the columns.
        lines: cells of each line.
    """
    head = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def caption(found: Sequence[Total]) -> str:
    """The machine and the settings that all lines share, on one line.

    Args:
        found: totals, one for each line.
    """
    hidden = ("methods", "device", "gguf", "quality", "attention", "capture", "repeats", "chat", "parameters")
    shared = {key: value for key, value in common(found).items() if key not in hidden and not key.startswith(DECODER)}
    if isinstance(size := common(found).get("parameters"), int):
        shared["model"] = f"{shared['model']} ({size / 1e6:.1f} M parameters)"
    machines = "; ".join(dict.fromkeys(total.hardware for total in found))
    torch = "; ".join(dict.fromkeys(record["versions"]["torch"] for total in found for record in total.records))
    shown = {key: value for key, value in shared.items() if value not in (None, [], False)}
    parts = [machines, f"torch {torch}", *_attention(found), *(f"{key} {short(value)}" for key, value in shown.items())]
    return ", ".join(parts)


def notes(found: Sequence[Total]) -> list[str]:
    """Lines for below a table: how many rounds were measured, and warnings about the times, such as a busy machine.

    Args:
        found: totals, one for each line.
    """
    rounds = {len(record.get("rounds_s") or []) for total in found for record in total.records} - {0}
    counts = " or ".join(map(str, sorted(rounds)))
    said = "one round, so its times have no known spread; repeats=3 gives one"
    lines = [said if rounds == {1} else f"medians of {counts} rounds, with least and most"] if rounds else []
    return lines + remarks([record for total in found for record in total.records])


def _attention(found: Sequence[Total]) -> list[str]:
    """Which backend computed attention, in words; if methods differ, with their names. Old records do not have it."""
    methods: dict[str, list[str]] = {}
    for total in found:
        for record in total.records:
            if name := record.get("attention"):
                name += f", captured by {record['captured']}" if record.get("captured") else ""
                methods.setdefault(name, []).append(total.method)
    if len(methods) == 1:
        return [f"attention {name}" for name in methods]
    return [f"attention of {' and '.join(dict.fromkeys(of))}: {name}" for name, of in methods.items()]
