"""A server in a thread of the test's own process, on a free port, and the clients of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lp
from lp.budget.step_times import StepTimes
from lp.models.loader import vocabulary_size

if TYPE_CHECKING:
    from launch.serve.named_keys import NamedKey
    from launch.serve.unfinished import UnfinishedRequests
    from launch.text.image_prompts import ImagePrompts

STEP_TIMES = StepTimes((1, 64), (1e-3, 1.63e-3), 1e-3)


@dataclass
class Running:
    """A server that runs in this process, and its clients.

    Args:
        url: address of its root, such as "http://127.0.0.1:1234".
        served: state that its endpoints share: tokenizer, engine, limits.
        decoder: a decoder of the same model and settings, which tells what to expect.
        api_key: key that clients must send.
    """

    url: str
    served: Any
    decoder: lp.LookaheadDecoder
    api_key: str = "none"
    clients: list[Any] = field(default_factory=list)

    def openai(self) -> Any:
        """OpenAI's official client of the server; it tries no request twice, so that failures show."""
        import httpx
        import openai

        client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.api_key,
            max_retries=0,
            timeout=180,
            http_client=httpx.Client(verify=False),  # as below
        )
        self.clients.append(client)
        return client

    def http(self) -> Any:
        """A plain HTTP client of the server, for bodies that the official client cannot send."""
        import httpx

        client = httpx.Client(base_url=self.url, timeout=180, verify=False)  # it would read all certificates there are
        self.clients.append(client)
        return client

    def encode(self, text: str) -> list[int]:
        return list(self.served.tokenizer(text)["input_ids"])

    def decode(self, tokens: list[int]) -> str:
        return str(self.served.tokenizer.decode(tokens, skip_special_tokens=True))


@contextmanager
def serving(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_waiting: int = 64,
    max_sequences: int = 8,
    api_key: str | None = None,
    metrics_key: bool = False,
    models_key: bool = True,
    named_keys: Mapping[str, NamedKey] | None = None,
    max_body_bytes: int = 1 << 20,
    sampling: lp.SamplingParams | None = None,
    decoder: Callable[[], lp.LookaheadDecoder] | None = None,
    unfinished: UnfinishedRequests | None = None,
    reasoning: Any = None,
    images: ImagePrompts | None = None,
    allow_image_urls: bool = False,
    adapters: tuple[str, ...] = (),
    **limits: Any,
) -> Iterator[Running]:
    """A server of this model, with fixed step times unless `decoder` makes another; it ends with the block."""
    import uvicorn

    from launch.serve.api import build_app
    from launch.serve.engine_loop import EngineLoop
    from launch.serve.fim import FimPrompts, fim_format
    from launch.serve.grammars import Grammars
    from launch.serve.image_urls import ImageUrls
    from launch.serve.metrics import Metrics
    from launch.serve.reasoning import reasoning_block
    from launch.serve.served import Limits, Served
    from launch.serve.server import KEEP_ALIVE_S, bind
    from launch.serve.unfinished import UnfinishedRequests

    decoder = decoder or partial(lp.LookaheadDecoder, model, step_times=STEP_TIMES)

    grammars = Grammars(tokenizer, vocabulary_size(model))
    loop = EngineLoop(lp.Engine(decoder(), max_sequences, cache_tokens=1 << 13), grammars, max_waiting)
    fim = fim_format(tokenizer, None)
    served = Served(
        name="models/demo",
        model=model,
        tokenizer=tokenizer,
        loop=loop,
        sampling=sampling or lp.SamplingParams(),
        limits=Limits(**limits),
        metrics=Metrics(loop),
        unfinished=unfinished or UnfinishedRequests(None),
        fim=FimPrompts(tokenizer, fim) if fim else None,
        reasoning=reasoning_block(tokenizer, reasoning),
        images=images,
        image_urls=ImageUrls(allow_image_urls),
        adapters=adapters,
    )
    app = build_app(
        served, api_key, max_body_bytes, metrics_key=metrics_key, models_key=models_key, named_keys=named_keys
    )
    socket = bind("127.0.0.1", 0)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
    socket.listen()  # who comes before uvicorn has started waits
    loop.start()
    thread.start()
    running = Running(f"http://127.0.0.1:{socket.getsockname()[1]}", served, decoder(), api_key or "none")
    try:
        yield running
    finally:
        for client in running.clients:
            client.close()
        server.should_exit = True
        thread.join()
        loop.close()
        socket.close()
