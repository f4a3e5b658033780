"""Endpoints that generate no text: /health, /ready, /metrics, /v1/models, /props, /tokenize, /detokenize and pages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

import lp

from ..text.detokenizer import decoded
from .api_errors import ApiError
from .bodies import DetokenizeBody, TokenizeBody
from .docs_page import docs_page
from .served import Served, closing

PAGE = Path(__file__).with_name("page.html")
OPEN_PATHS = ("/", "/health", "/ready", "/docs", "/openapi.json")  # need no API key: they tell nothing and run nothing
POLICY = "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; frame-ancestors 'none'"


def open_paths(metrics_key: bool, models_key: bool) -> set[str]:
    """Paths that are answered without an API key.

    Args:
        metrics_key: whether /metrics needs a key.
        models_key: whether the list of models needs a key.
    """
    metrics = [] if metrics_key else ["/metrics"]
    models = [] if models_key else ["/v1/models", "/models"]
    return {*OPEN_PATHS, *metrics, *models}


def status_routes(served: Served) -> APIRouter:
    """Create the router with the endpoints that generate no text, such as /health and /v1/models.

    Args:
        served: the model that the endpoints tell about.
    """
    router = APIRouter()
    tokenizer = served.tokenizer

    @router.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": POLICY})

    @router.get("/health")
    @router.get("/v1/health")
    async def health() -> Response:
        """Whether the engine works; a server that finishes its last texts is still healthy."""
        if served.loop.failure:
            return not_now()
        return JSONResponse({"status": "ok" if served.loop.takes_texts else "draining"})

    @router.get("/ready")
    async def ready() -> Response:
        """Whether new texts are taken: what a router asks before it sends one."""
        return JSONResponse({"status": "ready"}) if served.loop.takes_texts else not_now()

    def not_now() -> Response:
        error = closing(served.loop)
        return JSONResponse({"status": "error", **error.body()}, error.status, headers=error.headers)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def model_data(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": served.created, "owned_by": "lp"}

    @router.get("/v1/models")
    @router.get("/models")
    async def models() -> dict[str, Any]:
        own = {"max_model_len": served.context, "fill_in_the_middle": served.fim is not None}
        adapters = [model_data(name) | own | {"parent": served.short_name} for name in served.adapters]
        return {"object": "list", "data": [*(model_data(name) | own for name in served.names.listed), *adapters]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served.check_model(name)
        return model_data(name)

    @router.get("/props")
    async def props() -> dict[str, Any]:
        times = getattr(served.loop.decoder, "step_times", None)
        return {
            "model": served.short_name,
            "version": lp.__version__,
            "total_slots": served.loop.engine.max_sequences,
            "n_ctx": served.context,
            "chat_template": tokenizer.chat_template or "",
            "default_generation_settings": {"n_ctx": served.context},
            "plain_tokens_per_s": 1 / times.plain_s if times else None,
            "ranks": served.loop.context.world_size,
            "exact": served.loop.decoder.exact,
            "kv_dtype": served.loop.decoder.kv_dtype,
        }

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return HTMLResponse(docs_page(request.app.openapi()), headers={"Content-Security-Policy": POLICY})

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        def tokens() -> list[Any]:
            ids = served.encode(body.content, body.add_special, body.parse_special)
            return [{"id": token, "piece": served.piece(token)} for token in ids] if body.with_pieces else ids

        return {"tokens": await asyncio.to_thread(tokens)}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        for token in body.tokens:
            if token >= served.vocabulary:
                message = f"tokens has token id {token}; this model's vocabulary is 0..{served.vocabulary - 1}"
                raise ApiError(400, message, "tokens")
        return {"content": await asyncio.to_thread(decoded, served.words, body.tokens, special=True)}

    return router
