"""A server that keeps tokens, killed behind every step: the one after it answers what an undisturbed one answers."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lp
from launch.serve.spec import TextSpec
from launch.serve.start_up import resumed_model
from launch.serve.unfinished import UnfinishedRequests
from lp.config import KVDtype
from lp.digest import chain_digest
from lp.models.loader import Loaded
from tests.conftest import LONG
from tests.support.serving import serving

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


def test_a_server_that_is_asked_to_end_keeps_tokens(loaded: Loaded, tmp_path: Path) -> None:
    """The ordinary restart, where a text has no time to end; its figures are of the steps that were made."""
    request = {"prompt": "x = [", "max_tokens": 500, "temperature": 0.9, "seed": 5, "logit_bias": {"2": -100}}
    with serving(loaded.model, loaded.tokenizer, unfinished=UnfinishedRequests(tmp_path, "model")) as running:
        client = running.openai()
        chunks = client.completions.create(model="demo", stream=True, **request)
        for _ in range(4):  # tokens of several steps
            next(chunks)
        assert not running.served.loop.close(0.1)
        running.served.loop.abandon()
        with pytest.raises(openai.APIError, match="the server ended before the text did"):
            list(chunks)
    (undisturbed,) = asked(loaded, UnfinishedRequests(None), [request])
    with serving(loaded.model, loaded.tokenizer, unfinished=UnfinishedRequests(tmp_path, "model")) as running:
        (facts,) = running.served.unfinished.earlier
        made = running.openai().completions.create(model="demo", **request)
        metrics = running.http().get("/metrics").text
    assert [(choice.text, choice.finish_reason) for choice in made.choices] == undisturbed[0]
    tokens = made.usage.completion_tokens - (facts["tokens"] - 1)
    assert 0 < tokens < made.usage.completion_tokens == undisturbed[1]
    assert made.usage.tokens_per_step == tokens / made.usage.steps
    assert f"lp_generated_tokens_total {tokens:.1f}" in metrics
    assert not [*tmp_path.iterdir()]


def test_tokens_stay_until_a_client_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that fails again before that must not lose them; a client who never asks must not fill the disk."""
    spec = TextSpec(prompt=[1, 2, 3], max_new_tokens=12)
    requests = UnfinishedRequests(tmp_path, "model")
    key = requests.key([spec])
    requests.begin("a", key, texts=1).add(0, [4, 5, 6])
    for _ in range(2):
        again = UnfinishedRequests(tmp_path, "model")
        assert [facts["id"] for facts in again.earlier] == ["a"]
        assert [text.resumed for text in again.resumed([spec], key)] == [[4, 5]]
    noted = again.begin("b", key, texts=1)
    assert len([*tmp_path.iterdir()]) == 2, "of a name of its own"
    again.taken(key)
    noted.end()
    assert not [*tmp_path.iterdir()]
    again.begin("c", key, texts=1).add(0, [4, 5, 6])
    (path,) = tmp_path.iterdir()
    runs = UnfinishedRequests(tmp_path, "model")
    day = 24 * 3600
    with monkeypatch.context() as patch:
        patch.setattr("launch.serve.unfinished.time", lambda: path.stat().st_mtime + day - 1)
        assert runs.resumed([], "another") == [] and path.exists()
        patch.setattr("launch.serve.unfinished.time", lambda: os.stat(tmp_path).st_mtime + day + 60)
        assert runs.resumed([spec], key) == [spec] and not path.exists(), "a server that runs for longer"
    again.begin("d", key, texts=1).add(0, [4, 5, 6])
    (path,) = tmp_path.iterdir()
    os.utime(path, (0, 0))
    started = UnfinishedRequests(tmp_path, "model")
    assert not [*tmp_path.iterdir()], "of a server that was started a day later"
    assert started.resumed([spec], key) == [spec]


def test_a_full_disk_keeps_what_was_there(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes on, and its own file can't be written: until it has ended, the old one has the only tokens."""
    request = {"prompt": "x = [", "max_tokens": 12, "temperature": 0.9, "seed": 5}
    undisturbed = asked(loaded, UnfinishedRequests(None), [request])
    with monkeypatch.context() as patch:
        killed_behind(patch, 4, 1)
        asked(loaded, UnfinishedRequests(tmp_path, "model"), [request])
    (path,) = tmp_path.iterdir()
    kept = path.read_bytes()
    monkeypatch.setattr("launch.serve.unfinished._append", lambda *args: False)
    again = asked(loaded, UnfinishedRequests(tmp_path, "model"), [request])
    assert [answer[:3] for answer in again] == [answer[:3] for answer in undisturbed]
    assert again[0][3] < undisturbed[0][3] and path.read_bytes() == kept


def test_a_step_behind_the_end_makes_no_file(tmp_path: Path) -> None:
    """The client leaves while the engine's thread is about to note a step: nobody would delete a file made then."""
    noted = UnfinishedRequests(tmp_path, "model").begin("a", "key", texts=1)
    noted.end()
    noted._adds = True  # as the engine's thread has seen it
    noted.add(0, [4, 5])
    assert not [*tmp_path.iterdir()]


def test_what_names_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of other tokens never; a prediction changes none. A long prompt, shared by choices, is read once."""

    read: list[list[int]] = []

    def digest(previous: int, tokens: list[int]) -> int:
        read.append(tokens)
        return chain_digest(previous, tokens)

    monkeypatch.setattr("launch.serve.unfinished.chain_digest", digest)
    requests = UnfinishedRequests(tmp_path, "model")
    spec = TextSpec(prompt=[1, 2, 3], max_new_tokens=12)
    specs = [replace(spec, sequence=index) for index in range(64)]
    key = requests.key(specs)
    assert len(read) == 1 and spec.as_data()["prompt"] is spec.prompt
    others = [replace(spec, prompt=[1, 2, 4]), replace(spec, max_new_tokens=13), replace(spec, presence_penalty=0.5)]
    assert len({key, *(requests.key([*specs[:-1], other]) for other in others)}) == 4
    assert requests.key([replace(spec, prediction=[7]) for spec in specs]) == key


def test_the_model_s_own_end_names_a_request(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens behind a new EOS would be shown."""
    decoder = lp.LookaheadDecoder(loaded.model)
    before = resumed_model(loaded, decoder)
    assert before and before == resumed_model(loaded, decoder)
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", 7)
    assert resumed_model(loaded, decoder) != before


def test_another_cache_names_other_requests(loaded: Loaded) -> None:
    """Tokens of a cache in the model's dtype would begin a text of a quantised one."""
    named = {resumed_model(loaded, lp.LookaheadDecoder(loaded.model, kv_dtype=each)) for each in KVDtype}
    assert None not in named and len(named) == 3


def test_a_journal_that_somebody_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines are read as far as they are a server's, and shown without what steers a terminal."""
    from launch.serve.start_up import report

    for number, changed in enumerate([{"key": [1]}, {"key": {}}, {"id": "\x1b[31m\nc"}]):
        first = json.dumps({"id": "a", "began": 1, **changed}, separators=(",", ":"))
        (tmp_path / f"{number}.jsonl").write_text(first + '\n{"text": 0, "t": [1, 2]}\n')
    report(UnfinishedRequests(tmp_path, "model").earlier)
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
