"""What sessions lose where a router sends their turns to any replica: S, and tokens of prompts computed again.

    python scripts/tables.py session_routing --model FOLDER --task data/mtbench.jsonl --limit 7 --replicas 1,2,4

A session is a prompt of the task and follow-ups, each with all that was said before; sessions take turns. Routed by
"session", a session keeps its replica; by "turn", each turn goes to the next replica. A replica remembers n-grams
(pool.scope=session) and cached prefixes of what it has answered itself. Steps have a fixed number of tokens, so that
counts alone decide; a text is the same on any replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import lp
from launch.text.chat_tokens import chat_tokens, text_tokens
from lp.digest import chain_digest
from lp.errors import UserError

from .harness import (
    Method,
    PromptStudy,
    Result,
    Row,
    Table,
    budget_config,
    compression,
    grouped,
    option,
    sampling_at,
    total,
)

FOLLOW_UPS = (
    "Give an example.",
    "Write your first answer again, with the example in it.",
    "Write that again, for a child.",
)
SESSION, TURN = "session", "turn"


@dataclass(kw_only=True)
class SessionRouting(PromptStudy):
    """Counts steps and computed prompt tokens of sessions over replicas, by the way turns are routed."""

    replicas: list[int] = option([1, 2, 4])
    temperatures: list[float] = option([0.0, 0.8], "0 is greedy")
    limit: int | None = option(7, "sessions: the first prompts of the task")
    num_tokens: int = option(32, "of a step")
    cache_tokens: int = option(16384, "of a replica")
    max_new_tokens: int = option(96)
    SHARED = (*PromptStudy.SHARED, "num_tokens", "cache_tokens", "limit", "task_name")

    def rows(self) -> Iterable[Row]:
        sessions = len(self.prompts)
        if shared := [count for count in self.replicas if math.gcd(count, sessions) > 1]:
            raise UserError(
                f"--limit gives {sessions} sessions for {shared[0]} replicas: turns in turn would keep to a replica; "
                "give a number that has no divisor in common with any of --replicas"
            )
        ways = [(count, way) for count in self.replicas for way in (SESSION, TURN)[: min(count, 2)]]
        return [
            Row({"temperature": at, "replicas": count, "routed": way})
            for at in self.temperatures
            for count, way in ways
        ]

    def methods(self) -> Mapping[str, Method]:
        return {"": self.routed}

    def routed(self, row: Row) -> Result:
        """All turns, each on the replica that it is routed to."""
        count, temperature = row.key["replicas"], row.key["temperature"]
        outputs: list[lp.GenerationOutput] = []
        prompt_tokens = 0
        with ExitStack() as held:
            replicas = [held.enter_context(self.replica()) for _ in range(count)]
            chats = [Chat(self, prompt.text) for prompt in self.prompts]
            for turn in range(1 + len(FOLLOW_UPS)):
                for session, chat in enumerate(chats):
                    at = session if row.key["routed"] == SESSION else turn * len(chats) + session
                    ids = chat.prompt(turn)
                    handle = replicas[at % count].submit(
                        ids, self.max_new_tokens, sampling_at(temperature), sequence=session
                    )
                    replicas[at % count].run()
                    outputs.append(handle.result())
                    chat.answered(outputs[-1].tokens)
                    prompt_tokens += len(ids)
        return {
            "tokens": sum(len(output.tokens) for output in outputs),
            "steps": sum(output.steps for output in outputs),
            "prompt_tokens": prompt_tokens,
            "reused": sum(output.reused for output in outputs),
            "texts": [chain_digest(0, output.tokens) for output in outputs],
        }

    def replica(self) -> lp.Engine:
        """Make an engine that has answered nothing."""
        config = budget_config(self.num_tokens, pool_scope=lp.PoolScope.SESSION)
        return lp.Engine(lp.LookaheadDecoder(self.loaded.model, config), 1, self.cache_tokens)

    def tables(self, results: list[Result]) -> Iterable[Table]:
        for temperature, of in grouped(results, "temperature").items():
            yield Table(HEADS, [*self.cells(of)], f"T = {temperature:g}")

    def cells(self, results: list[Result]) -> Iterator[list[str]]:
        """A row for each number of replicas and way of routing."""
        first = results[0]
        for result in results:
            computed = result["prompt_tokens"] - result["reused"]
            differ = sum(one != other for one, other in zip(first["texts"], result["texts"], strict=True))
            s, alone = compression([result]), compression([first])
            yield [
                str(result["replicas"]),
                result["routed"],
                f"{s:.2f}",
                f"{s / alone - 1:+.1%}",
                f"{computed:,} of {total([result], 'prompt_tokens'):,}",
                str(differ),
            ]


HEADS = ("replicas", "routed by", "S", "beside the first line", "prompt tokens computed", "texts that differ")


class Chat:
    """A session so far.

    Args:
        study: has the tokenizer.
        begun: the first message.
    """

    def __init__(self, study: SessionRouting, begun: str) -> None:
        self.tokenizer = study.loaded.tokenizer
        self.messages = [{"role": "user", "content": begun}]

    def prompt(self, turn: int) -> list[int]:
        """Token ids of all that was said, and the follow-up of this turn; without a chat template line by line."""
        if turn:
            self.messages.append({"role": "user", "content": FOLLOW_UPS[turn - 1]})
        if self.tokenizer.chat_template:
            return chat_tokens(self.tokenizer, self.messages)
        return text_tokens(self.tokenizer, "\n".join(message["content"] for message in self.messages) + "\n")

    def answered(self, tokens: list[int]) -> None:
        """Note the answer, as a client sends it back."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
