"""lm_eval's local-completions against launch.serve: the figures that lm_eval gets from the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lp.models.loader import DEMO_MODEL
from tests.support.serving import Running

lm_eval = pytest.importorskip("lm_eval", reason="the package lm_eval is not installed; pip install 'lm_eval[api]'")

CHOICES = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXTS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
PERPLEXITY = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}{{{{choices[0]}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
QUESTIONS = [
    ("import os\nimport ", ["sys", "größe\n", "漢字"], 0),
    ("def add(a, b):\n    return a +", [" b", " c", "(("], 0),
    ("for i in range(", ["10):", "])", " class"], 1),
    ("class Stack:\n    def __init__(self):\n        self.", ["items = []", "return", "\n\n\n"], 0),
    ("x = [1, 2, 3]\nprint(x[", ["0])", "def", "é"], 2),
]


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tasks of all three kinds of requests, from a file."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    file = tmp_path / "questions.jsonl"
    keys = ("question", "choices", "answer")
    file.write_text("".join(json.dumps(dict(zip(keys, each, strict=True))) + "\n" for each in QUESTIONS))
    for name, form in (("choices", CHOICES), ("texts", TEXTS), ("perplexity", PERPLEXITY)):
        (tmp_path / f"{name}.yaml").write_text(form.format(name=name, file=file))
    return [str(tmp_path / f"{name}.yaml") for name in ("choices", "texts", "perplexity")]


def evaluate(model: str, args: dict[str, Any], tasks: list[str]) -> Any:
    options = {"bootstrap_iters": 0, "log_samples": True, "batch_size": 2 if model == "local-completions" else 1}
    return lm_eval.simple_evaluate(model=model, model_args=args, tasks=tasks, **options)


def test_lm_eval_measures_what_it_measures_of_the_model(demo_server: Running, tasks: list[str]) -> None:
    """Every log probability, every text, every figure."""
    server = {"model": "demo", "base_url": f"{demo_server.url}/v1/completions", "tokenizer": str(DEMO_MODEL)}
    through = evaluate("local-completions", {**server, "num_concurrent": 2, "max_retries": 1}, tasks)
    own = evaluate("hf", {"pretrained": str(DEMO_MODEL), "dtype": "float32", "device": "cpu"}, tasks)
    check_equal(through, own)


def check_equal(through: Any, own: Any) -> None:
    """Both have the same figures and answers of all tasks."""
    assert set(through["results"]) == {"choices", "texts", "perplexity"}
    for task, figures in own["results"].items():
        for name, value in figures.items():
            expected = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert through["results"][task][name] == expected, (task, name)
        pairs = zip(through["samples"][task], own["samples"][task], strict=True)
        for answer, expected in pairs:
            assert flat(answer["resps"]) == pytest.approx(flat(expected["resps"]), abs=1e-3), task


def flat(responses: Any) -> list[Any]:
    """The numbers and texts in nested lists."""
    if isinstance(responses, list | tuple):
        return [value for each in responses for value in flat(each)]
    return [responses]
