"""The load of a server: requests that are drawn, sent by many clients at once, and what came back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

MALFORMED: list[dict[str, Any]] = [  # each is refused with 400
    {"temperature": 9.0},
    {"max_tokens": -2},
    {"prompt": []},
    {"prompt": [1 << 30]},
    {"n": 0},
    {"stop": [""]},
    {"seed": 0.5},
    {"extra_body": {"logit_bias": {"x": 1}}},
]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request of /v1/completions.

    Args:
        fields: arguments of the client's `completions.create`.
        leaves_after: the client leaves the stream after so many events; None: it takes all of them.
        malformed: the server must refuse it.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    leaves_after: int | None = None
    malformed: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back for a request, and when: what the figures of a load are made of.

    Args:
        tokens: number of generated tokens; 0 where the server did not say.
        first_s: seconds to the first characters of a stream; None for an answer that came whole.
        total_s: seconds to the end.
        failure: what went wrong that the client did not; empty for nothing.
    """

    tokens: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    failure: str = ""


def draw_requests(
    model: str, prompts: Sequence[str], count: int, seed: int = 0, most_tokens: int = 128
) -> list[Request]:
    """Requests of mixed lengths: half of them streams, a tenth of whose clients leave, and 5 % malformed.

    Args:
        model: the server's name for its model.
        prompts: texts; a request's prompt is the end of one of them, cut at a drawn place.
        count: number of requests.
        seed: the same seed draws the same requests.
        most_tokens: largest `max_tokens` that a request asks for.
    """
    draw = random.Random(seed)
    requests = []
    for index in range(count):
        prompt = draw.choice(prompts)
        fields: dict[str, Any] = {
            "model": model,
            "prompt": prompt[draw.randrange(len(prompt)) :],
            "max_tokens": draw.randint(1, most_tokens),
            "temperature": draw.choice([0.0, 0.8]),
            "seed": index,
            "stream": draw.random() < 0.5,
        }
        malformed = draw.random() < 0.05
        if malformed:
            fields |= draw.choice(MALFORMED)
        leaves = fields["stream"] and draw.random() < 0.1
        requests.append(
            Request(fields=fields, leaves_after=draw.randint(1, 8) if leaves else None, malformed=malformed)
        )
    return requests


def send(client: Any, request: Request) -> Answer:
    """Send one request and wait for its end.

    Args:
        client: an `openai.OpenAI`, which knows the server's address.
        request: what is asked for, and whether the client leaves early or the server must refuse.
    """
    import openai

    start = time.perf_counter()
    try:
        answer = (_stream if request.fields.get("stream") else _whole)(client, request, start)
    except openai.BadRequestError as error:
        failure = "" if request.malformed else f"refused: {error}"
        return Answer(total_s=time.perf_counter() - start, failure=failure)
    except openai.OpenAIError as error:
        cause = f" ({error.__cause__!r})" if error.__cause__ else ""
        return Answer(total_s=time.perf_counter() - start, failure=f"{type(error).__name__}: {error}{cause}")
    return Answer(failure="a malformed request was not refused") if request.malformed else answer


def _whole(client: Any, request: Request, start: float) -> Answer:
    answer = client.completions.create(**request.fields)
    failure = "" if answer.choices[0].finish_reason else "the answer has no end"
    return Answer(tokens=answer.usage.completion_tokens, total_s=time.perf_counter() - start, failure=failure)


def _stream(client: Any, request: Request, start: float) -> Answer:
    first_s: float | None = None
    tokens = 0
    ended = False
    with closing(client.completions.create(**request.fields)) as events:
        for number, event in enumerate(events, 1):
            text = event.choices[0].text if event.choices else ""
            if text and first_s is None:
                first_s = time.perf_counter() - start
            ended |= bool(event.choices and event.choices[0].finish_reason)
            tokens = event.usage.completion_tokens if event.usage else tokens
            if number == request.leaves_after:
                return Answer(first_s=first_s, total_s=time.perf_counter() - start)
    failure = "" if ended else "the stream has no end"
    return Answer(tokens=tokens, first_s=first_s, total_s=time.perf_counter() - start, failure=failure)


def send_all(
    client: Any, requests: Iterable[Request], clients: int, on_answer: Callable[[int], None] = lambda count: None
) -> tuple[list[Answer], float]:
    """Send requests from several threads; the answers in the order of the requests, and the seconds of it all.

    Args:
        client: an `openai.OpenAI`, which all threads share.
        requests: what is sent, in this order.
        clients: threads; each sends one request at a time.
        on_answer: is told how many answers there are, at each.
    """
    answers: list[Answer] = []
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for answer in pool.map(lambda request: send(client, request), requests):
            answers.append(answer)
            on_answer(len(answers))
    return answers, time.perf_counter() - start
