"""One harness for all studies: options, rows x methods, resume, rounds in turn, spread, tables, figure, page.

A study is a subclass of `Study` in a module of this folder. Its dataclass fields are its options on the command line.
It says what its rows and methods are, and makes tables of their results; `Study.run` does the rest:

1. take the results that the file has, if `--results` names one;
2. measure what is left: on each row all methods in turn, as many rounds as asked for;
3. print the settings, the tables and one line of JSON, draw the figure and write the page, where they are asked for.

A study that measures nothing, as one that writes a page of the docs, is a subclass of `Command`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import types
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import transformers
from rich.progress import track

import lp
from launch.bench.table_text import markdown
from launch.data.prompts import Prompt, load_builtin, load_jsonl
from lp.digest import chain_digest
from lp.errors import UserError
from lp.models.loader import Loaded, load

T = TypeVar("T")
Result = dict[str, Any]  # values that JSON has
PAPER: dict[str, Any] = {"window_size": 7, "ngram_size": 5, "guess_set_size": 7}  # of studies of one shape
BUILTIN = "builtin"  # the task of the prompts that come with the package


class Row(NamedTuple):
    """What every method of a study is measured on.

    Attributes:
        key: names and JSON values that tell the row from others in a file of results.
        item: what methods work on.
    """

    key: dict[str, Any]
    item: Any = None


class Table(NamedTuple):
    """A Markdown table that a study prints and writes into a page of the docs.

    Attributes:
        heads: one for each column.
        lines: cells of text.
        title: a line above it.
        note: lines behind it.
    """

    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""

    def __str__(self) -> str:
        above = f"{self.title}\n\n" if self.title else ""
        behind = f"\n{self.note}\n" if self.note else ""
        return f"{above}{markdown(self.heads, self.lines)}{behind}"


def task_rows(tasks: Sequence[Path], limit: int | None, temperatures: Sequence[float], option: str) -> Iterator[Row]:
    """A row for each of the first `limit` prompts of every task at each temperature; the item is the prompt's text.

    Raises:
        UserError: there is no task; names the option.
    """
    if not tasks:
        raise UserError(f"no task is given; give {option}")
    for task in tasks:
        for index, prompt in enumerate(load_jsonl(task, limit)):
            for temperature in temperatures:
                yield Row({"task": task.stem, "index": index, "temperature": temperature}, prompt.text)


Method = Callable[[Row], Result | None]  # None: it has nothing to measure on this row


def option(default: Any = MISSING, help: str = "", choices: Sequence[str] | None = None) -> Any:
    """A dataclass field that is an option of the command line; a positional argument where it has no default.

    Args:
        default: its value where the command does not have it; a list gives an option of several values.
        help: a few words.
        choices: the values that are allowed.
    """
    metadata = {"help": help, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Command(ABC):
    """A command of scripts/tables.py, whose fields made with `option` are its options."""

    stack: ExitStack = field(default_factory=ExitStack, repr=False)  # what is closed behind the command

    @abstractmethod
    def run(self) -> None:
        """Do what the command is for, and print what it found.

        Raises:
            UserError: ends the command with one line.
        """

    @classmethod
    def parser(cls, prog: str, description: str) -> argparse.ArgumentParser:
        """Make the parser of the command line: one option for each field made with `option`."""
        plain = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=plain)
        hints = get_type_hints(cls)
        for name, each in cls._options().items():
            _add_option(parser, each, hints[name])
        return parser

    @classmethod
    def _options(cls) -> dict[str, Any]:
        """The fields that are options, by name; those of the class itself before those of its bases."""
        found = {each.name: each for each in fields(cls) if "help" in each.metadata}
        names = dict.fromkeys(name for base in cls.__mro__ for name in vars(base).get("__annotations__", ()))
        return {name: found[name] for name in names if name in found.keys() - cls._hidden()}

    @classmethod
    def _hidden(cls) -> set[str]:
        """Names of options of a base class that this one has no use for: the command line does not offer them."""
        return set()

    @property
    def settings(self) -> dict[str, Any]:
        """What the command was asked for, by name, without files and time limits, which change no figure."""
        files = ("results", "seconds", "page", "figure")
        return {name: getattr(self, name) for name in self._options() if name not in files}


def _add_option(parser: argparse.ArgumentParser, option: Any, hint: Any) -> None:
    """Add a field to a parser; what is not given is left to the field's default."""
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    kind = kinds[0] if get_origin(hint) in (Union, types.UnionType) else hint
    given: dict[str, Any] = {"help": option.metadata["help"], "choices": option.metadata["choices"]}
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
        given["nargs"] = "*"
    positional = option.default is MISSING and option.default_factory is MISSING
    if positional:
        parser.add_argument(option.name, type=kind, **given)
        return
    name = f"--{option.name.replace('_', '-')}"
    if kind is bool:
        parser.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=given["help"])
        return
    default = option.default_factory() if option.default_factory is not MISSING else option.default
    if default not in (None, []):
        given["help"] = f"{given['help']} (default: {default})".strip()
    if "nargs" in given and kind in (int, float):
        given["action"], kind = _Flat, by_commas(kind)
    parser.add_argument(name, type=kind, default=argparse.SUPPRESS, **given)


class _Flat(argparse.Action):
    """Keeps the numbers of an option whose values have commas, spaces or both between them."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, [each for several in values for each in several])


def by_commas(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """The type of an option that takes several values."""

    def several(text: str) -> list[T]:
        return [kind(each) for each in text.split(",")]

    several.__name__ = f"list of {kind.__name__}"  # for argparse's errors
    return several


class ResultFile:
    """Results of rows and methods, each a line of JSON, which a stopped run goes on from.

    Args:
        path: JSONL file that results are read from and appended to; None: they are kept in memory alone.
        shared: settings that the lines must have, and get: lines of other settings are not this study's.
        writes: whether this process writes the file: of several ranks, one does.
    """

    def __init__(self, path: Path | None, shared: Mapping[str, Any], writes: bool = True) -> None:
        self.path = path
        self.shared = dict(shared)
        self.writes = writes
        lines = read_results(path) if path else []
        self.lines = [line for line in lines if self.shared.items() <= line.items()]

    def by(self, names: Sequence[str]) -> dict[tuple[Any, ...], Result]:
        """The lines by these of their values, equal ones in one; lines without one of the values are left out."""
        found: dict[tuple[Any, ...], Result] = {}
        for line in self.lines:
            if line.keys() >= {*names}:
                key = tuple(line[name] for name in names)
                found[key] = found.get(key, {}) | line
        return found

    def add(self, result: Result) -> Result:
        """Keep a result; it is in the file from now on."""
        assert not result.keys() & self.shared.keys(), "a result's value would be taken for a setting"
        self.lines.append(result | self.shared)
        if self.path and self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.lines[-1]) + "\n")
        return self.lines[-1]


def read_results(path: Path) -> list[Result]:
    """The objects of a JSONL file; none if there is no such file. A line that an interrupt cut is taken out."""
    if not path.exists():
        return []
    whole, newline, cut = path.read_bytes().rpartition(b"\n")
    if cut:
        path.write_bytes(whole + newline)
    return [json.loads(line) for line in whole.decode("utf-8").split("\n") if line]


@dataclass(kw_only=True)
class Study(Command):
    """Rows x methods, each measured so many times in turn."""

    # Which settings all lines of a file of results share: those that change a result and are no part of a row.
    SHARED: ClassVar[tuple[str, ...]] = ("model", "dtype", "threads", "max_new_tokens")
    WARM_UP: ClassVar[int] = 0  # rounds of each row before those that count

    results: Path | None = option(None, "JSONL to write, or to go on with")
    seconds: float = option(math.inf, "stop measuring after this time; 0 prints what the file has")
    page: Path | None = option(None, "Markdown whose part between two comments the tables replace")
    figure: Path | None = option(None, "PNG to draw")
    rounds: int = 1

    def rows(self) -> Iterable[Row]:
        """What is measured, in order; the keys of all rows have the same names."""
        return ()

    def methods(self) -> Mapping[str, Method]:
        """What is measured on each row, by name; the name "" is for the one method of a study that has no others."""
        return {}

    def check(self, row: Row, results: list[Result]) -> None:
        """Refuse the results of a row that can't be right.

        Raises:
            RuntimeError: names the method and what is wrong.
        """

    def tables(self, results: list[Result]) -> Iterable[Table]:
        """Make the tables that the study prints, from the results of all rows and methods."""
        return ()

    def draw(self, results: list[Result], path: Path) -> None:
        """Draw the figure of the results into a file; a study without this method has no --figure."""

    def shared(self) -> dict[str, Any]:
        """Settings that every line of a file of results must share, so that none of another run's is taken."""
        return {name: getattr(self, name) for name in self.SHARED if hasattr(self, name)}

    @property
    def name(self) -> str:
        """What the command line calls it: the name of its module."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def turns(self) -> int:
        """How often each method is measured on each row."""
        return self.rounds

    @property
    def prints(self) -> bool:
        """Whether this process prints: of several ranks, one does."""
        return True

    def run(self) -> None:
        results = self.measure()
        tables = [*self.tables(results)]
        if not self.prints:
            return
        text = "\n".join([f"{self.heading()}\n", *map(str, tables)])
        print(text)
        if self.page:
            write_part(self.page, self.name, text)
        if self.figure:
            self.draw(results, self.figure)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        found = {} if self.results else {"results": results}
        print(json.dumps({"study": self.name, "settings": self.settings} | versions | found, default=str))

    def heading(self) -> str:
        """The line above the tables: the settings and releases that the figures hold for."""
        settings = ", ".join(f"{name} {_worded(value)}" for name, value in self.settings.items() if value)
        return f"{settings}; torch {torch.__version__}, transformers {transformers.__version__}"

    def measure(self) -> list[Result]:
        """The results of every row, method and round, those of the file among them.

        The methods of a row take turns, and each row and round begins with another one.

        Raises:
            RuntimeError: see `check`.
            UserError: the file has no results, and none may be measured.
        """
        rows, methods = [*self.rows()], self.methods()
        file = ResultFile(self.results, self.shared(), self.prints)
        names = [name for row in rows[:1] for name in self._key(row, next(iter(methods)), 0)]
        done = file.by(names)
        end = time.monotonic() + self.seconds
        found: list[Result] = []
        left = 0
        for number, row in enumerate(progress(rows, self.name)):
            turns = [(name, at) for at in range(self.turns) for name in _rotated([*methods], number + at)]
            keys = {turn: self._key(row, *turn) for turn in turns}
            missing = [turn for turn, key in keys.items() if (*key.values(),) not in done]
            if missing and time.monotonic() >= end:
                left += 1
                missing = []
            for name, _ in missing[: len(methods)] * self.WARM_UP:
                methods[name](row)
            for turn in missing:
                if result := timed(methods[turn[0]], row):
                    done[(*keys[turn].values(),)] = file.add(keys[turn] | result)
            here = [done[values] for key in keys.values() if (values := (*key.values(),)) in done]
            self.check(row, here)
            found += here
        if left:
            print(f"{left} of {len(rows)} rows are left", file=sys.stderr)
        if rows and not found:
            raise UserError(f"{self.results} has no results of these settings, and none were measured")
        return found

    def _key(self, row: Row, method: str, round_: int) -> dict[str, Any]:
        """What tells a line of the file from the others; a single method or round is not named."""
        return row.key | ({"method": method} if method else {}) | ({"round": round_} if self.turns > 1 else {})

    @classmethod
    def _hidden(cls) -> set[str]:
        hidden = {"figure"} if cls.draw is Study.draw else set()
        return hidden | ({"results", "seconds"} if cls.rows is Study.rows else set())


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timed(method: Method, row: Row) -> Result | None:
    """Measure a method on a row; "seconds" is added where the result does not say them itself."""
    start = time.perf_counter()
    result = method(row)
    took_s = time.perf_counter() - start
    return None if result is None else {"seconds": took_s} | result


def _rotated(items: list[T], by: int) -> list[T]:
    by = by % max(len(items), 1)
    return items[by:] + items[:by]


def _worded(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def progress(items: Sequence[T], description: str) -> Iterable[T]:
    """The items, with a bar on a terminal."""
    return track(items, description, disable=not sys.stderr.isatty())


def write_part(page: Path, name: str, text: str) -> None:
    """Replace the part of a page that a study writes.

    Args:
        page: a Markdown file.
        name: the study's; the part is between `<!-- NAME -->` and `<!-- end of NAME -->`.
        text: the part.

    Raises:
        UserError: the page has no such part.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise UserError(f"{page} has no lines {begin} and {end}, between which the tables would be; add them")
    page.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


@dataclass(kw_only=True)
class ModelStudy(Study):
    """A study that needs one model: its options, and loading it at the first use."""

    model: str = option("demo", "folder, hub name or demo")
    dtype: str = option("float32")
    threads: int = option(1)

    @cached_property
    def loaded(self) -> Loaded:
        """The model, on this many threads; loaded at its first use, which a finished study never comes to."""
        torch.set_num_threads(self.threads)
        return load(self.model, self.dtype)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, by the model's tokenizer."""
        return list(self.loaded.tokenizer(text)["input_ids"])


@dataclass(kw_only=True)
class TextStudy(ModelStudy):
    """A study of texts that one model writes: options and methods for decoding them."""

    max_new_tokens: int = option(256)

    def decodes(
        self,
        build: Callable[[Any], lp.Decoder],
        sampling: lp.SamplingParams | None = None,
        result: Callable[[lp.GenerationOutput, Row], Result] | None = None,
    ) -> Method:
        """A method that decodes a row's item: a prompt as text or as tokens, or a text that has one.

        Args:
            build: makes the decoder of a model, at its first row.
            sampling: how every row is sampled; None: coupled sampling at the row's temperature.
            result: makes the row's result of what was generated; None: `counts` does.
        """
        decoder = cache(lambda: build(self.loaded.model))

        def method(row: Row) -> Result:
            ids = self.ids(row.item) if isinstance(row.item, str) else getattr(row.item, "prompt", row.item)
            at = sampling or sampling_at(row.key.get("temperature", 0.0))
            # The index of a prompt is its sequence, so that noise differs.
            own = decoder()
            start = time.perf_counter()
            output = own.generate(ids, self.max_new_tokens, at, sequence=row.key["index"])
            took_s = time.perf_counter() - start
            return {"seconds": took_s} | (result(output, row) if result else counts(output))

        return method


@dataclass(kw_only=True)
class PromptStudy(TextStudy):
    """A study of one model on prompts: the options that choose the prompts, and a row for each."""

    task: Path | None = option(None, "JSONL of prompts; the built-in ones without it")
    limit: int | None = option(None, "first prompts of the task")

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts that the options choose, in order."""
        return load_jsonl(self.task, self.limit) if self.task else load_builtin(self.limit)

    @property
    def task_name(self) -> str:
        """The task's name in results and tables."""
        return self.task.stem if self.task else BUILTIN

    def prompt_rows(self, **key: Any) -> Iterator[Row]:
        """A row for each prompt.

        Args:
            key: what the rows' keys begin with.
        """
        for index, prompt in enumerate(self.prompts):
            yield Row(key | {"task": self.task_name, "index": index}, prompt.text)


def counts(output: lp.GenerationOutput) -> Result:
    """A text's tokens, steps and step tokens, and a digest that equal texts share."""
    return {
        "tokens": len(output.tokens),
        "steps": output.steps,
        "num_tokens": sum(step.num_tokens for step in output.step_stats),
        "text": chain_digest(0, output.tokens),
    }


def sampling_at(temperature: float) -> lp.SamplingParams | None:
    """Coupled sampling with seed 0; None, which is greedy, at temperature 0."""
    return lp.SamplingParams(temperature=temperature, seed=0) if temperature else None


def budget_config(num_tokens: int, **changes: Any) -> lp.LookaheadConfig:
    """A fixed budget of this many step tokens: N = 2, a sixth of them window columns."""
    window = num_tokens // 6
    shape: dict[str, Any] = {"window_size": window, "ngram_size": 2, "guess_set_size": num_tokens - max(window, 1)}
    return lp.LookaheadConfig(**shape | changes)


def grouped(results: Iterable[Result], *names: str) -> dict[Any, list[Result]]:
    """Group results by their values of these names; a group's key is the tuple of them, or a single name's value."""
    groups: dict[Any, list[Result]] = defaultdict(list)
    for result in results:
        values = tuple(result[name] for name in names)
        groups[values if len(names) > 1 else values[0]].append(result)
    return dict(groups)


def total(results: Iterable[Result], name: str) -> Any:
    """The sum of one value over results."""
    return sum(result[name] for result in results)


def compression(results: Sequence[Result]) -> float:
    """S: tokens of all results over their steps."""
    return float(total(results, "tokens") / total(results, "steps"))


def step_tokens(results: Sequence[Result]) -> float:
    """Mean number of tokens that a step computed, over all results."""
    return float(total(results, "num_tokens") / total(results, "steps"))


def values(results: Iterable[Result], name: str = "seconds") -> list[Any]:
    """The value that each result has under this name, such as its seconds, for a median or a spread."""
    return [result[name] for result in results]


def ratios(upper: Sequence[float], lower: Sequence[float]) -> list[float]:
    """Ratio of each pair of measurements that were made in turn: what slows both of a pair leaves it as it is."""
    return [above / below for above, below in zip(upper, lower, strict=True)]


def spread(values: Sequence[float], digits: int = 0, unit: str = "") -> str:
    """The median with the least and most, as "2.04 x (1.90 to 2.20)"; of one value, that it is one.

    Args:
        values: at least one, a measurement each.
        digits: decimals that are written.
        unit: text behind the median, such as " x".
    """
    middle = f"{median(values):.{digits}f}"
    about = f"{min(values):.{digits}f} to {max(values):.{digits}f}" if len(values) > 1 else "measured once"
    return f"{middle}{unit} ({about})"
