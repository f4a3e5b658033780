"""A drawn case as requests of a server, whose tokens `/completion` streams."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from transformers import PreTrainedModel

import lp
from lp.parallel.context import ParallelContext
from tests.support.drawn_cases import Case
from tests.support.serving import serving
from tests.support.tiny_models import VOCABULARY, letters


def served_tokens(
    turns: Sequence[tuple[Case, list[int]]],
    model: PreTrainedModel,
    decoder: Callable[[ParallelContext], lp.LookaheadDecoder],
) -> list[tuple[list[int], list[int]]]:
    """Ask one server for every turn of a case; each request's tokens, beside those that it was to give.

    Requests of a turn come at once: one asks for the whole text, others for its beginning, and half of those leave.

    Args:
        turns: the case of each turn, and the tokens that its text has by plain decoding.
        model: the model that the server has.
        decoder: makes the server's decoder, given the context of its rank.
    """
    case, _ = turns[0]
    rng = random.Random(f"server-{case.step_times}")
    model.generation_config.eos_token_id = case.eos or None
    tokenizer = letters(case.overrides.get("vocab_size", VOCABULARY))
    found: list[tuple[list[int], list[int]]] = []
    with (
        serving(model, tokenizer, decoder=lambda: decoder(ParallelContext())) as running,
        ThreadPoolExecutor(1 + case.server) as threads,
    ):
        for turn, plain in turns:
            asked = [(turn.new, False), *((rng.randint(1, turn.new), rng.random() < 0.5) for _ in range(turn.server))]
            given = [threads.submit(_asked, running.url, turn, new, leaves) for new, leaves in asked]
            for (new, leaves), request in zip(asked, given, strict=True):
                tokens = request.result()
                found.append((tokens, plain[: min(new, len(tokens)) if leaves else new]))
    return found


def _asked(url: str, case: Case, new: int, leaves: bool) -> list[int]:
    """Send one request; its tokens, or those of the first chunk where the client leaves early."""
    sampling: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | (case.sampling or {})
    if "repetition_penalty" in sampling:
        sampling["repeat_penalty"] = sampling.pop("repetition_penalty")
    body = {"prompt": case.ids, "n_predict": new, "stream": True, **sampling}
    tokens: list[int] = []
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/completion", json=body) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {response.read()!r}")
        for line in response.iter_lines():
            if line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise AssertionError(line)
                tokens += chunk["tokens"]
                if leaves:
                    break
    return tokens
