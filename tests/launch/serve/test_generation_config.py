"""A server follows the checkpoint's generation config behind what a client gives, field by field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import GenerationConfig

import lp
from lp.models.loader import vocabulary_size
from lp.sampling.generation_config import CheckpointDefaults
from tests.launch.test_generation_config import FIELDS
from tests.support.serving import Running

for package in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")
NEW = 20
COMPLETE = "/v1/completions"


LLAMA = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's defaults


@contextmanager
def tiny_server(tiny_folder: Any, sampling: lp.SamplingParams | None = None) -> Iterator[Running]:
    """A server of the tiny model."""
    from tests.support.serving import serving

    with serving(*lp.load(str(tiny_folder), "float64"), sampling=sampling) as running:
        yield running


@pytest.fixture(scope="module")
def server(tiny_folder: Any) -> Iterator[Running]:
    """One for all tests that give its checkpoint the generation config that they ask about."""
    with tiny_server(tiny_folder) as running:
        yield running


def asking(running: Running, path: str) -> tuple[Any, Callable[..., str]]:
    """The prompt's token ids, and what gives the text behind it under some fields."""
    ids = running.served.tokenizer("def f(x):", return_tensors="pt")["input_ids"]
    limit = "max_tokens" if path == COMPLETE else "n_predict"
    http = running.http()

    def text(**asked: Any) -> str:
        data = http.post(path, json={"prompt": ids[0].tolist(), limit: NEW, **asked}).json()
        return str(data["choices"][0]["text"] if "choices" in data else data["content"])

    return ids, text


@pytest.mark.parametrize("path", [COMPLETE, "/completion"])
def test_a_server_follows_it(server: Running, path: str) -> None:
    """At temperature 0 as transformers' `generate`; a client that gives none is answered as the checkpoint samples.

    /completion said llama.cpp's defaults as if the client had, so that a checkpoint had no say in them.
    """
    ids, text = asking(server, path)
    model = server.served.model
    prompt = ids[0].tolist()
    own = {} if path == COMPLETE else LLAMA
    for fields in FIELDS:
        model.generation_config = GenerationConfig(**{"pad_token_id": 0, **fields})
        new = model.generate(ids, max_new_tokens=NEW)[0, len(prompt) :].tolist()
        assert text(temperature=0) == server.decode(new), fields
        model.generation_config.do_sample, model.generation_config.temperature = True, 0.7
        said = CheckpointDefaults.of(model.generation_config).sampling
        expected = server.decoder.generate(prompt, NEW, lp.SamplingParams(**own | said, seed=5)).tokens
        assert text(seed=5) == server.decode(expected), fields
        assert text(temperature=0) == server.decode(new), fields  # what the client gives wins
    model.generation_config = GenerationConfig(pad_token_id=0, repetition_penalty=1.8, do_sample=True)
    plain = server.decoder.generate(prompt, NEW, generation_config="none").tokens
    assert text(temperature=0, repeat_penalty=1.0) == server.decode(plain)
    assert vocabulary_size(model) > 500


GIVEN = [("temperature", 1.4), ("top_k", 3), ("top_p", 0.3), ("min_p", 0.3), ("typical_p", 0.2)]


@pytest.mark.parametrize("name, value", [*GIVEN, ("repetition_penalty", 1.6)])
def test_each_field_of_completion(server: Running, name: str, value: float) -> None:
    """The client's is before the checkpoint's, and that before llama.cpp's; a chain without it leaves it out."""
    ids, text = asking(server, "/completion")
    server.served.model.generation_config = GenerationConfig(pad_token_id=0, **{name: value})

    def drawn(**sampling: Any) -> str:
        params = lp.SamplingParams(**LLAMA | sampling, seed=5)
        tokens = server.decoder.generate(ids[0].tolist(), 40, params, generation_config="none").tokens
        return server.decode(tokens)

    neutral = getattr(lp.SamplingParams(), name)
    own = "repeat_penalty" if name == "repetition_penalty" else name
    texts = [drawn(**{name: value}), drawn(**{name: neutral})]
    assert texts[0] != texts[1]
    assert [text(seed=5, n_predict=40), text(seed=5, n_predict=40, **{own: neutral})] == texts
    chain = ["temperature", "top_k", "top_p", "min_p", "typ_p", "penalties"]
    chain.remove({"typical_p": "typ_p", "repetition_penalty": "penalties"}.get(name, name))
    assert text(seed=5, n_predict=40, samplers=chain) == texts[1]


def test_the_servers_own_settings_come_first(tiny_folder: Any) -> None:
    """On /completion, too, before the checkpoint's and llama.cpp's; it had no say there at all."""
    own = lp.SamplingParams(temperature=1.4, seed=6)
    with tiny_server(tiny_folder, own) as running:
        ids, text = asking(running, "/completion")
        running.served.model.generation_config = GenerationConfig(pad_token_id=0, temperature=0.5, top_p=0.3)
        params = lp.SamplingParams(**LLAMA | {"temperature": 1.4, "top_p": 0.3, "seed": 6})
        tokens = running.decoder.generate(ids[0].tolist(), NEW, params, generation_config="none").tokens
        assert text() == text(seed=6) == running.decode(tokens) != text(temperature=0.1)
