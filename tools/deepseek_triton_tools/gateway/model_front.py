"""A model as clients see it: its name, what its server tells of it, the fleet that answers, and its server's errors."""

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import msgspec

from deepseek_triton_tools.gateway.chat_request import EFFORT, sent_names, with_effort
from deepseek_triton_tools.gateway.fleet import Fleet, open_fleet
from deepseek_triton_tools.gateway.fleet_member import compare_metrics
from deepseek_triton_tools.gateway.guard import Caller, Guard
from deepseek_triton_tools.gateway.observers import AccessLog, GatewayMetrics, HandledRequest
from deepseek_triton_tools.gateway.openai_fields import OWN_TEMPERATURE, OpenAIError, given_fields, with_names
from deepseek_triton_tools.gateway.responses_request import in_own_words, translated, with_item
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings, SharedTable
from deepseek_triton_tools.gateway.triton_call import Call, UpstreamError

_FIELD = re.compile(r"(?:sampling_param_)?([a-z_]+)(?=[\[.:,])")
_NAMES = {
    "bad": "bad_words",
    "guided_json": "response_format",
    "guided_json_object": "response_format",
    "text_input": "prompt",
    "input_ids": "prompt",
}
"""The contract's name of a field -> the name that clients know, where they differ."""
_log = logging.getLogger(__name__)


def log_failure(record: HandledRequest, error: UpstreamError) -> None:
    """Log what clients are not told, because it may have the addresses of servers."""
    if error.code in ("", "E_UNAVAILABLE") and str(error) != error.told:
        _log.warning("request %s: %r", record.request_id, str(error))


CODES = {
    "E_INVALID_ARGUMENT": (400, None, "{}"),
    "E_UNSUPPORTED": (400, "unsupported_parameter", "{}"),
    # LiteLLM and LangChain know it by these words only.
    "E_PROMPT_TOO_LONG": (
        400,
        "context_length_exceeded",
        "This model's maximum context length is exceeded (context_length_exceeded): {}",
    ),
    "E_OVERLOADED": (429, "overloaded", "{}"),
    "E_UNAVAILABLE": (503, "unavailable", "no server of this model can take the request now"),
    "E_CANCELLED": (503, "cancelled", "{}"),
    "E_INTERNAL": (500, "internal_error", "{}"),
}
"""The contract's code -> the status, OpenAI's code, and the message with the server's own in it."""
_NO_CODE = (502, "bad_gateway", "the model's server failed at this request; the gateway's log says more")


def openai_error(error: UpstreamError, route: str, document: object = None) -> OpenAIError:
    """The answer to a request at `route`, with the JSON `document`, for which the server gave `error`."""
    message = str(error)
    sent = given_fields(document) if isinstance(document, dict) else {}
    is_response = route.startswith("/v1/responses")
    if sent:
        chat = translated(sent)[0] if is_response else sent
        message = with_names(message, sent_names(chat))
        message = with_item(message, sent["input"], chat["messages"]) if is_response else message
    status, code, form = CODES.get(error.code, _NO_CODE)
    retry_after_s = (error.retry_after_s or 1.0) if error.code in ("E_OVERLOADED", "E_UNAVAILABLE") else None
    kind = "invalid_request_error" if status == 400 else "server_error"
    param = None
    if error.code == "E_PROMPT_TOO_LONG":
        param = "prompt" if route == "/v1/completions" else "messages"
    elif status == 400:
        named = _FIELD.match(message)  # the field that the server's message begins with
        param = named[1] if named else None
        if param not in sent:
            param = _NAMES.get(str(param), param)
    answer = OpenAIError(
        status, error.told or form.format(message), kind=kind, param=param, code=code, retry_after_s=retry_after_s
    )
    return in_own_words(answer) if is_response else answer


TEXTS_AT_ONCE = 32
"""How many texts of one request are asked for together."""


class ModelInfo(msgspec.Struct, frozen=True):
    """The answer to `describe` (docs/contract.md)."""

    name: str = ""
    checkpoint: str = ""
    engine: str = ""
    engine_version: str = ""
    max_seq_len: int = 0
    default_max_tokens: int | None = None
    greedy_by_default: bool = True
    thinking_switch: bool = False
    reasoning_efforts: tuple[str, ...] | None = None
    tool_form: str | None = None
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    pad_token: str = ""
    vocab_size: int | None = None


class ModelFront:
    def __init__(self, model: ModelSettings, fleet: Fleet) -> None:
        self.fleet = fleet
        self.created = int(time.time())
        self._given_name = model.name
        self.reason = ""
        """Why it gets no requests, although its servers may be up."""
        self._told = ""
        self._info = ModelInfo()

    @property
    def known_name(self) -> str:
        """The name that clients use; "" while no server has told it."""
        return self._given_name or self._info.name

    async def name(self) -> str:
        """The name that clients use. Raises UpstreamError while no server has told it."""
        return self._given_name or (await self.info()).name

    async def info(self) -> ModelInfo:
        """Raises UpstreamError while no server has told it."""
        told = self.fleet.model_info
        if not told:
            raise self.fleet.unavailable()
        if told != self._told:
            try:
                self._told, self._info = told, msgspec.json.decode(told, type=ModelInfo)
            except msgspec.DecodeError as error:
                raise UpstreamError(f"the server tells of its model what can't be read: {error}") from error
        return self._info

    async def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: another one when the model or engine is another, whichever server tells it."""
        info = await self.info()
        model = (info.name, PurePath(info.checkpoint).name, info.tool_form, info.chat_template)
        return f"fp_{hashlib.sha256(repr((model, info.engine, info.engine_version)).encode()).hexdigest()[:10]}"

    async def ask(self, inputs: dict[str, object]) -> dict[str, object]:
        """The outputs of a task that generates nothing. Raises UpstreamError."""
        return await self.fleet.ask(Call(await self.own_inputs(inputs), f"gateway-{uuid.uuid4().hex}"))

    async def own_inputs(self, inputs: dict[str, object]) -> dict[str, object]:
        """The inputs of a request as this model takes them. Raises UpstreamError, and OpenAIError."""
        if OWN_TEMPERATURE in inputs and not (await self.info()).greedy_by_default:
            inputs = {name: value for name, value in inputs.items() if name != OWN_TEMPERATURE}
        return with_effort(inputs, (await self.info()).reasoning_efforts) if EFFORT in inputs else inputs

    async def texts_of(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The texts of lists of token ids, which are asked for together. The first that fails stops the others. Raises
        UpstreamError."""
        room = asyncio.Semaphore(TEXTS_AT_ONCE)

        async def text_of(token_ids: Sequence[int]) -> str:
            async with room:
                outputs = await self.ask({"task": "detokenize", "text_input": "", "input_ids": token_ids})
            return str(outputs["text_output"])

        tasks = [asyncio.ensure_future(text_of(token_ids)) for token_ids in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


_PROBES = ("/health", "/ready", "/metrics", "/v2/")
"""Routes that begin so are asked every few seconds by machines; nobody is told of these."""


class Observers:
    """The metrics, and the access log and traces where the settings have them. They neither raise nor wait."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises OSError for the access log, and ModuleNotFoundError for traces without the extra `tracing`."""
        self.metrics = GatewayMetrics()
        self._access_log = AccessLog(settings.access_log) if settings.access_log is not None else None
        self._traces = None
        if settings.traces_url is not None:
            # Only here: without traces the SDK need not be installed.
            from deepseek_triton_tools.gateway.tracing import Traces

            self._traces = Traces(settings.traces_url)

    def begins(self, record: HandledRequest) -> None:
        """The request's headers have come. `upstream_headers` may be set."""
        if not record.route.startswith(_PROBES):
            self.metrics.begins(record)
            if self._traces is not None:
                self._traces.begins(record)

    def ends(self, record: HandledRequest) -> None:
        """The response has been sent, or its client has gone."""
        record.ended_s = time.perf_counter()
        if not record.route.startswith(_PROBES):
            self.metrics.ends(record)
            if self._access_log is not None:
                self._access_log.ends(record)
            if self._traces is not None:
                self._traces.ends(record)

    def close(self) -> None:
        if self._access_log is not None:
            self._access_log.close()
        if self._traces is not None:
            self._traces.close()


_LOOK_S = 1.0
"""Between two looks at what runs, after which the metrics have it, and at the file of keys."""
_NUM_LOOKS = 10
"""How many looks make one moment of the dashboard's history."""
_NUM_MOMENTS = 180
# For clients to read that their requests are ended. One that reads nothing must not hold up the stop.
_LAST_WORDS_S = 2.0
_HIDDEN = "another model is called {!r} too, and gets them all; --model NAME=URL gives a model its own name"


class GatewayState:
    """Lives as long as the application. Raises what Guard and Observers raise."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.guard = Guard(settings.keys_file, settings) if settings.keys_file is not None else None
        self.observers = Observers(settings)
        self.models: Sequence[ModelFront] = [
            ModelFront(model, open_fleet(model, settings, number)) for number, model in enumerate(settings.models)
        ]
        self._running: set[asyncio.Task[object]] = set()
        self._history = SharedTable(settings.shared_folder, "history")

    def runs(self, task: asyncio.Task[object]) -> None:
        """The task answers a request, and needs all of this until it has ended."""
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def start(self) -> None:
        await asyncio.gather(*(model.fleet.start() for model in self.models))
        await self.named_models()  # says which have the same name
        self._look(0)

    def _look(self, number: int) -> None:
        self._next_look = asyncio.get_running_loop().call_later(_LOOK_S, self._look, number + 1)
        self.observers.metrics.count_running()
        for model in self.models:
            model.fleet.look()
        compare_metrics(member for model in self.models for member in model.fleet.members.values())
        if self.guard is not None:
            self.guard.look()
        if number % _NUM_LOOKS == 0:
            self.history()

    def history(self) -> list[dict[str, Any]]:
        """The values of `now` in the last half hour, to which one of the workers adds each."""
        with self._history.changing() as table:
            moments: list[dict[str, Any]] = table.setdefault("moments", [])
            if not moments or abs(time.time() - moments[-1]["at"]) > _LOOK_S * (_NUM_LOOKS - 1):
                moments.append(self.now())
            del moments[:-_NUM_MOMENTS]
            return moments

    def now(self) -> dict[str, Any]:
        """Return the numbers of the dashboard's tiles. `sums` grow, so two of them tell a rate."""
        servers = [server for model in self.models for server in model.fleet.servers()]
        own, seen = Counter[str](), Counter[str]()
        for server in servers:  # what one model has at a server is in `others` of another
            own[server.url] += server.own.sequences
            seen[server.url] = max(seen[server.url], server.own.plus(server.others).sequences)
        return {
            "at": time.time(),
            "servers": len(own),
            "up": len({server.url for server in servers if server.state == "up" and not server.leaving}),
            "inflight": (own | seen).total(),
            "sums": self.observers.metrics.sums(),
        }

    async def close(self) -> None:
        """Let the requests end first: after `drain_s` uvicorn cancels them, and does not wait for their ends."""
        if self._running:
            await asyncio.wait(self._running, timeout=_LAST_WORDS_S)
        await asyncio.gather(*(model.fleet.close() for model in self.models))
        self._next_look.cancel()
        if self.guard is not None:
            self.guard.close()
        self.observers.close()

    async def named_models(self) -> dict[str, ModelFront]:
        """Every model whose name is known, the first of those with the same name. One is unknown while none of its
        servers has ever been up."""
        named: dict[str, ModelFront] = {}
        for model in self.models:
            with suppress(UpstreamError):
                name = await model.name()
                former, model.reason = model.reason, ""
                if named.setdefault(name, model) is not model:
                    model.reason = _HIDDEN.format(name)
                    if model.reason != former:
                        urls = ", ".join(server.url for server in model.fleet.servers())
                        _log.warning("no requests go to %s: %s", urls, model.reason)
        return named

    async def model(self, name: str, caller: Caller | None) -> tuple[str, ModelFront]:
        """The model that a request names, and its name. A gateway with one model needs no name.

        Raises OpenAIError: 403 for one that the caller's key isn't for, or 404, which names those that it is for.
        Raises UpstreamError while no server can tell what the model is called.
        """
        first = self.models[0]
        named = {await first.name(): first} if len(self.models) == 1 else await self.named_models()
        if not name and len(named) == 1 == len({model.known_name for model in self.models}):
            [name] = named
        if name in named:
            if caller is not None and self.guard is not None:
                self.guard.check_model(caller, name)
            return name, named[name]
        names = sorted(each for each in named if caller is None or caller.may_use(each))
        expected = " or ".join(map(repr, names)) or "one of those that /v1/models lists"
        got = repr(name[:200]) if name else "nothing"
        raise OpenAIError(404, f"model: expected {expected}, got {got}.", param="model", code="model_not_found")
