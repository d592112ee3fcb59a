"""The way of every request to the API: its key, its body, its record, and the words for what went wrong.

It stands on bare ASGI: no other layer lies between a chunk and the socket.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qs

import msgspec
from starlette.types import Message, Receive, Scope, Send

from deepseek_triton_tools.gateway.guard import Caller, Reservation
from deepseek_triton_tools.gateway.model_front import GatewayState, ModelFront, log_failure, openai_error
from deepseek_triton_tools.gateway.observers import HandledRequest, begin_record
from deepseek_triton_tools.gateway.openai_fields import OpenAIError, invalid
from deepseek_triton_tools.gateway.settings import GatewaySettings
from deepseek_triton_tools.gateway.triton_call import UpstreamError
from deepseek_triton_tools.gateway.triton_server import within

Headers = Iterable[tuple[bytes, bytes]]
JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
# A comment of server-sent events. Proxies close connections on which nothing comes for a minute or so.
_KEEP_ALIVE = b": keep-alive\n\n"


class ClientLeft(Exception):
    """The client has closed the connection. There is nobody to answer."""


class ApiExchange:
    """headers: of every response, beside those of its kind."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, record: HandledRequest, settings: GatewaySettings
    ) -> None:
        self.record = record
        self.headers: list[tuple[bytes, bytes]] = [(b"x-request-id", record.request_id.encode())]
        self.request_headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.path_parameters: dict[str, str] = scope.get("path_params", {})
        self.query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        self.begun = False
        """A response has begun, so that there can be no other one."""
        self.document: object = None
        """The body's JSON, once it has been read."""
        self.has_events = False
        """A stream has begun, and not only with comments."""
        self.num_events = 0  # of a response that is numbered, once it has failed
        self._receive = receive
        self._sends = send
        self._settings = settings
        self._body_until_s = asyncio.get_running_loop().time() + settings.body_timeout_s
        # ASGI does not say whether there is a body; by HTTP/1.1, a request without these headers has none.
        self._body_ended = not any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.request_headers
        )
        self._silent: asyncio.Task[None] | None = None
        self._sent_at_s = 0.0

    async def body(self) -> bytes:
        """The whole of it. Raises OpenAIError 408 and 413, and ClientLeft."""
        pieces: list[bytes] = []
        timeout_s = self._settings.body_timeout_s
        try:
            await within(timeout_s, self._read_body(pieces, self._settings.max_body_bytes))
        except TimeoutError:
            got = sum(map(len, pieces))
            text = f"the request's body: expected all of it within {timeout_s:g} s, got {got} bytes. Send it faster."
            raise OpenAIError(408, text, code="request_timeout") from None
        return b"".join(pieces)

    async def _read_body(self, pieces: list[bytes], max_bytes: int) -> None:
        size = 0
        while True:
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise self.left()
            piece = message.get("body", b"")
            size += len(piece)
            if size > max_bytes:
                raise OpenAIError(413, f"the request's body has more than {max_bytes} bytes", code="request_too_large")
            pieces.append(piece)
            if self._body_ended:
                return

    async def _send(self, message: Message) -> None:
        try:
            await self._sends(message)
        except RuntimeError as error:
            # uvicorn closes the connection when bytes behind the request are no HTTP, and uvloop refuses to write then.
            if "closed" not in str(error):
                raise
            raise self.left() from error

    async def _drop_body(self) -> None:
        while not self._body_ended and (await self._next())["type"] != "http.disconnect":
            pass

    async def _next(self) -> Message:
        message = await self._receive()
        self._body_ended |= message["type"] == "http.request" and not message.get("more_body", False)
        return message

    def left(self) -> ClientLeft:
        """To be raised where the client has gone before the response was complete."""
        self.record.client_left = True
        return ClientLeft()

    async def client_leaves(self) -> None:
        """Wait until the client closes the connection; it may be after the response."""
        while (await self._next())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, body: bytes, *, media_type: bytes = JSON, headers: Headers = (), more: bool = False
    ) -> None:
        """Send the whole response. more: the connection stays open until `end_stream`."""
        self.close()  # no comment may come into it
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [(b"content-type", media_type), length, *headers])
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def expect_stream(self) -> None:
        """Begin the stream with comments, should the first event be long in coming: the model may be busy.

        After that a refusal is an event too.
        """
        self._sent_at_s = asyncio.get_running_loop().time()
        self._silent = asyncio.ensure_future(self._keep_alive())

    async def start_stream(self) -> None:
        """Begin a stream of server-sent events, which `send_events` and `end_stream` go on with."""
        self.has_events = True
        await self._start_events()

    async def send_events(self, events: bytes) -> None:
        self._sent_at_s = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, events: bytes = b"") -> None:
        self.close()
        await self._send({"type": "http.response.body", "body": events})

    async def refuse(self, error: OpenAIError) -> None:
        """Tell the error: as the response, or as the last event of a stream that has begun."""
        self.record.error_code = error.code or error.kind
        if self.begun:
            await self.end_stream(error.event(self.num_events if self.record.route == "/v1/responses" else None))
            return
        headers = list(error.headers)
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
        unread = not self._body_ended
        await self.respond(error.status, error.body(), headers=headers, more=unread)
        if unread:
            # A connection that is closed before its bytes are read is reset, and the client may never see the response.
            rest_s = max(0.0, self._body_until_s - asyncio.get_running_loop().time())
            with suppress(TimeoutError, asyncio.CancelledError):  # the latter comes from uvicorn when it stops
                await within(rest_s, self._drop_body())
            await self.end_stream()

    def close(self) -> None:
        """Nothing more will be sent."""
        if self._silent is not None:
            self._silent.cancel()

    async def _start(self, status: int, headers: Headers) -> None:
        self.begun = True
        self.record.status = status
        # Whoever sends the rest of a body slowly would hold the connection.
        closing = () if self._body_ended else ((b"connection", b"close"),)
        all_headers = [*headers, *self.headers, *closing]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def _start_events(self) -> None:
        if not self.begun:
            # nginx holds events back unless it is told not to.
            await self._start(
                200, [(b"content-type", _EVENTS), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            )

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            rest_s = self._sent_at_s + self._settings.keep_alive_s - loop.time()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self._start_events()
                await self.send_events(_KEEP_ALIVE)


_TOO_DEEP = "the request's body is nested too deeply"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ApiRequest:
    """A request that was let in, and the way to its response."""

    state: GatewayState
    exchange: ApiExchange
    caller: Caller | None
    document: object
    """The body's JSON; None where there is no body."""
    num_body_bytes: int
    reserved: Reservation | None = None
    has_several_prompts: bool = False
    made_per_choice: float = 1.0
    """How many answers are made for each that is given: `best_of` / `n`."""

    async def model(self, name: str, most_tokens: int | None = None) -> tuple[str, ModelFront]:
        """The model that is asked for, once the key may use it and has enough left. Raises OpenAIError.

        most_tokens: of all answers together, where the client says it.
        """
        known, model = await self.state.model(name, self.caller)
        self.exchange.record.model = known
        if self.caller is not None and self.state.guard is not None:
            self.reserved = self.state.guard.reserve(self.caller, self.num_body_bytes, most_tokens)
            self.exchange.headers += self.reserved.headers
        return known, model

    def settle(self, *, failed: bool) -> None:
        """Count the tokens that were used, as far as they are known.

        A client may leave before the server has told anything, or while prompts wait for others, and one prompt that
        is refused stops the others. So at least the estimate of the prompts is counted once a server was asked.
        """
        if self.caller is not None and self.state.guard is not None and self.reserved is not None:
            # Not what the client asked for but what a server did for it, whether or not anybody read it.
            record = self.exchange.record
            num_input = record.num_input_tokens
            if record.server and (record.client_left or (failed and self.has_several_prompts)):
                num_input = max(num_input, self.reserved.num_prompt_tokens)
            num_output = math.ceil(record.num_output_tokens * self.made_per_choice)
            self.state.guard.settle(self.caller, self.reserved, num_input + num_output)


Handler = Callable[[ApiRequest], Awaitable[None]]
MOST_BRACKETS = 2**20
"""Lists and objects of a request, with those brackets that are text. A list of two bytes takes 30 times as much memory,
and nobody else is served while millions of them are read."""


class ApiRoute:
    """An ASGI application for one path.

    reads_body: the request has a body of JSON. needs_key: only with an API key, where there are any.
    """

    def __init__(
        self, state: GatewayState, path: str, handler: Handler, *, reads_body: bool = True, needs_key: bool = True
    ) -> None:
        self._state = state
        self._path = path
        self._handler = handler
        self._reads_body = reads_body
        self._needs_key = needs_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._state.runs(task)
        record = begin_record(self._path, scope["headers"])
        exchange = ApiExchange(scope, receive, send, record, self._state.settings)
        self._state.observers.begins(record)
        try:
            with suppress(ClientLeft):  # it may leave while it is refused
                await self._answer(exchange)
        finally:
            exchange.close()
            self._state.observers.ends(record)

    async def _answer(self, exchange: ApiExchange) -> None:
        try:
            await self._handle(exchange)
        except ClientLeft:
            return  # there is nobody to answer
        except OpenAIError as error:
            await exchange.refuse(error)
        except UpstreamError as error:
            log_failure(exchange.record, error)
            await exchange.refuse(openai_error(error, self._path, exchange.document))
        except RecursionError:  # values that could be read just so can't be written again
            await exchange.refuse(invalid(_TOO_DEEP))
        except asyncio.CancelledError:  # by uvicorn, when a stop has waited for as long as it may
            text = "the gateway is being stopped"
            await exchange.refuse(OpenAIError(503, text, kind="server_error", code="unavailable", retry_after_s=1.0))
        except Exception:
            _log.exception("request %s failed", exchange.record.request_id)
            text = "the gateway failed at this request; its log says more"
            await exchange.refuse(OpenAIError(500, text, kind="server_error", code="internal_error"))

    async def _handle(self, exchange: ApiExchange) -> None:
        caller = None
        if self._state.guard is not None and self._needs_key:
            caller = self._state.guard.check(exchange.request_headers)
            exchange.record.key_name = caller.name
        body, document = b"", None
        if self._reads_body:
            # Browsers send JSON to a stranger's server after asking it only, so that no page can spend tokens unasked.
            declared = dict(exchange.request_headers).get(b"content-type", b"").decode("latin-1")
            kind = declared.partition(";")[0].strip().lower()
            if kind != "application/json" and not kind.endswith("+json"):
                text = f"expected JSON, got {declared[:80]!r}; send the header Content-Type: application/json"
                raise OpenAIError(415, text, code="unsupported_media_type")
            coding = dict(exchange.request_headers).get(b"content-encoding", b"").lower()
            if coding in (b"gzip", b"x-gzip", b"deflate", b"br", b"zstd"):  # some say utf-8 there, which does no harm
                text = f"expected JSON as it is, got Content-Encoding: {coding.decode()}; send it uncompressed"
                raise OpenAIError(415, text, code="unsupported_media_type")
            body = await exchange.body()
            document = exchange.document = _document(body)
        request = ApiRequest(self._state, exchange, caller, document, len(body))
        failed = True
        try:
            await _while_client_waits(exchange, self._handler(request))
            failed = False
        finally:
            request.settle(failed=failed)


async def _while_client_waits(exchange: ApiExchange, work: Awaitable[None]) -> None:
    """Do the work, and stop it when the client leaves. Raises ClientLeft then."""
    # Nobody cancels the task of a client that has left: uvicorn only tells whoever receives.
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(exchange.client_leaves())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise exchange.left()
        working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await working


def _document(body: bytes) -> object:
    if (num_values := body.count(b"[") + body.count(b"{")) > MOST_BRACKETS:
        text = f"the request's body: expected at most {MOST_BRACKETS:,} opening brackets, got {num_values:,}"
        raise OpenAIError(413, text, code="request_too_large")
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise invalid(_TOO_DEEP) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the request's body is not JSON: {error}") from None
