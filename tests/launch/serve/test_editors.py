"""Editors' own requests, as recorded or as their sources make them, and their answers as the editors read them.

llama.vim at commit a1c8e6e, in vim 9.0; Continue at d0a3c0b (VS Code 1.3.40), its own autocompletion and adapters in
node; Tabby at 21b2904 and Zed at 09512d2, whose requests are those of their sources. docs/guide/editors.md has their
settings. A `seed` and a limit of tokens are ours, where a text is compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import lp
from launch.serve.fim import FAMILIES, Extra, FimPrompts
from tests.support.fim_models import infilling_model
from tests.support.serving import Running, serving

BEFORE, BEHIND = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
GAP = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{BEHIND}<|fim_middle|>"
QWENS = FAMILIES["qwen2.5-coder"]


def gap_ids(server: Running, *extras: Extra) -> list[int]:
    """The prompt that Qwen2.5-Coder's tokens make of the gap."""
    return FimPrompts(server.served.tokenizer, QWENS).prompt(BEFORE, BEHIND, None, extras)[0]


def expected(server: Running, ids: list[int], count: int, **sampling: Any) -> str:
    """The decoder's own text behind these tokens."""
    return server.decode(server.decoder.generate(ids, count, lp.SamplingParams(**sampling)).tokens)


def events(text: str) -> list[dict[str, Any]]:
    """A stream's events, up to [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# llama.vim: to warm the cache, and to complete. The empty model is always there, as is an empty key: the plugin looks
# at the length of the setting's name.
KEY = {"Authorization": "Bearer"}
RING = [{"text": "import os\nimport sys\n", "time": [0, 1], "filename": "/src/main.py"}]
WARM = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": RING,
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
    "model": "",
}
TIMINGS = [
    f"timings/{part}_{name}" for part in ("prompt", "predicted") for name in ("n", "ms", "per_token_ms", "per_second")
]
VIM = {
    "id_slot": 0,
    "input_prefix": "def add(a, b):\n",
    "input_suffix": BEHIND,
    "input_extra": RING,
    "prompt": "    return ",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": ["content", *TIMINGS, "truncated", "tokens_cached"],
    "model": "",
}


def test_llama_vims_requests(infill_server: Running) -> None:
    """Its answer has the fields that it asks for, by their paths, in JSON that its pattern recognises."""
    http = infill_server.http()
    assert http.post("/infill", json=WARM, headers=KEY).json() == {}
    answer = http.post("/infill", json=VIM, headers=KEY)
    assert re.match(r"^\s*\{", answer.text) and re.search(r'"content"\s*:"', answer.text)
    data = answer.json()
    assert set(data) == set(VIM["response_fields"])  # type: ignore[call-overload]
    assert data["truncated"] is False and 1 <= data["timings/predicted_n"] <= 128
    assert data["timings/prompt_ms"] > 0 and data["timings/predicted_per_second"] > 0


def test_llama_vims_completion_has_the_decoders_tokens(infill_server: Running) -> None:
    """With the other files before the gap, and their tokens reused; `infill` keeps what llama.cpp's sampler would.

    Without it llama.vim's completions were drawn at temperature 1 from 90% of all tokens.
    """
    http = infill_server.http()
    ids = gap_ids(infill_server, Extra("/src/main.py", str(RING[0]["text"])))
    text = expected(infill_server, ids, 24, temperature=1.0, top_k=40, top_p=0.9, min_p=0.5, seed=4)
    free = {"n_predict": 24, "n_indent": 0, "t_max_predict_ms": 0, "response_fields": None}
    asked = {**VIM, "seed": 4, **free}
    data = http.post("/infill", json=asked).json()
    assert data["content"] == text and data["stop_type"] == "limit" and data["tokens_predicted"] == 24
    again = http.post("/infill", json=asked).json()
    assert again["content"] == text and again["timings"]["cache_n"] >= len(ids) - 2
    assert http.post("/infill", json={**asked, "response_fields": []}).json().keys() == data.keys(), "as llama.cpp"
    without = http.post("/infill", json={**asked, "samplers": ["top_k", "top_p"]}).json()["content"]
    assert without == expected(infill_server, ids, 24, temperature=1.0, top_k=40, top_p=0.9, seed=4) != text


def test_a_min_p_that_is_higher_than_infills_holds(infill_server: Running) -> None:
    asked = {**VIM, "seed": 4, "n_predict": 24, "n_indent": 0, "t_max_predict_ms": 0, "response_fields": ["content"]}
    asked |= {"input_extra": [], "min_p": 0.9, "samplers": ["min_p", "infill"]}
    text = infill_server.http().post("/infill", json=asked).json()["content"]
    assert text == expected(infill_server, gap_ids(infill_server), 24, temperature=1.0, min_p=0.9, seed=4)


def test_an_infill_that_does_not_fit_is_cut(infill_server: Running) -> None:
    http = infill_server.http()
    long = {**VIM, "input_prefix": "x = 1\n" * 500, "response_fields": ["truncated", "timings/prompt_n"]}
    answer = http.post("/infill", json=long)
    assert answer.status_code == 200 and answer.json()["truncated"] is True


def test_llama_vim_without_fill_in_the_middle(demo_server: Running) -> None:
    """The plugin shows nothing of it; who asks why by curl is told."""
    answer = demo_server.http().post("/infill", json=VIM, headers=KEY)
    assert answer.status_code == 501
    assert answer.json()["error"]["message"] == (
        "demo has no tokens for fill-in-the-middle; serve a model that has them, or name its own by fim.prefix, "
        "fim.suffix and fim.middle"
    )


# To change a selection: first, while the user still types the instruction, to warm the cache, then for the text.
INSTRUCT: dict[str, Any] = {
    "id_slot": 0,
    "messages": [{"role": "system", "content": "--- CONTEXT\n"}, {"role": "user", "content": ""}],
    "samplers": [],
    "n_predict": 0,
    "stream": False,
    "cache_prompt": True,
    "response_fields": [""],
    "model": "",
}
TEXT = {"min_p": 0.1, "temperature": 0.1, "samplers": ["min_p", "temperature"], "stream": True}


def test_llama_vims_instructions(demo_server: Running) -> None:
    """The first request generates one token, not all that a text may have; the second is read by its deltas."""
    http = demo_server.http()
    warm = http.post("/v1/chat/completions", json=INSTRUCT, headers=KEY).json()
    assert warm["usage"]["completion_tokens"] == 1
    messages = [INSTRUCT["messages"][0], {"role": "user", "content": "INSTRUCTION: def add(a, b):\n"}]
    asked = {name: INSTRUCT[name] for name in ("id_slot", "cache_prompt", "model")} | {"messages": messages} | TEXT
    asked |= {"max_tokens": 20, "seed": 3}
    answer = http.post("/v1/chat/completions", json=asked, headers=KEY).text
    assert answer.rstrip().endswith("data: [DONE]")
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events(answer))
    ids = demo_server.encode("--- CONTEXT\nINSTRUCTION: def add(a, b):\n")
    assert text == expected(demo_server, ids, 20, temperature=0.1, min_p=0.1, seed=3)


# Continue, provider openai: autocompletion writes the gap in the tokens of the model that it knows by its name.
STOPS = [
    *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"),
    *("<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```"),
]
CONTINUE = {"max_tokens": 4096, "temperature": 0.01, "stream": True, "stop": STOPS, "prompt": GAP}


def test_continues_autocompletion(infill_server: Running) -> None:
    """It asks for more tokens than the context has, reads the texts of a stream, and leaves when it has a line."""
    http = infill_server.http()
    asked = {"model": "demo", **CONTINUE}
    with http.stream("POST", "/v1/completions", json=asked, headers={"api-key": "none"}) as stream:
        assert stream.status_code == 200
        first = next(line for line in stream.iter_lines() if line)
    assert isinstance(json.loads(first.removeprefix("data: "))["choices"][0]["text"], str)
    answer = http.post("/v1/completions", json={**asked, "seed": 3, "max_tokens": 16})
    text = "".join(event["choices"][0]["text"] for event in events(answer.text))
    assert text == expected(infill_server, gap_ids(infill_server), 16, temperature=0.01, seed=3)


def test_continues_llama_cpp_provider(infill_server: Running) -> None:
    """It sends the same gap to /completion, and reads `content`."""
    asked = {"model": "demo", **CONTINUE, "n_predict": 16, "seed": 3}
    del asked["max_tokens"]
    answer = infill_server.http().post("/completion", json=asked)
    text = "".join(event["content"] for event in events(answer.text))
    sampling = {"temperature": 0.01, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 3}
    assert text == expected(infill_server, gap_ids(infill_server), 16, **sampling)


def test_continues_chat(demo_server: Running) -> None:
    """By OpenAI's own client; the chunk with the usage has no choices."""
    asked = {
        "messages": [{"role": "system", "content": "You are an AI.\n"}, {"role": "user", "content": "def add(a, b):"}],
        "model": "demo",
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
    }
    *chunks, usage = events(demo_server.http().post("/v1/chat/completions", json=asked).text)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    ids = demo_server.encode("You are an AI.\ndef add(a, b):")
    assert text == expected(demo_server, ids, 20, temperature=1.0, seed=3)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 20
    assert [model["id"] for model in demo_server.http().get("/v1/models").json()["data"]] == ["demo"]


@pytest.mark.parametrize("written", ["<fim_prefix>a<fim_suffix>b<fim_middle>", "[SUFFIX]b[PREFIX]a"])
@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_a_gap_in_tokens_that_the_model_lacks(path: str, written: str, infill_server: Running) -> None:
    """Continue writes a model that it does not know StarCoder's: their names were continued as if they were code."""
    http = infill_server.http()
    answer = http.post(path, json={"prompt": written})
    family = "starcoder" if "fim" in written else "codestral"
    theirs = ", ".join(FAMILIES[family].tokens)
    assert answer.status_code == 400 and answer.json()["error"] == {
        "message": f"prompt is a gap in the tokens of {family} ({theirs}), which demo lacks; let the client write its "
        "own, <|fim_prefix|>, <|fim_suffix|>, <|fim_middle|>",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": None,
    }
    for other in (f"# {written}", GAP):
        assert http.post(path, json={"prompt": other, "max_tokens": 1}).status_code == 200, other
    scored = {"prompt": written, "max_tokens": 0, "echo": True}
    assert http.post("/v1/completions", json=scored).json()["choices"][0]["text"] == written


def test_a_gap_for_a_model_without_fill_in_the_middle(demo_server: Running) -> None:
    answer = demo_server.http().post("/v1/completions", json={"prompt": ["a", GAP]})
    remedy = "let the client send the text before the gap alone, or serve a model that has such tokens"
    assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(f"which demo lacks; {remedy}")


# Zed's edit predictions: no temperature, no stream, and four stop strings at most.
ZED = {
    "model": "demo",
    "prompt": GAP,
    "max_tokens": 64,
    "stop": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
}


def test_zeds_predictions(infill_server: Running) -> None:
    """Its parser wants each of these fields; a text of a server without sampling is greedy."""
    data = infill_server.http().post("/v1/completions", json={**ZED, "seed": 3}).json()
    assert {name: type(data[name]) for name in ("id", "object", "created", "model")} == {
        **dict.fromkeys(("id", "object", "model"), str),
        "created": int,
    }
    assert all(data["usage"][f"{name}_tokens"] > 0 for name in ("prompt", "completion", "total"))
    (choice,) = data["choices"]
    assert choice["text"] == expected(infill_server, gap_ids(infill_server), 64, temperature=1.0, seed=3)
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_a_written_gap_ends_at_its_familys_tokens(path: str, infill_server: Running) -> None:
    """Zed and Tabby name few or none: behind <|file_sep|>, which is no text, a text went on with another file."""
    served = infill_server.served
    count, sampling = 40, {"temperature": 2.0, "seed": 11}
    ids = gap_ids(infill_server)
    tokens = infill_server.decoder.generate(ids, count, lp.SamplingParams(**sampling)).tokens
    ends = [place for place, token in enumerate(tokens) if token in served.fim.ends]
    assert ends and 0 < ends[0] < count - 1, "another seed will do"
    asked: dict[str, Any] = {"prompt": GAP, "max_tokens": count, **sampling}
    if path == "/completion":
        asked |= {"samplers": ["temperature"]}

    def text(**changed: Any) -> str:
        data = infill_server.http().post(path, json={**asked, **changed}).json()
        return str(data["content"] if path == "/completion" else data["choices"][0]["text"])

    assert text() == text(prompt=ids) == infill_server.decode(tokens[: ends[0]])
    assert text(ignore_eos=True) == infill_server.decode(tokens)


@pytest.fixture(scope="module")
def codellama_server() -> Iterator[Running]:
    """A server of a model with CodeLlama's tokens, whose names begin with "▁"."""
    with serving(*infilling_model(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])) as running:
        yield running


def test_zeds_code_llama(codellama_server: Running) -> None:
    """The names that Zed writes, "<PRE>" without "▁", are no tokens to a tokenizer, which took them for text."""
    tokenizer = codellama_server.served.tokenizer
    ids = FimPrompts(tokenizer, FAMILIES["codellama"]).prompt(BEFORE, BEHIND, None)[0]
    written = f"<PRE> {BEFORE} <SUF>{BEHIND} <MID>"
    assert tokenizer(written)["input_ids"] != ids
    stop = ["<PRE>", "<SUF>", "<MID>"]
    asked = {"model": "demo", "prompt": written, "max_tokens": 16, "stop": stop, "temperature": 0}
    data = codellama_server.http().post("/v1/completions", json=asked).json()
    assert data["choices"][0]["text"] == expected(codellama_server, ids, 16, temperature=0)
    assert data["usage"]["prompt_tokens"] == len(ids)


def test_zeds_chat(demo_server: Running) -> None:
    """The agent's panel: a key always, a temperature of 1, `max_completion_tokens`, chunks with the usage."""
    asked = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "You are an AI.\n"},
            {"role": "user", "content": [{"type": "text", "text": "def "}, {"type": "text", "text": "add(a, b):"}]},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 20,
        "temperature": 1.0,
        "seed": 3,
    }
    chunks = events(demo_server.http().post("/v1/chat/completions", json=asked, headers=KEY).text)
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == expected(demo_server, demo_server.encode("You are an AI.\ndef add(a, b):"), 20, seed=3)
    assert chunks[-1]["usage"]["total_tokens"] > 20


# Tabby, by the kind of model that its config names.
TABBY = {"max_tokens": 64, "temperature": 0.1, "stream": True, "presence_penalty": 0.0}


def tabbys_text(answer: Any) -> str:
    """The text that Tabby reads from a stream of /v1/completions: up to the first chunk with a reason."""
    text = ""
    for event in events(answer.text):
        text += event["choices"][0]["text"]
        if event["choices"][0]["finish_reason"]:
            break
    return text


def test_tabbys_openai_completion(infill_server: Running) -> None:
    """Kind openai/completion: the server writes the gap. An empty suffix, as at a file's end, is a plain completion."""
    http = infill_server.http()
    asked = {"model": "demo", "prompt": BEFORE, "suffix": BEHIND, **TABBY, "max_tokens": 20, "seed": 3}
    text = expected(infill_server, gap_ids(infill_server), 20, temperature=0.1, seed=3)
    assert tabbys_text(http.post("/v1/completions", json=asked)) == text
    plain = expected(infill_server, infill_server.encode(BEFORE), 20, temperature=0.1, seed=3)
    for suffix in ("", None):  # null: openai/legacy_completion_no_fim
        assert tabbys_text(http.post("/v1/completions", json=asked | {"suffix": suffix})) == plain
    health = {"model": "demo", "prompt": "def fib(n):\n", "suffix": None, **TABBY}
    assert tabbys_text(http.post("/v1/completions", json=health))


def test_tabbys_llama_cpp_completion(demo_server: Running) -> None:
    """Kind llama.cpp/completion: events with `content` and `stop`, and no [DONE], which Tabby would not read."""
    asked: dict[str, Any] = {
        "seed": 1795901283123,  # the time in ms
        "prompt": "def fibonacci(n):\n",
        "n_predict": 20,
        "temperature": 0.1,
        "stream": True,
        "penalty_last_n": 0,
        "presence_penalty": 0.0,
    }
    http = demo_server.http()
    lines = [line for line in http.post("/completion", json=asked).text.splitlines() if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    sampling = {"temperature": 0.1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": asked["seed"]}
    text = expected(demo_server, demo_server.encode(asked["prompt"]), 20, **sampling)
    assert "".join(chunk["content"] for chunk in chunks) == text
    whole = http.post("/completion", json={**asked, "stream": False}).json()
    assert whole["content"] == text and whole["stop"] is True


def test_tabbys_chat(demo_server: Running) -> None:
    """Kind openai/chat: its stream has whole numbers for times, and roles and reasons that its types know."""
    messages = [{"role": "user", "content": "Hello, please reply in short"}]
    asked = {"model": "demo", "messages": messages, "presence_penalty": 0.5, "stream": True, "max_tokens": 8}
    chunks = events(demo_server.http().post("/v1/chat/completions", json=asked).text)
    assert all(chunk["object"] == "chat.completion.chunk" and 0 < chunk["created"] < 2**32 for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {choice["delta"].get("role") for choice in choices} <= {None, "assistant"}
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
