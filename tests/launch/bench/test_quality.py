"""Perplexity, repetition and ROUGE, against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from launch.bench.compare import Difference
from launch.bench.quality import assess, distinct, perplexity, rouge
from launch.bench.runs import ModelCache
from launch.benchmark import benchmark
from launch.scaling import scaling
from tests.support.apps import Ran
from tests.support.tiny_models import VOCABULARY, tiny_model


def test_perplexity_is_that_of_the_text_alone() -> None:
    """The prompt's own tokens must not count, and every token of the text must."""
    model, prompt, tokens = tiny_model(), [3, 1, 4], [1, 5, 9, 2]
    with torch.inference_mode():
        accept_probs = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    losses = [-float(accept_probs[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]
    assert perplexity(model, prompt, tokens) == pytest.approx(math.exp(sum(losses) / 4), rel=1e-5)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    assert perplexity(model, prompt, tokens) == pytest.approx(VOCABULARY, rel=1e-5)


def test_distinct_ngrams() -> None:
    assert distinct([1, 2, 1, 2, 1], 1) == 2 / 5 and distinct([1, 2, 1, 2, 1], 2) == 2 / 4
    assert distinct([1, 2, 3], 3) == 1.0 and distinct([1], 2) is None


def test_rouge() -> None:
    pytest.importorskip("rouge_score")
    assert rouge("the cats sat", "the cat sat") == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    scores = rouge("b a", "a b c d")
    assert (
        scores["rouge1"] == pytest.approx(2 / 3) and scores["rouge2"] == 0 and scores["rougeL"] == pytest.approx(1 / 3)
    )


def test_a_missing_package_is_refused_before_the_model(
    start_app: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was refused when the first prompt had been measured by all methods."""
    monkeypatch.setattr("launch.bench.quality.is_installed", lambda name: False)
    task = tmp_path / "t.jsonl"
    asked = ["task=humaneval", f"task.path={task}", "model=hf", "model.name=./none", f"out={tmp_path / 'out'}"]
    refused = {'{"prompt": "a", "reference": "b"}': "ROUGE needs", '{"prompt": "a"}': "'./none' does not exist"}
    for line, said in refused.items():
        task.write_text(line + "\n")
        ran = start_app(partial(benchmark, models=ModelCache()), "benchmark", *asked, "quality=true")
        assert ran.code == 2 and said in ran.err
    task.write_text('{"prompt": "a", "reference": "b"}\n')
    ran = start_app(scaling, "scaling", *asked, "quality=true", "ranks=[1]")
    assert ran.code == 2 and "ROUGE needs" in ran.err


def test_assessed_text_says_where_it_parts() -> None:
    parted = Difference(method="x", position=2, token=1, plain_token=2, gap=0.1, near_tie=True)
    found = assess(tiny_model(), [1, 2], [3, 3, 3], "words", None, parted)
    assert (found["differs_at"], found["near_tie"], found["rouge"]) == (2, True, None)
    assert found["distinct"] == {"1": 1 / 3, "2": 1 / 2, "3": 1.0, "4": None}
    assert assess(tiny_model(), [1, 2], [3], "words", None, None)["differs_at"] is None
