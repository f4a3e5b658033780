"""A server follows the checkpoint's generation config behind what a client gives, field by field."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

import lp
from lp.models.loader import vocabulary_size
from tests.unit.test_generation_config_apps import FIELDS

for package in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")
NEW = 20


def test_a_server_follows_it(tiny_folder: Any) -> None:
    """At temperature 0 as transformers' `generate`; a client that gives none is answered as the checkpoint samples."""
    from tests.serving import serving

    model, tokenizer = lp.load(str(tiny_folder), "float64")
    ids = tokenizer("def f(x):", return_tensors="pt")["input_ids"]
    prompt = ids[0].tolist()
    with serving(model, tokenizer) as running:

        def text(**asked: Any) -> str:
            body = {"prompt": prompt, "max_tokens": NEW, **asked}
            return str(running.http().post("/v1/completions", json=body).json()["choices"][0]["text"])

        for fields in FIELDS:
            model.generation_config = GenerationConfig(**{"pad_token_id": 0, **fields})
            new = model.generate(ids, max_new_tokens=NEW)[0, len(prompt) :].tolist()
            assert text(temperature=0) == running.decode(new), fields
            model.generation_config.do_sample, model.generation_config.temperature = True, 0.7
            expected = running.decoder.generate(prompt, NEW, seed=5).tokens
            assert text(seed=5) == running.decode(expected), fields
            assert text(temperature=0) == running.decode(new), fields  # what the client gives wins
        model.generation_config = GenerationConfig(pad_token_id=0, repetition_penalty=1.8, do_sample=True)
        plain = running.decoder.generate(prompt, NEW, generation_config="none").tokens
        assert text(temperature=0, repetition_penalty=1.0) == running.decode(plain)
    assert vocabulary_size(model) > 500
