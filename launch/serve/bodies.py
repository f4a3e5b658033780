"""The bodies of requests as pydantic models: a value of a wrong type or out of range is refused with its field's name.

Unknown fields are ignored, as editors also send settings that only other servers have. But a field that would change
the generated text, and that this server does not support, is refused (`Fields.REFUSED`).
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
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lp.errors import UserError
from lp.sampling.params import LEAST_TEMPERATURE, MOST_PENALTY, SamplingParams

from .api_errors import SHOWN, FieldError

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


def _not_too_cold(value: float) -> float:
    """Refuse a temperature by which scores would overflow."""
    if 0 < value < LEAST_TEMPERATURE:
        raise UserError(f"temperature is {value!r}; give 0, which is greedy, or at least {LEAST_TEMPERATURE:g}")
    return value


NotTooCold = AfterValidator(_not_too_cold)
RepetitionPenalty = Annotated[float, Field(ge=1 / MOST_PENALTY, le=MOST_PENALTY)]
CountedPenalty = Annotated[float, Field(ge=-MOST_PENALTY, le=MOST_PENALTY)]
LastTokens = Annotated[Int, Field(ge=-1)]


def _check_prompt(value: Any, wanted: str, several: bool) -> Any:
    """Refuse the first thing that is no prompt, by its place: an error of each type that it could be says nothing.

    Args:
        value: what the field is given.
        wanted: what may be given.
        several: whether it may be a list of prompts.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(f"prompt is {_shown(value)}; give {wanted}")
    if not value:
        raise UserError(f"prompt is []; give {wanted}, with one token or more")
    if not several or _is_id(value[0]):
        _check_ids(value, "prompt", wanted)
        return value
    kind = type(value[0])
    for place, each in enumerate(value):
        if type(each) is not kind or kind not in (str, list):
            raise UserError(f"prompt[{place}] is {_shown(each)}; give {wanted}, not of several kinds")
        if each == []:
            raise UserError(f"prompt[{place}] is []; give one token id or more")
        if kind is list:
            _check_ids(each, f"prompt[{place}]", "token ids")
    return value


def _check_ids(values: list[Any], name: str, wanted: str) -> None:
    for place, each in enumerate(values):
        if not _is_id(each):
            raise UserError(f"{name}[{place}] is {_shown(each)}; give {wanted}; a token id is an integer >= 0")


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _shown(value: Any) -> str:
    text = repr(value[:SHOWN] if isinstance(value, str | list) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _prompts(value: Any) -> Any:
    return _check_prompt(value, "a text, texts, token ids, or lists of token ids", several=True)


def _one_prompt(value: Any) -> Any:
    return _check_prompt(value, "one text, or its token ids; /v1/completions takes several", several=False)


Stops = Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS), BeforeValidator(_listed)]


# Fields of other servers that forbid or favour tokens.
TOKENS_FAVOURED = (
    *("bad_words", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "allowed_token_ids", "sequence_bias"),
    *("min_tokens", "min_new_tokens", "min_length", "ban_eos_token", "forced_bos_token_id"),
)
NOTHING: tuple[Any, ...] = (0, False, "", [], {})  # values of an unsupported field that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {  # the same for fields where other values do; null asks for nothing in all
    **dict.fromkeys(("tfs_z", "guidance_scale", "repetition_penalty", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("num_beams", "num_return_sequences", "n", "n_cmpl"), (1,)),
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens", "add_generation_prompt", "do_sample"), (True,)),
    "min_keep": (0, 1),
    "adaptive_target": (),
    "t_max_predict_ms": (0, -1),
    "modalities": ([], ["text"]),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    **dict.fromkeys(("summary", "generate_summary"), ("auto",)),
    "response_format": ({}, {"type": "text"}),
    **dict.fromkeys(("guided_json", "json_schema", "web_search_options"), ()),
    **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens", "truncate"), ()),
    **dict.fromkeys(("max_completion_tokens", "max_length", "max_time"), ()),
    **dict.fromkeys(("eos_token_id", "forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("enable_thinking", "thinking_budget", "thinking_token_budget", "thinking_budget_tokens"), ()),
}


OFF_BELOW_0 = ("top_n_sigma", "adaptive_target")


def _asks(name: str, value: Any) -> bool:
    """Whether a field that is not supported asks for something."""
    if name in OFF_BELOW_0 and isinstance(value, int | float) and value < 0:
        return False
    neutral = NEUTRAL.get(name, NOTHING)
    return not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


class Fields(BaseModel):
    """Base class of all JSON objects in request bodies; a field that is null counts as left out.

    Attributes:
        REFUSED: fields that are not supported and would change the generated text, each with the remedy that the error
            message names, as in {"num_return_sequences": "give n"}. Such a field is accepted only with a value that
            changes nothing, such as 0 or false. A class that refuses fields must keep extra fields (extra="allow").
    """

    REFUSED: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _refuse(self) -> Fields:
        given = self.model_extra or {}
        for name, remedy in self.REFUSED.items():
            if name in given and _asks(name, given[name]):
                raise FieldError(name, f"{name} is not supported; {remedy}")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Its JSON schema, with what is refused, for which JSON schemas have no keyword."""
        schema = handler(core_schema)
        handler.resolve_ref_schema(schema).update({"x-refused": cls.REFUSED} if cls.REFUSED else {})
        return schema


class Body(Fields):
    """Base class of whole request bodies: unknown fields are accepted, while NaN and infinity are refused."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


SAMPLERS = {  # llama.cpp's letters of them; those without a setting here change nothing
    "k": "top_k",
    "p": "top_p",
    "m": "min_p",
    "y": "typ_p",
    "t": "temperature",
    "e": "penalties",
    "d": "dry",
    "x": "xtc",
    "s": "top_n_sigma",
    "i": "infill",
    "a": "adaptive_p",
}
INFILL_MIN_P = 0.5  # of llama.cpp's sampler `infill`, which of two tokens drops one below half the other
OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "typ": "typ_p", "nucleus": "top_p", "temp": "temperature"}
CHAINED = {  # fields of lp.SamplingParams, and the sampler that each belongs to
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typ_p",
    "repetition_penalty": "penalties",
}


def _sampler_names(value: Any) -> Any:
    """A chain as names, which llama.cpp takes as letters, too.

    Raises:
        UserError: names what is no sampler.
    """
    if not isinstance(value, str | list):
        return value
    names = [SAMPLERS.get(letter, letter) for letter in value] if isinstance(value, str) else value
    plain = [name.replace("-", "_") if isinstance(name, str) else name for name in names]
    known = [OTHER_NAMES.get(name, name) if isinstance(name, str) else name for name in plain]
    for name, given in zip(known, names, strict=True):
        if name not in SAMPLERS.values():
            raise UserError(f"samplers has {_shown(given)}; give some of {', '.join(SAMPLERS.values())}")
    return known


def _in_range(name: str, value: float) -> float:
    """A client's value as lp.SamplingParams takes it: a top_k of -1 is 0, a top_p or typical_p above 1 is 1."""
    if name == "top_k":
        return max(value, 0)
    return min(value, 1.0) if name in ("top_p", "typical_p") else value


class Generated(Body):
    """Base class of the request bodies of all endpoints that generate text, with the fields that all of these have.

    Settings that other servers and libraries have are refused if they would change the text.

    Attributes:
        PROMPT: name of the field that holds the prompt, for error messages, such as "prompt" or "messages".
        max_new_tokens: most tokens to generate, under transformers' name; None: the endpoint's own field counts, such
            as max_tokens, or else the server's limit.
        stop: strings that end the generated text, which then ends before the string.
        stream: whether the answer comes in pieces, as server-sent events.
        samplers: names of the sampling methods to apply, as in llama.cpp, such as ["top_k", "temperature"]; None: all.
        ignore_eos: whether generation continues after an EOS token.
        corpora: names of the server's corpora (files made by `lp corpus`) that draft tokens may come from; None: all
            that the client may use.
    """

    PROMPT: ClassVar[str] = "prompt"
    REFUSED = {
        **dict.fromkeys(
            ("mirostat", "mirostat_mode", "tfs_z", "top_a", "top_h", "top_n_sigma", "epsilon_cutoff", "eta_cutoff"),
            "take temperature, top_k, top_p, min_p and typical_p",
        ),
        **dict.fromkeys(
            ("dry_multiplier", "xtc_probability", "dynatemp_range", "smoothing_factor", "adaptive_target", "min_keep"),
            "take temperature, top_k, top_p, min_p and typical_p",
        ),
        **dict.fromkeys(
            ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
            "give frequency_penalty",
        ),
        "do_sample": "a temperature of 0 is greedy",
        **dict.fromkeys(
            ("guidance_scale", "penalty_alpha", "dola_layers", "token_healing", "watermark", "watermarking_config"),
            "leave it out",
        ),
        **dict.fromkeys(
            (
                "renormalize_logits",
                "remove_invalid_values",
                "logits_processors",
                "custom_logit_processor",
                "is_assistant",
            ),
            "leave it out",
        ),
        **dict.fromkeys(
            ("lora", "lora_path", "adapter_id"), "start the server with adapters, and give the name of one as the model"
        ),
        **dict.fromkeys(
            ("use_beam_search", "num_beams", "constraints", "force_words_ids"),
            "a step verifies one path, and beams depend on each other: leave it out",
        ),
        **dict.fromkeys(TOKENS_FAVOURED, "OpenAI's endpoints have logit_bias"),
        **dict.fromkeys(("forced_eos_token_id", "exponential_decay_length_penalty"), "give max_tokens"),
        **dict.fromkeys(("max_length", "max_time"), "give max_tokens"),
        **dict.fromkeys(("stop_token_ids", "stop_strings", "stop_regex", "eos_token_id"), "give stop"),
        **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), "a text ends before its stop string"),
        **dict.fromkeys(("truncate_prompt_tokens", "truncate"), "send as much as there is room for"),
        "prompt_logprobs": "give echo and logprobs to /v1/completions",
        "skip_special_tokens": "special tokens are no text",
        "num_return_sequences": "OpenAI's endpoints have n",
    }
    max_new_tokens: Annotated[Int, Field(ge=1)] | None = None
    stop: Stops = []
    stream: Bool = False
    samplers: Annotated[Names, BeforeValidator(_sampler_names)] | None = None
    ignore_eos: Bool = False
    corpora: Names | None = None

    @property
    def grammar_given(self) -> tuple[str, str] | None:
        """Kind and source of the grammar for the generated text, such as ("regex", "[0-9]+"); None: no grammar."""
        return None

    @property
    def grammar_field(self) -> str:
        """Name of the request's field that sets the grammar, for error messages; "" if the endpoint has none."""
        return ""

    @property
    def images(self) -> list[ImageUrl]:
        """Images in the prompt, in order; empty unless the request is a chat."""
        return []

    @property
    def sampling_given(self) -> dict[str, Any]:
        """The sampling settings that the client sets, by their field names in lp.SamplingParams.

        If the request has a list `samplers`, the settings of all other samplers get the values that switch them off.
        Fields that the client leaves open are missing.
        """
        neutral = SamplingParams()
        given = {}
        for name, sampler in CHAINED.items():
            names = (name, "repeat_penalty") if name == "repetition_penalty" else (name,)
            own = [each for each in names if each in self.model_fields_set]
            if not self.samples_by(sampler):
                given[name] = getattr(neutral, name)
            elif own:
                given[name] = _in_range(name, getattr(self, own[0]))
        if self.samplers is not None and "infill" in self.samplers:
            given["min_p"] = max(given.get("min_p", 0.0), INFILL_MIN_P)
        return given

    def samples_by(self, name: str) -> bool:
        """Whether a sampling method applies to this request: its field `samplers` names the method, or is not given.

        Args:
            name: llama.cpp's name of the method, such as "top_k" or "penalties" (SAMPLERS has all).
        """
        return self.samplers is None or name in self.samplers

    @model_validator(mode="after")
    def _may_end(self) -> Generated:
        if self.ignore_eos and self.grammar_given:
            name = self.grammar_field.partition(".")[0]
            raise FieldError(
                "ignore_eos", f"ignore_eos is true with a {name}, whose text an EOS ends; leave one of them out"
            )
        return self


class Sampled(Generated):
    """Base class of the request bodies of OpenAI's endpoints, with the fields that control sampling.

    A field that is None takes the server's own setting.

    Attributes:
        top_k: sample among this number of likeliest tokens; 0 and -1: among all.
        repetition_penalty, repeat_penalty: two names of one setting, transformers' and llama.cpp's.
        repeat_last_n: how many of the last tokens the penalties look at; -1: all; 0: none, so that no penalty applies.
        logit_bias: numbers to add to tokens' logits, by token id as a string, as in {"50256": -100}.
    """

    temperature: Annotated[float, Field(ge=0, le=2), NotTooCold] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: LastTokens | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Int | None = None

    @model_validator(mode="after")
    def _one_penalty(self) -> Sampled:
        if (
            None not in (self.repetition_penalty, self.repeat_penalty)
            and self.repetition_penalty != self.repeat_penalty
        ):
            raise FieldError(
                "repetition_penalty",
                f"repetition_penalty is {self.repetition_penalty:g} and repeat_penalty is {self.repeat_penalty:g}, "
                "which are one setting; give one of them",
            )
        return self

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _first_bad(cls, value: Any) -> Any:
        """Refuse the first bad entry: an error of each, as of long lists, takes seconds and gigabytes."""
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
    """OpenAI's stream_options; with `include_usage`, the last event of a streamed answer has the token counts."""

    include_usage: Bool = False


FORMS = {  # types of a response_format, and the field that says more of each
    "text": None,
    "json_object": "schema",  # llama.cpp's
    "json_schema": "json_schema",
    "grammar": "grammar",
    "regex": "regex",
}


class ResponseFormat(Fields):
    """OpenAI's response_format: constrains the generated text to JSON, a JSON schema, a grammar or a regex.

    Attributes:
        type: the kind of constraint; "text" allows any text.
        json_schema: with type "json_schema": an object whose "schema" is the JSON schema.
        grammar: with type "grammar": rules in EBNF (llama.cpp's GBNF).
        regex: with type "regex": a regular expression that the whole text matches.
        form: the request's field "schema", allowed with type "json_object": a JSON schema, as in llama.cpp; None: any
            JSON object may be generated.
    """

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: dict[str, Any] | None = None
    grammar: Text | None = None
    regex: Text | None = None
    form: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        own = FORMS[self.type]
        given = {"json_schema": self.json_schema, "grammar": self.grammar, "regex": self.regex, "schema": self.form}
        for name, value in given.items():
            if value is not None and name != own:
                other = next(type for type, field in FORMS.items() if field == name)
                raise UserError(
                    f"response_format.{name} is given, but response_format.type is {self.type!r}; set it to {other!r}, "
                    f"or leave {name} out"
                )
        if own not in (None, "schema") and given[own] is None:
            raise UserError(f"response_format.type is {self.type!r}; give response_format.{own} with it")
        if self.type == "json_schema" and not isinstance((self.json_schema or {}).get("schema"), dict | bool):
            raise UserError("response_format.json_schema.schema must be a JSON schema; give an object")
        return self

    @property
    def grammar_given(self) -> tuple[str, str] | None:
        """Kind and source of the grammar for the generated text, such as ("regex", "[0-9]+"); None: no grammar."""
        if self.type == "json_object":
            return "json_schema", json.dumps(self.form or {"type": "object"})
        if self.type == "json_schema":
            return "json_schema", json.dumps((self.json_schema or {})["schema"])
        kinds = {"grammar": "ebnf", "regex": "regex"}
        return (kinds[self.type], self.grammar or self.regex or "") if self.type in kinds else None


class OpenAI(Sampled):
    """Base class of the bodies of /v1/completions and /v1/chat/completions.

    Attributes:
        model: name of the served model or of one of its LoRA adapters; None: the model.
        n: how many texts to generate for each prompt.
        stream_options: options of a streamed answer; refused unless `stream` is true.
        response_format: the form that the text must have; None: any.
    """

    REFUSED = {
        **Sampled.REFUSED,
        **dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
            "give response_format",
        ),
        **dict.fromkeys(("regex", "ebnf", "structural_tag"), "give response_format"),
        **dict.fromkeys(("grammar", "json_schema"), "give response_format, or take /completion"),
        **dict.fromkeys(TOKENS_FAVOURED, "give logit_bias"),
        "num_return_sequences": "give n",
        "n_probs": "give logprobs",
        **dict.fromkeys(("n_indent", "t_max_predict_ms"), "/completion has it"),
    }
    model: Text | None = None
    n: Annotated[Int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def grammar_given(self) -> tuple[str, str] | None:
        """Kind and source of the grammar for the generated text, such as ("regex", "[0-9]+"); None: no grammar."""
        return self.response_format.grammar_given if self.response_format else None

    @property
    def grammar_field(self) -> str:
        """Name of the request's field that sets the grammar, such as "response_format.regex", for error messages."""
        own = FORMS[self.response_format.type] if self.response_format else None
        return f"response_format.{own}" if own else "response_format"

    @model_validator(mode="after")
    def _sound_options(self) -> OpenAI:
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options", "stream_options is given, but stream is not true; leave stream_options out"
            )
        return self


def _first(*given: int | None) -> int | None:
    """The first one that is given."""
    return next((each for each in given if each is not None), None)


class CompletionBody(OpenAI):
    """Body of a request to /v1/completions; the token limit may also have llama.cpp's or transformers' name.

    Attributes:
        prompt: a text, a list of texts, a prompt's token ids, or a list of several prompts' token ids.
        suffix: text after the gap that the model fills, with `prompt` as the text before it (fill-in-the-middle); None:
            the model continues the prompt.
        max_tokens, n_predict: most tokens to generate; -1: the server's own limit; 0: none, only allowed with `echo`.
            n_predict may also be -2: as many as the model's context has room for.
        logprobs: how many of the likeliest tokens are reported beside each token and its log probability; None: no log
            probabilities are reported.
        echo: whether the answer begins with the prompt.
        best_of: accepted only if it equals `n`, as generated texts are not ranked.
    """

    REFUSED = {
        **OpenAI.REFUSED,
        "prompt_embeds": "give a text or token ids",
        "add_special_tokens": "give token ids",
        "top_logprobs": "give logprobs",
        "max_completion_tokens": "give max_tokens",
        "prediction": "/v1/chat/completions has it",
    }
    prompt: Annotated[Text | TokenIds | Texts | TokenLists, BeforeValidator(_prompts)]
    suffix: Text | None = None
    max_tokens: Annotated[Int, Field(ge=-1)] | None = None
    n_predict: Annotated[Int, Field(ge=-2)] | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: Bool = False
    best_of: Int | None = None

    @property
    def most_tokens(self) -> int | None:
        """The request's token limit: the first of max_tokens, n_predict and max_new_tokens that is set, else None."""
        return _first(self.max_tokens, self.n_predict, self.max_new_tokens)

    @model_validator(mode="after")
    def _sound(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.n:
            message = f"best_of is {self.best_of} and n is {self.n}; texts are not ranked: leave best_of out"
            raise FieldError("best_of", message)
        if self.suffix and self.echo:
            raise FieldError("echo", "echo is true with a suffix; leave one of them out")
        if self.suffix and not isinstance(self.prompt, str):
            raise FieldError("suffix", "suffix is given, but prompt is no single text; give one text before the gap")
        if self.most_tokens == 0 and not self.echo:
            name = "n_predict" if self.max_tokens is None else "max_tokens"
            raise FieldError(name, f"{name} is 0, which leaves nothing to do without echo; ask for at least one token")
        return self


class TextPart(Fields):
    """A content part of predicted output, which may only be text: {"type": "text", "text": ...}."""

    type: Text
    text: Text | None = None

    @model_validator(mode="after")
    def _is_text(self) -> TextPart:
        if self.type != "text" or self.text is None:
            raise UserError(f"a content part is of type {self.type[:SHOWN]!r}; give text alone")
        return self


def _as_object(value: Any) -> Any:
    """A lone URL is an object with it."""
    if isinstance(value, dict) and value.get("url") is None:
        raise UserError("image_url has no url; give it one, as in data:image/png;base64,...")
    return {"url": value} if isinstance(value, str) else value


class ImageUrl(Fields):
    """The field `image_url` of a content part, as in OpenAI's interface: where an image is.

    Attributes:
        url: a data URL with the image itself, or an http or https address.
        detail: ignored, as the model's processor decides on the resolution.
    """

    url: Text
    detail: Text | None = None


OneImageUrl = Annotated[ImageUrl, BeforeValidator(_as_object, json_schema_input_type=Text | ImageUrl)]


class ContentPart(Fields):
    """A part of a message's content: {"type": "text", "text": ...} or {"type": "image_url", "image_url": ...}."""

    type: Text
    text: Text | None = None
    image_url: OneImageUrl | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> ContentPart:
        if self.type not in ("text", "image_url"):
            raise UserError(f"a content part is of type {self.type[:SHOWN]!r}; give text or image_url")
        if getattr(self, self.type) is None:
            raise UserError(f"a content part of type {self.type!r} has no {self.type}; give it")
        return self


TextContent = Text | Annotated[list[TextPart], Field(fail_fast=True)]
Content = Text | Annotated[list[ContentPart], Field(fail_fast=True)]


def plain_text(content: TextContent | Content | None) -> str:
    """Join the text parts of a message's content, leaving out its images.

    Args:
        content: a string, or a list of content parts; None gives "".
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content)


class FunctionCall(Fields):
    """The function that a tool call names, with its arguments as a JSON string."""

    name: Text
    arguments: Text = "{}"


class ToolCall(Fields):
    """A tool call in an earlier message of the assistant; the message with the tool's result refers to it by `id`."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields):
    """A message of a chat, in OpenAI's form.

    Attributes:
        content: a string or a list of content parts; only a user's message may have images. None is allowed only in an
            assistant's message with tool calls.
        name: name of the speaker, for chat templates that print it.
        reasoning_content, reasoning: two names, used by different servers, for an assistant's reasoning before its
            answer; if both are given, reasoning_content counts.
        tool_calls: tool calls that the assistant made.
        tool_call_id: id of the tool call that a tool's message answers.
    """

    REFUSED = {
        "function_call": "give tool_calls",
        "refusal": "give it as content",
        "audio": "this model takes text alone",
        **dict.fromkeys(("prefix", "partial"), "give the text so far to /v1/completions"),
    }
    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise UserError(f"a message of role {self.role!r} has no content; give a text")
        if self.images and self.role != "user":
            raise UserError(f"a message of role {self.role!r} has an image; give it in one of role 'user'")
        return self

    @property
    def images(self) -> list[ImageUrl]:
        """Images of the message, in the order of its content parts."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url for part in parts if part.type == "image_url" and part.image_url is not None]


class Function(Fields):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    model_config = ConfigDict(extra="allow")
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    """An entry of a chat's `tools`, as in OpenAI's interface; functions are the only type of tool."""

    type: Literal["function"]
    function: Function


class Prediction(Fields):
    """OpenAI's predicted output: text that the client expects in the answer, used as a source of draft tokens."""

    type: Literal["content"]
    content: TextContent


def _some(value: int, info: ValidationInfo) -> int:
    """Refuse an answer of no tokens."""
    if value == 0:
        raise UserError(f"{info.field_name} is 0; ask for one token or more, or give -1 for the server's own limit")
    return value


AnswerTokens = Annotated[Int, Field(ge=-1), AfterValidator(_some)]


class ChatBody(OpenAI):
    """Body of a request to /v1/chat/completions.

    Attributes:
        max_tokens, max_completion_tokens, n_predict, max_new_tokens: four names for the most tokens to generate. If
            several are given, one counts, in the order max_completion_tokens, max_tokens, n_predict, max_new_tokens.
            -1: the server's own limit.
        logprobs: whether the log probabilities of the tokens are reported.
        top_logprobs: how many of the likeliest tokens are reported beside each token; refused unless `logprobs` is
            true.
        prediction: text that the client expects in the answer, used as a source of draft tokens.
        tool_choice: "none" keeps the model from calling tools; "auto" and None let it call them.
        parallel_tool_calls: false keeps only the first tool call of an answer.
        chat_template_kwargs: further variables for the model's chat template, such as {"enable_thinking": false}.
    """

    PROMPT: ClassVar[str] = "messages"
    REFUSED = {
        **OpenAI.REFUSED,
        "functions": "give tools",
        **dict.fromkeys(
            ("reasoning_effort", "reasoning", "enable_thinking", "thinking"),
            "give what the model's template reads in chat_template_kwargs",
        ),
        **dict.fromkeys(
            ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"),
            "give what the model's template reads in chat_template_kwargs",
        ),
        "add_generation_prompt": "give the text so far to /v1/completions",
        **dict.fromkeys(("prompt", "suffix", "echo"), "/v1/completions has it"),
        "chat_template": "the server has its own, by its setting chat_template",
        "continue_final_message": "give the text so far to /v1/completions",
        "documents": "give chat_template_kwargs.documents",
        "function_call": "give tool_choice",
        "verbosity": "say it in a message",
        **dict.fromkeys(("audio", "modalities"), "this model writes text"),
        "web_search_options": "this server has no search",
    }
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: AnswerTokens | None = None
    max_completion_tokens: AnswerTokens | None = None
    n_predict: Annotated[Int, Field(ge=-2)] | None = None
    logprobs: Bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def images(self) -> list[ImageUrl]:
        """Images of all messages, in order."""
        return [image for message in self.messages for image in message.images]

    @property
    def most_tokens(self) -> int | None:
        """The request's limit of generated tokens, under the first of its names that is set; None if none is.

        n_predict=0, with which llama.cpp only caches the prompt, becomes 1 token.
        """
        given = _first(self.max_completion_tokens, self.max_tokens, self.n_predict, self.max_new_tokens)
        return 1 if given == 0 else given

    @model_validator(mode="after")
    def _sound(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs is given, but logprobs is not true; set logprobs")
        if self.tool_choice and not self.tools:
            raise FieldError("tool_choice", "tool_choice is given without tools; give tools, or leave it out")
        if self.response_format and self.grammar_given and self.tools and self.tool_choice != "none":
            raise FieldError(
                "response_format",
                f"response_format is {self.response_format.type!r} with tools, which it would keep the model from "
                "calling; leave one of them out, or set tool_choice to 'none'",
            )
        return self


class LlamaCpp(Generated):
    """Body of a request to /completion, with llama.cpp's names and defaults; base class of the body of /infill.

    Attributes:
        model: name of a LoRA adapter; any other name means the served model.
        n_predict: most tokens to generate; -1: the server's own limit; -2: as many as the model's context has room for.
        max_tokens: another name for n_predict.
        n_indent: the text ends before a line that is indented by fewer characters than this; its first line may be
            indented less. 0: indentation never ends the text.
        t_max_predict_ms: milliseconds of generation after which the text ends, once its first line is complete; 0 and
            -1: no limit.
        grammar: rules in EBNF (llama.cpp's GBNF) that the text must follow; "": any text.
        json_schema: JSON schema that the text must follow; None: any text.
        response_fields: names of the response's fields to send, such as "timings/prompt_n"; None: all.
    """

    REFUSED = {
        **Generated.REFUSED,
        **dict.fromkeys(("image_data", "multimodal_data"), "/v1/chat/completions has images"),
        **dict.fromkeys(("n_probs", "logprobs", "top_logprobs"), "/v1/completions has logprobs"),
        **dict.fromkeys(("logit_bias", "n", "n_cmpl", "echo", "suffix"), "/v1/completions has it"),
        "repetition_penalty": "give repeat_penalty",
        "max_completion_tokens": "give max_tokens",
        "prediction": "/v1/chat/completions has it",
        **dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
            "give json_schema or grammar",
        ),
        **dict.fromkeys(("response_format", "regex", "ebnf", "structural_tag"), "give json_schema or grammar"),
    }
    model: Text | None = None  # any: a server of llama.cpp has one
    prompt: Annotated[Text | TokenIds, BeforeValidator(_one_prompt)] = ""
    n_predict: Annotated[Int, Field(ge=-2)] = -1
    max_tokens: Annotated[Int, Field(ge=-2)] | None = None
    temperature: Annotated[float, Field(ge=0), NotTooCold] = 0.8
    top_k: Int = 40
    top_p: Annotated[float, Field(ge=0)] = 0.95
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.05
    typical_p: Annotated[float, Field(gt=0)] = 1.0
    repeat_penalty: RepetitionPenalty = 1.0
    repeat_last_n: LastTokens = -1
    presence_penalty: CountedPenalty = 0.0
    frequency_penalty: CountedPenalty = 0.0
    seed: Int = -1
    cache_prompt: Bool = True
    n_indent: Annotated[Int, Field(ge=0)] = 0
    t_max_predict_ms: Annotated[float, Field(ge=-1)] = 0  # 0 and -1: no limit
    grammar: Text = ""
    json_schema: dict[str, Any] | None = None
    response_fields: Names | None = None

    @model_validator(mode="after")
    def _one_form(self) -> LlamaCpp:
        if self.grammar and self.json_schema is not None:
            raise FieldError("grammar", "grammar is given with json_schema; leave one of them out")
        return self

    @property
    def grammar_given(self) -> tuple[str, str] | None:
        """Kind and source of the grammar for the generated text, such as ("ebnf", RULES); None: no grammar."""
        if self.grammar:
            return "ebnf", self.grammar
        return None if self.json_schema is None else ("json_schema", json.dumps(self.json_schema))

    @property
    def grammar_field(self) -> str:
        """Name of the request's field that sets the grammar, "grammar" or "json_schema", for error messages."""
        return "grammar" if self.grammar else "json_schema"

    @property
    def most_tokens(self) -> int:
        """The request's limit of generated tokens: the first of n_predict, max_tokens and max_new_tokens that is set.

        -1 stands for the server's own limit, -2 for as many as the model's context has room for.
        """
        own = self.n_predict if "n_predict" in self.model_fields_set else None
        given = _first(own, self.max_tokens, self.max_new_tokens)
        return self.n_predict if given is None else given

    @classmethod
    def sampling_defaults(cls) -> dict[str, Any]:
        """llama.cpp's default sampling settings, by their field names in lp.SamplingParams.

        They are used for settings that client, server and checkpoint all leave open.
        """
        own = {name: "repeat_penalty" if name == "repetition_penalty" else name for name in CHAINED}
        return {name: cls.model_fields[each].default for name, each in own.items()}

    @property
    def seed_given(self) -> int | None:
        """The request's seed; None if the request has none."""
        return self.seed if "seed" in self.model_fields_set else None


class ExtraBody(Fields):
    """An entry of /infill's input_extra: a piece of another file, put into the prompt before the file with the gap."""

    model_config = ConfigDict(extra="ignore")
    filename: Text = ""
    text: Text


class InfillBody(LlamaCpp):
    """Body of a request to /infill (fill-in-the-middle): the model writes the text that belongs into a gap of a file.

    Attributes:
        prompt: text between input_prefix and the gap, such as the beginning of the line that the user is typing.
        input_prefix: text of the file before the gap.
        input_suffix: text of the file after the gap.
        input_extra: pieces of other files.
    """

    REFUSED = {name: remedy for name, remedy in LlamaCpp.REFUSED.items() if name != "suffix"} | {
        "suffix": "give input_suffix"
    }
    prompt: Text = ""
    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[ExtraBody], Field(fail_fast=True)] = []


class TokenizeBody(Body):
    """Body of a request to /tokenize, as in llama.cpp: a text to encode.

    Attributes:
        content: the text.
        add_special: whether the tokenizer adds its own special tokens, such as BOS.
        parse_special: whether names of special tokens in the text, such as "<|im_end|>", become these tokens.
        with_pieces: whether the answer has each token's text beside its id.
    """

    content: Text
    add_special: Bool = False
    parse_special: Bool = True
    with_pieces: Bool = False


class DetokenizeBody(Body):
    """Body of a request to /detokenize, as in llama.cpp: token ids to decode into text."""

    tokens: Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(fail_fast=True, max_length=MOST_TOKENS)]
