"""launch.chat through a pipe: what is answered, remembered, refused and dropped."""

from __future__ import annotations

import io
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import lp
from launch.chat.conversation import Chat
from launch.chat.history import History, Turn
from launch.chat.settings import Settings
from launch.config.schema import AutoregressiveSchema, ChatConfig, GreedySchema
from launch.text.stream import Pen
from lp.checks import check_int
from lp.models.loader import load
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.generation_config import CheckpointDefaults
from tests.support.apps import CONTEXT, Ran, with_template

SMALL = ("model=hf", "model.dtype=float64", "W=4", "N=3", "G=4", "max_new_tokens=12")
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
FIGURES = re.compile(r"(\d+) tokens, (\d+) steps, S ([\d.]+), ([\d.]+) tokens/s")


@pytest.fixture(scope="module")
def chat_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    return with_template(tiny_folder, tmp_path_factory.mktemp("chat") / "model", TEMPLATE)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the decoder was asked, as a text and its settings, and what it gave."""
    asked: list[dict[str, Any]] = []
    honest = lp.LookaheadDecoder.generate

    def noted(self: lp.LookaheadDecoder, ids: list[int], *args: Any, **options: Any) -> lp.GenerationOutput:
        decode, interruption = options["tokenizer"].decode, None
        try:
            output = honest(self, ids, *args, **options)
        except lp.Interrupted as error:
            output, interruption = error.output, error
        asked.append({"text": decode(ids), "answer": decode(output.tokens), "asked": args, "output": output})
        asked[-1]["interruption"] = interruption
        if interruption:
            raise interruption
        return output

    monkeypatch.setattr(lp.LookaheadDecoder, "generate", noted)
    return asked


@pytest.fixture
def talk(launch_chat: Callable[..., Ran], tiny_folder: Path) -> Callable[..., Ran]:
    """Starts launch.chat with these lines and a tiny model that has no chat template."""
    return lambda lines, *overrides: launch_chat(lines, *SMALL, f"model.name={tiny_folder}", *overrides)


@pytest.fixture
def talk_turns(launch_chat: Callable[..., Ran], chat_folder: Path) -> Callable[..., Ran]:
    """Starts launch.chat with these lines and a tiny model that has a chat template."""
    return lambda lines, *overrides: launch_chat(lines, *SMALL, f"model.name={chat_folder}", *overrides)


def test_without_a_template_the_text_goes_on(talk: Callable[..., Ran], prompts: list[dict[str, Any]]) -> None:
    """A base model, such as the demo model, only continues text; each line begins a new one, an empty one adds none."""
    ran = talk("import os\n\nx = 1\n", "system='# Python'")
    assert ran.code == 0 and ran.err == "" and "\x1b" not in ran.out
    assert "no chat template: your lines and the answers are one text" in ran.out.splitlines()[1]
    first, second, third = prompts
    assert first["text"] == "# Python\nimport os"
    assert second["text"] == first["text"] + first["answer"]
    assert third["text"] == second["text"] + second["answer"] + "\nx = 1"
    assert all(prompt["answer"] in ran.out for prompt in prompts)


def test_every_answer_ends_with_its_figures(talk: Callable[..., Ran], prompts: list[dict[str, Any]]) -> None:
    """Nobody believes a speed that is shown nowhere."""
    ran = talk("a\nb\n/stats\n")
    figures = [(int(tokens), int(steps)) for tokens, steps, *_ in FIGURES.findall(ran.out)]
    each = [(len(prompt["output"].tokens), prompt["output"].steps) for prompt in prompts]
    assert figures == [*each, (sum(tokens for tokens, _ in each), sum(steps for _, steps in each))]
    assert "answers: 2, " in ran.out and f"of {CONTEXT} tokens of history" in ran.out
    assert ran.out.count("(cut at max_new_tokens)") == 2


def test_with_a_template_it_has_turns(talk_turns: Callable[..., Ran], prompts: list[dict[str, Any]]) -> None:
    """The template decides what a turn looks like; a blank line is none, and /reset keeps the system prompt."""
    ran = talk_turns("one\n \ntwo\n/reset\nthree\n/exit\nfour\n", "system=brief")
    assert ran.code == 0 and "no chat template" not in ran.out
    first, second, third = prompts
    assert first["text"] == "<system>brief\n<user>one\n<assistant>"
    assert second["text"] == f"{first['text']}{first['answer']}\n<user>two\n<assistant>"
    assert third["text"] == "<system>brief\n<user>three\n<assistant>"


def test_a_text_of_several_lines(talk: Callable[..., Ran], prompts: list[dict[str, Any]]) -> None:
    """Code is pasted; a line of it that looks like a command is one only if it is."""
    talk('"""\ndef f(x):\n    return x"""\n// two\n')
    assert prompts[0]["text"] == "def f(x):\n    return x"
    assert prompts[1]["text"].endswith("\n// two")


def test_set_reaches_the_decoder(talk: Callable[..., Ran], prompts: list[dict[str, Any]]) -> None:
    lines = ["/set temperature=0.8 top_p=0.9 seed=3", "a", "/set max_new_tokens=5 verifier=rejection seed=null", "b"]
    ran = talk("\n".join([*lines, "/set temperature=0", "c", "/set repetition_penalty=1.5 seed=5", "d", "/set"]))
    sampled, rejected, greedy, penalised = (prompt["asked"] for prompt in prompts)
    assert sampled == (12, lp.SamplingParams(temperature=0.8, top_p=0.9, seed=3))
    assert rejected == (5, lp.SamplingParams(temperature=0.8, top_p=0.9, verifier=lp.Verifier.REJECTION))
    assert greedy == (5, None) and penalised == (5, lp.SamplingParams(temperature=0, repetition_penalty=1.5))
    assert ran.out.splitlines()[-1] == "temperature=0 (greedy) repetition_penalty=1.5 max_new_tokens=5 seed=5 (unused)"
    assert ran.err == ""


def test_sampling_of_the_config_is_used(talk: Callable[..., Ran], prompts: list[dict[str, Any]]) -> None:
    flags = ("sampling=sample", "sampling.temperature=0.5", "seed=9")
    ran = talk("a\n", *flags, "stop_strings=[zzz]", "W=2")
    assert prompts[0]["asked"] == (12, lp.SamplingParams(temperature=0.5, seed=9))
    assert "sampled with temperature=0.5 seed=9 verifier=coupled" in ran.out


WRONG = {
    "/set top_p=3": "top_p is 3.0; it must be a number in (0, 1]",
    "/set temperature=-1": "temperature is -1.0; it must be 0, which is greedy, or a number >=",
    "/set heat=1": "unknown setting 'heat'; known: temperature, top_k",
    "/set seed=a": "seed: Value 'a' of type 'str' could not be converted to Integer; /set shows the settings",
    "/set verifier=none": "verifier is 'none'; it must be one of",
    "/set max_new_tokens=0": "max_new_tokens is 0; it must be an integer >= 1",
    "/set max_new_tokens=many": "max_new_tokens is 'many'",
    "/set temperature": "cannot read 'temperature'; write /set key=value",
    "/bye": "unknown command /bye; /help lists the commands",
    "x" * 4 * CONTEXT: f"tokens, the model's context is {CONTEXT}; shorten it",
}


def test_a_wrong_line_is_one_line_and_the_chat_goes_on(talk: Callable[..., Ran], prompts: list[dict[str, Any]]) -> None:
    """A typing error must not cost a conversation."""
    ran = talk("\n".join(["first", *WRONG, "last", "/help"]))
    assert ran.code == 0 and "/set temperature=0.8" in ran.out
    errors = ran.err.splitlines()
    assert len(errors) == len(WRONG)
    for error, message in zip(errors, WRONG.values(), strict=True):
        assert error.startswith("error: ") and message in error
    assert [prompt["asked"] for prompt in prompts] == [(12, None)] * 2 and prompts[1]["text"].startswith("first")


STARTS = {
    "system=x": "the model's chat template refuses this conversation: no system role; leave system out",
    "prompt=x": "unknown config key 'prompt'; known here: model, decoder",
    "max_new_tokens=0": "max_new_tokens is 0",
    "sampling=sample sampling.top_p=0": "top_p is 0.0",
}


@pytest.mark.parametrize("overrides", STARTS)
def test_a_start_that_cannot_be(
    launch_chat: Callable[..., Ran], tiny_folder: Path, tmp_path: Path, overrides: str
) -> None:
    """Found before the first line is typed, not after."""
    folder = with_template(tiny_folder, tmp_path / "model", NO_SYSTEM)
    ran = launch_chat("a\n", *SMALL[:-1], f"model.name={folder}", *overrides.split(" "))
    assert ran.code == 2 and ran.out == ""
    assert ran.err.startswith("error: ") and STARTS[overrides] in ran.err and ran.err.count("\n") == 1


def test_the_oldest_turns_are_dropped(talk_turns: Callable[..., Ran], prompts: list[dict[str, Any]]) -> None:
    """A conversation past the context used to end with an error for ever."""
    lines = [f"question {number} of some length" for number in range(8)]
    ran = talk_turns("\n".join([*lines, "/stats"]), "max_new_tokens=40", "system=brief")
    assert ran.code == 0 and ran.err == "" and f"dropped: the model's context is {CONTEXT} tokens" in ran.out
    assert len(prompts) == 8 and "the oldest turn was dropped" in ran.out
    last = prompts[-1]
    assert last["text"].startswith("<system>brief\n<user>question ") and "question 0 " not in last["text"]
    assert "question 6 " in last["text"]
    assert all(len(prompt["output"].tokens) == 40 for prompt in prompts)


def test_what_cannot_fit_drops_nothing(tiny_folder: Path) -> None:
    """One text too long must not wipe the conversation that it does not fit into."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_folder)
    history = History(tokenizer, 64, turns=[Turn("a", "b"), Turn("c", "d")])
    with pytest.raises(ValueError, match="shorten it"):
        history.fit(Turn("x = 1\n" * 64), 8)
    assert len(history.turns) == 2
    assert history.fit(Turn("y"), 10**6)[1] == 0  # room for more than the context has does not empty the history


def _signal_first_answer(
    monkeypatch: pytest.MonkeyPatch, prompts: list[dict[str, Any]], number: signal.Signals
) -> None:
    noted = lp.LookaheadDecoder.generate

    def interrupted(self: lp.LookaheadDecoder, *args: Any, on_tokens: Any, **options: Any) -> lp.GenerationOutput:
        def press(tokens: list[int], step: int) -> None:
            on_tokens(tokens, step)
            if step == 2 and not prompts:
                signal.raise_signal(number)

        return noted(self, *args, on_tokens=press, **options)

    monkeypatch.setattr(lp.LookaheadDecoder, "generate", interrupted)


def test_ctrl_c_keeps_the_answer_so_far(
    talk_turns: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, prompts: list[dict[str, Any]]
) -> None:
    """The reader has seen that text, and may ask about it."""
    _signal_first_answer(monkeypatch, prompts, signal.SIGINT)
    ran = talk_turns("one\ntwo\n", "max_new_tokens=30")
    first, second = prompts
    assert ran.code == 0 and ran.out.count("(stopped by Ctrl-C)") == 1
    assert 0 < len(first["output"].tokens) < 30 == len(second["output"].tokens)
    assert second["text"] == f"{first['text']}{first['answer']}\n<user>two\n<assistant>"


def test_sigterm_ends_the_chat(
    talk_turns: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, prompts: list[dict[str, Any]]
) -> None:
    """Who asks a process to end does not mean the answer under way: a chat that goes on must be killed."""
    _signal_first_answer(monkeypatch, prompts, signal.SIGTERM)

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        ran = talk_turns("one\ntwo\n", "max_new_tokens=30")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ran.code == 143 and len(prompts) == 1 and prompts[0]["interruption"].signal == signal.SIGTERM


@pytest.mark.parametrize("bad", [{0}, {1}, {0, 1, 2}])
def test_a_rank_that_fails_alone_stays_in_step(
    chat_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bad: set[int]
) -> None:
    """As one without room for the cache does: it took the others' answer for the next line, and the chat hung."""
    monkeypatch.setattr("lp.parallel.context.DEFAULT_TIMEOUT_S", 20)
    loaded = load(chat_folder)
    capfd.readouterr()
    config = ChatConfig(decoder=AutoregressiveSchema(), sampling=GreedySchema(), max_new_tokens=4)

    def body(context: ParallelContext) -> tuple[list[list[int]], Chat]:
        asked, lines = list[list[int]](), iter(["one", "two", None])

        class Fails:
            def checkpoint(self) -> CheckpointDefaults:
                return CheckpointDefaults.of(loaded.model.generation_config)

            def generate(self, ids: list[int], *args: Any, on_tokens: Any, **options: Any) -> lp.GenerationOutput:
                asked.append(ids)
                if len(asked) == 1 and context.rank in bad:
                    check_int("bytes", 9, 0, 8, "use a device with more memory")
                on_tokens([7], 0)
                raise lp.Interrupted(lp.GenerationOutput([7], "interrupted", []), 0)

        class Typed:
            def read(self) -> str | None:
                return next(lines)

        history, keyboard = History(loaded.tokenizer, CONTEXT), Typed() if context.is_main else None
        said: dict[str, Any] = {"decoder": Fails(), "keyboard": keyboard, "pen": Pen(io.StringIO(), False)}
        chat = Chat(
            config=config, context=context, loaded=loaded, history=history, settings=Settings.of(config), **said
        )
        chat.run()
        return asked, chat

    asked, chats = zip(*run_lockstep(3, body), strict=True)
    assert len(asked[0]) == 2 and asked[0] == asked[1] == asked[2]
    assert all(chat.ended and chat.history.turns == chats[0].history.turns for chat in chats)
    assert len(chats[0].history.turns) == (1 if 0 in bad else 2)
    message = "error: bytes is 9; it must be an integer in [0, 8]; use a device with more memory\n"
    assert capfd.readouterr().err == ("[rank 1] " if 0 not in bad else "") + message


def test_a_json_schema(launch_chat: Callable[..., Ran], prompts: list[dict[str, Any]], tmp_path: Path) -> None:
    """Every answer follows it; one that is none is refused before the model is loaded, as by launch.generate."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}')
    ran = launch_chat("# as JSON\nonce more\n", f"json_schema={schema}", "max_new_tokens=48")  # the demo model
    assert ran.code == 0 and ran.err == ""
    assert [list(json.loads(prompt["answer"].removesuffix("<|endoftext|>"))) for prompt in prompts] == [["ok"]] * 2
    schema.write_text("{")
    ran = launch_chat("a\n", f"json_schema={schema}", "model.name=./none")
    assert ran.code == 2 and f"json_schema {schema} is no JSON" in ran.err
