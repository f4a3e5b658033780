"""A text as its client sees it: whole characters, cut at stop strings, lines and times."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from launch.serve.stopping import TextWatch
from lp.models.loader import DEMO_MODEL
from tests.support.tokenizers_of import ADDED, BYTES, DECODERS, llama_2, tokenizer_with


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def watched(watch: TextWatch, tokens: list[int], seed: int = 0) -> list[str]:
    """What is shown, where steps have one to five tokens, up to the end."""
    generator = random.Random(seed)
    shown: list[str] = []
    while tokens and not watch.ended:
        count = generator.randint(1, 5)
        shown.append(watch.push(tokens[:count]))
        tokens = tokens[count:]
    return [*shown, watch.flush()]


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Drawn texts and stop strings: what was shown is always a beginning of what will have been shown."""
    generator = random.Random(seed)
    text = "".join(generator.choice(["ab", "a", "b", "aab", "\n", "ä", "漢", " x"]) for _ in range(40))
    stop = ["".join(generator.choice("abx \nä") for _ in range(generator.randint(1, 4))) for _ in range(2)]
    tokens = tokenizer(text)["input_ids"]
    watch = TextWatch(tokenizer, [], stop)
    shown = watched(watch, tokens, seed)
    # The first one to be complete ends the text, as the model would go on behind it no more.
    ends = [text.find(one) + len(one) for one in stop if one in text]
    cut = min(
        (
            text.find(one)
            for one in stop
            if one in text and text.find(one) + len(one) <= _seen(watch, tokenizer, tokens)
        ),
        default=len(text),
    )
    assert "".join(shown) == text[:cut]
    assert watch.ended == bool(ends) and (watch.found in stop if ends else watch.found is None)
    assert watch.num_tokens <= len(tokens)


def _seen(watch: TextWatch, tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> int:
    """Characters of the tokens up to the end."""
    return len(str(tokenizer.decode(tokens[: watch.num_tokens])).rstrip("\ufffd"))


def test_a_stop_string_ends_it_at_its_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """However many more the step has brought."""
    tokens = tokenizer("one = 1\ntwo = 2\nthree = 3\n")["input_ids"]
    watch = TextWatch(tokenizer, [], ["two"])
    assert watch.push(tokens) == "one = 1\n" and watch.ended and watch.flush() == ""
    assert str(tokenizer.decode(tokens[: watch.num_tokens])).startswith("one = 1\ntwo")
    assert "=" not in str(tokenizer.decode(tokens[: watch.num_tokens])).split("two")[1]


def test_of_two_stop_strings_in_one_token_the_first_in_the_text_ends_it(tokenizer: PreTrainedTokenizerBase) -> None:
    """The one that was given first showed what is behind the other; at one place, the longer is the more telling."""
    tokens = tokenizer(" return")["input_ids"]
    for stop, shown, found in ((["turn", "re"], " ", "re"), (["re", "ret"], " ", "ret"), (["tu", "n"], " re", "tu")):
        watch = TextWatch(tokenizer, [], stop)
        assert (len(tokens), watch.push(tokens), watch.found) == (1, shown, found)


def test_characters_stay_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    """The bytes of one that is not complete wait."""
    tokens = tokenizer("漢字ä😀")["input_ids"]
    watch = TextWatch(tokenizer, [])
    parts = [watch.push([token]) for token in tokens]
    assert "".join(parts) == "漢字ä😀" and all("\ufffd" not in part for part in parts)
    half = TextWatch(tokenizer, [], ["zz"])
    shown = [half.push([token]) for token in tokens[:1]]
    assert "".join(shown) == "" and half.flush() == "\ufffd"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("x\n    y\n    z\ndef f():\n", "x\n    y\n    z"),
        ("x\n\n    y\n  z\n", "x\n\n    y"),
        ("x\n    y\n   z\n", "x\n    y"),
        ("x\n    y", "x\n    y"),
        ("x\n    y\n  ", "x\n    y\n  "),
        ("  x", "  x"),
    ],
)
def test_a_line_that_is_indented_less_ends_it(
    tokenizer: PreTrainedTokenizerBase, text: str, cut: str, seed: int
) -> None:
    """As llama.vim asks: a completion stays in its block."""
    watch = TextWatch(tokenizer, [], min_indent=4)
    assert "".join(watched(watch, tokenizer(text)["input_ids"], seed)) == cut
    assert watch.ended == (cut != text)


def test_a_time_limit_waits_for_a_line(tokenizer: PreTrainedTokenizerBase) -> None:
    watch = TextWatch(tokenizer, [], time_limit_s=0.005)
    one, two = tokenizer("a = ")["input_ids"], tokenizer("1\n")["input_ids"]
    watch.push(one)
    time.sleep(0.01)
    watch.push(one)
    assert not watch.ended  # its first line is not complete
    watch.push(two)
    assert watch.ended


@pytest.mark.parametrize("min_indent", [0, 2])
def test_what_waits_is_shown_where_the_clock_ends_it(tokenizer: PreTrainedTokenizerBase, min_indent: int) -> None:
    """The beginning of a stop string, and half a character; with a least indent, as llama.vim asks, they were lost."""
    for end, shown in [("bx", "bx"), ("b\u6f22", "b\ufffd"), ("b\n", "b\n")]:
        watch = TextWatch(tokenizer, [], ["xyz"], min_indent, time_limit_s=1e-9)
        text = watch.push(tokenizer("a\n")["input_ids"])
        tokens = tokenizer(f"   {end}")["input_ids"]
        text += watch.push(tokens[:-1] if "\ufffd" in shown else tokens)
        assert watch.ended and watch.found is None
        assert text + watch.flush() == f"a\n   {shown}", end


@pytest.mark.parametrize(("limits", "text"), [({"min_indent": 4}, "x\n    y"), ({"stop": ["z"]}, "x\n    y\n")])
def test_nothing_comes_behind_what_ended_it(limits: dict[str, Any], text: str) -> None:
    """Nor half a character that came in the very token which ended the text."""
    tokenizer = tokenizer_with(DECODERS["byte-level"])
    tokenizer.add_tokens(["z\u00e6"])  # z and the first byte of a character
    watch = TextWatch(tokenizer, [], **limits)
    tokens = [tokenizer.convert_tokens_to_ids(each) for each in [*"x\u010a\u0120\u0120\u0120\u0120y\u010a", "z\u00e6"]]
    assert watch.push(tokens) + watch.flush() == text and watch.ended


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_stop_string_may_name_special_tokens(ahead: int) -> None:
    """They are no text, so that they never ended one; their names, and text beside them, are not shown."""
    llama = llama_2()
    ids = {name: llama.convert_tokens_to_ids(name) for name in ("<file_sep>", "</s>", "<tool>", "\u2581hi", "a", "b")}
    hi, a, b, sep, end = ids["\u2581hi"], ids["a"], ids["b"], ids["<file_sep>"], ids["</s>"]
    written = list(llama("<file_sep>", split_special_tokens=True, add_special_tokens=False)["input_ids"])
    cases = [
        (["<file_sep>"], written, (" ", len(written), "<file_sep>")),
        (["<file_sep>"], [hi, a, sep, b], (" hia", 3, "<file_sep>")),
        (["x", "</s>"], [hi, end, sep], (" hi", 2, "</s>")),
        (["a<file_sep>b"], [a, sep, a, sep, b, b], ("a", 5, "a<file_sep>b")),
        (["a<file_sep>b"], [a, sep, a], ("aa", 3, None)),
        (["ab"], [hi, a, sep, b, a], (" hi", 4, "ab")),
        (["<tool>"], [hi, ids["<tool>"], a], (" hi", 2, "<tool>")),
        (["<file_sep></s>"], [hi, sep, end], (" hi", 3, "<file_sep></s>")),
        (["i<file_sep>"], [hi, a, hi, sep], (" hia h", 4, "i<file_sep>")),
    ]
    for stop, tokens, expected in cases:
        watch = TextWatch(llama, [llama.convert_tokens_to_ids("\u2581the")], stop)
        text, left = "", [*tokens]
        while left and not watch.ended:
            text += watch.push(left[: 1 + ahead])
            left = left[1 + ahead :]
        text += watch.flush()
        assert (text, watch.num_tokens, watch.found) == expected, (stop, tokens)


def test_the_name_of_an_added_token_may_be_decoded_to_another_text() -> None:
    """Where its decoder takes a character of it for a space."""
    tokenizer = tokenizer_with(DECODERS["llama-2"])
    name = ADDED[-1]
    watch = TextWatch(tokenizer, [], [name])
    assert watch.push([tokenizer.convert_tokens_to_ids(each) for each in ("a", name, "b")]) == "a"
    assert watch.found == name and watch.num_tokens == 2


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_half_a_character_takes_nothing_away(stop: list[str]) -> None:
    """With stop strings tokens are decoded one by one, without all at once: the text was another one."""
    tokenizer = tokenizer_with(DECODERS["llama-2"])
    for data in ("\U0001f600\U0001f600".encode()[:6], "\ud55c\uae00".encode()[:5]):
        watch = TextWatch(tokenizer, [], stop)
        tokens = [tokenizer.convert_tokens_to_ids(BYTES[byte]) for byte in data]
        assert watch.push(tokens) + watch.flush() == data.decode(errors="replace")
