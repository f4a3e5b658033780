"""What the server says of single tokens: their names, bytes and offsets are those of the text they are in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from launch.text.detokenizer import TokenWalk, Vocabulary
from lp.sampling.logprob_sampler import Logprob
from tests.support.serving import Running, serving
from tests.support.tokenizers_of import llama_2, model_with

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

TEXTS = ["hi the hi", " hi  the", "the\u6f22\u5b57 \U0001f600!", "<s>hi", "a</s>b", "x\n\ty<file_sep>z<tool>w"]
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server of a tiny model with Llama 2's kind of tokenizer, which also has a token that the model has not."""
    tokenizer = llama_2()
    model = model_with(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<beyond>"]})
    tokenizer.add_tokens(["<too far>"])
    with serving(model, tokenizer, sampling=None) as running:
        yield running


def choice(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = server.http().post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_echo_is_the_prompt_as_sent(server: Running, text: str, stream: bool) -> None:
    """With special tokens, which decoding leaves out, and with the space that it takes away."""
    assert choice(server, "/v1/completions", prompt=text, max_tokens=0, echo=True)["text"] == text
    asked = {"max_tokens": 3, "temperature": 0, "echo": True, "n": 2}
    plain = choice(server, "/v1/completions", prompt=text, **asked | {"echo": False})["text"]
    if not stream:
        assert choice(server, "/v1/completions", prompt=text, **asked)["text"] == text + plain
        return
    answer = server.http().post("/v1/completions", json={"prompt": [text, text], "stream": True, **asked})
    parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    for index in range(4):
        chunks = [part["choices"][0] for part in parts]
        assert "".join(chunk["text"] for chunk in chunks if chunk["index"] == index) == text + plain


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_are_those_of_the_text(server: Running, text: str) -> None:
    """A token that is text stands at its offset, whatever the prompt and behind it."""
    found = choice(server, "/v1/completions", prompt=text, max_tokens=5, temperature=0, echo=True, logprobs=2)
    whole, logprobs = found["text"], found["logprobs"]
    ids = server.encode(text)
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert len(tokens) == len(offsets) == len(ids) + 5 and offsets == sorted(offsets) and offsets[:2] == [0, 0]
    names = set(server.served.words.added)
    for before, name, offset in zip(["", *tokens], tokens, offsets, strict=False):
        if name.startswith("bytes:") or (name in names and name not in text):
            continue
        inserted = (name == "<s>" and offset == 0) or (name[:1] == " " and before in names)  # by the tokenizer
        assert whole[offset : offset + len(name)] == name or inserted, (name, offset)


def test_offsets_behind_token_ids(server: Running) -> None:
    """Offsets of a prompt of ids count the text they decode to; half a character at its end waits for the text."""
    ids = [*server.encode("hi \u6f22"), *server.encode("\u6f22")[2:4]]
    found = choice(server, "/v1/completions", prompt=ids, max_tokens=2, echo=True, logprobs=0, temperature=0)
    assert found["text"].startswith("hi \u6f22")
    assert found["logprobs"]["text_offset"][len(ids) - 2 : len(ids)] == [4, 4]
    alone = choice(server, "/v1/completions", prompt=ids, max_tokens=0, echo=True)
    assert alone["text"] == "hi \u6f22\ufffd"


def test_two_tokens_are_two_names() -> None:
    """The dictionary of top_logprobs dropped one of them, and lm_eval took the wrong token for the likeliest."""
    from launch.serve.logprobs import LegacyLogprobs

    tokenizer = llama_2()
    words = Vocabulary(tokenizer)
    names = ["\u2581the", "the", "A", "<0x41>", "<0xE6>", "<0xE7>", "</s>", "\u2581", "<0x20>"]
    ids = tokenizer.convert_tokens_to_ids(names)
    prompts: list[list[int]] = [[], tokenizer("hi")["input_ids"]]
    for prompt in prompts:
        for own in range(len(ids)):
            legacy = LegacyLogprobs(words.name, TokenWalk(words, prompt))
            legacy.add([Logprob(ids[own], -float(own), [(token, -float(i)) for i, token in enumerate(ids)])])
            data = legacy.data()
            top = data["top_logprobs"][0]
            assert [*top.values()] == [-float(i) for i in range(len(ids))] and len(top) == len(ids)
            assert top[data["tokens"][0]] == -float(own)
            assert [*top][:2] == [" the", "the"] or (not prompt and own < 2)
            assert [*top][4:6] == ["bytes:\\xe6", "bytes:\\xe7"]
            assert [*top][3] == ("A" if own == 3 else f"token_id:{ids[3]}")


@pytest.mark.parametrize("regex", ["hi the", "\u6f22 \U0001f600the", "(the|a) ?hi"])
def test_the_bytes_of_a_chats_tokens_are_its_text(server: Running, regex: str) -> None:
    """Bytes of parts of characters too; the token that ends the text has none."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    asked = {"messages": USER, "max_tokens": 20, "temperature": 0, "response_format": {"type": "regex", "regex": regex}}
    answer = choice(server, "/v1/chat/completions", logprobs=True, top_logprobs=3, **asked)
    content = answer["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == answer["message"]["content"]
    assert all(len({(top["token"], *top["bytes"]) for top in token["top_logprobs"]}) == 3 for token in content)
    for token in content:
        assert token["bytes"] == next(
            (top["bytes"] for top in token["top_logprobs"] if top["token"] == token["token"]), token["bytes"]
        )


def test_pieces_are_what_tokens_add(server: Running) -> None:
    """As llama.cpp has them: with the space before a word, and bytes for parts of characters."""
    pieces = server.http().post("/tokenize", json={"content": "hi the\u6f22", "with_pieces": True}).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == [" hi", " the", [0xE6], [0xBC], [0xA2]]
    ids = server.encode("hi the</s>\u6f22")
    whole = server.served.tokenizer.decode(ids)
    assert whole.startswith("<s> hi the</s>")
    assert server.http().post("/detokenize", json={"tokens": ids}).json() == {"content": whole}
    assert server.http().post("/detokenize", json={"tokens": ids[-3:-1]}).json() == {"content": "\ufffd"}


@pytest.mark.parametrize(("name", "path"), [("<file_sep>", "/v1/completions"), ("<tool>", "/v1/chat/completions")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_names_a_token_ends_the_text(server: Running, name: str, path: str, stream: bool) -> None:
    """A special one, and one that is text."""
    token = server.served.tokenizer.convert_tokens_to_ids(name)
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": USER}
    asked = {"max_tokens": 8, "temperature": 0, "stop": [name], "logit_bias": {str(token): 90}, **body}
    if not stream:
        answer = server.http().post(path, json=asked).json()
        found = answer["choices"][0]
        text = found["text"] if path == "/v1/completions" else found["message"]["content"]
        assert (text, found["finish_reason"], answer["usage"]["completion_tokens"]) == ("", "stop", 1)
        return
    answer = server.http().post(path, json={**asked, "stream": True}).text
    assert '"finish_reason":"stop"' in answer and name not in answer


@pytest.mark.parametrize(
    "content", ["a<beyond>b", "a<too far>b", "</s>", "<s>hi</s>", "", "\u6f22", "x" * 4000, "<beyond><too far>"]
)
def test_a_prediction_fails_no_request(server: Running, content: str) -> None:
    """It changes no token: names of special tokens in it are text, and tokens that the model lacks are left out."""
    asked = {"messages": USER, "max_tokens": 4, "temperature": 0}
    plain = choice(server, "/v1/chat/completions", **asked)
    predicted = choice(server, "/v1/chat/completions", prediction={"type": "content", "content": content}, **asked)
    assert predicted == plain
    tokens = server.served.expected(content)
    assert all(token < server.served.vocabulary and not server.served.words.special(token) for token in tokens)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("first", [False, True])
def test_special_tokens_as_text(server: Running, text: str, first: bool) -> None:
    """`parse_special: false` of /tokenize, as of llama.cpp, was ignored: the ids of what is no special token there."""
    asked = {"content": text, "add_special": first}
    parsed, plain = (
        server.http().post("/tokenize", json=asked | {"parse_special": each}).json()["tokens"] for each in (True, False)
    )
    tokenizer = server.served.tokenizer
    assert plain == tokenizer(text, split_special_tokens=True, add_special_tokens=first)["input_ids"]
    assert {*plain[first:]}.isdisjoint(tokenizer.all_special_ids) and (plain[0] == tokenizer.bos_token_id) == first
    assert (plain == parsed) == (text not in TEXTS[3:])
