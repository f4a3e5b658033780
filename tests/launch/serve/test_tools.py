"""Tools in a chat: parsed calls, and answers that are none, whatever the model writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import lp
from tests.support.serving import Running, serving

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

USER = [{"role": "user", "content": "def f(x):\n"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TURN = "{{ message['content'] }}{{ message['tool_calls'] | tojson if message['tool_calls'] }}"
TEMPLATE = (
    "{{ greeting }}{{ tools[0].function.x if tools }}{% for message in messages %}" + TURN + "{% endfor %}<answer>"
)
# As transformers describes Qwen's.
FORMAT: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<answer>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server of the demo model whose format reads all text as a call: none of it is one, and none may be lost."""
    model, tokenizer = lp.load("demo")
    tokenizer.chat_template = TEMPLATE
    calls = {**FORMAT["fields"]["tool_calls"], "open_pattern": r"\s*", "close": "</tool_call>"}
    tokenizer.response_template = {**FORMAT, "fields": {**FORMAT["fields"], "tool_calls": calls}}
    with serving(model, tokenizer) as running:
        yield running


def answered(text: str, **fields: Any) -> dict[str, Any]:
    """The message of an answer."""
    from launch.serve.bodies import ChatBody
    from launch.serve.chat_template import answer

    _, tokenizer = lp.load("demo")
    body = ChatBody(messages=USER, tools=[TOOL], **fields)
    prompt, tokens = tokenizer(USER[0]["content"] + "<answer>")["input_ids"], tokenizer(text)["input_ids"]
    return answer(tokenizer, FORMAT, text, tokens, prompt, body)


def test_calls_are_parsed() -> None:
    """Calls in OpenAI's form, whose arguments are text; one where the client takes no more."""
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    message = answered(f"so: {call}{call}")
    assert message["content"].strip() == "so:"
    assert [each["function"] for each in message["tool_calls"]] == [{"name": "f", "arguments": '{"x": 1}'}] * 2
    assert len({each["id"] for each in message["tool_calls"]}) == 2
    assert len(answered(call + call, parallel_tool_calls=False)["tool_calls"]) == 1
    written = answered('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1.0}"}</tool_call>')
    assert written["tool_calls"][0]["function"]["arguments"] == '{"x": 1.0}'
    assert answered('<tool_call>{"name": "f"}</tool_call>')["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("text", ["", "<tool_call>" + '{"name": "f", "arguments": {}}' + "</tool_call>"])
def test_an_answer_may_be_sent_back(text: str) -> None:
    """As the history of the next request: one without content or calls was refused, and the chat was stuck."""
    from launch.serve.bodies import ChatBody

    message = answered(text)
    assert ChatBody.model_validate({"messages": [*USER, message, *USER]}).messages[1].content == message["content"]
    assert message["content"] == (None if text else "")


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "argum', "{bad}", "[1]", '{"arguments": {}}', '{"name": 3}', "3",
        '{"name": "f", "arguments": {"x": "\\ud800"}}', '{"name": "f\\ud800"}',
        '{"name": "f", "arguments": ' + "[" * 3000 + "]" * 3000 + "}",
        '{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": [-Infinity]}}',
        '{"name": "f", "arguments": {"x": 1e999}}', '{"name": "f", "arguments": "{\\"x\\": NaN}"}',
        '{"name": "f", "arguments": "no JSON"}', '{"name": "f", "arguments": "[1]"}', '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": null}', '{"name": "f", "arguments": "null"}', '{"name": "f", "arguments": ""}',
    ],
)  # fmt: skip
def test_what_is_no_call_is_text(call: str) -> None:
    """A call cut off, malformed, or with half a character was an error of the server, whose client lost the text.

    Arguments that are no object of JSON were given out as if they were, and the client's own parser failed.
    """
    text = f"<tool_call>{call}</tool_call>" if call.endswith(("}", "]", "3")) else f"<tool_call>{call}"
    assert answered(text) == {"role": "assistant", "content": text}


def check_alike(found: list[Any], expected: list[Any]) -> None:
    """Equal tokens, log probabilities to rounding: a reused prefix leaves other draft tokens, so other steps."""
    assert [each.token for each in found] == [each.token for each in expected]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_call_over_http(server: Running, stream: bool) -> None:
    """The text, its log probabilities and how it ended, as without tools."""
    pytest.importorskip("openai", reason="openai is not installed")
    client = server.openai()
    fields = {"model": "demo", "messages": USER, "max_tokens": 12, "temperature": 0, "logprobs": True}
    expected = client.chat.completions.create(**fields).choices[0]
    assert expected.finish_reason == "length"
    found = client.chat.completions.create(**fields, tools=[TOOL], stream=stream)
    if not stream:
        assert found.choices[0].message.content == expected.message.content
        check_alike(found.choices[0].logprobs.content, expected.logprobs.content)
        return
    chunks = [chunk.choices[0] for chunk in found]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == expected.message.content
    assert chunks[-1].finish_reason == "length"
    streamed = [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content]
    check_alike(streamed, expected.logprobs.content)


def called(arguments: str) -> dict[str, Any]:
    """A body with a call of these arguments."""
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


KWARGS = "chat_template_kwargs"


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({"messages": USER, KWARGS: {"greeting": "\ud83d"}}, KWARGS, f"chat template refuses {KWARGS}: "),
        ({"messages": USER, KWARGS: {"documents": [1]}}, KWARGS, f"chat template refuses {KWARGS}: "),
        ({"messages": USER, KWARGS: {"messages": 1}}, KWARGS, f"{KWARGS}.messages is 1, and the server sets messages"),
        (
            {"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "x": "\ud83d"}}]},
            "tools",
            "tools",
        ),
        (called('"\\ud83d"'), "messages", "chat template refuses these messages: "),
        (called('"\\ud83d"') | {KWARGS: {"greeting": "a"}}, "messages", "chat template refuses these messages: "),
        (called("[" * 30_000 + "]" * 30_000), "messages", "the model's context"),  # text, as what is no JSON
    ],
)
def test_what_templates_cannot_write(server: Running, body: dict[str, Any], param: str, message: str) -> None:
    """Half a character, and arguments without end, were errors of the server; messages were blamed for settings."""
    content = json.dumps({**body, "max_tokens": 1}).encode()
    response = server.http().post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and message in error["message"] and error["param"] == param


def test_a_response_format_with_tools_is_refused(server: Running) -> None:
    """A grammar for all of the text forbids calls, which a client that gives tools waits for."""
    http = server.http()
    body = {"messages": USER, "max_tokens": 4, "tools": [TOOL], "response_format": {"type": "json_object"}}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "response_format is 'json_object' with tools" in json.loads(response.text)["error"]["message"]
