"""The ASGI application: which path is answered by what."""

from __future__ import annotations

import difflib
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from deepseek_triton_tools.gateway import own_routes, responses, tokenization
from deepseek_triton_tools.gateway.api_route import ApiExchange, ApiRoute, ClientLeft, Handler
from deepseek_triton_tools.gateway.chat import chat_completion
from deepseek_triton_tools.gateway.completions import completion
from deepseek_triton_tools.gateway.guard import RATE_LIMIT_HEADERS
from deepseek_triton_tools.gateway.model_front import GatewayState
from deepseek_triton_tools.gateway.observers import begin_record
from deepseek_triton_tools.gateway.openai_fields import OpenAIError
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
    "/v1/models": own_routes.list_models,
    "/v1/models/{model:path}": own_routes.one_model,
    "/tokenizer_info": tokenization.tokenizer_info,
    "/fleet": own_routes.fleet,
}
_KEPT = ("/v1/responses/{response_id}", "/v1/responses/{response_id}/{part}")
_OPEN: dict[str, Handler] = {
    "/health": own_routes.health,
    "/ready": own_routes.ready,
    "/health/ready": own_routes.ready,
    "/version": own_routes.version,
    # Triton's own paths, so that what watches Triton servers can watch a gateway.
    "/v2/health/live": own_routes.health,
    "/v2/health/ready": own_routes.ready,
    "/v2/models/{model}/ready": own_routes.ready,
}
"""Paths that are asked without a key, by probes."""
_NO_ROUTE = "other"
"""The route in the log and the metrics of a path or method that there is not. Metrics must not grow with guesses."""


def create_app(settings: GatewaySettings) -> ASGIApp:
    """Raises what the guard, the observers and the lists of servers raise for settings that can't work."""
    state = GatewayState(settings)

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncGenerator[None, None]:
        await state.start()
        yield
        await state.close()

    routes: list[BaseRoute] = []

    def add(handlers: Mapping[str, Handler], *methods: str, reads_body: bool = False, needs_key: bool = True) -> None:
        for path, handler in handlers.items():
            answer = ApiRoute(state, path, handler, reads_body=reads_body, needs_key=needs_key)
            # DeepSeek's own API has these paths below / and /beta as well.
            bases = ("/v1", "", "/beta") if path.startswith("/v1/") else ("",)
            routes.extend(Route(base + path.removeprefix("/v1"), answer, methods=list(methods)) for base in bases)

    add(_POST, "POST", reads_body=True)
    add(_GET, "GET")
    add(dict.fromkeys(_KEPT, responses.kept_response), "GET", "POST", "DELETE")
    add(_OPEN, "GET", needs_key=False)
    add({"/metrics": own_routes.metrics}, "GET", needs_key=settings.metrics_need_key)
    if settings.page:
        routes += own_routes.page_routes()
    router = Router(routes, lifespan=lifespan)

    # The class Starlette would put two layers of its own between every chunk and the socket.
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = app  # so that the router raises what it can't route
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            await _refuse(state, error, scope, receive, send)

    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(settings.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", *RATE_LIMIT_HEADERS],
    )


async def _refuse(state: GatewayState, error: HTTPException, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request that no route takes. The observers are told of it, too."""
    path = scope["path"][:200]
    if error.status_code == 405:
        allowed = dict(error.headers or {}).get("Allow", "")
        text = f"{path} takes {allowed or 'another method'}, not {scope['method']}"
        headers = ((b"allow", allowed.encode()),)
        refusal = OpenAIError(405, text, code="method_not_allowed", headers=headers)
    else:
        near = difflib.get_close_matches(path, (*_POST, *_GET), n=1, cutoff=0.8)
        hint = f"; did you mean {near[0]}?" if near else ""
        refusal = OpenAIError(404, f"nothing is at {path}{hint}", code="not_found")
    record = begin_record(_NO_ROUTE, scope["headers"])
    state.observers.begins(record)
    try:
        with suppress(ClientLeft):
            await ApiExchange(scope, receive, send, record, state.settings).refuse(refusal)
    finally:
        state.observers.ends(record)
