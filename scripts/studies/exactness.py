"""How often rounding makes lookahead and plain decoding differ, by dtype.

    python scripts/tables.py exactness --task data/humaneval.jsonl --limit 8 --max-new-tokens 128
    python scripts/tables.py exactness --model FOLDER --builtin 8 --reference plain --temperatures 0,0.8
    python scripts/tables.py exactness --model FOLDER --builtin 8 --reference plain --exact tokens bitwise

A step of many tokens runs other kernels than a step of one, which add in another order; where the two best scores tie
within rounding, either may win. Every first difference is listed with the float64 model's gap of its two best scores.
The built-in prompts come first, then those of --task. Against plain decoding logits are compared, too, bit for bit:
with `--exact bitwise` none may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

import lp
from launch.bench.compare import Prediction, first_difference
from launch.data.prompts import Prompt, load_builtin
from lp.models.loader import load

from .harness import PAPER, Method, PromptStudy, Result, Row, Table, grouped, option, sampling_at, total, values

DTYPES = ["float64", "float32", "float16", "bfloat16"]
REFERENCES = ["generate", "plain"]

Texts = Callable[[list[int], lp.SamplingParams | None], lp.GenerationOutput]


@dataclass(kw_only=True)
class Exactness(PromptStudy):
    """Lookahead against plain decoding, text by text."""

    builtin: int | None = option(None, "so many of the built-in prompts; all without it")
    dtypes: list[str] = option(DTYPES, choices=DTYPES)
    reference: str = option("generate", "whose texts are the right ones", REFERENCES)
    temperatures: list[float] = option([0.0])
    exact: list[str] = option(["tokens"], "the modes", ["tokens", "bitwise"])
    attention: str = option("auto")
    SHARED = ("model", "threads", "max_new_tokens", "reference", "attention")

    @classmethod
    def _hidden(cls) -> set[str]:
        return super()._hidden() | {"dtype"}

    @cached_property
    def prompts(self) -> list[Prompt]:
        return load_builtin(self.builtin) + (super().prompts if self.task else [])

    def rows(self) -> Iterable[Row]:
        for dtype in self.dtypes:
            for exact in self.exact:
                for temperature in self.temperatures:
                    for prompt in self.prompts:
                        key = {"dtype": dtype, "exact": exact, "temperature": temperature, "prompt": prompt.task_id}
                        yield Row(key, prompt.text)

    def methods(self) -> Mapping[str, Method]:
        torch.set_num_threads(self.threads)
        made = lru_cache(maxsize=1)(self.decoders)  # rows of one dtype and mode follow each other
        wide = lru_cache(maxsize=1)(lambda: load(self.model, "float64").model)

        def compare(row: Row) -> Result:
            tokenizer, plain, lookahead = made(row.key["dtype"], row.key["exact"])
            ids = tokenizer(row.item)["input_ids"]
            sampling = sampling_at(row.key["temperature"])
            expected, found = plain(ids, sampling), lookahead(ids, sampling)
            at = first_difference(found.tokens, expected.tokens)
            gap = None
            if at is not None:
                gap = Prediction.after(wide(), [*ids, *expected.tokens[:at]], sampling).gap()
            other_logits = None
            if found.logits is not None and expected.logits is not None:
                other_logits = not torch.equal(found.logits, expected.logits)
            return {
                "tokens": len(expected.tokens) if at is None else at + 1,
                "position": at,
                "gap": None if gap is None else round(gap, 6),
                "other_logits": other_logits,
            }

        return {"": compare}

    def decoders(self, dtype: str, exact: str) -> tuple[Any, Texts, Texts]:
        """The tokenizer, plain decoding and lookahead of a dtype and mode."""
        loaded = load(self.model, dtype)
        config = lp.LookaheadConfig(**PAPER)
        lookahead = lp.LookaheadDecoder(loaded.model, config, attention=self.attention, exact=exact)
        if self.reference == "plain":
            plain = lp.PlainDecoder(loaded.model, attention=self.attention, exact=exact)
            return loaded.tokenizer, self.text_of(plain), self.text_of(lookahead)
        if exact == lp.Exact.BITWISE:
            raise lp.UserError("exact is 'bitwise', which promises plain decoding's own bits; take --reference plain")
        return loaded.tokenizer, self.generated(loaded.model), self.text_of(lookahead)

    def text_of(self, decoder: lp.Decoder) -> Texts:
        """Texts by one of lp's decoders, with logits where plain decoding on the same engine has them."""
        logits = self.reference == "plain"
        return lambda ids, sampling: decoder.generate(ids, self.max_new_tokens, sampling, output_logits=logits)

    def generated(self, model: Any) -> Texts:
        """Texts by transformers' own `generate`."""

        def text(ids: list[int], sampling: lp.SamplingParams | None) -> lp.GenerationOutput:
            if sampling is not None:
                remedy = "take --temperatures 0, or --reference plain"
                raise lp.UserError(f"transformers' generate draws other noise; {remedy}")
            batch = torch.tensor([ids])
            given = {"attention_mask": torch.ones_like(batch), "max_new_tokens": self.max_new_tokens}
            tokens = model.generate(batch, do_sample=False, **given)
            return lp.GenerationOutput(tokens[0, len(ids) :].tolist(), "", [])

        return text

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines, parted = [], []
        for (dtype, exact), of in grouped(results, "dtype", "exact").items():
            differing = [result for result in of if result["position"] is not None]
            parted += differing
            tokens = total(of, "tokens")
            often = f"{tokens // len(differing):,}" if differing else "-"
            largest = max((gap for gap in values(differing, "gap") if gap is not None), default="-")
            bits = "-" if of[0]["other_logits"] is None else str(total(of, "other_logits"))
            lines.append((dtype, exact, f"{len(differing)} of {len(of)}", bits, f"{tokens:,}", often, str(largest)))
        heads = (
            "dtype",
            "exact",
            "texts that part",
            "other logits",
            "tokens",
            "one in ... tokens",
            "largest gap there",
        )
        yield Table(heads, lines)
        if parted:
            names = ("dtype", "exact", "temperature", "prompt", "position", "gap")
            yield Table(names, [[str(result[name]) for name in names] for result in parted], "First differences")
