"""Lists of different items: by masks of tokens, however items and tokens lie, on branches and back."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

import llguidance
from llguidance._tokenizer import TokenizerWrapper

import lp
from lp.errors import UserError
from lp.models.loader import vocabulary_size
from lp.sampling.grammar_compiler import LLGrammar
from lp.sampling.schema_grammar import schema_to_lark
from lp.sampling.schema_rewriting import comparable
from tests.support.grammar_texts import Texts
from tests.support.serving import STEP_TIMES

PIECES = (
    ', |", "|1, 1|["a|["|"]|"],|a", "|b", "a|e-1]|\\u00e9|10|, 0]|]]|], [|}, {|{"a": |1.0|.0]|true, |true]|null|[1, 1]'
)
PIECES += '|ab|"a"|[]|[], []|"", ""|\\u00|e9"|-0|00|: 1}|: 1}]|e1]|1e|], "|false, false|, -0]|1, 10, 1|", "a", "a'
EOS = 256


class _Tokens:
    """Bytes, an EOS, and tokens of several characters."""

    eos_token_id = EOS
    bos_token_id = None
    tokens: Sequence[bytes] = [
        *(bytes([byte]) for byte in range(256)),
        b"<eos>",
        *(p.encode() for p in PIECES.split("|")),
    ]
    special_token_ids: Sequence[int] = [EOS]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def tokenizer() -> Any:
    return llguidance.LLTokenizer(TokenizerWrapper(_Tokens()), slices=[])


STRING = {"type": "string"}
SCHEMAS: list[Any] = [
    {"type": "array", "uniqueItems": True},
    {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
    {"type": "array", "uniqueItems": True, "items": STRING},
    {"type": "array", "uniqueItems": True, "items": {"type": "number"}},
    {"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 0, "maximum": 12}, "maxItems": 5},
    {"type": "array", "uniqueItems": True, "items": {"type": "string", "maxLength": 1}},
    {"type": "array", "uniqueItems": True, "items": {"type": "string", "pattern": "^(a|b[0-9]?|é)$"}},
    {
        "type": "array",
        "items": {"type": "array", "uniqueItems": True, "items": {"type": ["integer", "boolean", "string"]}},
    },
    {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}, "ab": {"type": "array"}}},
    {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "ab", "b", 1, 10, None, *range(100, 170)]}},
    {"type": "array", "uniqueItems": True, "prefixItems": [{"type": "boolean"}, {"type": "boolean"}], "items": STRING},
    {"type": "array", "uniqueItems": True, "items": {"type": "array"}},
]


def allowed_by(matcher: Any, vocabulary: int) -> set[int]:
    mask = torch.zeros(-(-vocabulary // 32), dtype=torch.int32)
    matcher.allowed(mask)
    words = mask.tolist()
    return {token for token in range(vocabulary) if words[token // 32] >> token % 32 & 1}


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_masks_of_tokens_are_those_of_their_bytes(number: int) -> None:
    """A token that ends an item, begins another and ends that; the same item by escapes: byte by byte as at once."""
    lark = schema_to_lark(json.dumps(SCHEMAS[number]))
    names = _Tokens.tokens
    of_tokens = LLGrammar(tokenizer(), len(names), lark, "")
    seen = Counter[str]()
    for seed in range(12):
        rng = random.Random(f"{number} {seed}")
        matcher: Any = of_tokens.matcher([EOS])
        by_bytes = Texts(lark).matcher()
        text: list[int] = []
        for _ in range(40):
            allowed = allowed_by(matcher, len(names))
            inner = allowed_by(matcher._inner, len(names))
            for token in inner | {EOS}:
                taken = 0
                data = [EOS] if token == EOS else names[token]
                while taken < len(data) and by_bytes.accept(data[taken]):
                    taken += 1
                by_bytes.rollback(taken)
                assert (taken == len(data)) == (token in allowed), (text_of(text), names[token])
            seen["forbidden"] += len(inner - allowed)
            if text and rng.random() < 0.15:
                count = rng.randint(1, len(text))
                matcher.rollback(count)
                by_bytes.rollback(sum(len(names[token]) for token in text[-count:]))
                del text[-count:]
                continue
            choices = [
                token for token in allowed if token != EOS and (token > EOS or names[token] in b'[]{}", 01a:tb\\e')
            ]
            choices = choices or [token for token in allowed if token != EOS]
            if not choices:
                assert EOS in allowed, text_of(text)
                break
            token = (
                rng.choice([each for each in choices if each > EOS] or choices)
                if rng.random() < 0.5
                else rng.choice(choices)
            )
            assert matcher.accept(token)
            assert all(by_bytes.accept(byte) for byte in names[token])
            text.append(token)
            if EOS in allowed_by(matcher, len(names)):
                seen["ended"] += 1
                _check_different(json.loads(text_of(text)), SCHEMAS[number])
    assert seen["forbidden"] > 1 and seen["ended"] > 2, seen


def text_of(tokens: list[int]) -> str:
    return b"".join(_Tokens.tokens[token] for token in tokens).decode(errors="replace")


def _check_different(value: Any, schema: Any) -> None:
    if schema.get("uniqueItems") and isinstance(value, list):
        assert len({*map(comparable, value)}) == len(value), value
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for each in value:
            _check_different(each, schema["items"])
    if isinstance(value, dict):
        for name, each in value.items():
            _check_different(each, schema.get("properties", {}).get(name, {}))


def test_every_list_of_different_items_has_its_text() -> None:
    """And no other: all lists of up to 3 of some values, in all spellings."""
    texts = Texts(schema_to_lark('{"type": "array", "uniqueItems": true}'))
    spelled = [
        "1",
        "1.0",
        "10e-1",
        "0",
        "-0",
        '"a"',
        '"é"',
        '"\\u00e9"',
        "[]",
        "[1]",
        "[1.0]",
        '{"a": 1, "b": 2}',
        '{"b": 2, "a": 1}',
        "true",
        "10",
        '""',
    ]
    for count in (2, 3):
        for items in product(spelled, repeat=count):
            different = len({comparable(json.loads(item)) for item in items}) == count
            assert texts.has(f"[{', '.join(items)}]") == different, items


def test_items_that_are_all_there_end_the_list() -> None:
    """A comma behind the last value that there is would leave no text."""
    texts = Texts(
        schema_to_lark(
            '{"type": "array", "uniqueItems": true, "items": {"type": "integer", "minimum": 0, "maximum": 2}}'
        )
    )
    assert texts.has("[0, 2, 1]")
    matcher = texts.matcher()
    assert all(matcher.accept(byte) for byte in b"[0, 2, 1")
    assert allowed_by(matcher, EOS + 1) == {ord("]")}


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind 0.0e there are 1,300 ways to write 0 again; who asks for many such places may not hold the server."""
    texts = Texts(schema_to_lark('{"type": "array", "uniqueItems": true, "items": {"type": "number"}}'))
    matcher = texts.matcher()
    assert all(matcher.accept(byte) for byte in b"[0, 0.0")
    assert not matcher.accept(ord("e"))
    monkeypatch.setattr("lp.sampling.unique_items.MOST_LOOKED", 100)
    with pytest.raises(UserError, match="more than 100 places"):
        allowed_by(matcher, EOS + 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_plain_decoding(temperature: float) -> None:
    """Branches of a draft tree, each with its own items before, and back."""
    model, tokens = lp.load("demo")
    compiler = lp.GrammarCompiler(tokens, vocabulary_size(model))
    grammar = compiler.json_schema(
        {"type": "array", "uniqueItems": True, "items": STRING | {"maxLength": 3}, "minItems": 6}
    )
    prompt = tokens('["a", "b", "a", "b", "a"]\n')["input_ids"]
    sampling = lp.SamplingParams(temperature=temperature, seed=3) if temperature else None
    expected = lp.AutoregressiveDecoder(model).generate(prompt, 60, sampling, grammar=grammar)
    output = lp.LookaheadDecoder(model, step_times=STEP_TIMES).generate(prompt, 60, sampling, grammar=grammar)
    assert output.tokens == expected.tokens
    if output.finish_reason == "eos":
        _check_different(json.loads(tokens.decode(output.tokens, skip_special_tokens=True)), {"uniqueItems": True})
    assert output.steps < len(output.tokens)
