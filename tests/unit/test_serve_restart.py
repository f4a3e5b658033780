"""A server that keeps tokens, killed behind every step: the one after it answers what an undisturbed one answers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lp
from launch.serve.spec import TextSpec
from launch.serve.unfinished import UnfinishedRequests
from lp.models.loader import Loaded
from tests.conftest import LONG
from tests.serving import serving

openai = pytest.importorskip("openai", reason="the package openai is not installed")

# Asked at once; the second is one of two texts and the third ends at a stop string.
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "def fibonacci(n):\n", "max_tokens": 10, "temperature": 0},
    {"prompt": "import os\n", "max_tokens": 8, "n": 2, "temperature": 0.9, "seed": 5, "presence_penalty": 0.5},
    {"prompt": "class Stack:\n", "max_tokens": 40, "stop": ["self"], "temperature": 0, "logit_bias": {"5": -1.0}},
]
FEW = (1, 2, 5)  # steps, in the short form


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason="the extra `serve` is not installed")
    return lp.load("demo")


class Killed(Exception):
    """Stands for what ends a rank."""


def asked(loaded: Loaded, unfinished: UnfinishedRequests, requests: list[dict[str, Any]], stream: bool = False) -> Any:
    """What a server answers to each of the requests: (texts, tokens, steps), or the error."""
    with serving(loaded.model, loaded.tokenizer, unfinished=unfinished) as running:
        client = running.openai()

        def answer(request: dict[str, Any]) -> Any:
            try:
                if stream:
                    return streamed(client.completions.create(model="demo", stream=True, **request))
                whole = client.completions.create(model="demo", **request)
            except openai.APIStatusError as error:
                return error
            choices = [(choice.text, choice.finish_reason) for choice in whole.choices]
            return choices, whole.usage.completion_tokens, whole.usage.prompt_tokens, whole.usage.steps

        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(answer, requests))


def streamed(chunks: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def killed_behind(monkeypatch: pytest.MonkeyPatch, steps: int, texts: int) -> None:
    """The engine fails in place of the step after so many; the first one waits for so many texts."""
    step, count = lp.Engine.step, [0]

    def failing(self: lp.Engine) -> bool:
        if count[0] or self.running + self.waiting == texts:
            count[0] += 1
            if count[0] > steps:
                raise Killed
            return step(self)
        return self.waiting > 0

    monkeypatch.setattr(lp.Engine, "step", failing)


def test_killed_behind_every_step(loaded: Loaded, tmp_path: Path) -> None:
    """Whole and streamed: what comes after the restart is the undisturbed text, in fewer steps."""
    undisturbed = asked(loaded, UnfinishedRequests(None), REQUESTS)
    resumed = killed = 0
    for steps in range(1, 40) if LONG else FEW:
        folder = tmp_path / str(steps)
        with pytest.MonkeyPatch.context() as patch:
            killed_behind(patch, steps, 4)
            before = asked(loaded, UnfinishedRequests(folder, "model"), REQUESTS)
        lost = [request for request, answer in zip(REQUESTS, before, strict=True) if isinstance(answer, Exception)]
        killed += len(lost)
        left = UnfinishedRequests(folder, "model")
        assert sorted(request["texts"] for request in left.earlier) == sorted(request.get("n", 1) for request in lost)
        expected = [undisturbed[REQUESTS.index(request)] for request in lost]
        if steps % 2:
            after = asked(loaded, left, lost) if lost else []
            assert [answer[:3] for answer in after] == [answer[:3] for answer in expected], steps
            resumed += sum(a[3] > b[3] for a, b in zip(expected, after, strict=True))
        elif lost:
            after = asked(loaded, left, lost, stream=True)
            texts = [dict(enumerate(text for text, _ in answer[0])) for answer in expected]
            assert after == texts, steps
        assert not [*folder.iterdir()], "they have ended"
    assert killed > len(FEW) and resumed > 0


def test_what_does_not_go_on(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed, another model, log probabilities: the text begins anew. The same request goes on once."""
    request = {"prompt": "x = [", "max_tokens": 12, "temperature": 0.9, "seed": 5}
    other = request | {"seed": 6}
    scored = request | {"seed": 7, "logprobs": 1}
    requests = [request, other, scored]
    undisturbed = [answer[:3] for answer in asked(loaded, UnfinishedRequests(None), requests)]
    for name in ("a", "b"):
        with pytest.MonkeyPatch.context() as patch:
            killed_behind(patch, 4, 2)
            asked(loaded, UnfinishedRequests(tmp_path / name, "model"), [request, scored])
    prompts: list[int] = []
    submit = lp.Engine.submit

    def noting(self: lp.Engine, input_ids: Any, *args: Any, **options: Any) -> Any:
        prompts.append(len(input_ids))
        return submit(self, input_ids, *args, **options)

    monkeypatch.setattr(lp.Engine, "submit", noting)

    def longer(left: UnfinishedRequests) -> int:
        """How many texts go on behind more than their prompt."""
        prompts.clear()
        assert [answer[:3] for answer in asked(loaded, left, requests)] == undisturbed
        assert min(prompts) == undisturbed[0][2] and len(prompts) == 3
        return sum(length > min(prompts) for length in prompts)

    another = UnfinishedRequests(tmp_path / "a", "another model")
    assert len(another.earlier) == 2 and longer(another) == 0
    left = UnfinishedRequests(tmp_path / "b", "model")
    assert [longer(left), longer(left)] == [1, 0]


def test_a_journal_that_somebody_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines are read as far as they are a server's, and shown without what steers a terminal."""
    from launch.serve.server import _report

    for number, first in enumerate([{"id": "a", "key": [1]}, {"id": "b", "key": {}}, {"id": "\x1b[31m\nc"}]):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(first) + '\n{"text": 0, "t": [1, 2]}\n')
    _report(UnfinishedRequests(tmp_path, "model").earlier)
    lines = capsys.readouterr().err.splitlines()
    assert [line.count("request unknown") for line in lines] == [1, 1, 0]
    assert all(line.isprintable() for line in lines) and "\\x1b[31m\\nc" in lines[2]


def test_tokens_of_a_request_that_is_refused_are_kept(tmp_path: Path) -> None:
    """All clients ask again at once after a restart, and some have to wait."""
    requests = UnfinishedRequests(tmp_path, "model")
    spec = TextSpec(prompt=[1, 2, 3], max_new_tokens=12)
    key = requests.key([spec])
    requests.begin("a", key, texts=1).add(0, [4, 5, 6])
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0, "no other user may read it"
    left = UnfinishedRequests(tmp_path, "model")
    for _ in range(2):
        assert [text.resumed for text in left.resumed([spec], key)] == [[4, 5]]
    left.taken(key)
    assert [text.resumed for text in left.resumed([spec], key)] == [[]]
