"""A method's runs added up: the one set of figures behind every table, plot and JSON of methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from lp.engine.output import GenerationOutput

from ..config.builders import ORACLE, PLAIN
from ..config.schema import SHAPE_KEYS
from .alternation import Measured
from .compare import Difference
from .records import Record, digest

DECODER = "decoder."  # begins the names of the decoder's own settings


@dataclass(frozen=True, kw_only=True)
class Total:
    """A method's runs over prompts under one setting, added up.

    Attributes:
        method: the method's name.
        prompts: how many prompts were continued.
        tokens: generated tokens, without those that a journal had.
        steps: steps that were taken.
        step_tokens: tokens that rank 0 computed in all these steps.
        decode_s: seconds of decoding without the prefill: the median round of each prompt.
        rounds_s: seconds of every round, all prompts together; empty where there is no count of rounds.
        differing: prompts whose tokens are not the oracle's; None where nothing was promised or compared.
        near_ties: how many of the differing part from plain decoding where rounding lets either token win.
        interrupted: Ctrl-C cut the run short.
        plain: plain decoding of the same prompts in the same run, or the oracle where that did not run; None if neither
            did.
        records: the records that were added up, one a prompt; empty for runs without a file.
    """

    method: str
    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    step_tokens: float = 0.0
    decode_s: float = 0.0
    rounds_s: Sequence[float] = ()
    differing: int | None = None
    near_ties: int = 0
    interrupted: bool = False
    plain: Total | None = None
    records: list[Record] = field(default_factory=list)

    @classmethod
    def of_runs(cls, method: str, runs: Iterable[Measured], differences: Iterable[Difference] | None = None) -> Total:
        """Totals of runs that have just been measured.

        Args:
            method: the method's name.
            runs: one run for each prompt.
            differences: where texts of any method part from the oracle's; None if they were not compared.
        """
        runs = list(runs)
        total = cls(method=method)
        for run in runs:
            total = total.plus(run.output, run.decode_s)
        rounds_s = [sum(times) for times in zip(*(run.rounds_s for run in runs), strict=False)]
        if differences is None:
            return replace(total, rounds_s=rounds_s)
        own = [difference for difference in differences if difference.method == method]
        ties = sum(difference.near_tie for difference in own)
        return replace(total, rounds_s=rounds_s, differing=len(own), near_ties=ties)

    @classmethod
    def of_records(cls, records: list[Record], plain: Total | None = None) -> Total:
        """Totals of a method's records under one setting."""
        rounds = [record.get("rounds_s") or [] for record in records]
        equal = [record.get("equal") for record in records]
        differences = [record.get("difference") for record in records]
        return cls(
            method=str(records[0]["method"]),
            prompts=len(records),
            tokens=sum(record["tokens"] for record in records),
            steps=sum(record["steps"] for record in records),
            step_tokens=sum(record.get("tokens_a_step", 0.0) * record["steps"] for record in records),
            decode_s=sum(record["decode_s"] for record in records),
            rounds_s=[sum(times) for times in zip(*rounds, strict=False)],
            differing=None if None in equal else equal.count(False),
            near_ties=sum(bool(each and each["near_tie"]) for each in differences),
            plain=plain,
            records=records,
        )

    def plus(self, output: GenerationOutput, decode_s: float | None = None) -> Total:
        """These totals and one more text, whose seconds of decoding are its own unless they are given."""
        return replace(
            self,
            prompts=self.prompts + 1,
            tokens=self.tokens + len(output.tokens) - output.resumed,
            steps=self.steps + output.steps,
            step_tokens=self.step_tokens + output.mean_tokens * output.steps,
            decode_s=self.decode_s + (output.decode_s if decode_s is None else decode_s),
        )

    @property
    def compression(self) -> float:
        """S: tokens a step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed, without the prefill."""
        return self.tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_a_step(self) -> float:
        """Mean step tokens of rank 0."""
        return self.step_tokens / max(self.steps, 1)

    @property
    def rates(self) -> list[float]:
        """Tokens/s of every round; empty where records do not say."""
        return [self.tokens / seconds for seconds in self.rounds_s]

    @property
    def speedups(self) -> list[float]:
        """Speed-up over plain decoding, round by round; empty for plain decoding itself."""
        if self.plain is None or self.plain.method == self.method:
            return []
        return [rate / plain for rate, plain in zip(self.rates, self.plain.rates, strict=False)]

    @property
    def speedup(self) -> float | None:
        """Speed-up over plain decoding of the same run: the median round's, which lies between least and most."""
        if self.speedups:
            return median(self.speedups)
        return self.tokens_per_s / self.plain.tokens_per_s if self.plain and self.plain.tokens_per_s else None

    @property
    def task(self) -> str:
        return str(self.records[0]["task"])

    @property
    def setting(self) -> dict[str, Any]:
        """Settings as in the records, the decoder's own as decoder.KEY; its W, N and G are the run's."""
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
    def peak_bytes(self) -> int | None:
        """Most memory of a rank; None where records do not say."""
        return max((record.get("peak_bytes") or 0 for record in self.records), default=0) or None

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
        """Everything a line of JSON or CSV says of a method in a benchmark."""
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
    """Totals for each setting and method, in the order in which they first come."""
    grouped: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        grouped.setdefault(digest(record["settings"]), {}).setdefault(record["method"], []).append(record)
    found = []
    for methods in grouped.values():
        reference = methods.get(PLAIN) or methods.get(ORACLE)
        plain = Total.of_records(reference) if reference else None
        found += [Total.of_records(of_method, plain) for of_method in methods.values()]
    return found
