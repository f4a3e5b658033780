"""/v1/responses with OpenAI's own client: the chat's texts as items and typed events, and what nothing is kept for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from transformers import AddedToken

import lp
from tests.support.serving import Running, serving
from tests.support.tokenizers_of import llama_2, model_with

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
from pydantic import BaseModel  # noqa: E402 # it is of the extra

PROMPT = "def fibonacci(n):\n"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m | tojson }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
# Whatever the model writes is a call of f.
FORMAT: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<answer>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*",
            "close": "<end>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "f", "arguments": {"x": "{content}"}}},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
ITEM = ["response.output_item.added", "response.content_part.added"]
ITEM_END = ["response.content_part.done", "response.output_item.done"]
CALL = [
    "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
    "response.output_item.done",
]  # fmt: skip
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("greedy", {"temperature": 0}),
    ("sampled", {"temperature": 0.8, "extra_body": {"seed": 7}}),
    ("top_p", {"temperature": 1.2, "top_p": 0.9, "extra_body": {"seed": 11, "repetition_penalty": 1.1}}),
]


@pytest.fixture
def client(demo_server: Running) -> Any:
    return demo_server.openai()


@pytest.fixture(scope="module")
def caller() -> Iterator[Running]:
    """A server of a model all of whose texts are calls where there are tools."""
    model, tokenizer = lp.load("demo")
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = FORMAT
    with serving(model, tokenizer) as running:
        running.decoder.generate([70], 8)
        yield running


@pytest.fixture(scope="module")
def thinker() -> Iterator[Running]:
    """A server of a model whose answers begin within their reasoning, and that soon ends it."""
    tokenizer = llama_2()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])  # as of Qwen3
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"
    with serving(model_with(tokenizer), tokenizer, reasoning="auto") as running:
        yield running


def expected(server: Running, asked: dict[str, Any], tokens: int) -> str:
    """The decoder's own text."""
    given = {name: value for name, value in asked.items() if name != "extra_body"} | asked.get("extra_body", {})
    sampling = lp.SamplingParams(**given) if given["temperature"] else None
    return server.decode(server.decoder.generate(server.encode(PROMPT), tokens, sampling).tokens)


def kinds(events: list[Any]) -> list[str]:
    """Types of events in their order, several deltas as one."""
    types = [event.type for event in events]
    return [kind for place, kind in enumerate(types) if not (kind.endswith(".delta") and types[place - 1] == kind)]


def plain(response: Any) -> dict[str, Any]:
    """A response without what each has of its own: ids, time, and how its steps went."""
    data: dict[str, Any] = response.to_dict()
    for name in ("id", "created_at"):
        del data[name]
    data["usage"] = {name: value for name, value in data["usage"].items() if name.endswith("_tokens")}
    data["usage"] = {name: value for name, value in data["usage"].items() if "draft" not in name}
    for item in data["output"]:
        del item["id"]
        item.pop("call_id", None)
    return data


@pytest.mark.parametrize("asked", [asked for _, asked in FORMS], ids=[name for name, _ in FORMS])
def test_a_text_is_the_decoders(demo_server: Running, client: Any, asked: dict[str, Any]) -> None:
    """Streamed and whole, with temperature, top_p and settings of ours; what is answered is what was done."""
    text = expected(demo_server, asked, 40)
    whole = client.responses.create(model="demo", input=PROMPT, max_output_tokens=40, metadata={"a": "b"}, **asked)
    assert whole.output_text == text
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete" and whole.metadata == {"a": "b"} and whole.store is False
    assert whole.temperature == asked["temperature"] and whole.top_p == asked.get("top_p", 1.0)
    prompt_tokens = len(demo_server.encode(PROMPT))
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (prompt_tokens, 40)
    assert whole.usage.total_tokens == prompt_tokens + 40 and whole.usage.steps < 40
    assert getattr(whole, "seed", None) == asked.get("extra_body", {}).get("seed")
    asked = {"model": "demo", "input": PROMPT, "max_output_tokens": 40, "metadata": {"a": "b"}, **asked}
    events = [*client.responses.create(stream=True, **asked)]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text and len(deltas) > 2
    assert kinds(events) == [
        "response.created", "response.in_progress", *ITEM,
        "response.output_text.delta", "response.output_text.done", *ITEM_END, "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert {event.response.id for event in events if hasattr(event, "response")} == {events[0].response.id}
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    (item,) = events[-1].response.output
    assert item == events[-2].item and item.id == events[2].item.id == events[4].item_id
    assert plain(events[-1].response) == plain(whole)


def test_events_have_names(demo_server: Running) -> None:
    """Clients that are no program of OpenAI's read the line `event`; no [DONE] comes, which is no event of theirs."""
    asked = {"input": PROMPT, "max_output_tokens": 4, "temperature": 0, "stream": True}
    lines = demo_server.http().post("/v1/responses", json=asked).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [each["type"] for each in data] and len(names) > 6


def test_a_text_that_ends(demo_server: Running, client: Any) -> None:
    """By EOS: completed, with an empty message where it has no characters; the client's helper takes the stream."""
    eos = {str(demo_server.served.tokenizer.eos_token_id): 100}
    asked: dict[str, Any] = {"model": "demo", "input": PROMPT, "temperature": 0}
    ended = client.responses.create(**asked, extra_body={"logit_bias": eos})
    assert (ended.status, ended.output_text, ended.output[0].status) == ("completed", "", "completed")
    assert ended.incomplete_details is None
    text = expected(demo_server, {"temperature": 0}, 40)
    stop = text[20:24]
    with client.responses.stream(**asked, extra_body={"stop": [stop]}) as stream:
        events = [*stream]
        final = stream.get_final_response()
    assert events[-1].type == "response.completed" and final.output_text == text[: text.index(stop)]


def test_items_are_messages_of_a_chat(caller: Running) -> None:
    """Instructions, parts, calls and what they returned: the prompt is that of the same chat."""
    http, parts = caller.http(), [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    given = [
        {"role": "user", "content": parts},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": parts},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "then"}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
        {"type": "reasoning", "summary": []},
        {"role": "developer", "content": "g"},
    ]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        {"id": "3", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    ]
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "reasoning_content": "so", "content": "c", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "ab"},
        {"role": "assistant", "reasoning_content": "then", "tool_calls": calls[2:]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "reasoning_content": "", "content": ""},
        {"role": "developer", "content": "g"},
    ]
    for limit, tools in ((20, {}), (20, {"tools": [TOOL], "tool_choice": "none"})):
        ours = {"input": given, "instructions": "be short", "max_output_tokens": limit, **tools}
        answer = http.post("/v1/responses", json=ours | {"temperature": 0}).json()
        chat = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": limit, "temperature": 0})
        assert answer["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]
        assert answer["output"][0]["content"][0]["text"] == chat.json()["choices"][0]["message"]["content"]
    from launch.serve.responses_bodies import ResponsesBody

    body = ResponsesBody(input=given, instructions="be short")
    assert [each.model_dump(exclude_unset=True) for each in body.chat.messages] == messages


@pytest.mark.parametrize("stream", [False, True])
def test_calls(caller: Running, stream: bool) -> None:
    """An answer that calls has items of calls, as the chat has them; sent back, with what they returned, it goes on."""
    client = caller.openai()
    asked: dict[str, Any] = {"model": "demo", "tools": [TOOL], "temperature": 0, "max_output_tokens": 12}
    with client.responses.stream(input=PROMPT, **asked) as events:
        seen = [*events]
    response = seen[-1].response if stream else client.responses.create(input=PROMPT, **asked)
    tool = {"type": "function", "function": {name: TOOL[name] for name in ("name", "parameters")}}
    chat = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": PROMPT}], tools=[tool], temperature=0, max_tokens=12
    )
    (wanted,) = chat.choices[0].message.tool_calls
    (call,) = response.output
    assert response.status == "completed" and chat.choices[0].finish_reason == "tool_calls"
    assert (call.type, call.name, call.arguments) == ("function_call", "f", wanted.function.arguments)
    assert json.loads(call.arguments)["x"].strip() and call.call_id.startswith("call_") and call.id.startswith("fc_")
    assert kinds(seen) == ["response.created", "response.in_progress", *CALL, "response.completed"]
    returned = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    history = [{"role": "user", "content": PROMPT}, call.to_dict(), returned]
    assert client.responses.create(input=history, **asked).output[0].type == "function_call"


def test_reasoning_is_an_item(thinker: Running) -> None:
    """Before the message, with its number of tokens; the chat has the same texts."""
    client = thinker.openai()
    ends = {str(thinker.served.tokenizer.convert_tokens_to_ids("</think>")): 5.0}
    seen = set[tuple[str, ...]]()
    for seed in range(8):
        asked = {"temperature": 1.0, "extra_body": {"seed": seed, "logit_bias": ends}}
        chat = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hi"}], max_tokens=30, **asked
        )
        message = chat.choices[0].message
        whole = client.responses.create(model="demo", input="hi", max_output_tokens=30, **asked)
        events = [*client.responses.create(model="demo", input="hi", max_output_tokens=30, stream=True, **asked)]
        assert plain(events[-1].response) == plain(whole)
        texts = {item.type: item.content[0].text for item in whole.output}
        thought = getattr(message, "reasoning_content", "")
        assert texts.get("reasoning", "") == thought and texts.get("message", "") == message.content
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == thought
        details = whole.usage.output_tokens_details
        assert details.reasoning_tokens == chat.usage.completion_tokens_details.reasoning_tokens
        assert 1 <= details.reasoning_tokens <= whole.usage.output_tokens
        if not message.content:
            assert details.reasoning_tokens == 30 or not thought
        seen.add(tuple(item.type for item in whole.output))
        statuses = [item.status for item in whole.output]
        assert statuses == ["completed"] * (len(statuses) - 1) + [whole.status]
        if [*texts] == ["reasoning", "message"]:
            assert kinds(events) == [
                "response.created", "response.in_progress",
                *ITEM, "response.reasoning_text.delta", "response.reasoning_text.done", *ITEM_END,
                *ITEM, "response.output_text.delta", "response.output_text.done", *ITEM_END, f"response.{whole.status}",
            ]  # fmt: skip
    assert ("reasoning", "message") in seen


class Person(BaseModel):  # type: ignore[misc]
    name: Literal["Ann", "Bob"]
    is_old: bool


def test_a_form(demo_server: Running, client: Any) -> None:
    """text.format, as the client makes it of a class, and what the server has beside OpenAI's."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    asked: dict[str, Any] = {"model": "demo", "input": PROMPT, "temperature": 0.7}
    schema = {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "answer", "schema": {"type": "object"} | schema}
    whole = client.responses.create(**asked, text={"format": form}, extra_body={"seed": 3})
    assert [*json.loads(whole.output_text)] == ["a"] and whole.text.format.schema_ == form["schema"]
    compiler = lp.GrammarCompiler(demo_server.served.tokenizer, demo_server.served.vocabulary)
    grammar = compiler.json_schema(json.dumps(form["schema"]))
    sampling = lp.SamplingParams(temperature=0.7, seed=3)
    tokens = demo_server.decoder.generate(demo_server.encode(PROMPT), 64, sampling, grammar=grammar).tokens
    assert whole.output_text == demo_server.decode(tokens)
    parsed = client.responses.parse(**asked, text_format=Person, extra_body={"seed": 3})
    assert isinstance(parsed.output_parsed, Person) and parsed.status == "completed"
    regex = client.responses.create(**asked, extra_body={"text": {"format": {"type": "regex", "regex": "[ab]{5}"}}})
    assert {*regex.output_text} <= {"a", "b"} and len(regex.output_text) == 5
    some = client.responses.create(**asked, text={"format": {"type": "json_object"}}, max_output_tokens=4)
    assert some.output_text.startswith("{")


def test_log_probabilities(demo_server: Running, client: Any) -> None:
    """Those of the chat, at the message; each token's once, whatever the events."""
    asked: dict[str, Any] = {"model": "demo", "temperature": 0}
    chat = client.chat.completions.create(
        **asked, messages=[{"role": "user", "content": PROMPT}], max_tokens=12, logprobs=True, top_logprobs=2
    )
    wanted = [each.to_dict() for each in chat.choices[0].logprobs.content]
    included = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    asked |= {"input": PROMPT, "max_output_tokens": 12}
    whole = client.responses.create(**asked, **included)
    assert [each.to_dict() for each in whole.output[0].content[0].logprobs] == wanted
    events = [*client.responses.create(**asked, **included, stream=True)]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [each.token for each in done.logprobs] == [each["token"] for each in wanted]
    named = client.responses.create(**asked, include=["message.output_text.logprobs"]).output[0].content[0].logprobs
    assert [(each.token, each.top_logprobs) for each in named] == [(each["token"], []) for each in wanted]
    assert client.responses.create(**asked).output[0].content[0].logprobs == []


def test_log_probabilities_behind_reasoning(thinker: Running) -> None:
    """Tokens of the reasoning are no tokens of the message."""
    client = thinker.openai()
    ends = {str(thinker.served.tokenizer.convert_tokens_to_ids("</think>")): 5.0}
    seen = 0
    for seed in range(8):
        asked = {"temperature": 1.0, "extra_body": {"seed": seed, "logit_bias": ends}, "max_output_tokens": 30}
        include = ["message.output_text.logprobs"]
        whole = client.responses.create(model="demo", input="hi", include=include, **asked)
        thought = whole.usage.output_tokens_details.reasoning_tokens
        for item in whole.output:
            if item.type == "message" and thought:
                assert len(item.content[0].logprobs) == whole.usage.output_tokens - thought
                seen += 1
    assert seen > 3


def test_nothing_is_kept(client: Any) -> None:
    """What a client asks for of an earlier response is not there, and it is told why."""
    answer = client.responses.create(model="demo", input="a", max_output_tokens=2, store=True)
    assert answer.store is False
    ways = (client.responses.retrieve, client.responses.delete, client.responses.cancel)
    for way in (*ways, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=rf"no response '{answer.id}'; the server keeps no resp") as no:
            way(answer.id)
        assert no.value.code == "response_not_found"


def test_the_prompts_tokens_are_counted(client: Any, caller: Running) -> None:
    """As many as the answer's usage says, with instructions and tools; what can't be answered is refused here, too."""
    ways: list[tuple[Any, dict[str, Any]]] = [
        (client, {}),
        (client, {"instructions": "a b c"}),
        (caller.openai(), {"tools": [TOOL]}),
    ]
    counts = set()
    for of, more in ways:
        asked: dict[str, Any] = {"model": "demo", "input": PROMPT, **more}
        counted = of.responses.input_tokens.count(**asked)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == of.responses.create(**asked, max_output_tokens=1).usage.input_tokens
        counts.add(counted.input_tokens)
    assert len(counts) == len(ways)
    for given in ({"input": "a" * 9000}, {"input": "a", "previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_tokens.count(model="demo", **given)


def test_other_paths_are_refused_by_name(client: Any) -> None:
    """A path of OpenAI's that is no response's name, and one that nobody has, are not answered as if they were one."""
    with pytest.raises(openai.APIStatusError, match="does not compact items; send fewer of them") as no:
        client.with_options(max_retries=0).responses.compact(model="demo", input="a")
    assert (no.value.status_code, no.value.code) == (501, "not_supported")
    for path in ("/responses/resp_1", "/responses/input_items", "/responses/compact/cancel/a"):
        with pytest.raises(openai.APIStatusError, match=r"does not take POST|there is no path") as no:
            client.post(path, body={}, cast_to=object)
        assert no.value.status_code in (404, 405)


@pytest.mark.parametrize(
    "given, param, message",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "the server keeps no responses: send the earlier"),
        ({"conversation": "conv_1"}, "conversation", "the server keeps no responses"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "the server keeps no responses"),
        ({"background": True}, "background", "background is not supported; wait for the answer, or stream it"),
        ({"truncation": "auto"}, "truncation", "truncation is not supported; send as much as there is room for"),
        ({"tools": [{"type": "web_search"}]}, "tools", "a tool is of type 'web_search', which this server has not"),
        ({"tools": [{"type": "function"}]}, "tools", "a tool has no name; give it"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is 'required'; input should be 'none' or 'auto'"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "effort is not supported; give what the model's template"),
        ({"max_tokens": 3}, "max_tokens", "max_tokens is not supported; give max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "give text.format.schema with it"),
        ({"text": {"format": {"type": "regex", "regex": "a", "grammar": "b"}}}, "text", "text.format.grammar is given"),
        ({"text": {"format": {"type": "regex", "regex": "("}}}, "text", "text.format.regex"),
        (
            {"tools": [TOOL], "text": {"format": {"type": "json_object"}}},
            "text",
            "text.format is 'json_object' with tools",
        ),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "input[0]: an item is of type 'item_reference'"),
        ({"input": [{"type": "computer_call"}]}, "input", "input[0]: an item is of type 'computer_call'; give one of"),
        ({"input": [{"type": "function_call"}]}, "input", "an item of type 'function_call' has no call_id; give it"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input",
            "this model takes text alone; leave the image out",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]},
            "input",
            "input[0].content: a part is of type 'input_file'; give input_text or input_image",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "a"}]},
            "input",
            "encrypted_content is not supported; only its own server can read it",
        ),
        ({"input": []}, "input", "input is []"),
        ({"input": "a" * 9000}, "input", "input has 9000 tokens, the model's context 2048; shorten it"),
        ({"metadata": {str(place): "" for place in range(17)}}, "metadata", "metadata has 17 entries; give at most 16"),
        ({"temperature": 3}, "temperature", "temperature is 3"),
        ({"model": "gpt-4"}, "model", "there is no model 'gpt-4'"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(client: Any, given: dict[str, Any], param: str, message: str) -> None:
    """In place of an answer to something else."""
    if "regex" in message:
        pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    body = {"model": "demo", "input": "a", "max_output_tokens": 2} | given
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as refused:
            client.post("/responses", body=body | {"stream": stream}, cast_to=object)
        assert refused.value.status_code in (400, 404) and message in refused.value.message
        assert refused.value.param == param


def test_a_template_that_refuses_names_the_input(caller: Running) -> None:
    """Messages are no field of this endpoint."""
    before, caller.served.tokenizer.chat_template = TEMPLATE, "{{ raise_exception('no') }}"
    try:
        error = caller.http().post("/v1/responses", json={"input": "a"}).json()["error"]
    finally:
        caller.served.tokenizer.chat_template = before
    assert error["param"] == "input" and "chat template refuses these messages" in error["message"]


def test_what_fails_within_a_stream_is_an_event(
    demo_server: Running, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that has got events already is told with the last one; one that has not, by the status."""
    from launch.serve.api_errors import ApiError
    from launch.serve.openai import Chat

    chunks = Chat.chunks

    async def failing(chat: Chat) -> Any:
        async for chunk in chunks(chat):
            yield chunk
            if chunk["choices"][0]["delta"].get("content"):
                raise ApiError(503, "the server ended before the text did; ask again")

    monkeypatch.setattr(Chat, "chunks", failing)
    asked = {"model": "demo", "input": PROMPT, "max_output_tokens": 40}
    events = [*client.responses.create(**asked, stream=True)]
    last = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error" and "ask again" in last.response.error.message
    assert [event.sequence_number for event in events] == [*range(len(events))] and len(events) > 4
    with pytest.raises(openai.InternalServerError, match="ask again") as failed:
        client.responses.create(**asked)
    assert failed.value.status_code == 503


def test_too_late() -> None:
    """A stream that takes too long ends with an event of the endpoint's own."""
    with serving(*lp.load("demo"), timeout_s=0.5) as running:
        running.decoder.generate([70], 8)
        asked = {"input": PROMPT, "max_output_tokens": 2000, "temperature": 1.5, "ignore_eos": True}
        whole = running.http().post("/v1/responses", json=asked)
        assert whole.status_code == 504
        streamed = running.http().post("/v1/responses", json=asked | {"stream": True})
        if streamed.status_code == 200:  # on a busy machine no token may have come in time
            last = json.loads(streamed.text.strip().splitlines()[-1].removeprefix("data: "))
            assert last["type"] == "response.failed" and "not done within 0.5 s" in last["response"]["error"]["message"]
