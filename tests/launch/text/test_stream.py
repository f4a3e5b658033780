"""Streaming: text that never shows half a character, and colours for terminals alone."""

from __future__ import annotations

import io
import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from launch.text.detokenizer import Detokenizer
from launch.text.stream import RESET, STEP_COLOURS, Pen, shows_colours
from lp.models.loader import DEMO_MODEL

TEXTS = [
    "naïve café — 漢字かな交じり文 🙂🙃 👩\N{ZERO WIDTH JOINER}👧 end",
    "def f(x):\n    return x  # ok\n",
    "\N{REPLACEMENT CHARACTER} kept\n",
    "é",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def _stream(tokenizer: PreTrainedTokenizerBase, prompt: list[int], tokens: list[int]) -> list[str]:
    """Push the tokens in steps of 1 to 5."""
    detokenizer, parts = Detokenizer(tokenizer, prompt), list[str]()
    while tokens:
        size = random.randint(1, 5)
        parts.append(detokenizer.push(tokens[:size]))
        tokens = tokens[size:]
    return [*parts, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_split_characters_are_held_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """A character of several tokens used to come out as replacement marks."""
    prompt = tokenizer("x = ")["input_ids"]
    for _ in range(20):
        parts = _stream(tokenizer, prompt, tokenizer(text)["input_ids"])
        assert "".join(parts) == text
        assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_a_prompt_that_ends_inside_a_character(tokenizer: PreTrainedTokenizerBase) -> None:
    """A prompt of ids may end within a character: it is shown whole and once when the model completes it."""
    text = "é€😀"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > 7
    for cut in range(len(ids)):
        whole = tokenizer.decode(ids[:cut]).rstrip("\N{REPLACEMENT CHARACTER}")
        for _ in range(5):
            assert "".join(_stream(tokenizer, ids[:cut], ids[cut:])) == text[len(whole) :], cut


@pytest.mark.parametrize("prompt", ["abc\ufffd", "\ufffd" * 3, "\ufffd\u20ac"])
def test_a_prompt_with_replacement_characters_of_its_own(tokenizer: PreTrainedTokenizerBase, prompt: str) -> None:
    """As of a file with broken encoding: they came back as if the model had written them."""
    ids, new = tokenizer(prompt)["input_ids"], tokenizer(" def x")["input_ids"]
    for _ in range(5):
        assert "".join(_stream(tokenizer, ids, new)) == " def x"
    cut = ids[:-1]  # inside a character, where the prompt ends with another one than that
    text = "".join(_stream(tokenizer, cut, [*ids[-1:], *new]))
    assert text == prompt[-1] + " def x" if prompt[-1] != "\ufffd" else text.endswith(" def x")


def test_any_tokens_give_the_text_of_all_of_them(tokenizer: PreTrainedTokenizerBase) -> None:
    """A model that emits broken bytes must neither lose text nor print any twice."""
    prompt = tokenizer("x = ")["input_ids"]
    for _ in range(100):
        tokens = [random.randrange(1, 300 if random.random() < 0.5 else len(tokenizer)) for _ in range(60)]
        whole = tokenizer.decode([*prompt, *tokens], skip_special_tokens=True)
        assert "".join(_stream(tokenizer, prompt, tokens)) == whole.removeprefix("x = ")


def test_special_tokens_are_not_text(tokenizer: PreTrainedTokenizerBase) -> None:
    assert _stream(tokenizer, [5], [tokenizer.eos_token_id]) == ["", ""]


def test_the_pen_colours_steps_of_several_tokens_alone() -> None:
    file = io.StringIO()
    pen = Pen(file, colour=True)
    for count in (1, 2, 9):
        pen.step(f"<{count}>", count)
    assert file.getvalue() == f"<1>{STEP_COLOURS[2]}<2>{RESET}{STEP_COLOURS[5]}<9>{RESET}"


def test_bare_text_has_no_escape_codes() -> None:
    """Piped output goes into files."""
    file = io.StringIO()
    pen = Pen(file, colour=False)
    pen.legend()
    pen.aside("prompt ")
    pen.step("text", 3)
    assert file.getvalue() == "prompt text"


def test_a_model_does_not_steer_the_terminal() -> None:
    file = io.StringIO()
    Pen(file, colour=True).step("\x1b[2Jgone", 1)
    assert "\x1b" not in file.getvalue()


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert shows_colours(Terminal()) and not shows_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shows_colours(Terminal())
