"""What clients send, as pydantic models, which refuse values of another type or out of range by name.

Fields that a model does not have are ignored, as editors send settings of other servers along; those that would change
a text and cannot be had are refused (`Refused`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from lp.errors import UserError

from .errors import SHOWN

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_LOGPROBS = 20
MOST_DIGITS = 18  # of a token id
MOST_TOKENS = 1 << 17  # to decode at once, while which nothing else runs: a third of a second


def _whole(text: str) -> str:
    """Refuse half a character, which JSON can have and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"half a character at {error.start}; send whole ones") from None
    return text


Text = Annotated[str, StringConstraints(strict=True), AfterValidator(_whole)]
StopString = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=1024), AfterValidator(_whole)]
Int = Annotated[int, Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]

# Every list stops at its first bad item: pydantic makes an error of each, and of a million takes seconds and gigabytes.
Names = Annotated[list[Text], Field(fail_fast=True)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(fail_fast=True, min_length=1)]
TokenLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]


def _listed(value: Any) -> Any:
    """A lone stop string is a list of one; nothing is an empty list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


Stops = Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS), BeforeValidator(_listed)]


class Fields(BaseModel):
    """Fields of a body, where null is the same as nothing, as clients send it for what they leave open."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class Body(Fields):
    """A request's body.

    Attributes:
        REFUSED: settings that would change the text and cannot be had, and what to do instead.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    REFUSED: ClassVar[dict[str, str]] = {}

    @model_validator(mode="after")
    def _refuse(self) -> Body:
        for name, remedy in self.REFUSED.items():
            if (self.model_extra or {}).get(name):
                raise UserError(f"{name} is not supported; {remedy}")
        return self


class Sampled(Body):
    """How tokens are sampled; what is not given is the server's own setting."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Int | None = None
    ignore_eos: Bool = False

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _first_bad(cls, value: Any) -> Any:
        """Refuse the first bad one, as of lists."""
        for token, bias in value.items() if isinstance(value, dict) else ():
            if not token.isascii() or not token.isdecimal() or len(token) > MOST_DIGITS:
                raise UserError(f"the key {token[:SHOWN]!r} is no token id; give ids, as in {{'50256': -100}}")
            if not isinstance(bias, int | float) or not -100 <= bias <= 100:
                shown = repr(bias)[:SHOWN]
                raise UserError(
                    f"logit_bias of token {token} is {shown}; give a number greater than or equal to -100 and less "
                    "than or equal to 100"
                )
        return value


class StreamOptions(Fields):
    """What a stream has beside the text."""

    include_usage: Bool = False


class ResponseFormat(Fields):
    """The form that a text must have."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: dict[str, Any] | None = None
    grammar: Text | None = None
    regex: Text | None = None
    form: dict[str, Any] | None = Field(None, alias="schema")  # llama.cpp's, of a json_object

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        needed = {"json_schema": self.json_schema, "grammar": self.grammar, "regex": self.regex}
        if self.type in needed and needed[self.type] is None:
            raise UserError(f"response_format.type is {self.type!r}; give response_format.{self.type} with it")
        if self.type == "json_schema" and not isinstance((self.json_schema or {}).get("schema"), dict | bool):
            raise UserError("response_format.json_schema.schema must be a JSON schema; give an object")
        return self

    @property
    def grammar_given(self) -> tuple[str, str] | None:
        """As of `Grammars.grammar`; None for none."""
        if self.type == "json_object":
            return "json_schema", json.dumps(self.form or {"type": "object"})
        if self.type == "json_schema":
            return "json_schema", json.dumps((self.json_schema or {})["schema"])
        kinds = {"grammar": "ebnf", "regex": "regex"}
        return (kinds[self.type], self.grammar or self.regex or "") if self.type in kinds else None


class OpenAI(Sampled):
    """What both of OpenAI's endpoints take."""

    REFUSED = {
        **dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
            "give response_format",
        ),
        **dict.fromkeys(("grammar", "json_schema"), "give response_format, or take /completion"),
        **dict.fromkeys(("bad_words", "allowed_token_ids", "min_tokens"), "give logit_bias"),
        "stop_token_ids": "give stop",
        "use_beam_search": "a step verifies one path, and beams depend on each other: leave it out",
    }
    model: Text | None = None
    n: Annotated[Int, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: Stops = []
    stream: Bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def grammar_given(self) -> tuple[str, str] | None:
        """As of `Grammars.grammar`; None for none."""
        return self.response_format.grammar_given if self.response_format else None

    @model_validator(mode="after")
    def _sound_options(self) -> OpenAI:
        if self.grammar_given and self.ignore_eos:
            raise UserError("ignore_eos is true with a response_format, whose text an EOS ends; leave one of them out")
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options is given, but stream is not true; leave stream_options out")
        return self


class CompletionBody(OpenAI):
    """/v1/completions."""

    REFUSED = {**OpenAI.REFUSED, "prompt_embeds": "give a text or token ids"}
    prompt: Text | TokenIds | Texts | TokenLists
    suffix: Text | None = None
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: Bool = False
    best_of: Int | None = None

    @model_validator(mode="after")
    def _sound(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.n:
            raise UserError(f"best_of is {self.best_of} and n is {self.n}; texts are not ranked: leave best_of out")
        if self.suffix and self.echo:
            raise UserError("echo is true with a suffix; leave one of them out")
        if self.suffix and not isinstance(self.prompt, str):
            raise UserError("suffix is given, but prompt is no single text; give one text before the gap")
        if self.max_tokens == 0 and not self.echo:
            raise UserError("max_tokens is 0, which leaves nothing to do without echo; ask for at least one token")
        return self


class ContentPart(Fields):
    """A part of a message."""

    type: Text
    text: Text | None = None

    @model_validator(mode="after")
    def _is_text(self) -> ContentPart:
        if self.type != "text" or self.text is None:
            raise UserError(f"a content part is of type {self.type!r}; this model takes text alone")
        return self


Content = Text | Annotated[list[ContentPart], Field(fail_fast=True)]


def plain_text(content: Content | None) -> str:
    """A message's text, of all its parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content)


class FunctionCall(Fields):
    """A call in a message of the assistant."""

    name: Text
    arguments: Text = "{}"


class ToolCall(Fields):
    """The same, with its id."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields):
    """A message of a chat."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise UserError(f"a message of role {self.role!r} has no content; give a text")
        return self


class Function(Fields):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


class Prediction(Fields):
    """The predicted output."""

    type: Literal["content"]
    content: Content


class ChatBody(OpenAI):
    """/v1/chat/completions."""

    REFUSED = {
        **OpenAI.REFUSED,
        "functions": "give tools",
        "chat_template": "the server has its own, by its setting chat_template",
        "continue_final_message": "give the text so far to /v1/completions",
        "documents": "give chat_template_kwargs.documents",
        "function_call": "give tool_choice",
        "audio": "this model writes text",
        "web_search_options": "this server has no search",
    }
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    n_predict: Annotated[Int, Field(ge=-1)] | None = None
    logprobs: Bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        """By OpenAI's names of the limit, or llama.cpp's, whose 0 caches the prompt alone, by one token."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if given is None and self.n_predict is not None and self.n_predict >= 0:
            return max(self.n_predict, 1)
        return given

    @model_validator(mode="after")
    def _sound(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("top_logprobs is given, but logprobs is not true; set logprobs")
        if self.tool_choice and not self.tools:
            raise UserError("tool_choice is given without tools; give tools, or leave it out")
        if self.response_format and self.grammar_given and self.tools and self.tool_choice != "none":
            raise UserError(
                f"response_format is {self.response_format.type!r} with tools, which it would keep the model from "
                "calling; leave one of them out, or set tool_choice to 'none'"
            )
        return self


class LlamaCpp(Body):
    """What both of llama.cpp's endpoints take."""

    REFUSED = {
        "mirostat": "take temperature, top_k and top_p",
        "lora": "load the model with its adapter",
        "image_data": "this model takes text alone",
        "n_probs": "/v1/completions has logprobs",
        "logit_bias": "/v1/completions has it",
        **dict.fromkeys(("dry_multiplier", "xtc_probability", "dynatemp_range"), "take temperature, top_k and top_p"),
    }
    prompt: Text | TokenIds = ""
    n_predict: Annotated[Int, Field(ge=-1)] = -1
    temperature: Annotated[float, Field(ge=0)] = 0.8
    top_k: Int = 40
    top_p: Annotated[float, Field(ge=0)] = 0.95
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.05
    typical_p: Annotated[float, Field(gt=0)] = 1.0
    repeat_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Int = -1
    stop: Stops = []
    stream: Bool = False
    samplers: Names | Text | None = None
    cache_prompt: Bool = True
    n_indent: Annotated[Int, Field(ge=0)] = 0
    t_max_predict_ms: Annotated[float, Field(ge=0)] = 0
    ignore_eos: Bool = False
    grammar: Text = ""
    json_schema: dict[str, Any] | None = None
    response_fields: Names | None = None

    @property
    def grammar_given(self) -> tuple[str, str] | None:
        """As of `Grammars.grammar`; None for none."""
        if self.grammar:
            return "ebnf", self.grammar
        return ("json_schema", json.dumps(self.json_schema)) if self.json_schema else None

    @property
    def top(self) -> dict[str, Any]:
        """What the samplers of its chain leave out, as fields of lp.SamplingParams; none for greedy decoding."""
        on = self.samples_by
        return {
            "temperature": self.temperature if on("temperature") else 1.0,
            "top_k": max(self.top_k, 0) if on("top_k") else 0,
            "top_p": min(self.top_p, 1.0) if on("top_p") else 1.0,
            "min_p": self.min_p if on("min_p") else 0.0,
            "typical_p": min(self.typical_p, 1.0) if on("typ_p") or on("typical_p") else 1.0,
            "repetition_penalty": self.repeat_penalty if on("penalties") else 1.0,
        }

    def samples_by(self, name: str) -> bool:
        """Whether the sampler is in the chain, which has all of them where none is given by names."""
        return not isinstance(self.samplers, list) or name in self.samplers


class ExtraBody(Fields):
    """A piece of another file."""

    model_config = ConfigDict(extra="ignore")
    filename: Text = ""
    text: Text


class InfillBody(LlamaCpp):
    """/infill."""

    prompt: Text = ""
    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[ExtraBody], Field(fail_fast=True)] = []


class TokenizeBody(Body):
    """/tokenize."""

    content: Text
    add_special: Bool = False
    with_pieces: Bool = False


class DetokenizeBody(Body):
    """/detokenize."""

    tokens: Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(fail_fast=True, max_length=MOST_TOKENS)]
