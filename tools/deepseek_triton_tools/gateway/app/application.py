"""The ASGI application: which path is answered by what."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from deepseek_triton_tools.gateway.app import models, responses, tokenization
from deepseek_triton_tools.gateway.app.api_route import ApiRoute, Handler
from deepseek_triton_tools.gateway.app.chat import chat_completion
from deepseek_triton_tools.gateway.app.completions import completion
from deepseek_triton_tools.gateway.app.gateway_state import GatewayState
from deepseek_triton_tools.gateway.app.page import page_routes
from deepseek_triton_tools.gateway.protocol.openai_errors import OpenAIError
from deepseek_triton_tools.gateway.settings import GatewaySettings

_POST: dict[str, Handler] = {
    "/v1/chat/completions": chat_completion,
    "/v1/completions": completion,
    "/v1/responses": responses.create_response,
    "/v1/responses/input_tokens": responses.count_input_tokens,
    "/tokenize": tokenization.tokenize,
    "/detokenize": tokenization.detokenize,
}
_GET: dict[str, Handler] = {
    "/v1/models": models.list_models,
    "/v1/models/{model:path}": models.one_model,
    "/tokenizer_info": tokenization.tokenizer_info,
    "/fleet": models.fleet,
}
_OPEN: dict[str, Handler] = {
    "/health": models.health,
    "/ready": models.ready,
    "/health/ready": models.ready,
    "/version": models.version,
    # Triton's own paths, so that what watches Triton servers can watch a gateway.
    "/v2/health/live": models.health,
    "/v2/health/ready": models.ready,
    "/v2/models/{model}/ready": models.ready,
}
"""Paths that are asked without a key, by probes."""


def create_app(settings: GatewaySettings) -> Starlette:
    """Raises what the guard, the observers and the lists of servers raise for settings that can't work."""
    state = GatewayState(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        await state.start()
        yield
        await state.close()

    routes: list[BaseRoute] = [
        Route(path, ApiRoute(state, path, handler), methods=["POST"]) for path, handler in _POST.items()
    ]
    routes += [
        Route(path, ApiRoute(state, path, handler, reads_body=False), methods=["GET"]) for path, handler in _GET.items()
    ]
    routes += [
        Route(path, ApiRoute(state, path, responses.kept_response, reads_body=False), methods=["GET", "POST", "DELETE"])
        for path in ("/v1/responses/{response_id}", "/v1/responses/{response_id}/{part}")
    ]
    open_paths = {**_OPEN, **({} if settings.metrics_need_key else {"/metrics": models.metrics})}
    closed_paths = {"/metrics": models.metrics} if settings.metrics_need_key else {}
    for paths, needs_key in ((open_paths, False), (closed_paths, True)):
        routes += [
            Route(path, ApiRoute(state, path, handler, reads_body=False, needs_key=needs_key), methods=["GET"])
            for path, handler in paths.items()
        ]
    if settings.page:
        routes += page_routes()
    middleware = [
        Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=middleware if settings.cors_origins else [],
        exception_handlers={404: _not_found, 405: _wrong_method},
    )


async def _not_found(request: Request, error: Exception) -> Response:
    return _response(OpenAIError(404, f"nothing is at {request.url.path[:200]}", code="not_found"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    allowed = getattr(error, "headers", None) or {}
    text = f"{request.url.path[:200]} takes {allowed.get('Allow', 'another method')}, not {request.method}"
    return _response(OpenAIError(405, text, code="method_not_allowed"), allowed)


def _response(error: OpenAIError, headers: dict[str, str] | None = None) -> Response:
    return Response(error.body(), error.status, headers, media_type="application/json")
