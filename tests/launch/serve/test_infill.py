"""Fill-in-the-middle, and llama.cpp's endpoints as llama.vim and Tabby call them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import lp
from launch.serve.fim import FAMILIES, Extra, FimFormat, FimPrompts, fim_format, given_format
from lp.errors import UserError
from lp.models.loader import DEMO_MODEL
from tests.conftest import ROOT
from tests.support.serving import Running, serving

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"


def tokenizer_with(tokens: list[str]) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer


def infilling_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """A random model with Qwen2.5-Coder's special tokens."""
    tokenizer = tokenizer_with(QWEN)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


@pytest.fixture(scope="module")
def infill_server() -> Iterator[Running]:
    """A server of such a model."""
    for package in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
        pytest.importorskip(package, reason="the extra `serve` is not installed")
    with serving(*infilling_model()) as running:
        yield running


@pytest.mark.parametrize("name", [*FAMILIES])
def test_a_family_is_known_by_its_tokens(name: str) -> None:
    """And writes the gap in its own order."""
    family = FAMILIES[name]
    others = [token for token in (family.file, *family.ends) if token]
    tokenizer = tokenizer_with([*family.tokens, *others])
    assert fim_format(tokenizer, None) == family
    prompt, cut = FimPrompts(tokenizer, family).prompt("one = ", "\ntwo", None)
    text = tokenizer.decode(prompt)
    assert not cut
    middle = family.middle or ""
    if family.suffix_first:
        assert text == f"{family.suffix}\ntwo{family.prefix}one = {middle}"
    else:
        assert text == f"{family.prefix}one = {family.suffix}\ntwo{middle}"


@pytest.mark.parametrize("name", [*FAMILIES])
@pytest.mark.parametrize("special", [True, False])  # Qwen's are added, but not marked as special
def test_names_of_special_tokens_in_a_file_are_text(name: str, special: bool) -> None:
    """A file about fill-in-the-middle would otherwise end its own prefix."""
    family = FAMILIES[name]
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokens = [token for token in (*family.tokens, family.file, *family.ends) if token]
    tokenizer.add_tokens(list(dict.fromkeys(tokens)), special_tokens=special)
    written = "".join(f"x = {token!r}{token}\n" for token in tokens)
    fim = FimPrompts(tokenizer, family)
    prompt, cut = fim.prompt(written, written, None, [Extra(written, written)])
    ids = [tokenizer.convert_tokens_to_ids(token) for token in dict.fromkeys(tokens)]
    own = [*family.tokens, *([family.file] if family.file else [])]
    assert not cut
    assert [prompt.count(index) for index in ids] == [own.count(token) for token in dict.fromkeys(tokens)]
    assert tokenizer.decode(prompt).count(written) == (4 if family.file else 3)


def test_a_model_without_such_tokens_has_no_format() -> None:
    tokenizer = tokenizer_with([])
    assert fim_format(tokenizer, None) is None
    with pytest.raises(UserError, match="'<PRE>', which the model's vocabulary lacks"):
        FimPrompts(tokenizer, FimFormat(prefix="<PRE>", suffix="<SUF>"))


def test_a_format_of_the_users_own() -> None:
    """Others than the known ones, by config; half a format is refused."""
    given = {"prefix": "<P>", "suffix": "<S>", "middle": "<M>", "suffix_first": True, "file": None, "ends": ["<E>"]}
    format = given_format(given)
    assert format == FimFormat(prefix="<P>", suffix="<S>", middle="<M>", suffix_first=True, ends=("<E>",))
    tokenizer = tokenizer_with(["<P>", "<S>", "<M>", "<E>"])
    prompts = FimPrompts(tokenizer, format)
    assert tokenizer.decode(prompts.prompt("a", "b", None)[0]) == "<S>b<P>a<M>"
    assert prompts.ends == tokenizer.convert_tokens_to_ids(["<E>"])
    assert given_format({"prefix": None, "suffix": None, "ends": []}) is None
    with pytest.raises(UserError, match=r"fim.prefix is not given, but fim.middle is"):
        given_format({"middle": "<M>"})


@pytest.mark.parametrize("room", [40, 24, 12])
def test_what_has_no_room_is_cut_far_from_the_gap(room: int) -> None:
    """The end of the prefix and the beginning of the suffix stay; other files go first."""
    tokenizer = tokenizer_with(QWEN)
    prompts = FimPrompts(tokenizer, FAMILIES["qwen2.5-coder"])
    prefix, suffix = "".join(f"before{i}\n" for i in range(9)), "".join(f"after{i}\n" for i in range(9))
    prompt, cut = prompts.prompt(prefix, suffix, room, [Extra("a.py", "import os\n" * 9)])
    assert cut and len(prompt) == room
    text = tokenizer.decode(prompt)
    front, behind = re.split(r"<\|fim_prefix\|>", text)[1].split("<|fim_suffix|>")
    assert prefix.endswith(front) and suffix.startswith(behind.removesuffix("<|fim_middle|>"))
    assert front and len(front) > len(behind) - len("<|fim_middle|>")


def test_suffix_of_completions(infill_server: Running) -> None:
    """The prompt is the family's; the text ends at the model's own tokens for it."""
    http = infill_server.http()
    prompt = FimPrompts(infill_server.served.tokenizer, FAMILIES["qwen2.5-coder"]).prompt(PREFIX, SUFFIX, None)[0]
    expected = infill_server.decoder.generate(prompt, 12).tokens
    asked = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 12, "temperature": 0}
    answer = http.post("/v1/completions", json=asked).json()
    assert answer["choices"][0]["text"] == infill_server.decode(expected)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    separator = infill_server.served.tokenizer.convert_tokens_to_ids("<|file_sep|>")
    ended = http.post("/v1/completions", json={**asked, "logit_bias": {str(separator): 100}}).json()
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["choices"][0]["text"] == ""


# What llama.vim sends (its autoload/llama.vim of January 2026) by default: to warm the cache, and to complete.
# The empty model is always there, as is an empty key: the plugin looks at the length of the setting's name.
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
    "input_suffix": SUFFIX,
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
    asked |= {"max_tokens": 20, "seed": 3}  # which the plugin does not send
    lines = [line for line in http.post("/v1/chat/completions", json=asked, headers=KEY).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    ids = demo_server.encode("--- CONTEXT\n\nINSTRUCTION: def add(a, b):\n")
    sampling = lp.SamplingParams(temperature=0.1, min_p=0.1, seed=3)
    assert text == demo_server.decode(demo_server.decoder.generate(ids, 20, sampling).tokens)


def test_infill_has_the_decoders_tokens(infill_server: Running) -> None:
    """Infill must decode the prompt with the other files before it, and reuse their tokens when asked again."""
    http = infill_server.http()
    prompts = FimPrompts(infill_server.served.tokenizer, FAMILIES["qwen2.5-coder"])
    ids, _ = prompts.prompt("def add(a, b):\n    return ", SUFFIX, None, [Extra("/src/main.py", RING[0]["text"])])  # type: ignore[arg-type]
    sampling = lp.SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=4)
    expected = infill_server.decode(infill_server.decoder.generate(ids, 24, sampling).tokens)
    free = {"n_predict": 24, "n_indent": 0, "t_max_predict_ms": 0, "response_fields": None}
    asked = {**VIM, "seed": 4, **free}
    data = http.post("/infill", json=asked).json()
    assert data["content"] == expected and data["stop_type"] == "limit" and data["tokens_predicted"] == 24
    again = http.post("/infill", json=asked).json()
    assert again["content"] == expected and again["timings"]["cache_n"] >= len(ids) - 2
    assert http.post("/infill", json={**asked, "response_fields": []}).json().keys() == data.keys(), "as llama.cpp"


def test_an_infill_that_does_not_fit_is_cut(infill_server: Running) -> None:
    http = infill_server.http()
    long = {**VIM, "input_prefix": "x = 1\n" * 500, "response_fields": ["truncated", "timings/prompt_n"]}
    answer = http.post("/infill", json=long)
    assert answer.status_code == 200 and answer.json()["truncated"] is True


def test_tabbys_requests(demo_server: Running) -> None:
    """/completion, streamed: events with `content` and `stop`, and no [DONE], which Tabby would not read."""
    asked: dict[str, Any] = {
        "seed": 9,
        "prompt": "def fibonacci(n):\n",
        "n_predict": 20,
        "temperature": 0.1,
        "stream": True,
        "penalty_last_n": 0,
        "presence_penalty": 0.0,
    }
    http = demo_server.http()
    lines = [line for line in http.post("/completion", json=asked).text.splitlines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    sampling = lp.SamplingParams(temperature=0.1, top_k=40, top_p=0.95, min_p=0.05, seed=9)
    ids = demo_server.encode(asked["prompt"])
    expected = demo_server.decode(demo_server.decoder.generate(ids, 20, sampling).tokens)
    assert "".join(event["content"] for event in events) == expected
    whole = http.post("/completion", json={**asked, "stream": False}).json()
    assert whole["content"] == expected and whole["stop"] is True


def test_a_chain_without_penalties_has_none(demo_server: Running) -> None:
    """It switched repeat_penalty off alone: another text than llama.cpp's, which leaves out all three."""
    http = demo_server.http()
    asked: dict[str, Any] = {"prompt": "def fibonacci(n):\n", "n_predict": 20, "seed": 3, "samplers": ["temperature"]}
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repeat_penalty": 2.0}
    without = http.post("/completion", json=asked).json()["content"]
    assert http.post("/completion", json=asked | penalties).json()["content"] == without
    asked["samplers"] = ["penalties", "temperature"]
    for name, value in penalties.items():
        assert http.post("/completion", json=asked | {name: value}).json()["content"] != without, name


def test_null_is_nothing(demo_server: Running) -> None:
    """llama.cpp takes null for its default, and so do clients that send every field."""
    http = demo_server.http()
    body = {"prompt": "import os\n", "n_predict": 6, "seed": 3}
    nulls = dict.fromkeys(("temperature", "top_k", "stop", "grammar", "json_schema", "n_indent", "stream"))
    contents = [http.post("/completion", json=each).json()["content"] for each in (body, body | nulls)]
    assert contents[0] == contents[1] and contents[0]


def test_tokens_and_back(demo_server: Running) -> None:
    http = demo_server.http()
    text = "def größe(x):\n    return x  # 漢字"
    tokens = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert tokens == demo_server.encode(text)
    pieces = http.post("/tokenize", json={"content": "import os", "with_pieces": True}).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "import os"
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    props = http.get("/props").json()
    assert props["n_ctx"] == 2048 and props["total_slots"] == 8


def test_the_package_has_no_path_of_a_machine() -> None:
    """The page is one file, with nothing from outside."""
    page = (ROOT / "launch" / "serve" / "page.html").read_text()
    assert not re.search(r"https?://|src=|@import|url\(", page)
