"""GET /v1/models, and whether the gateway and the servers behind it are well."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import msgspec

from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.gateway.app.api_route import ApiRequest
from deepseek_triton_tools.gateway.app.model_front import ModelFront
from deepseek_triton_tools.gateway.protocol.openai_errors import OpenAIError
from deepseek_triton_tools.gateway.triton.call import UpstreamError

_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


async def list_models(request: ApiRequest) -> None:
    named = await request.state.named_models()
    data = []
    for name, model in named.items():
        if request.caller is None or request.caller.may_use(name):
            with suppress(UpstreamError):  # none of its servers has been up yet
                data.append(await _entry(name, model))
    await request.exchange.respond(200, msgspec.json.encode({"object": "list", "data": data}))


async def one_model(request: ApiRequest) -> None:
    name, model = await request.state.model(request.exchange.path_parameters["model"], request.caller)
    await request.exchange.respond(200, msgspec.json.encode(await _entry(name, model)))


async def health(request: ApiRequest) -> None:
    """The gateway itself runs."""
    await request.exchange.respond(200, b"{}")


async def ready(request: ApiRequest) -> None:
    """Some model has a server that takes requests. One that has none is no reason to take the others' gateway away."""
    servers = [server for model in request.state.models for server in model.fleet.servers()]
    if not any(server.state == "up" for server in servers):
        raise OpenAIError(
            503, f"none of {len(servers)} servers is up", kind="server_error", code="unavailable", retry_after_s=1.0
        )
    await request.exchange.respond(200, b"{}")


async def fleet(request: ApiRequest) -> None:
    """Every server as it is now, for the dashboard. With several workers, as the one that answers sees it."""
    if not _is_admin(request):
        message = "this API key may not see the servers: expected one with admin=yes in the file of keys"
        raise OpenAIError(403, message, code="not_an_admin")
    models = [
        {
            "model": model.known_name,
            "servers": [dataclasses.asdict(server) for server in model.fleet.servers()],
        }
        for model in request.state.models
    ]
    answer = {"workers": request.state.settings.workers, "models": models}
    await request.exchange.respond(200, msgspec.json.encode(answer))


async def metrics(request: ApiRequest) -> None:
    servers = [(server.url, server.state == "up") for model in request.state.models for server in model.fleet.servers()]
    body = request.state.observers.metrics(servers, names=_is_admin(request))
    await request.exchange.respond(200, body, media_type=_METRICS_TYPE)


def _is_admin(request: ApiRequest) -> bool:
    """Whether addresses of servers and names of keys may be told. On a path that needs no key, whoever has an unknown
    one is a stranger: it may be meant for a proxy."""
    guard, caller, headers = request.state.guard, request.caller, request.exchange.request_headers
    if guard is None:
        return True
    if caller is None:
        with suppress(OpenAIError):
            caller = guard.check(headers)
    return caller is not None and caller.admin


async def version(request: ApiRequest) -> None:
    await request.exchange.respond(200, msgspec.json.encode({"version": __version__}))


async def _entry(name: str, model: ModelFront) -> dict[str, object]:
    info = await model.info()
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "deepseek-triton",
        "root": info.checkpoint,
        "parent": None,
        "max_model_len": info.max_seq_len,
        "thinking_switch": info.thinking_switch,
    }
