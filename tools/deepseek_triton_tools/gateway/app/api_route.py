"""The way of every request to the API: its key, its body, its record, and the words for what went wrong."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from deepseek_triton_tools.gateway.app.api_exchange import ApiExchange, ClientLeft
from deepseek_triton_tools.gateway.app.gateway_state import GatewayState
from deepseek_triton_tools.gateway.app.handled_request import begin_record
from deepseek_triton_tools.gateway.app.model_front import ModelFront
from deepseek_triton_tools.gateway.app.upstream_errors import log_failure, openai_error
from deepseek_triton_tools.gateway.guard.api_keys import Caller
from deepseek_triton_tools.gateway.guard.guard import Reservation
from deepseek_triton_tools.gateway.protocol.openai_errors import OpenAIError, invalid
from deepseek_triton_tools.gateway.triton.call import UpstreamError

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
            self.exchange.record.counts_responses = self.caller.tokens_per_minute is not None
            self.exchange.headers += self.reserved.headers
        return known, model

    def settle(self, *, failed: bool) -> None:
        """Count the tokens that were used, as far as they are known.

        A client may leave before the server has told anything, or while prompts wait for others, and one prompt that
        is refused stops the others. So at least the estimate of the prompts is counted once a server was asked.
        """
        if self.caller is not None and self.state.guard is not None and self.reserved is not None:
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
            await exchange.refuse(openai_error(error, self._path))
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
        if self._reads_body:
            _check_type(exchange.request_headers)
        body = await exchange.body() if self._reads_body else b""
        document = _document(body) if self._reads_body else None
        request = ApiRequest(self._state, exchange, caller, document, len(body))
        failed = True
        try:
            await _while_client_waits(exchange, self._handler(request))
            failed = False
        finally:
            request.settle(failed=failed)


async def _while_client_waits(exchange: ApiExchange, work: Awaitable[None]) -> None:
    """Do the work, and stop it when the client leaves. Raises ClientLeft then."""
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


def _check_type(headers: list[tuple[bytes, bytes]]) -> None:
    """Browsers send JSON to a stranger's server after asking it only, so that no page can spend tokens unasked."""
    given = dict(headers).get(b"content-type", b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        text = f"Content-Type: expected application/json, got {given[:80]!r}"
        raise OpenAIError(415, text, code="unsupported_media_type")


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
