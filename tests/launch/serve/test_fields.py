"""Every field of every endpoint, at T = 0 and 0.8: another value gives another answer, or is refused by its name.

A field without an entry here fails, whether it is new in a body or on docs/reference/http.md.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import tokenizers as tk
import torch
import transformers as tf
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.serving import serving
from tests.support.tiny_models import tiny_model

for package in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")
from pydantic import BaseModel  # noqa: E402 # it is of the extra

from launch.serve.bodies import (  # noqa: E402
    NEUTRAL,
    NOTHING,
    OFF_BELOW_0,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    InfillBody,
    LlamaCpp,
    TokenizeBody,
)
from launch.serve.responses_bodies import ResponsesBody  # noqa: E402
from lp.sampling.generation_config import FIELDS as LIBRARY  # noqa: E402
from lp.sampling.generation_config import Does  # noqa: E402
from tests.conftest import ROOT  # noqa: E402

COMPLETE, CHAT, LLAMA, INFILL = "/v1/completions", "/v1/chat/completions", "/completion", "/infill"
RESPONSES = "/v1/responses"
BODIES: dict[str, type[Body]] = {
    COMPLETE: CompletionBody,
    CHAT: ChatBody,
    RESPONSES: ResponsesBody,
    LLAMA: LlamaCpp,
    INFILL: InfillBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
ENDS = "".join(map(chr, [*range(10), *range(11, 32), *range(ord("A"), ord("Z") + 1)]))  # are EOS: half of all tokens
SAMPLED = (COMPLETE, CHAT, RESPONSES, LLAMA, INFILL)
TOOL = {"type": "function", "function": {"name": "f", "description": "does", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
USER = {"role": "user", "content": "ab cd ab"}
ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "one"}
NOT_OF_RESPONSES = ("n", "stream_options", "response_format")
TEMPLATE = (
    "{{ mark }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m | tojson }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
FORMAT: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<answer>",
    "fields": {"content": {"close": "<end>", "content": "text"}},
}
BASE: dict[str, dict[str, Any]] = {
    COMPLETE: {"prompt": "ab cd ab", "max_tokens": 8, "ignore_eos": True},
    CHAT: {"messages": [USER], "max_tokens": 8, "ignore_eos": True},
    RESPONSES: {"input": [USER], "max_output_tokens": 8, "ignore_eos": True},
    LLAMA: {"prompt": "ab cd ab", "n_predict": 8, "ignore_eos": True},
    INFILL: {"input_prefix": "ab cd ab", "input_suffix": "cd", "n_predict": 8, "ignore_eos": True},
    "/tokenize": {"content": "ab"},
    "/detokenize": {"tokens": [70, 71]},
}


@dataclass(frozen=True)
class Answer:
    """What came back for a request, to see whether a field changed it.

    Attributes:
        status: HTTP status.
        headers: HTTP headers.
        raw: the body as text.
        data: the body as JSON; a stream's last event.
    """

    status: int
    headers: Any
    raw: str
    data: Any

    @property
    def text(self) -> str:
        """The text of the first choice, whichever endpoint gave it."""
        if "choices" in self.data:
            choice = self.data["choices"][0]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        if "output" in self.data:
            return str(self.data["output"][0]["content"][0]["text"])
        return str(self.data["content"])

    @property
    def prompt_tokens(self) -> int:
        return self._counted("prompt_tokens", "input_tokens", "tokens_evaluated")

    @property
    def new_tokens(self) -> int:
        return self._counted("completion_tokens", "output_tokens", "tokens_predicted")

    def _counted(self, *names: str) -> int:
        """A number of tokens, by the endpoint's name of it."""
        figures = self.data.get("usage", self.data)
        return int(next(figures[name] for name in names if name in figures))


Seen = Callable[[Answer, Answer], bool]


def other_text(before: Answer, after: Answer) -> bool:
    return before.text != after.text


def same_text(before: Answer, after: Answer) -> bool:
    return before.text == after.text


def other_prompt(before: Answer, after: Answer) -> bool:
    return before.prompt_tokens != after.prompt_tokens


def other_answer(before: Answer, after: Answer) -> bool:
    return bool(before.data != after.data)


def text_is(pattern: str) -> Seen:
    """The text, which was of another form, is of this one, up to the character that ended it."""
    form = re.compile(f"(?:{pattern})[{re.escape(ENDS)}]?")
    return lambda before, after: bool(form.fullmatch(after.text) and not form.fullmatch(before.text))


def is_object(before: Answer, after: Answer) -> bool:
    """The text was no JSON, and now begins as an object: a random model may not end it."""
    return not before.text.strip().startswith("{") and after.text.strip().startswith("{")


@dataclass(frozen=True)
class Changed:
    """A field whose value shows in the answer.

    Args:
        after: fields with the other value.
        seen: how it shows.
        greedy: the same at T = 0; None as in `seen`.
        before: fields of both requests.
        without: fields of the base that neither has.
    """

    after: dict[str, Any] | Callable[[Answer], dict[str, Any]]
    seen: Seen = other_text
    greedy: Seen | None = None
    before: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    needs_grammar: bool = False


@dataclass(frozen=True)
class Refused:
    """A field, or its other values, that are refused by name."""

    after: dict[str, Any]
    status: int = 400


@dataclass(frozen=True)
class Elsewhere:
    """A field whose effect another test shows.

    Args:
        test: file and name.
    """

    test: str


Entry = Changed | Refused | Elsewhere


def of_messages(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER | fields]}


def with_call(**fields: Any) -> dict[str, Any]:
    """A message with a call, some fields of which are others."""
    function = CALL["function"] | {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [CALL | {"function": function} | fields]}, USER]}


def with_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [TOOL | {"function": TOOL["function"] | fields}]}  # type: ignore[operator]


def of_form(kind: str, seen: Seen, **given: Any) -> Changed:
    """A response_format; `ignore_eos` is refused beside it."""
    return Changed({"response_format": {"type": kind, **given}}, seen, without=("ignore_eos",), needs_grammar=True)


def of_items(*items: dict[str, Any]) -> dict[str, Any]:
    return {"input": [USER, *items] if items[0].get("type") else [*items]}


def of_text(kind: str, seen: Seen, **given: Any) -> Changed:
    """A form as /v1/responses has it; `ignore_eos` is refused beside it."""
    return Changed({"text": {"format": {"type": kind, **given}}}, seen, without=("ignore_eos",), needs_grammar=True)


def with_function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", "description": "does", "parameters": {"a": 1}} | fields]}


def logprobs_of(answer: Answer) -> list[Any]:
    """Log probabilities of an answer of /v1/responses."""
    return list(answer.data["output"][0]["content"][0]["logprobs"])


def ends_sooner(before: Answer, after: Answer) -> bool:
    return after.new_tokens < before.new_tokens


def is_drawn(answer: Answer) -> bool:
    """Whether its temperature is above 0."""
    return bool("seed" in answer.data or answer.data.get("generation_settings", {}).get("temperature"))


def inner_characters(before: Answer) -> list[str]:
    """A stop string that the text has."""
    return [before.text[3:5]]


# What leaves tokens out has no say where the likeliest one is taken.
WARPERS: dict[str, Entry] = {
    "temperature": Changed(lambda before: {"temperature": 0.05 if is_drawn(before) else 1.9}),
    "top_p": Changed({"top_p": 0.05}, greedy=same_text),
    "top_k": Changed({"top_k": 1}, greedy=same_text),
    "min_p": Changed({"min_p": 0.99}, greedy=same_text),
    "typical_p": Changed({"typical_p": 0.05}, greedy=same_text),
    "seed": Changed({"seed": 8}, greedy=same_text),
}
PENALTIES: dict[str, Entry] = {
    "repeat_penalty": Changed({"repeat_penalty": 0.01}),  # below 1, as below 0, tokens come again that came already
    "repeat_last_n": Changed({"repeat_last_n": 1}, before={"repeat_penalty": 0.01}),
    "presence_penalty": Changed({"presence_penalty": 2}, before={"presence_penalty": -2}),
    "frequency_penalty": Changed({"frequency_penalty": 2}, before={"frequency_penalty": -2}),
}
OF_OPENAI: dict[str, Entry] = {
    **WARPERS,
    **PENALTIES,
    "repetition_penalty": Changed({"repetition_penalty": 0.01}),
    "logit_bias": Changed({"logit_bias": {"70": 100}}),
    "ignore_eos": Changed({"ignore_eos": False}, ends_sooner),
    "corpora": Refused({"corpora": ["other"]}),  # test_named_keys.py has servers with some
    "samplers": Changed({"samplers": ["temperature"]}, before={"top_k": 1}, greedy=same_text),
    "model": Refused({"model": "other"}, 404),
    "n": Changed({"n": 2}, lambda before, after: (len(before.data["choices"]), len(after.data["choices"])) == (1, 2)),
    "stop": Changed(lambda before: {"stop": inner_characters(before)}, ends_sooner),
    "stream": Changed({"stream": True}, lambda before, after: "event-stream" in after.headers["content-type"]),
    "stream_options": Changed(
        {"stream_options": {"include_usage": True}},
        lambda before, after: "usage" not in before.data and after.data["usage"]["completion_tokens"] == 8,
        before={"stream": True},
    ),
    "stream_options.include_usage": Changed(
        {"stream_options": {"include_usage": True}},
        lambda before, after: "usage" not in before.data and "usage" in after.data,
        before={"stream": True, "stream_options": {"include_usage": False}},
    ),
    "response_format": of_form("json_object", is_object),
    "response_format.type": Refused({"response_format": {"type": "xml"}}),
    "response_format.schema": of_form("json_object", is_object, schema={"type": "object"}),
    "response_format.json_schema": of_form(
        "json_schema", text_is("true|false"), json_schema={"schema": {"type": "boolean"}}
    ),
    "response_format.grammar": of_form("grammar", text_is("[ab]{3}"), grammar="root ::= [ab] [ab] [ab]"),
    "response_format.regex": of_form("regex", text_is("[0-9]{3}"), regex="[0-9]{3}"),
}
OF_LLAMA: dict[str, Entry] = {
    **WARPERS,
    **PENALTIES,
    "n_predict": Changed({"n_predict": 5}, lambda before, after: after.new_tokens == 5),
    "max_tokens": Changed({"max_tokens": 5}, lambda before, after: after.new_tokens == 5, without=("n_predict",)),
    "max_new_tokens": Changed(
        {"max_new_tokens": 5}, lambda before, after: after.new_tokens == 5, without=("n_predict",)
    ),
    "stop": Changed(lambda before: {"stop": inner_characters(before)}, ends_sooner),
    "stream": Changed({"stream": True}, lambda before, after: "event-stream" in after.headers["content-type"]),
    "samplers": Changed({"samplers": ["temperature"]}, before={"top_k": 1}, greedy=same_text),
    "model": Changed({"model": "any"}, same_text),  # one of an adapter changes it: test_adapters.py
    "cache_prompt": Changed({"cache_prompt": False}, same_text),  # what is cached changes no token
    "n_indent": Changed(
        {"n_indent": 2},
        text_is("a\n  b"),
        before={"grammar": 'root ::= "a\\n  b\\nc"'},
        without=("ignore_eos",),
        needs_grammar=True,
    ),
    "t_max_predict_ms": Changed(
        {"t_max_predict_ms": 1e-6},
        ends_sooner,
        before={"grammar": f'root ::={" line" * 12}\nline ::= [ab] "\\n"', "n_predict": 24},
        without=("ignore_eos",),
        needs_grammar=True,
    ),
    "ignore_eos": Changed({"ignore_eos": False}, ends_sooner),
    "corpora": Refused({"corpora": ["other"]}),  # test_named_keys.py has servers with some
    "grammar": Changed(
        {"grammar": "root ::= [ab] [ab] [ab]"}, text_is("[ab]{3}"), without=("ignore_eos",), needs_grammar=True
    ),
    "json_schema": Changed(
        {"json_schema": {"type": "boolean"}}, text_is("true|false"), without=("ignore_eos",), needs_grammar=True
    ),
    "response_fields": Changed({"response_fields": ["content"]}, lambda before, after: [*after.data] == ["content"]),
}
IMAGE_FIELDS = ("image_url", "image_url.url", "image_url.detail")
OF_IMAGES = Elsewhere("test_images.py::test_a_chat_has_the_processors_prompt")
FIELDS: dict[str, dict[str, Entry]] = {
    COMPLETE: {
        **OF_OPENAI,
        "prompt": Changed({"prompt": "xyz"}),
        "suffix": Changed({"suffix": "cd"}, other_prompt),
        "max_tokens": Changed({"max_tokens": 5}, lambda before, after: after.new_tokens == 5),
        "n_predict": Changed({"n_predict": 5}, lambda before, after: after.new_tokens == 5, without=("max_tokens",)),
        "max_new_tokens": Changed(
            {"max_new_tokens": 5}, lambda before, after: after.new_tokens == 5, without=("max_tokens",)
        ),
        "logprobs": Changed({"logprobs": 2}, lambda before, after: bool(after.data["choices"][0]["logprobs"])),
        "echo": Changed({"echo": True}, lambda before, after: after.text.startswith("ab cd ab")),
        "best_of": Refused({"best_of": 2}),
    },
    CHAT: {
        **OF_OPENAI,
        "messages": Changed(of_messages(content="xyz")),
        "messages.role": Changed(of_messages(role="system"), other_prompt),
        "messages.content": Changed(of_messages(content="xyz")),
        "messages.content.type": Refused(of_messages(content=[{"type": "image_url", "text": "a"}])),
        **dict.fromkeys((f"messages.content.{name}" for name in IMAGE_FIELDS), OF_IMAGES),
        "messages.content.text": Changed(of_messages(content=[{"type": "text", "text": "xyz"}])),
        "messages.name": Changed(of_messages(name="me"), other_prompt),
        "messages.reasoning_content": Changed(of_messages(reasoning_content="so"), other_prompt),
        "messages.reasoning": Changed(of_messages(reasoning="so"), other_prompt),
        "messages.tool_call_id": Changed({"messages": [USER, {"role": "tool", "content": "a", "tool_call_id": "1"}]}),
        "messages.tool_calls": Changed(with_call(), other_prompt),
        "messages.tool_calls.id": Changed(with_call(id="12"), other_prompt, before=with_call()),
        "messages.tool_calls.type": Refused(with_call(type="custom")),
        "messages.tool_calls.function": Changed(with_call(name="fgh"), other_prompt, before=with_call()),
        "messages.tool_calls.function.name": Changed(with_call(name="fgh"), other_prompt, before=with_call()),
        "messages.tool_calls.function.arguments": Changed(with_call(arguments="{}"), other_prompt, before=with_call()),
        "max_tokens": Changed({"max_tokens": 5}, lambda before, after: after.new_tokens == 5),
        "max_completion_tokens": Changed(
            {"max_completion_tokens": 5}, lambda before, after: after.new_tokens == 5, without=("max_tokens",)
        ),
        "n_predict": Changed({"n_predict": 5}, lambda before, after: after.new_tokens == 5, without=("max_tokens",)),
        "max_new_tokens": Changed(
            {"max_new_tokens": 5}, lambda before, after: after.new_tokens == 5, without=("max_tokens",)
        ),
        "logprobs": Changed({"logprobs": True}, lambda before, after: bool(after.data["choices"][0]["logprobs"])),
        "top_logprobs": Changed(
            {"top_logprobs": 2},
            lambda before, after: len(after.data["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2,
            before={"logprobs": True},
        ),
        "prediction": Changed(
            {"prediction": {"type": "content", "content": "ab"}},
            lambda before, after: same_text(before, after) and predicted(before) == 0 and predicted(after) == 2,
        ),
        "prediction.type": Refused({"prediction": {"type": "text", "content": "ab"}}),
        "prediction.content": Changed(
            {"prediction": {"type": "content", "content": "abc"}},
            lambda before, after: same_text(before, after) and (predicted(before), predicted(after)) == (2, 3),
            before={"prediction": {"type": "content", "content": "ab"}},
        ),
        "prediction.content.type": Refused({"prediction": {"type": "content", "content": [{"type": "x"}]}}),
        "prediction.content.text": Changed(
            {"prediction": {"type": "content", "content": [{"type": "text", "text": "abc"}]}},
            lambda before, after: same_text(before, after) and predicted(after) == 3,
        ),
        "tools": Changed(with_tool(), other_prompt),
        "tools.type": Refused({"tools": [TOOL | {"type": "custom"}]}),
        "tools.function": Changed(with_tool(name="fgh"), other_prompt, before=with_tool()),
        "tools.function.name": Changed(with_tool(name="fgh"), other_prompt, before=with_tool()),
        "tools.function.description": Changed(with_tool(description="d"), other_prompt, before=with_tool()),
        "tools.function.parameters": Changed(with_tool(parameters={}), other_prompt, before=with_tool()),
        "tool_choice": Changed({"tool_choice": "none"}, other_prompt, before=with_tool()),
        "parallel_tool_calls": Elsewhere("test_tools.py::test_calls_are_parsed"),
        "chat_template_kwargs": Changed({"chat_template_kwargs": {"mark": "hello"}}, other_prompt),
    },
    RESPONSES: {
        **{name: entry for name, entry in OF_OPENAI.items() if name.partition(".")[0] not in NOT_OF_RESPONSES},
        "input": Changed(of_items({"role": "user", "content": "xyz"})),
        "input.type": Refused(of_items({"type": "web_search_call"})),
        "input.role": Changed(of_items(USER | {"role": "system"}), other_prompt),
        "input.content": Changed(of_items(USER | {"content": "xyz"})),
        "input.content.type": Refused(of_items({"role": "user", "content": [{"type": "input_image", "text": "a"}]})),
        **dict.fromkeys((f"input.content.{name}" for name in IMAGE_FIELDS), OF_IMAGES),
        "input.content.text": Changed(of_items({"role": "user", "content": [{"type": "input_text", "text": "xyz"}]})),
        "input.summary": Changed(
            of_items({"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}),
            other_prompt,
            before=of_items({"type": "reasoning"}),
        ),
        "input.summary.type": Refused(of_items({"type": "reasoning", "summary": [{"type": "x", "text": "so"}]})),
        "input.summary.text": Changed(
            of_items({"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}),
            other_prompt,
            before=of_items({"type": "reasoning", "summary": [{"type": "summary_text", "text": "then"}]}),
        ),
        "input.call_id": Changed(of_items(ITEM | {"call_id": "12"}), other_prompt, before=of_items(ITEM)),
        "input.name": Changed(of_items(ITEM | {"name": "fgh"}), other_prompt, before=of_items(ITEM)),
        "input.arguments": Changed(of_items(ITEM | {"arguments": "{}"}), other_prompt, before=of_items(ITEM)),
        "input.output": Changed(
            of_items(ITEM, OUTPUT | {"output": "wxyz"}), other_prompt, before=of_items(ITEM, OUTPUT)
        ),
        "input.output.type": Refused(of_items(OUTPUT | {"output": [{"type": "input_file", "text": "a"}]})),
        "input.output.text": Changed(
            of_items(ITEM, OUTPUT | {"output": [{"type": "input_text", "text": "wxyz"}]}),
            other_prompt,
            before=of_items(ITEM, OUTPUT),
        ),
        "instructions": Changed({"instructions": "xyz"}, other_prompt),
        "max_output_tokens": Changed({"max_output_tokens": 5}, lambda before, after: after.new_tokens == 5),
        "max_new_tokens": Changed(
            {"max_new_tokens": 5}, lambda before, after: after.new_tokens == 5, without=("max_output_tokens",)
        ),
        "include": Changed(
            {"include": ["message.output_text.logprobs"]},
            lambda before, after: (len(logprobs_of(before)), len(logprobs_of(after))) == (0, 8),
        ),
        "top_logprobs": Changed(
            {"top_logprobs": 2},
            lambda before, after: len(logprobs_of(before)) == 0 and len(logprobs_of(after)[0]["top_logprobs"]) == 2,
        ),
        "text": of_text("json_object", is_object),
        "text.format": of_text("json_object", is_object),
        "text.format.type": Refused({"text": {"format": {"type": "xml"}}}),
        "text.format.schema": of_text("json_schema", text_is("true|false"), schema={"type": "boolean"}),
        "text.format.grammar": of_text("grammar", text_is("[ab]{3}"), grammar="root ::= [ab] [ab] [ab]"),
        "text.format.regex": of_text("regex", text_is("[0-9]{3}"), regex="[0-9]{3}"),
        "reasoning": Refused({"reasoning": {"effort": "low"}}),
        "tools": Changed(with_function(), other_prompt),
        "tools.type": Refused(with_function(type="custom")),
        "tools.name": Changed(with_function(name="fgh"), other_prompt, before=with_function()),
        "tools.description": Changed(with_function(description="d"), other_prompt, before=with_function()),
        "tools.parameters": Changed(with_function(parameters={}), other_prompt, before=with_function()),
        "tool_choice": Changed({"tool_choice": "none"}, other_prompt, before=with_function()),
        "parallel_tool_calls": Elsewhere("test_tools.py::test_calls_are_parsed"),
        "chat_template_kwargs": Changed({"chat_template_kwargs": {"mark": "hello"}}, other_prompt),
        "metadata": Changed({"metadata": {"a": "b"}}, lambda before, after: after.data["metadata"] == {"a": "b"}),
        "store": Changed({"store": True}, lambda before, after: same_text(before, after) and not after.data["store"]),
    },
    LLAMA: {**OF_LLAMA, "prompt": Changed({"prompt": "xyz"})},
    INFILL: {
        **OF_LLAMA,
        "prompt": Changed({"prompt": "xyz"}, other_prompt),
        "input_prefix": Changed({"input_prefix": "xyz"}, other_prompt),
        "input_suffix": Changed({"input_suffix": "xyz"}, other_prompt),
        "input_extra": Changed({"input_extra": [{"text": "xyz"}]}, other_prompt),
        "input_extra.filename": Changed(
            {"input_extra": [{"text": "xyz", "filename": "a.py"}]},
            other_prompt,
            before={"input_extra": [{"text": "xyz"}]},
        ),
        "input_extra.text": Changed(
            {"input_extra": [{"text": "xyz" * 2}]}, other_prompt, before={"input_extra": [{"text": "xyz"}]}
        ),
    },
    "/tokenize": {
        "content": Changed({"content": "abc"}, other_answer),
        "add_special": Changed({"add_special": True}, other_answer),
        "parse_special": Changed({"parse_special": False}, other_answer, before={"content": "a<eos>"}),
        "with_pieces": Changed({"with_pieces": True}, other_answer),
    },
    "/detokenize": {"tokens": Changed({"tokens": [70, 72]}, other_answer)},
}


def predicted(answer: Answer) -> int:
    """Tokens of the prediction."""
    details = answer.data["usage"]["completion_tokens_details"]
    return int(details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"])


def names_of(body: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The fields of a body, and those of the objects in it."""
    for name, item in body.model_fields.items():
        own = prefix + (item.alias or name)
        yield own
        for inner in models_in(item.annotation):
            yield from names_of(inner, f"{own}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def documented() -> dict[str, set[str]]:
    """The fields of each endpoint, by the table of docs/reference/http.md."""
    page = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `POST (\S+?)`(?:, `(\S+?)`)? \| (.*?) \| .*? \|$", page, re.MULTILINE)
    found: dict[str, set[str]] = {}
    for path, other, takes in rows:
        parts = takes.split("; ") if other else [takes]  # each of two endpoints has its own
        for each, part in zip([path, other] if other else [path], parts, strict=True):
            own, _, exceptions = part.partition(" but not ")
            found[each] = set(re.findall(r"`(\w+)`", own))
            for reference, as_of in (("what /v1/completions takes", COMPLETE), ("what /completion takes", LLAMA)):
                if reference in own:
                    found[each] |= found[as_of] - set(re.findall(r"`(\w+)`", exceptions))
    return found


@pytest.fixture(scope="module")
def http() -> Iterator[Any]:
    """A client of a random model whose tokens are ASCII's characters; the large letters and signs end a text."""
    characters = bytes_to_unicode()
    words = {characters[byte]: byte for byte in range(0x80)}
    made = tk.Tokenizer(tk.models.BPE(words, []))
    made.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tk.decoders.ByteLevel()
    special = ["<eos>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]
    made.add_special_tokens(special)
    made.post_processor = tk.processors.TemplateProcessing(
        single="<eos> $A", pair="$A $B", special_tokens=[("<eos>", made.token_to_id("<eos>"))]
    )
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", chat_template=TEMPLATE)
    tokenizer.response_template = FORMAT
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=2048)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 0.1  # every token may be drawn, and a penalty of 2 decides
    model.generation_config.eos_token_id = [*map(ord, ENDS), tokenizer.eos_token_id]
    with serving(model, tokenizer) as running:
        running.decoder.generate([70], 8)  # what is compiled takes longer on a busy machine than a client waits
        yield running.http()


@pytest.fixture(scope="module")
def asked() -> dict[str, Answer]:
    """Answers by path and body: most fields are changed in the same request."""
    return {}


def ask(http: Any, path: str, body: dict[str, Any]) -> Answer:
    answer = http.post(path, json=body)
    if "event-stream" in answer.headers["content-type"]:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        last = json.loads(events[-1])
        return Answer(answer.status_code, answer.headers, answer.text, last.get("response", last))
    return Answer(answer.status_code, answer.headers, answer.text, answer.json())


CASES = [
    (path, name, temperature)
    for path, entries in FIELDS.items()
    for name in entries
    for temperature in ((0, 0.8) if path in SAMPLED else (None,))
]


@pytest.mark.parametrize("path, name, temperature", CASES)
def test_another_value_shows_or_is_refused(
    http: Any, asked: dict[str, Answer], path: str, name: str, temperature: float | None
) -> None:
    entry = FIELDS[path][name]
    if isinstance(entry, Elsewhere):
        file, _, test = entry.test.partition("::")
        tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, entry.test
        return
    drawn = {} if temperature is None else {"temperature": temperature, "seed": 7}
    base = BASE[path] | drawn
    if isinstance(entry, Refused):
        answer = ask(http, path, base | entry.after)
        assert answer.status == entry.status
        assert name.rpartition(".")[2] in answer.data["error"]["message"], answer.raw
        return
    if entry.needs_grammar:
        pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    base = {key: value for key, value in base.items() if key not in entry.without} | entry.before
    key = json.dumps([path, base])
    before = asked[key] = asked.get(key) or ask(http, path, base)
    assert before.status == 200, before.raw
    after = ask(http, path, base | (entry.after(before) if callable(entry.after) else entry.after))
    assert after.status == 200, after.raw
    seen = entry.greedy if temperature == 0 and entry.greedy else entry.seen
    assert seen(before, after), f"{before.raw}\n{after.raw}"


@pytest.mark.parametrize("path", BODIES)
def test_every_field_has_an_entry(path: str) -> None:
    """A field without an entry here, or on the page, is one whose effect nobody tests or reads of."""
    assert {*FIELDS[path]} == {*names_of(BODIES[path])}
    assert documented()[path] == {name for name in FIELDS[path] if "." not in name}


OTHERS: tuple[Any, ...] = (2, 0.5, 0, -1, False, True, {})


@pytest.mark.parametrize("path", SAMPLED)
def test_what_is_refused_is_refused_by_name(http: Any, path: str) -> None:
    """With any value that would change the text, and with none that would not: a tfs_z of 0.5 passed."""
    refused = BODIES[path].REFUSED
    for name in refused:
        neutral = (*NEUTRAL.get(name, NOTHING), *([-1] if name in OFF_BELOW_0 else []))
        for value in OTHERS:
            if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
                continue
            error: dict[str, Any] = ask(http, path, BASE[path] | {name: value}).data.get("error", {})
            assert error.get("message", "").startswith(f"{name} is not supported; "), (name, value)
            assert error["param"] == name
    for place in range(len(NOTHING)):
        given = {name: NEUTRAL.get(name, NOTHING) for name in refused}
        same = {name: values[min(place, len(values) - 1)] for name, values in given.items() if values}
        answer = ask(http, path, BASE[path] | same | {"temperature": 0})
        assert answer.status == 200, answer.raw
        assert answer.text == ask(http, path, BASE[path] | dict.fromkeys(refused) | {"temperature": 0}).text
    off = dict.fromkeys(OFF_BELOW_0, -0.01)
    assert ask(http, path, BASE[path] | off).status == 200
    assert len(refused) > 20


# By hand, from the documents of those whose fields they are: a value that changes a text there, and one that does not.
ASKED_AND_NEUTRAL: dict[str, tuple[Any, Any]] = {
    "tfs_z": (0.5, 1),
    "guidance_scale": (0.5, 1),
    "num_beams": (2, 1),
    "do_sample": (False, True),
    "skip_special_tokens": (False, True),
    "min_keep": (2, 1),
    "top_n_sigma": (1, -1),
    "adaptive_target": (0, -1),
    "xtc_probability": (0.5, 0),
    "max_time": (0, None),
    "prompt_logprobs": (0, None),
    "truncate_prompt_tokens": (-1, None),
    "guided_json": ({}, None),
    "enable_thinking": (False, None),
}


def test_which_values_change_a_text(http: Any) -> None:
    """The list of neutral values is the server's own: a wrong one would pass a test that reads it."""
    tried = set()
    for path in SAMPLED:
        for name in ASKED_AND_NEUTRAL.keys() & BODIES[path].REFUSED.keys():
            asked, neutral = ASKED_AND_NEUTRAL[name]
            assert ask(http, path, BASE[path] | {name: asked}).status == 400, (path, name, asked)
            assert ask(http, path, BASE[path] | {name: neutral}).status == 200, (path, name, neutral)
            tried.add(name)
    assert tried == {*ASKED_AND_NEUTRAL}


# What the parameters of vLLM's and SGLang's requests are called that change a text.
OF_VLLM = (
    "bad_words min_tokens stop_token_ids include_stop_str_in_output ignore_eos prompt_logprobs skip_special_tokens "
    "truncate_prompt_tokens allowed_token_ids logits_processors structured_outputs guided_json guided_regex "
    "guided_choice guided_grammar use_beam_search top_k min_p repetition_penalty response_format"
)
OF_SGLANG = (
    "max_new_tokens min_new_tokens stop_token_ids stop_regex regex ebnf structural_tag json_schema no_stop_trim "
    "custom_logit_processor lora_path"
)
UNSEEN = {"cache_prompt", "response_fields"}  # of llama.cpp: of the answer's form, and of its time


@pytest.mark.parametrize("path", SAMPLED)
def test_no_setting_of_another_is_dropped_in_silence(path: str) -> None:
    """Names by which transformers, vLLM, SGLang and llama.cpp change a text are taken, or refused by name."""
    changing = (Does.SCORES, Does.REFUSED)
    ended = {"max_length", "max_new_tokens", "max_time", "stop_strings", "do_sample", "eos_token_id"}
    known = {name for name, item in LIBRARY.items() if item.changes_tokens and item.does in changing}
    known |= ended | {*OF_VLLM.split(), *OF_SGLANG.split()} | {*LlamaCpp.model_fields} - UNSEEN - {"prompt"}
    assert known - {*BODIES[path].model_fields} - {*BODIES[path].REFUSED} == set()


def test_what_a_message_has_is_refused_by_name(http: Any) -> None:
    """What templates do not read was left out."""
    call = {"name": "f", "arguments": "{}"}
    for name, value in [("function_call", call), ("refusal", "no"), ("audio", {"id": "1"}), ("prefix", True)]:
        answer = ask(http, CHAT, BASE[CHAT] | {"messages": [USER, {"role": "assistant", "content": "a", name: value}]})
        assert answer.status == 400 and answer.data["error"]["param"] == "messages"
        assert answer.data["error"]["message"].startswith(f"messages[1]: {name} is not supported; ")
        assert f"<code>messages.{name}</code>" in http.get("/docs").text


def test_a_form_is_of_its_type(http: Any) -> None:
    """What another type of response_format has was ignored: a schema beside `json_object` was not followed."""
    schema = {"schema": {"type": "boolean"}}
    forms: list[dict[str, Any]] = [
        {"type": "json_object", "json_schema": schema},
        {"type": "text", "json_schema": schema},
        {"type": "json_schema", "json_schema": schema, "schema": {"type": "integer"}},
        {"type": "regex", "regex": "a", "grammar": 'root ::= "a"'},
    ]
    for form in forms:
        answer = ask(http, COMPLETE, {"prompt": "a", "max_tokens": 2, "response_format": form})
        other = [*form][-1]
        assert answer.status == 400 and answer.data["error"]["param"] == "response_format"
        expected = f"response_format.{other} is given, but response_format.type is {form['type']!r}; set it to "
        assert answer.data["error"]["message"].startswith(expected)


@pytest.mark.parametrize("path", [LLAMA, INFILL])
def test_an_empty_schema_is_one(http: Any, path: str) -> None:
    """`{}` takes any JSON; it gave free text. Beside a grammar a schema was ignored."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    base = {name: value for name, value in BASE[path].items() if name != "ignore_eos"} | {"temperature": 0}
    given = ask(http, path, base | {"json_schema": {}, "n_predict": 1})
    assert given.status == 200 and given.text[0] in '{["-0123456789tfn', given.raw
    assert ask(http, path, base | {"n_predict": 1}).text[0] not in '{["-0123456789tfn'
    both = ask(http, path, base | {"json_schema": {}, "grammar": 'root ::= "a"'})
    assert both.status == 400 and both.data["error"]["message"] == (
        "grammar is given with json_schema; leave one of them out"
    )


@pytest.mark.parametrize("path", SAMPLED)
def test_drawn_seeds(http: Any, path: str) -> None:
    """-1 and 4294967295, as of llama.cpp, give another text every time; on OpenAI's paths they were two fixed seeds."""

    def texts(seed: int) -> set[str]:
        return {ask(http, path, BASE[path] | {"temperature": 0.8, "seed": seed}).text for _ in range(2)}

    assert [len(texts(seed)) for seed in (-1, 0xFFFFFFFF, -2, 0xFFFFFFFE)] == [2, 2, 1, 1]
