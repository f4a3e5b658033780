"""The bodies of requests to /v1/responses, and their translation to bodies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from lp.errors import UserError

from .api_errors import SHOWN, FieldError
from .bodies import (
    FORMS,
    MOST_LOGPROBS,
    TOKENS_FAVOURED,
    Bool,
    ChatBody,
    Fields,
    ImageUrl,
    Int,
    Names,
    OneImageUrl,
    ResponseFormat,
    Sampled,
    Text,
)

LOGPROBS = "message.output_text.logprobs"  # what `include` has to name
MOST_METADATA = 16
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
ITEMS = {  # types of items, and what each needs
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
KEPT = "the server keeps no responses: send the earlier items again"


class InputText(Fields):
    """A text part of an input item, such as {"type": "output_text", "text": "..."}."""

    model_config = ConfigDict(extra="allow")
    type: Text
    text: Text | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> InputText:
        if self.type not in TEXT_PARTS or self.text is None:
            raise UserError(f"a part is of type {self.type[:SHOWN]!r}; give text here")
        return self


class InputPart(InputText):
    """A part of a message: a text, or an image such as {"type": "input_image", "image_url": "data:..."}."""

    REFUSED: ClassVar[dict[str, str]] = {"file_id": "the server keeps no files: give image_url"}
    image_url: OneImageUrl | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> InputPart:
        if self.type not in (*TEXT_PARTS, "input_image"):
            raise UserError(f"a part is of type {self.type[:SHOWN]!r}; give input_text or input_image")
        own = "image_url" if self.type == "input_image" else "text"
        if getattr(self, own) is None:
            raise UserError(f"a part of type {self.type!r} has no {own}; give it")
        return self

    @property
    def image(self) -> ImageUrl | None:
        """The part's image; None if the part is a text."""
        return self.image_url if self.type == "input_image" else None


def _parts(value: Any) -> Any:
    """A text is a list of one part."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[InputPart],
    Field(fail_fast=True),
    BeforeValidator(_parts, json_schema_input_type=Text | list[InputPart]),
]
TextParts = Annotated[
    list[InputText],
    Field(fail_fast=True),
    BeforeValidator(_parts, json_schema_input_type=Text | list[InputText]),
]


def _text(parts: Sequence[InputText] | None) -> str:
    return "".join(part.text or "" for part in parts or [])


def _content(parts: list[InputPart] | None) -> str | list[dict[str, Any]]:
    """The content of a chat's message: a text, or parts where there are images."""
    if not any(part.image for part in parts or []):
        return _text(parts)
    return [
        {"type": "text", "text": part.text}
        if part.image is None
        else {"type": "image_url", "image_url": dict(part.image)}
        for part in parts or []
    ]


class Item(Fields):
    """An entry of `input`: a message, an earlier answer's reasoning, a call of a function, or a call's output."""

    REFUSED: ClassVar[dict[str, str]] = {
        "encrypted_content": "only its own server can read it: give content, or leave it out"
    }
    model_config = ConfigDict(extra="allow")
    type: Text = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    summary: TextParts | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: TextParts | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Item:
        if self.type == "item_reference":
            raise UserError(f"an item is of type 'item_reference'; {KEPT}")
        if self.type not in ITEMS:
            raise UserError(f"an item is of type {self.type[:SHOWN]!r}; give one of {', '.join(ITEMS)}")
        for name in ITEMS[self.type]:
            if getattr(self, name) is None:
                raise UserError(f"an item of type {self.type!r} has no {name}; give it")
        if self.role != "user" and any(part.image for part in self.content or []):
            raise UserError("an input_image is in another item than a user's message; give it in one")
        return self


def _items(value: Any) -> Any:
    """A text is a message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(Fields):
    """The field `text.format`: the form that the answer must have, such as JSON that fits a schema."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    form: dict[str, Any] | None = Field(None, alias="schema")
    grammar: Text | None = None
    regex: Text | None = None

    @property
    def own(self) -> str | None:
        """Name of the field that `type` requires, such as "schema" for "json_schema"; None if it requires none."""
        return "schema" if self.type == "json_schema" else None if self.type == "json_object" else FORMS[self.type]

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        given = {"schema": self.form, "grammar": self.grammar, "regex": self.regex}
        for name, value in given.items():
            if value is not None and name != self.own:
                raise UserError(f"text.format.{name} is given, but text.format.type is {self.type!r}; leave it out")
        if self.own and given[self.own] is None:
            raise UserError(f"text.format.type is {self.type!r}; give text.format.{self.own} with it")
        return self

    @property
    def response_format(self) -> dict[str, Any]:
        """Translate this field to `response_format`, its counterpart in requests to /v1/chat/completions."""
        if self.type == "json_schema":
            return {"type": self.type, "json_schema": {"schema": self.form}}
        return {"type": self.type, "grammar": self.grammar, "regex": self.regex}


class TextOptions(Fields):
    """The field `text`: options for the answer's text, of which only its form (`format`) is supported."""

    REFUSED: ClassVar[dict[str, str]] = {"verbosity": "say it in the instructions"}
    model_config = ConfigDict(extra="allow")
    format: TextFormat | None = None


class ReasoningOptions(Fields):
    """The field `reasoning`, whose options are all refused: only chat_template_kwargs controls how a model reasons."""

    REFUSED: ClassVar[dict[str, str]] = {
        "effort": "give what the model's template reads in chat_template_kwargs",
        **dict.fromkeys(("summary", "generate_summary"), "the reasoning itself is given: leave it out"),
    }
    model_config = ConfigDict(extra="allow")


class FunctionTool(Fields):
    """A function that the model may call: an entry of the field `tools`."""

    model_config = ConfigDict(extra="allow")
    type: Text
    name: Text | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_function(self) -> FunctionTool:
        if self.type != "function":
            raise UserError(f"a tool is of type {self.type[:SHOWN]!r}, which this server has not; give functions")
        if self.name is None:
            raise UserError("a tool has no name; give it")
        return self

    @property
    def tool(self) -> dict[str, Any]:
        """Translate this function to an entry of `tools` as requests to /v1/chat/completions have it."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_METADATA:
        raise UserError(f"metadata has {len(value)} entries; give at most {MOST_METADATA}")
    return value


class AskedChat(ChatBody):
    """A request to /v1/responses translated to a chat body; its errors name fields of the original request."""

    PROMPT = "input"

    @property
    def grammar_field(self) -> str:
        """Name of the original request's field that sets the answer's form, for error messages: "text.format"."""
        return "text.format"


class ResponsesBody(Sampled):
    """Body of a request to /v1/responses."""

    PROMPT: ClassVar[str] = "input"
    REFUSED: ClassVar[dict[str, str]] = {
        **Sampled.REFUSED,
        **dict.fromkeys(("previous_response_id", "conversation", "prompt"), KEPT),
        "background": "wait for the answer, or stream it",
        "context_management": "send as much as there is room for",
        "truncation": "send as much as there is room for",
        "moderation": "this server judges no text",
        "messages": "give input",
        **dict.fromkeys(("n", "num_return_sequences"), "ask as often as you want answers"),
        **dict.fromkeys(("logprobs", "n_probs"), f"give top_logprobs, and include ['{LOGPROBS}']"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), "give max_output_tokens"),
        **dict.fromkeys(("response_format", "json_schema", "grammar", "regex", "ebnf"), "give text.format"),
        **dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag"),
            "give text.format",
        ),
        **dict.fromkeys(("functions", "function_call"), "give tools"),
        **dict.fromkeys(
            ("reasoning_effort", "enable_thinking", "thinking"),
            "give what the model's template reads in chat_template_kwargs",
        ),
        **dict.fromkeys(
            ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"),
            "give what the model's template reads in chat_template_kwargs",
        ),
        **dict.fromkeys(TOKENS_FAVOURED, "give logit_bias"),
        **dict.fromkeys(("suffix", "echo", "n_indent", "t_max_predict_ms"), "another endpoint has it"),
        "prediction": "/v1/chat/completions has it",
        "chat_template": "the server has its own, by its setting chat_template",
        **dict.fromkeys(("audio", "modalities"), "this model writes text"),
    }
    model: Text | None = None
    input: Annotated[
        list[Item],
        Field(fail_fast=True, min_length=1),
        BeforeValidator(_items, json_schema_input_type=Text | list[Item]),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    include: Names | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, Text], BeforeValidator(_few)] | None = None
    store: Bool | None = None

    @property
    def form(self) -> TextFormat | None:
        """The field `text.format`; None if the answer may have any form."""
        return self.text.format if self.text else None

    @property
    def grammar_given(self) -> tuple[str, str] | None:
        """Kind and source of the grammar for the answer, such as ("regex", "[0-9]+"); None: no grammar."""
        return ResponseFormat(**self.form.response_format).grammar_given if self.form else None

    @property
    def grammar_field(self) -> str:
        """Name of the field that sets the answer's form, such as "text.format.regex", for error messages."""
        own = self.form.own if self.form else None
        return f"text.format.{own}" if own else "text.format"

    @model_validator(mode="after")
    def _sound(self) -> ResponsesBody:
        if self.tool_choice == "auto" and not self.tools:
            self.tool_choice = None  # as clients send it that have none
        if self.form and self.grammar_given and self.tools and self.tool_choice != "none":
            raise FieldError(
                "text",
                f"text.format is {self.form.type!r} with tools, which it would keep the model from calling; leave one "
                "of them out, or set tool_choice to 'none'",
            )
        return self

    @property
    def chat(self) -> AskedChat:
        """Translate the request to a /v1/chat/completions body, which asks for a stream that ends with token counts."""
        asked = self.model_dump(include={*Sampled.model_fields}, exclude_unset=True)
        asked |= {"messages": self._messages(), "stream": True, "stream_options": {"include_usage": True}}
        if self.max_output_tokens is not None:
            asked["max_completion_tokens"] = self.max_output_tokens
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            asked |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.form:
            asked["response_format"] = self.form.response_format
        if self.tools:
            asked |= {"tools": [tool.tool for tool in self.tools], "tool_choice": self.tool_choice}
            asked["parallel_tool_calls"] = self.parallel_tool_calls
        return AskedChat.model_validate(asked | {"chat_template_kwargs": self.chat_template_kwargs})

    @property
    def images(self) -> list[ImageUrl]:
        """The images in all input items, in order."""
        return [part.image for item in self.input for part in item.content or [] if part.image]

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages of a chat, where reasoning, text and calls of one answer are one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if item.type == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            elif item.type == "message" and item.role != "assistant":
                messages.append({"role": item.role, "content": _content(item.content)})
            else:
                if not (messages and messages[-1]["role"] == "assistant" and _goes_on(messages[-1], item)):
                    messages.append({"role": "assistant"})
                _add(messages[-1], item)
        for message in messages:
            if "tool_calls" not in message:
                message.setdefault("content", "")
        return messages


def _goes_on(message: dict[str, Any], item: Item) -> bool:
    """Whether an item is of the answer that the message begins: reasoning comes first, then text, then calls."""
    if item.type == "message":
        return not {"content", "tool_calls"} & message.keys()
    return item.type == "function_call"


def _add(message: dict[str, Any], item: Item) -> None:
    """Put an item of an answer into its message."""
    if item.type == "message":
        message["content"] = _text(item.content)
    elif item.type == "reasoning":
        message["reasoning_content"] = _text(item.content or item.summary)
    else:
        function = {"name": item.name, "arguments": item.arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
