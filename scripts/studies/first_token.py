"""Time to the first token of a prompt that begins like an earlier one, against the same anew.

python scripts/tables.py first_token --prompt-tokens 1500 --seen 1450

Prompts are drawn tokens, since their time does not depend on which they are. Both ways in turn, in one engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import lp
from lp.models.loader import vocabulary_size

from .harness import Method, ModelStudy, Result, Row, Table, grouped, option, ratios, seconds_of, spread, values


@dataclass(kw_only=True)
class FirstToken(ModelStudy):
    """Times the first token of drawn prompts, with the cached beginning reused and computed anew."""

    prompt_tokens: int = option(1500)
    seen: int = option(1450, "first tokens that the earlier prompt has too")
    prompts: int = option(5, "drawn prompts")
    SHARED = (*ModelStudy.SHARED, "prompt_tokens", "seen")

    def rows(self) -> Iterable[Row]:
        return [Row({"prompt": number}) for number in range(self.prompts)]

    @cached_property
    def engine(self) -> lp.Engine:
        """The engine that both ways use, so that they differ in the reuse alone."""
        return lp.Engine(lp.LookaheadDecoder(self.loaded.model))

    def drawn(self, row: Row) -> tuple[list[int], list[int]]:
        """Draw an earlier prompt, and one that begins like it: what a row's methods are measured on."""
        draws = random.Random(row.key["prompt"])
        vocabulary = range(vocabulary_size(self.loaded.model))
        shared = draws.choices(vocabulary, k=self.seen)
        ends = (draws.choices(vocabulary, k=self.prompt_tokens - self.seen) for _ in range(2))
        earlier, prompt = (shared + end for end in ends)
        return earlier, prompt

    def methods(self) -> Mapping[str, Method]:
        def first_token(prompt: list[int]) -> None:
            self.engine.submit(prompt, 1)
            self.engine.run()

        def way(is_seen: bool) -> Method:
            def method(row: Row) -> Result:
                earlier, prompt = self.drawn(row)
                self.engine.clear_prefixes()
                if is_seen:
                    first_token(earlier)
                return {"seconds": seconds_of(lambda: first_token(prompt))}

            return method

        return {"reused": way(True), "anew": way(False)}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        reused_s, anew_s = (values(grouped(results, "method")[name]) for name in ("reused", "anew"))
        cells = [spread([1e3 * each for each in times_s]) for times_s in (reused_s, anew_s)]
        heads = ("tokens", "of them seen", "first token, ms", "anew, ms", "ratio")
        line = (str(self.prompt_tokens), str(self.seen), *cells, spread(ratios(reused_s, anew_s), 3))
        yield Table(heads, [line])
