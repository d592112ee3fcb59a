"""What the gateway says of itself: models, servers, metrics, whether it is well; and the pages for people, each of
which is one static file that loads nothing else and runs no script but its own."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.gateway.api_route import ApiRequest
from deepseek_triton_tools.gateway.model_front import ModelFront
from deepseek_triton_tools.gateway.openai_fields import OpenAIError
from deepseek_triton_tools.gateway.triton_call import UpstreamError

_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class StaticPage:
    """A page as it is sent. headers: the ETag by which a browser asks again among them."""

    body: bytes
    headers: dict[str, str]

    async def respond(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if self.headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers, media_type="text/html")


def page_routes() -> list[Route]:
    """The chat page at /, and one that watches the servers at /dashboard."""
    return [Route("/", _read("index.html").respond), Route("/dashboard", _read("dashboard.html").respond)]


def _read(name: str) -> StaticPage:
    body = resources.files("deepseek_triton_tools.gateway").joinpath("page", name).read_bytes()
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "script-src": _hashes("script", body),
        "style-src": _hashes("style", body),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(f"{key} {value}" for key, value in policy.items()),
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return StaticPage(body, headers)


def _hashes(tag: str, body: bytes) -> str:
    """Allows the page's own elements of this kind, and no other."""
    contents = re.findall(rb"<%s\b[^>]*>(.*?)</%s>" % (tag.encode(), tag.encode()), body, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in contents)


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
