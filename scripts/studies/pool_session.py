"""S by number of past requests whose outputs the pool remembers (pool.scope=session).

    python scripts/tables.py pool_session texts.jsonl --task humaneval --past 0 1 10 60 --num-tokens 48

The texts are those of `tables.py texts`. The last 20 of a task are measured, each behind the same past requests, which
are the first ones of the task: what a measured text leaves in the pool is thrown away again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lp

from .harness import Method, ModelStudy, Result, Row, Table, budget_config, compression, grouped, option, sampling_at
from .parts.replay import Text, load_texts

MEASURED = 20


@dataclass(kw_only=True)
class PoolSession(ModelStudy):
    """Compares S behind no, few and many past requests whose outputs the pool remembers."""

    texts: Path = option(help="JSONL of tables.py texts")
    task: str = option("humaneval")
    past: list[int] = option([0, 1, 10, 60])
    temperatures: list[float] = option([0.0, 0.3, 0.8])
    num_tokens: int = option(48, "most tokens a step")
    mib: int = option(64, "of the pool")
    SHARED = (*ModelStudy.SHARED, "task", "num_tokens", "mib")

    def rows(self) -> Iterable[Row]:
        texts = [text for text in load_texts(self.texts) if text.task == self.task]
        for temperature in self.temperatures:
            yield Row({"temperature": temperature}, [text for text in texts if text.temperature == temperature])

    def methods(self) -> Mapping[str, Method]:
        return {str(count): partial(self.behind, count) for count in self.past}

    def behind(self, count: int, row: Row) -> Result:
        """The last texts, each with a pool that remembers this many of the first."""
        past, measured = row.item[:-MEASURED][:count], row.item[-MEASURED:]
        with tempfile.TemporaryDirectory() as folder:
            pool, copy = Path(folder, "pool"), Path(folder, "copy")
            decoder = self.decoder(pool)
            for text in past:
                continue_text(decoder, text)
            outputs = []
            for text in measured:
                if past:
                    shutil.copy(pool, copy)
                outputs.append(continue_text(self.decoder(copy), text))
                copy.unlink()
        return {
            "tokens": sum(len(output.tokens) for output in outputs),
            "steps": sum(output.steps for output in outputs),
        }

    def decoder(self, file: Path) -> lp.LookaheadDecoder:
        """Make a decoder whose pool's tables are in a file, which can be set back after each text."""
        scope = lp.PoolScope.SESSION
        config = budget_config(self.num_tokens, pool_scope=scope, pool_mib=self.mib, pool_file=str(file))
        return lp.LookaheadDecoder(self.loaded.model, config)

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines = [
            (f"T = {temperature:g}", *(f"{compression([result]):.2f}" for result in of))
            for temperature, of in grouped(sorted(results, key=self.place), "temperature").items()
        ]
        yield Table(("past requests", *map(str, self.past)), lines)

    def place(self, result: Result) -> int:
        """The column of the table that a result belongs to."""
        return self.past.index(int(result["method"]))


def continue_text(decoder: lp.Decoder, text: Text) -> lp.GenerationOutput:
    """Decode as many tokens as a text has behind its prompt."""
    return decoder.generate(text.prompt, len(text.tokens), sampling_at(text.temperature), sequence=text.index)
