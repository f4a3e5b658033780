"""Turns chat requests into prompts by the model's chat template, and generated text into content and tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from inspect import signature
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lp

from ..text.chat_tokens import LiteralCopy, chat_tokens, text_tokens
from ..text.image_prompts import ImagePrompt, ImagePrompts, for_template
from .api_errors import SHOWN, ApiError
from .bodies import ChatBody, Message, plain_text
from .image_urls import decoded_images

# How a template is applied, to what, and which one: a client's own could run for ever.
SET_HERE = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {"documents"}
REFUSALS = (TemplateError, TypeError, ValueError, KeyError)  # what a template raises that can't write what it is given


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    body: ChatBody,
    literal: LiteralCopy | None = None,
    images: ImagePrompts | None = None,
) -> ImagePrompt:
    """Turn the messages of a chat request into the prompt whose continuation is the assistant's answer.

    Without a chat template, the prompt consists of the messages' contents, each on a line of its own. Names of special
    tokens in the client's texts, such as "<|im_end|>", are encoded as plain text.

    Args:
        tokenizer: the model's tokenizer.
        body: the request.
        literal: a copy of the tokenizer that encodes special tokens as plain text, needed if several threads encode at
            the same time; None: the tokenizer itself does this.
        images: makes prompts with images for this model; None: the model takes only text.

    Returns:
        The prompt's token ids, with the tensors of its images if there are any.

    Raises:
        ApiError: status 400: the template refuses the messages, the tools or chat_template_kwargs; chat_template_kwargs
            has a name that the server sets itself; or an image can't be used.
    """
    given = body.chat_template_kwargs or {}
    for name in SET_HERE.intersection(given):
        if name == "add_generation_prompt" and given[name] is True:
            continue
        raise ApiError(
            400,
            f"chat_template_kwargs.{name} is {repr(given[name])[:SHOWN]}, and the server sets {name} itself: the "
            "assistant's turn begins behind the messages, by the server's own template; leave it out",
            "chat_template_kwargs",
        )
    given = {name: value for name, value in given.items() if name not in SET_HERE}
    if body.images:
        return _image_prompt(images or ImagePrompts(tokenizer=tokenizer), body, literal, given)
    if not tokenizer.chat_template:
        text = ""
        for message in body.messages:
            text += "\n" if text and not text.endswith("\n") else ""
            text += plain_text(message.content)
        try:
            return ImagePrompt(text_tokens(tokenizer, text, literal), {})
        except ValueError as error:
            raise ApiError(400, str(error), body.PROMPT) from None
    tools = _tools(body)
    messages = [_for_template(message) for message in body.messages]
    if images and images.processor:
        messages = for_template(tokenizer, messages)
    try:
        return ImagePrompt(chat_tokens(tokenizer, messages, literal, tools=tools, **given), {})
    except REFUSALS as error:
        refused = _refused(tokenizer, messages, literal, tools, given)
        what, param = (refused, refused) if refused else ("these messages", body.PROMPT)
        raise ApiError(400, f"the model's chat template refuses {what}: {error}", param) from None


def _image_prompt(
    images: ImagePrompts, body: ChatBody, literal: LiteralCopy | None, given: dict[str, Any]
) -> ImagePrompt:
    """The prompt of messages with images.

    Raises:
        ApiError: 400.
    """
    try:
        images.check()
        messages = [_for_template(message) for message in body.messages]
        with images.one_at_a_time:
            found = decoded_images([image.url for image in body.images])
            return images.prompt(messages, found, literal, tools=_tools(body), **given)
    except lp.UserError as error:
        raise ApiError(400, str(error), body.PROMPT) from None
    except REFUSALS as error:
        raise ApiError(400, f"the model's chat template refuses these messages: {error}", body.PROMPT) from None


def _tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """What the model may call, as templates take it."""
    return [tool.model_dump(exclude_none=True) for tool in body.tools] if uses_tools(body) and body.tools else None


def _refused(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    literal: LiteralCopy | None,
    tools: list[dict[str, Any]] | None,
    given: dict[str, Any],
) -> str | None:
    """The field that a template refuses: the one without which it takes the others; None where it is the messages."""
    for name, others in (("chat_template_kwargs", {"tools": tools}), ("tools", given)):
        try:
            chat_tokens(tokenizer, messages, literal, **others)
        except REFUSALS:
            continue
        return name
    return None


def uses_tools(body: ChatBody) -> bool:
    """Whether the model may call tools in its answer: the request has tools, and its tool_choice is not "none"."""
    return bool(body.tools) and body.tool_choice != "none"


def tool_format(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> dict[str, Any]:
    """Look up how the model writes tool calls and reasoning in its text, so that `answer` can parse them.

    Args:
        tokenizer: the model's tokenizer; its attribute `response_template` is used if it has one.
        model: the model, for whose type transformers may know a response template.

    Returns:
        transformers' response template, as `tokenizer.parse_response` takes it.

    Raises:
        ApiError: status 400: there is no response template for this model, or the tokenizer has no chat template.
    """
    described = getattr(tokenizer, "response_template", None)
    if described is None:
        try:
            from transformers.cli.serving.utils import get_response_template

            described = get_response_template(tokenizer, model)
        except ImportError:  # it moves from release to release
            described = None
    if described is None or not tokenizer.chat_template:
        message = (
            f"tools are given, but transformers describes no format of calls for {model.config.model_type}; leave "
            "tools out, or give the tokenizer a response_template"
        )
        raise ApiError(400, message, "tools")
    return described


def answer(
    tokenizer: PreTrainedTokenizerBase,
    format: dict[str, Any],
    text: str,
    tokens: Sequence[int],
    prompt: Sequence[int],
    body: ChatBody,
) -> dict[str, Any]:
    """Parse the generated text of a request with tools into the assistant's message, in OpenAI's form.

    Text that can't be parsed, such as a tool call that is cut off, becomes the content as a whole.

    Args:
        tokenizer: the model's tokenizer.
        format: how the model writes tool calls (`tool_format`).
        text: the generated text, returned as the content if parsing fails.
        tokens: token ids of the generated text, special tokens included; these are parsed.
        prompt: token ids of the prompt.
        body: the request, which has the tools.

    Returns:
        The message: "role" and "content", and if there are any, "reasoning_content" and "tool_calls".
    """
    told = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
    try:
        parsed = tokenizer.parse_response([*tokens], format, prefix=[*prompt], tools=told)
        calls = [_call(call["function"]) for call in parsed.get("tool_calls") or []]
        # Of what only calls, null, as in OpenAI's answers; any other must be one that a client may send back.
        content = parsed.get("content") or (None if calls else "")
        reasoning = parsed.get("reasoning_content")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls[:1] if body.parallel_tool_calls is False else calls
        json.dumps(message, ensure_ascii=False).encode()  # half a character, which no response can have
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # nobody has checked what a model writes
        return {"role": "assistant", "content": text}
    return message


def _call(function: Any) -> dict[str, Any]:
    """A call in OpenAI's form.

    Raises:
        ValueError, TypeError: the name is no text, or the arguments are no object of JSON, which has no NaN.
    """
    name = function["name"]
    if not isinstance(name, str):
        raise TypeError(f"a function's name is {name!r}")
    given = function.get("arguments", {})
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
    if not isinstance(json.loads(arguments, parse_constant=_no_json), dict):
        raise TypeError(f"a function's arguments are {arguments[:SHOWN]}")
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _no_json(name: str) -> None:
    """Refuse NaN, Infinity and -Infinity, which Python reads and JSON has not."""
    raise lp.UserError(f"{name} is no JSON")


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates expect it: one text, calls with parsed arguments, and the role that they know."""
    role = "system" if message.role == "developer" else message.role
    data: dict[str, Any] = {"role": role, "content": plain_text(message.content)}
    if message.images and isinstance(message.content, list):
        data["content"] = [
            {"type": "image"} if part.type == "image_url" else {"type": "text", "text": part.text}
            for part in message.content
        ]
    if message.name is not None:
        data["name"] = message.name
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        data["reasoning_content"] = reasoning
    if message.tool_calls:
        data["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _parsed(call)}}
            for call in message.tool_calls
        ]
    return data


def _parsed(call: Any) -> Any:
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
