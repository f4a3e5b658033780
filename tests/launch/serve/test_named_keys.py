"""Keys with names: who may ask, and that what is kept of one client's texts is of no use to another."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lp
from launch.config.schema import ServeConfig
from launch.serve.named_keys import NamedKey, check_corpora, read_keys
from launch.serve.spec import TextSpec
from launch.serve.start_up import check_open_files
from launch.serve.unfinished import UnfinishedRequests
from lp.draft.pool.corpus import MAX_MATCH
from lp.draft.pool.history_file import HistoryFile
from lp.draft.pool.model_ngrams import write_file
from lp.errors import UserError
from lp.models.loader import vocabulary_size
from tests.support.corpora import corpus_of
from tests.support.fim_models import infilling_model
from tests.support.limits import limited
from tests.support.serving import STEP_TIMES, serving

for package in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")

PROMPT = "def fibonacci(n):\n    a, b = 0, 1\n"
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 12, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 16, "temperature": 0},
    "/completion": {"prompt": PROMPT, "n_predict": 12, "temperature": 0},
    "/infill": {"input_prefix": PROMPT, "input_suffix": "\n", "n_predict": 12, "temperature": 0},
}
KEYS = {"ann": NamedKey("a-key"), "bob": NamedKey("b-key")}


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_each_key_is_let_in_and_no_other() -> None:
    """A name is no key, and one client's key in place of the server's is one as good."""
    with serving(*lp.load("demo"), api_key="s3cret", named_keys=KEYS) as running:
        http = running.http()
        for key in ("a-key", "b-key", "s3cret"):
            assert http.get("/v1/models", headers=header(key)).status_code == 200
        for key in ("other", "ann", "a-keyb-key"):
            assert http.get("/v1/models", headers=header(key)).status_code == 401, key
        assert http.get("/v1/models").status_code == 401
    with serving(*lp.load("demo"), named_keys=KEYS) as running:
        assert running.http().get("/v1/models").status_code == 401, "named keys alone keep others out, too"


@pytest.mark.parametrize("path", ASKED)
def test_what_is_kept_is_the_key_s_own(path: str, tmp_path: Path) -> None:
    """Every endpoint: one that forgets whose request it is tells a client what others have asked."""
    model, tokenizer = infilling_model() if path == "/infill" else lp.load("demo")
    config = lp.LookaheadConfig(adaptive=True, history=str(tmp_path / "history"))
    build = partial(lp.LookaheadDecoder, model, config, step_times=STEP_TIMES)
    with serving(model, tokenizer, api_key="s3cret", named_keys=KEYS, decoder=build) as running:
        http = running.http()
        reused, texts = [], []
        for key in ("a-key", "b-key", "a-key", "s3cret"):
            answer = http.post(path, json=ASKED[path], headers=header(key))
            assert answer.status_code == 200, answer.text
            text = {name: value for name, value in answer.json().items() if name in ("content", "choices")}
            texts.append(str(text))
            reused.append(_reused(answer.json()))
        assert reused[0] == reused[1] == reused[3] == 0 < reused[2], reused
        assert len({*texts}) == 1
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"history", "history.ann", "history.bob"}
    sizes = {name: (tmp_path / name).stat().st_size for name in names}
    assert sizes["history"] == sizes["history.bob"] < sizes["history.ann"]


def test_what_is_kept_ends_where_the_answer_does(tmp_path: Path) -> None:
    """A step may bring tokens behind a stop string, which the client has not got: they are no text of the client's."""
    model, tokenizer = lp.load("demo")
    path = tmp_path / "history"
    build = partial(lp.LookaheadDecoder, model, lp.LookaheadConfig(history=str(path)), step_times=STEP_TIMES)
    expected = lp.PlainDecoder(model).generate(tokenizer(PROMPT)["input_ids"], 60).tokens
    text = tokenizer.decode(expected)
    stops = [text[place : place + 3] for place in range(10, 40, 5)]
    with serving(model, tokenizer, named_keys=KEYS, decoder=build) as running:
        http = running.http()
        asked = ASKED["/v1/completions"] | {"max_tokens": 60}
        counts = []
        for stop in stops:
            answer = http.post("/v1/completions", json=asked | {"stop": stop}, headers=header("a-key")).json()
            assert answer["choices"][0]["text"] == text[: text.index(stop)]
            counts.append(answer["usage"]["completion_tokens"])
    copy = shutil.copyfile(f"{path}.ann", tmp_path / "copy")  # the server's decoder has the file itself
    file = HistoryFile(str(copy), vocabulary_size(model), 1 << 20)
    kept = [each.tolist() for each in file.texts()]
    file.close()
    prompt = tokenizer(PROMPT)["input_ids"][-MAX_MATCH:]
    assert kept == [[*prompt, *expected[:count]] for count in counts]


def _listed(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else [*names]


def _reused(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that were cached before."""
    if "usage" not in answer:
        return int(answer["timings"]["cache_n"])
    details = answer["usage"].get("prompt_tokens_details") or answer["usage"]["input_tokens_details"]
    return int(details["cached_tokens"])


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# clients\n\nann a-key\n  bob\tb-key  \n")
    assert read_keys(str(path)) == KEYS
    path.write_text("ann a-key corpora=app,docs\nbob b-key corpora=\n")
    assert read_keys(str(path)) == {"ann": NamedKey("a-key", ("app", "docs")), "bob": NamedKey("b-key", ())}
    check_corpora(str(path), ["docs", "more", "app"])
    with pytest.raises(
        UserError, match=r"the line of 'ann' in .*: corpora has 'docs'; give names of these: app"
    ) as raised:
        check_corpora(str(path), ["app"])
    path.write_text("# clients\n\nann a-key\n  bob\tb-key  \n")
    assert read_keys(None) == {}
    with pytest.raises(UserError, match=r"line 4 of .* has a name or a key that is there already") as raised:
        read_keys(str(path), "b-key")
    assert "b-key" not in str(raised.value)


@pytest.mark.parametrize("path", ASKED)
def test_a_request_names_its_corpora(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every endpoint: those that the client may use, and no others, whose names are no client's matter either."""
    model, tokenizer = infilling_model() if path == "/infill" else lp.load("demo")
    for name in "abc":
        write_file(corpus_of([[1, 2, 3]], vocabulary_size(model)), tmp_path / f"{name}.corpus")
    config = lp.LookaheadConfig(corpora=[str(tmp_path / f"{name}.corpus") for name in "abc"])
    keys = {"ann": NamedKey("a-key", ("a", "b")), "bob": NamedKey("b-key", ()), "cid": NamedKey("c-key")}
    build = partial(lp.LookaheadDecoder, model, config, step_times=STEP_TIMES)
    with serving(model, tokenizer, named_keys=keys, decoder=build) as running:
        http, engine = running.http(), running.served.loop.engine
        submit, seen = engine.submit, []

        def spy(*values: Any, **given: Any) -> Any:
            seen.append(given["corpora"])
            return submit(*values, **given)

        monkeypatch.setattr(engine, "submit", spy)
        for key, named, expected in (
            ("a-key", None, ["a", "b"]),
            ("a-key", ["b"], ["b"]),
            ("b-key", None, []),
            ("c-key", None, None),
            ("c-key", ["c", "a", "c"], ["a", "c"]),
            ("c-key", [], []),
        ):
            asked = ASKED[path] | ({} if named is None else {"corpora": named})
            answer = http.post(path, json=asked, headers=header(key))
            assert answer.status_code == 200, answer.text
            assert _listed(seen.pop()) == expected, (key, named)
        for key, known in (
            ("a-key", "give names of these: a, b"),
            ("b-key", "leave it out: there are no corpora here"),
        ):
            answer = http.post(path, json=ASKED[path] | {"corpora": ["c"]}, headers=header(key))
            assert answer.status_code == 400 and answer.json()["error"]["message"] == f"corpora has 'c'; {known}"
        answer = http.post(path, json=ASKED[path] | {"corpora": "a"}, headers=header("a-key"))
        assert answer.status_code in (400, 422) and "corpora" in answer.text
        assert not seen
        answer = http.post(path, json=ASKED[path] | {"corpora": ["x" * 100_000]}, headers=header("a-key"))
        assert answer.status_code == 400 and len(answer.content) < 500


def test_a_key_s_corpora_beside_a_decoder_that_has_none() -> None:
    """As of `decoder=plain`: its requests were refused."""
    model, tokenizer = lp.load("demo")
    build = partial(lp.PlainDecoder, model)
    keys = {"ann": NamedKey("a-key", ("a",))}
    with serving(model, tokenizer, named_keys=keys, decoder=build) as running:
        answer = running.http().post("/v1/completions", json=ASKED["/v1/completions"], headers=header("a-key"))
        assert answer.status_code == 200, answer.text


def test_texts_of_two_keys_are_two_texts() -> None:
    """One that was cut off goes on where its own client asks again; another's would get its tokens."""
    spec = TextSpec(prompt=[1, 2], max_new_tokens=5)
    kept = UnfinishedRequests(None, model="m")
    keys = {kept.key([replace(spec, owner=owner)]) for owner in ("", "ann", "bob")}
    assert len(keys) == 3 and "" not in keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key; give a line NAME KEY"),
        ("ann s3cret more", "line 1 of .* is not NAME KEY"),
        ("ann", "line 1 of .* is not NAME KEY"),
        ("ann s3cret corpora=a corpora=b", "line 1 of .* is not NAME KEY"),
        ("ann corpora=a", "line 1 of .* is not NAME KEY"),
        ("ann corpora=a corpora=b", "line 1 of .* is not NAME KEY"),
        ("../ann s3cret", "line 1 of .* is not NAME KEY"),
        ("ann a\nann s3cret", "line 2 of .* has a name or a key that is there already"),
        ("ann s3cret\nbob s3cret", "line 2 of .* has a name or a key that is there already"),
        ("änn s3cret", "it has other characters than ASCII's"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """And the message, which goes to a terminal or a log, has no key."""
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as raised:
        read_keys(str(path))
    assert "s3cret" not in str(raised.value)
    with pytest.raises(UserError, match=r"can't be read .*; give a file of lines NAME KEY"):
        read_keys(str(tmp_path / "none"))


def test_more_owners_than_files_may_be_open() -> None:
    """Refused before a model is loaded: at the limit no client could connect."""
    config = ServeConfig()
    with limited(resource.RLIMIT_NOFILE, 300):
        check_open_files(config, 45)
        config.pool.history = "history"
        check_open_files(config, 44)
        with pytest.raises(UserError, match=r"each of 45 owners, and this process may open 300.*\(ulimit -n 301\)"):
            check_open_files(config, 45)
        config.adapters = {"red": "red", "blue": "blue"}  # each owner has a history of each
        check_open_files(config, 14)
        with pytest.raises(UserError, match=r"15 owners and of their 2 adapters, .*\(ulimit -n 301\)"):
            check_open_files(config, 15)
