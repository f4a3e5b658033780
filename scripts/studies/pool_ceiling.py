"""S that an oracle would reach which chooses among all votes of the pool, and the share of it that the pool reaches.

    python scripts/tables.py pool_ceiling --model FOLDER --task prompts.jsonl --limit 8

The oracle knows the text. In every step it drafts the text's next tokens as long as each has a vote, within the step's
draft tokens, and leaves what room there is to the pool. So no choice of weights reaches more with these votes. Both
write the same tokens, which is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

import lp
from lp.compiled import compiled_array
from lp.draft.path_first import share_with_path
from lp.draft.pool.mixture import predict
from lp.draft.pool.ngram_pool import NGramPool
from lp.draft.pool.tables import fill_context
from lp.draft.share import Share
from lp.draft.source import DraftSource, ShareInput
from lp.engine.request import Request

from .harness import Method, PromptStudy, Result, Row, Table, compression, counts, grouped, option, sampling_at

POOL, ORACLE = "pool", "oracle"
HEADS = ("T", "S, pool", "S, oracle", "share of it")


class OraclePool(NGramPool):
    """A pool that drafts what the text goes on with, as far as it has votes.

    Attributes:
        whole: the text, prompt included.
    """

    whole: np.ndarray

    @classmethod
    def of(cls, pool: NGramPool, whole: Sequence[int]) -> OraclePool:
        """Make a pool into one that knows its text."""
        oracle = cls.__new__(cls)
        vars(oracle).update(vars(pool))
        oracle.whole = compiled_array(np.array(whole, np.int64))
        return oracle

    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """The text's next tokens, then what the pool drafts."""
        self._catch_up(text, len(text))
        path: list[int] = []
        for end in range(len(text), min(len(text) + int(step.rooms[step.rank]), len(self.whole))):
            known = fill_context(self._predictor.context, self.whole, 0, end)
            choices, _ = predict(self._tables, self._predictor, known, end)
            if self.whole[end] not in np.asarray(self._predictor.tokens)[:choices]:
                break
            path.append(int(self.whole[end]))
        return share_with_path(super().propose_share, text, step, path, [1.0] * len(path))


class OracleDecoder(lp.LookaheadDecoder):
    """A decoder that knows its text: `expected` are the tokens behind the prompt."""

    expected: Sequence[int] = ()

    def source(self, request: Request) -> DraftSource:
        """The oracle's pool, of this call."""
        pool = super().source(request)
        assert isinstance(pool, NGramPool)
        return OraclePool.of(pool, [*request.prompt, *self.expected])


@dataclass(kw_only=True)
class PoolCeiling(PromptStudy):
    """The pool and the oracle on each prompt."""

    temperatures: list[float] = option([0.0, 0.8])
    window: int = option(7, "W")
    ngram: int = option(5, "N")
    guesses: int = option(7, "G")
    model_ngrams: str = option("auto", "as pool.model_ngrams")
    max_new_tokens: int = option(96)
    SHARED = (*PromptStudy.SHARED, "window", "ngram", "guesses", "model_ngrams")

    def rows(self) -> Iterable[Row]:
        for temperature in self.temperatures:
            yield from self.prompt_rows(temperature=temperature)

    def methods(self) -> Mapping[str, Method]:
        def made(kind: type[lp.LookaheadDecoder]) -> lp.LookaheadDecoder:
            config = lp.LookaheadConfig(
                window_size=self.window,
                ngram_size=self.ngram,
                guess_set_size=self.guesses,
                pool_model_ngrams=self.model_ngrams,
            )
            return kind(self.loaded.model, config)

        decoder = cache(lambda: made(lp.LookaheadDecoder))
        oracle = cache(lambda: made(OracleDecoder))

        def generate(own: lp.LookaheadDecoder, **key: Any) -> lp.GenerationOutput:
            ids, sampling = self.ids(self.prompts[key["index"]].text), sampling_at(key["temperature"])
            return own.generate(ids, self.max_new_tokens, sampling, sequence=key["index"])

        @lru_cache(maxsize=1)
        def text(**key: Any) -> lp.GenerationOutput:
            return generate(decoder(), **key)

        def of_oracle(row: Row) -> Result:
            own = oracle()
            own.expected = text(**row.key).tokens  # type: ignore[attr-defined]
            return counts(generate(own, **row.key))

        return {POOL: lambda row: counts(text(**row.key)), ORACLE: of_oracle}

    def check(self, row: Row, results: list[Result]) -> None:
        """Refuse texts that the oracle changes."""
        if len({result["text"] for result in results}) > 1:
            raise RuntimeError(f"text {row.key['index']}: other tokens of the oracle")

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines = []
        for temperature, of in grouped(results, "temperature").items():
            by_method = grouped(of, "method")
            pool, oracle = (compression(by_method[name]) for name in (POOL, ORACLE))
            lines.append((f"{temperature:g}", f"{pool:.2f}", f"{oracle:.2f}", f"{pool / oracle:.0%}"))
        yield Table(HEADS, lines)
