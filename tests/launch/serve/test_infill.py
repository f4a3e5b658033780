"""Fill-in-the-middle, and llama.cpp's endpoints. What editors send is in test_editors.py."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from transformers import AutoTokenizer

from launch.serve.fim import FAMILIES, Extra, FimFormat, FimPrompts, fim_format, given_format
from lp.errors import UserError
from lp.models.loader import DEMO_MODEL
from tests.conftest import ROOT
from tests.support.fim_models import QWEN, tokenizer_with
from tests.support.serving import Running

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"


@pytest.mark.parametrize("name", [*FAMILIES])
def test_a_long_prompt_is_looked_through_once(name: str) -> None:
    """A body of some MB that repeats a token of a family's held the server for hours."""
    family = FAMILIES[name]
    front, behind, end = (re.sub("^▁", " ", token or "") for token in (family.prefix, family.suffix, family.middle))
    first, second = (behind, front) if family.suffix_first else (front, behind)
    prompt = f"{first.strip()}{second * 300_000}\nx"
    began = time.thread_time()
    family.texts(prompt)
    assert family.texts(f"{prompt}{end}") is not None
    assert time.thread_time() - began < 1


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


# How Zed 1.0, Continue 1.3 and Tabby's templates write the gap.
WRITTEN = {
    "codellama": "<PRE> {prefix} <SUF>{suffix} <MID>",
    "deepseek-coder": "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    "codegemma": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "qwen2.5-coder": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "starcoder": "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "santacoder": "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",
    "codestral": "[SUFFIX]{suffix}[PREFIX]{prefix}",
}


@pytest.mark.parametrize("name", [*FAMILIES])
@pytest.mark.parametrize(("prefix", "suffix"), [(PREFIX, SUFFIX), ("  a", " b "), ("", "\n"), ("x = '[PREFIX", "")])
def test_a_gap_that_a_client_wrote_has_its_texts(name: str, prefix: str, suffix: str) -> None:
    """To the character, as indents matter; a text that only has some of the tokens is no gap."""
    family = FAMILIES[name]
    written = WRITTEN[name].format(prefix=prefix, suffix=suffix)
    assert family.texts(written) == (prefix, suffix)
    assert family.texts(f"See {written}") is None and family.texts(PREFIX) is None
    assert all(FAMILIES[other].texts(written) is None for other in FAMILIES if WRITTEN[other] != WRITTEN[name])


@pytest.mark.parametrize("name", [*FAMILIES])
def test_a_written_gap_is_known_by_its_tokens(name: str) -> None:
    """What ends a gap ends no other prompt."""
    family = FAMILIES[name]
    tokenizer = tokenizer_with(list(dict.fromkeys([*family.tokens, *family.ends])))
    fim = FimPrompts(tokenizer, family)
    prompt, _ = fim.prompt(PREFIX, SUFFIX, None)
    assert fim.is_gap(prompt) and fim.ends_of(prompt) == fim.ends
    some = [token for token in prompt if token != tokenizer.convert_tokens_to_ids(family.tokens[-1])]
    assert not fim.is_gap(some) and fim.ends_of(some) == []


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
