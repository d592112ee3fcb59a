"""The ASGI application: which path is answered by what, the pages for people, and what the gateway says of itself and
its models: servers, metrics, tokens, whether it is well."""

import base64
import dataclasses
import hashlib
import re
from collections.abc import AsyncGenerator, Mapping, Set
from contextlib import asynccontextmanager, suppress
from importlib import resources

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.gateway.api_route import ApiExchange, ApiRequest, ApiRoute, ClientLeft, Handler
from deepseek_triton_tools.gateway.chat import chat_completion
from deepseek_triton_tools.gateway.chat_request import EFFORT, GUIDE_FIELDS, guided_fields, rendering
from deepseek_triton_tools.gateway.completions import completion
from deepseek_triton_tools.gateway.guard import RATE_LIMIT_HEADERS
from deepseek_triton_tools.gateway.model_front import GatewayState, ModelFront
from deepseek_triton_tools.gateway.observers import CONTENT_TYPE, begin_record
from deepseek_triton_tools.gateway.openai_fields import (
    OpenAIError,
    a_list,
    boolean,
    given_fields,
    invalid,
    json_text,
    text,
    token_ids,
    wrong,
)
from deepseek_triton_tools.gateway.responses import count_input_tokens, create_response, kept_response
from deepseek_triton_tools.gateway.settings import GatewaySettings
from deepseek_triton_tools.gateway.triton_call import UpstreamError
from deepseek_triton_tools.tool_errors import nearest


def page_routes() -> list[Route]:
    """The chat page at /, and one that watches the servers at /dashboard."""
    return [_page_route("/", "index.html"), _page_route("/dashboard", "dashboard.html")]


def _page_route(path: str, name: str) -> Route:
    """One static file, which loads nothing else and runs no script but its own. A browser asks again by its ETag."""
    body = resources.files("deepseek_triton_tools.gateway").joinpath(f"page/{name}").read_bytes()
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

    async def respond(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="text/html")

    return Route(path, respond)


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
    name, model = await request.state.model(request.exchange.path_parameters["NAME"], request.caller)
    if not model.fleet.up("generation"):
        text = model.fleet.unavailable().told  # not the error itself, which would be logged for whoever waits so
        raise OpenAIError(503, text, kind="server_error", code="unavailable", retry_after_s=1.0)
    await request.exchange.respond(200, msgspec.json.encode(await _entry(name, model)))


async def health(request: ApiRequest) -> None:
    """The gateway itself runs."""
    await request.exchange.respond(200, b"{}")


async def ready(request: ApiRequest) -> None:
    """Some model has a server that takes requests. One that has none is no reason to take the others' gateway away."""
    servers = [server for model in request.state.models for server in model.fleet.servers()]
    if not any(server.state == "up" for server in servers):
        message = f"none of {len(servers)} servers is up"
        raise OpenAIError(503, message, kind="server_error", code="unavailable", retry_after_s=1.0)
    await request.exchange.respond(200, b"{}")


_HISTORY = "/fleet/history"


async def fleet(request: ApiRequest) -> None:
    """Every server as it is now, for the dashboard, and on the second path the last half hour. With several workers, as
    the one that answers sees it."""
    if not _is_admin(request):
        message = "this API key may not see the servers: expected one with admin=yes in the file of keys"
        raise OpenAIError(403, message, code="not_an_admin")
    state = request.state
    await state.named_models()  # so that a name is known before anybody has asked for the model
    models = [
        {
            "model": model.known_name,
            "reason": model.reason or model.fleet.no_servers,
            "servers": [dataclasses.asdict(server) for server in model.fleet.servers()],
        }
        for model in state.models
    ]
    answer = {"workers": state.settings.workers, "models": models, "now": state.now()}
    if request.exchange.record.route == _HISTORY:
        answer["history"] = state.history()
    await request.exchange.respond(200, msgspec.json.encode(answer))


async def metrics(request: ApiRequest) -> None:
    servers = [(server.url, server.state == "up") for model in request.state.models for server in model.fleet.servers()]
    body = request.state.observers.metrics.text(servers, names=_is_admin(request))
    await request.exchange.respond(200, body, media_type=CONTENT_TYPE.encode())


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
        "default_max_tokens": info.default_max_tokens,
        "thinking_switch": info.thinking_switch,
        "system_fingerprint": await model.fingerprint(),
    }


# Tokens, as vLLM has them, and as evaluation programs ask for them.

_TOKENIZE = frozenset({"model", "prompt", "messages", "add_special_tokens", "return_token_strs"})
_OF_MESSAGES = frozenset(
    {
        *("tools", "tool_choice", "chat_template_kwargs", EFFORT, "thinking"),
        *("add_generation_prompt", "continue_final_message"),
        *GUIDE_FIELDS,  # V4's prompts tell the form of the answer
    }
)
# The model's server tells the text of one token at a time.
_MOST_TEXTS = 1024


def _refuse_unknown(given: Mapping[str, object], known: Set[str]) -> None:
    if unknown := given.keys() - known:
        raise invalid(f"unknown field {min(unknown)!r:.80}.", param=min(unknown)[:80], code="unknown_parameter")


async def tokenize(request: ApiRequest) -> None:
    given = given_fields(request.document)
    _refuse_unknown(given, _TOKENIZE | _OF_MESSAGES)
    if ("prompt" in given) == ("messages" in given):
        raise invalid("expected prompt or messages, and one of them.", param="prompt")
    inputs: dict[str, object] = {"task": "tokenize", "text_input": text("prompt", given.get("prompt", ""))}
    sampling: dict[str, object] = {}
    if "messages" in given:
        sampling |= guided_fields(given)
        inputs |= rendering(given, a_list("messages", given["messages"]), a_list("tools", given.get("tools", [])))
    elif useless := given.keys() & _OF_MESSAGES:
        raise invalid(f"{min(useless)}: expected beside messages only, got it beside prompt.", param=min(useless))
    if "add_special_tokens" in given:
        sampling["add_special_tokens"] = boolean("add_special_tokens", given["add_special_tokens"])
    if sampling:
        inputs["sampling_parameters"] = json_text(sampling)
    has_texts = boolean("return_token_strs", given.get("return_token_strs", False))
    _, model = await request.model(text("model", given.get("model", "")))
    ids = (await model.ask(inputs)).get("output_ids", [])
    tokens = [int(str(one)) for one in (ids if isinstance(ids, list) else [ids])]  # one value is the value itself
    token_strs = None
    if has_texts:
        different = list(dict.fromkeys(tokens))
        if len(different) > _MOST_TEXTS:
            raise wrong("return_token_strs", f"a prompt of at most {_MOST_TEXTS} different tokens", len(different))
        texts = dict(zip(different, await model.texts_of([[token] for token in different]), strict=True))
        token_strs = [texts[token] for token in tokens]
    info = await model.info()
    document = {"count": len(tokens), "max_model_len": info.max_seq_len, "tokens": tokens, "token_strs": token_strs}
    await request.exchange.respond(200, msgspec.json.encode(document))


async def detokenize(request: ApiRequest) -> None:
    given = given_fields(request.document)
    _refuse_unknown(given, {"model", "tokens"})
    tokens = token_ids("tokens", given.get("tokens"))
    _, model = await request.model(text("model", given.get("model", "")))
    prompt = (await model.texts_of([tokens]))[0] if tokens else ""
    await request.exchange.respond(200, msgspec.json.encode({"prompt": prompt}))


async def tokenizer_info(request: ApiRequest) -> None:
    _, model = await request.model(request.exchange.query.get("model", [""])[0])
    info = await model.info()
    document = {
        "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": info.chat_template,
        "bos_token": info.bos_token,
        "eos_token": info.eos_token,
        "pad_token": info.pad_token,
        "vocab_size": info.vocab_size,
        "model_max_length": info.max_seq_len,
    }
    await request.exchange.respond(200, msgspec.json.encode(document))


_POST: dict[str, Handler] = {
    "/v1/chat/completions": chat_completion,
    "/v1/completions": completion,
    "/v1/responses": create_response,
    "/v1/responses/input_tokens": count_input_tokens,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
_GET: dict[str, Handler] = {
    "/v1/models": list_models,
    "/v1/models/NAME": one_model,
    "/tokenizer_info": tokenizer_info,
    "/fleet": fleet,
    _HISTORY: fleet,
}
_KEPT = ("/v1/responses/ID", "/v1/responses/ID/PART")
_OPEN: dict[str, Handler] = {
    "/health": health,
    "/ready": ready,
    "/health/ready": ready,
    "/version": version,
    # Triton's own paths, so that what watches Triton servers can watch a gateway.
    "/v2/health/live": health,
    "/v2/health/ready": ready,
    "/v2/models/NAME/ready": ready,
}
"""Paths that are asked without a key, by probes."""
# The route in the log and the metrics of a path or method that there is not. Metrics must not grow with guesses.
_NO_ROUTE = "other"


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
            rest = re.sub("[A-Z]+", r"{\g<0>}", path.removeprefix("/v1")).replace("NAME", "NAME:path")  # it may have /
            routes.extend(Route(base + rest, answer, methods=list(methods)) for base in bases)

    add(_POST, "POST", reads_body=True)
    add(_GET, "GET")
    add(dict.fromkeys(_KEPT, kept_response), "GET", "POST", "DELETE")
    add(_OPEN, "GET", needs_key=False)
    add({"/metrics": metrics}, "GET", needs_key=settings.metrics_need_key)
    if settings.page:
        routes += page_routes()
    router = Router(routes, lifespan=lifespan)

    # The class Starlette would put two layers of its own between every chunk and the socket.
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = app  # so that the router raises what it can't route
        scope["path"] = scope.get("path", "").rstrip("/") or "/"
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
        # Browsers hide every header of another origin that is not named here from its pages.
        expose_headers=["x-request-id", "retry-after", *RATE_LIMIT_HEADERS],
    )


async def _refuse(state: GatewayState, error: HTTPException, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request that no route takes. The observers are told of it, too."""
    path = scope["path"][:200]
    if error.status_code == 405:
        allowed = dict(error.headers or {}).get("Allow", "")
        text = f"{path} takes {allowed or 'another method'}, not {scope['method']}"
        refusal = OpenAIError(405, text, code="method_not_allowed", headers=((b"allow", allowed.encode()),))
    else:
        refusal = OpenAIError(404, f"nothing is at {path}{nearest(path, (*_POST, *_GET))}", code="not_found")
    record = begin_record(_NO_ROUTE, scope["headers"])
    state.observers.begins(record)
    try:
        with suppress(ClientLeft):
            await ApiExchange(scope, receive, send, record, state.settings).refuse(refusal)
    finally:
        state.observers.ends(record)
