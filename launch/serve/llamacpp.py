"""llama.cpp's endpoints, as llama.vim and Tabby call them: /completion and /infill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from .acceptance import draft_tokens
from .api_errors import ApiError
from .bodies import InfillBody, LlamaCpp
from .engine_loop import Ending, Piece
from .fim import Extra
from .responses import streamed, whole
from .served import Served, TextGroup, Wanted
from .spec import TextSpec


def llamacpp_routes(served: Served) -> APIRouter:
    """Create the router with llama.cpp's own endpoints: /completion, its other name /completions, and /infill.

    Args:
        served: the model that generates the answers.
    """
    router = APIRouter()

    async def respond(request: Request, completion: LlamaCompletion) -> Response:
        timeout_s = served.limits.timeout_s
        if completion.body.stream:
            return await streamed(request, completion.chunks(), timeout_s, done="")
        return await whole(request, completion.whole(), timeout_s)

    @router.post("/completion")
    @router.post("/completions")
    async def completion(body: LlamaCpp, request: Request) -> Response:
        await served.check_grammar(body.grammar_given, body.grammar_field)
        text = body.prompt
        given = await asyncio.to_thread(served.encode_prompt, text) if isinstance(text, str) else list(text)
        return await respond(
            request,
            LlamaCompletion(served.adapted(body.model).asked_by(request.scope), body, served.checked(given, "prompt")),
        )

    @router.post("/infill")
    async def infill(body: InfillBody, request: Request) -> Response:
        if served.fim is None:
            message = (
                f"{served.short_name} has no tokens for fill-in-the-middle; serve a model that has them, or name its "
                "own by fim.prefix, fim.suffix and fim.middle"
            )
            raise ApiError(501, message, code="not_supported")
        await served.check_grammar(body.grammar_given, body.grammar_field)
        extras = [Extra(extra.filename, extra.text) for extra in body.input_extra]
        room = None
        if served.context is not None:
            wanted = served.limits.max_new_tokens if body.most_tokens < 0 else max(body.most_tokens, 1)
            room = served.context - min(wanted, served.context // 2)
        prompt, truncated = await asyncio.to_thread(
            served.fim.prompt, body.input_prefix + body.prompt, body.input_suffix, room, extras
        )
        return await respond(
            request,
            LlamaCompletion(served.adapted(body.model).asked_by(request.scope), body, prompt, truncated),
        )

    return router


class LlamaCompletion:
    """Generates one request's text, and returns it in llama.cpp's response format, in one piece or as a stream.

    Args:
        served: the model, with the client and the LoRA adapter of this request.
        body: the request to /completion or /infill.
        prompt: token ids of the prompt.
        truncated: whether the prompt was cut, since the context has no room for all that the client sent; the response
            reports this.
    """

    def __init__(self, served: Served, body: LlamaCpp, prompt: list[int], truncated: bool = False) -> None:
        self.served = served
        self.body = body
        self.prompt = prompt
        self.truncated = truncated
        wanted = body.most_tokens
        penalised = body.samples_by("penalties")
        self.spec = TextSpec(
            prompt=prompt,
            max_new_tokens=served.new_tokens(prompt, wanted or 1),  # the prompt alone is cached by one token
            sampling=served.sampled(body.sampling_given, body.seed_given, body.sampling_defaults()),
            eos=served.ends_of(prompt, body.ignore_eos),
            presence_penalty=body.presence_penalty if penalised else 0.0,
            frequency_penalty=body.frequency_penalty if penalised else 0.0,
            repeat_last_n=body.repeat_last_n,
            grammar=body.grammar_given,
            corpora=served.corpora(body.corpora),
        )
        self.nothing = wanted == 0
        limit_s = max(body.t_max_predict_ms, 0) / 1000
        stop = [*served.stop, *body.stop]
        self.text = Wanted(self.spec, body.grammar_field, stop, body.n_indent, limit_s or None)

    async def whole(self) -> dict[str, Any]:
        """Generate the text, and return the response in one piece: the content, its token ids, counts and timings."""
        parts: list[str] = []
        tokens: list[int] = []
        ending = Ending()
        async with aclosing(TextGroup(self.served, "completion", [self.text]).events()) as events:
            async for _, event in events:
                parts.append(event.text)
                if isinstance(event, Ending):
                    ending = event
                else:
                    tokens += event.tokens
        if self.nothing:
            parts, tokens = [], []
        return self._chosen({"content": "".join(parts), "tokens": tokens, **self._last(ending)})

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Generate the text, and yield the response's chunks: one for each decode step, and one with final counts."""
        async with aclosing(TextGroup(self.served, "completion", [self.text]).events()) as events:
            async for _, event in events:
                if isinstance(event, Piece):
                    if not self.nothing:
                        yield {"index": 0, "content": event.text, "tokens": event.tokens, "stop": False}
                    continue
                if event.text and not self.nothing:
                    yield {"index": 0, "content": event.text, "tokens": [], "stop": False}
                yield self._chosen({"content": "", "tokens": [], **self._last(event)})

    def _last(self, ending: Ending) -> dict[str, Any]:
        """The fields that come with the end of an answer."""
        predicted = 0 if self.nothing else ending.num_tokens
        generated = 0 if self.nothing else ending.generated
        sampling = self.spec.sampling or {}
        return {
            "index": 0,
            "id_slot": 0,
            "stop": True,
            "model": self.served.short_name,
            "tokens_predicted": predicted,
            "tokens_evaluated": len(self.prompt),
            "tokens_cached": len(self.prompt) + ending.num_tokens,
            "truncated": self.truncated,
            "stop_type": "word" if ending.found else "eos" if ending.reason == "eos" else "limit",
            "stopping_word": ending.found or "",
            "generation_settings": {**sampling, "n_predict": self.spec.max_new_tokens, "stop": self.body.stop},
            "timings": {
                "cache_n": ending.cached,
                "prompt_n": len(self.prompt) - ending.cached,
                **_rate("prompt", len(self.prompt) - ending.cached, ending.prefill_s),
                "predicted_n": generated,
                **_rate("predicted", generated, ending.decode_s),
                "draft_n": draft_tokens(ending.steps),
                "draft_n_accepted": sum(step.accepted for step in ending.steps),
            },
        }

    def _chosen(self, data: dict[str, Any]) -> dict[str, Any]:
        """The fields that the client asks for, all where it names none.

        `timings/prompt_n` is a field of a field, and keeps its name.
        """
        if not self.body.response_fields:
            return data
        chosen = {}
        for path in self.body.response_fields:
            value: Any = data
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                chosen[path] = value
        return chosen


def _rate(name: str, count: int, seconds: float) -> dict[str, float]:
    """A part's time, in llama.cpp's four forms."""
    milliseconds = seconds * 1000
    return {
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }
