"""Sums of a method's runs over prompts, from which every table, plot and JSON object of methods takes its figures.

S: generated tokens per decode step. The oracle is decoder=autoregressive, one token per step without lp's engine.
"""

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
from .quality import DISTINCT, ROUGE
from .records import Record, digest

DECODER = "decoder."  # begins the names of the decoder's own settings


@dataclass(frozen=True, kw_only=True)
class Total:
    """A method's runs over prompts under one setting, added up.

    Attributes:
        method: the method's name.
        prompts: how many prompts were continued.
        tokens: generated tokens, without those that a resumed run read from its journal.
        steps: decode steps.
        step_tokens: tokens that rank 0 computed in all these steps.
        decode_s: seconds of decoding without the prefill: the sum of each prompt's median round.
        rounds_s: seconds of every round, all prompts together; empty where rounds were not recorded.
        differing: number of prompts whose tokens differ from those of decoder=autoregressive; None if tokens were not
            compared, or need not be equal.
        near_ties: how many of these first differ where two scores are so close that rounding decides.
        interrupted: whether Ctrl-C cut the run short.
        plain: totals of plain decoding on the same prompts in the same run, else of decoder=autoregressive; None if
            neither ran.
        records: the records that were added up, one for each prompt; empty for runs without a record file.
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
        """Add up a method's runs that have just been measured, one for each prompt.

        Args:
            method: the method's name.
            runs: one run for each prompt.
            differences: first differences of all methods' tokens from plain decoding's, of which those of this method
                count; None if tokens were not compared.
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
        """Add up one method's records, which were all measured under one setting.

        Args:
            records: one record for each prompt.
            plain: totals of plain decoding on the same prompts in the same run; None if it did not run.
        """
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
        """Return these totals with one more text added.

        Args:
            output: output of decoding that text.
            decode_s: seconds that its decoding took; None takes those of `output`.
        """
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
        """S, generated tokens per decode step; 0 without steps."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of decoding, without the prefill."""
        return self.tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_a_step(self) -> float:
        """Mean tokens that rank 0 computes in a decode step."""
        return self.step_tokens / max(self.steps, 1)

    @property
    def rates(self) -> list[float]:
        """Tokens/s of every round; empty where rounds were not recorded."""
        return [self.tokens / seconds for seconds in self.rounds_s]

    @property
    def speedups(self) -> list[float]:
        """Speed-up over plain decoding in every round.

        Empty for plain decoding itself, and if plain decoding did not run.
        """
        if self.plain is None or self.plain.method == self.method:
            return []
        return [rate / plain for rate, plain in zip(self.rates, self.plain.rates, strict=False)]

    @property
    def speedup(self) -> float | None:
        """Speed-up over plain decoding in the same run, the median over the rounds; None without plain decoding."""
        if self.speedups:
            return median(self.speedups)
        return self.tokens_per_s / self.plain.tokens_per_s if self.plain and self.plain.tokens_per_s else None

    @property
    def task(self) -> str:
        """Name of the task whose prompts were continued; read from the records."""
        return str(self.records[0]["task"])

    @property
    def setting(self) -> dict[str, Any]:
        """The settings by name, as in records; those of the decoder are named "decoder.KEY", without its W, N and G."""
        setting = dict(self.records[0]["settings"])
        decoder = setting.pop("decoder", None) or {}
        return setting | {f"{DECODER}{key}": value for key, value in decoder.items() if key not in SHAPE_KEYS}

    @property
    def guess_set_size(self) -> int | None:
        """G, the guess set size of this method; None for a method without a guess set."""
        size = self.setting["G"]
        return size.get(self.method.partition("@")[0]) if isinstance(size, dict) else size

    @property
    def hardware(self) -> str:
        """The machine in words; several machines, separated by "; ", if a run was resumed on another one."""
        return "; ".join(dict.fromkeys(record["hardware"] for record in self.records))

    @property
    def accepted(self) -> dict[int, int]:
        """Number of decode steps that accepted 0, 1, 2, ... draft tokens, by the number of accepted tokens."""
        found: dict[int, int] = {}
        for record in self.records:
            for length, count in (record.get("accepted") or {}).items():
                found[int(length)] = found.get(int(length), 0) + count
        return found

    def a_step(self, name: str) -> float:
        """Mean over all decode steps and ranks of a figure that records hold for each rank; 0 where they lack it.

        Args:
            name: a field of a record's "split": "num_tokens", "forward_ms", "exchange_ms" or "host_ms".
        """
        splits = [(record["steps"], record["split"]) for record in self.records if record.get("split")]
        sums = sum(steps * fmean(each[name] for each in split) for steps, split in splits)
        return sums / max(self.steps, 1)

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the rank that took most, in bytes; None where records do not have it."""
        return max((record.get("peak_bytes") or 0 for record in self.records), default=0) or None

    def quality(self, name: str, key: str | None = None) -> float | None:
        """Mean over the prompts of a quality figure; None where records have none (quality=false).

        Args:
            name: the figure: "perplexity", "distinct" or "rouge".
            key: name of the part, for a figure that has several, as in "rougeL"; None for a figure without parts.
        """
        found = [record["quality"][name] for record in self.records if record.get("quality")]
        values = [value if key is None else value[key] for value in found if value is not None]
        values = [value for value in values if value is not None]
        return fmean(values) if values else None

    def _parts(self, name: str, keys: Iterable[str]) -> dict[str, float]:
        """The parts of a quality figure that the records have, as in "rougeL", each as a mean over the prompts."""
        means = {key: self.quality(name, key) for key in keys}
        return {key: mean for key, mean in means.items() if mean is not None}

    @property
    def passed(self) -> int | None:
        """How many prompts' texts solve their task; None where texts were not judged."""
        checks = [record.get("check") for record in self.records]
        return None if None in checks else sum(check["passed"] for check in checks if check)

    @property
    def pass_at_1(self) -> float | None:
        """Share of the prompts whose text solves its task, 0 to 1; None where texts were not judged."""
        return None if self.passed is None else self.passed / self.prompts

    def figures(self) -> dict[str, Any]:
        """All figures by name, for a line of JSON or CSV."""
        judged = {} if self.passed is None else {"passed": self.passed, "pass_at_1": self.pass_at_1}
        quality = {
            "perplexity": self.quality("perplexity"),
            "distinct": self._parts("distinct", map(str, DISTINCT)),
            "rouge": self._parts("rouge", ROUGE),
        }
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
            **{name: value for name, value in quality.items() if value},
        }


def totals(records: Iterable[Record]) -> list[Total]:
    """Add up records into one total for each setting and method, in the order in which their first records come.

    Args:
        records: records of any settings and methods.
    """
    grouped: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        grouped.setdefault(digest(record["settings"]), {}).setdefault(record["method"], []).append(record)
    found = []
    for methods in grouped.values():
        reference = methods.get(PLAIN) or methods.get(ORACLE)
        plain = Total.of_records(reference) if reference else None
        found += [Total.of_records(of_method, plain) for of_method in methods.values()]
    return found
