"""Mixes of texts for an engine: drawn calls, what they have alone, and what they have together."""

from __future__ import annotations

import itertools
import random
from typing import Any

import lp
from lp.engine.core import Handle
from lp.engine.engine import Engine
from tests.support.tiny_models import VOCABULARY, drawn_text


class Call:
    """One text of a mix: what is asked, when it comes, and when it is cancelled, in steps."""

    def __init__(self, rng: random.Random, shared: list[int]) -> None:
        begins = shared[: rng.randint(0, len(shared))] if rng.random() < 0.5 else []
        self.ids = [*begins, *drawn_text(rng, rng.randint(1, 60))]
        self.new = rng.randint(1, 40)
        self.options: dict[str, Any] = {"sequence": rng.randrange(5)}
        self.sampling = None
        if rng.random() < 0.5:
            top_p = rng.choice([1.0, 0.8])
            self.sampling = lp.SamplingParams(temperature=rng.choice([0.5, 1.0]), top_p=top_p, seed=rng.randrange(100))
        if rng.random() < 0.3:
            self.options["eos_token_id"] = [rng.randrange(VOCABULARY) for _ in range(3)]
        self.arrival = rng.choice([0, 0, rng.randint(1, 12)])
        self.cancelled_at = rng.randint(0, 10) if rng.random() < 0.15 else None

    def alone(self, decoder: lp.Decoder) -> lp.GenerationOutput:
        """The text by plain decoding, without others: what the engine must give."""
        return decoder.generate(self.ids, self.new, self.sampling, **self.options)


def run_calls(engine: Engine, calls: list[Call]) -> list[Handle]:
    """Submit each call at its step, and step the engine until all have ended; its pool is checked at every step."""
    handles: dict[int, Handle] = {}
    for step in itertools.count():
        for index, call in enumerate(calls):
            if call.arrival == step:
                handles[index] = engine.submit(call.ids, call.new, call.sampling, **call.options)
            if call.cancelled_at is not None and call.arrival + call.cancelled_at == step:
                engine.cancel(handles[index])
        left = engine.step()
        engine.pool.check()
        if not left and len(handles) == len(calls):
            break
    return [handles[index] for index in range(len(calls))]


def check_call(handle: Handle, call: Call, expected: lp.GenerationOutput) -> None:
    """Assert that a text has the tokens that it has alone; a cancelled one, the first of them."""
    output = handle.result()
    if output.finish_reason == "cancelled":
        assert call.cancelled_at is not None
        assert output.tokens == expected.tokens[: len(output.tokens)]
    else:
        assert (output.tokens, output.finish_reason) == (expected.tokens, expected.finish_reason)
