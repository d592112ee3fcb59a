"""The backend without Triton: requests in, engine behind, responses out.

`model.py` wraps it in Triton's life cycle; tests drive it with a list for a reply and any engine.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import SAMPLING_BY_NAME, SAMPLING_FIELDS, ErrorCode
from deepseek_backend.engines.base import Engine, Step
from deepseek_backend.errors import (
    BackendError,
    CancelledError,
    ConfigError,
    EngineError,
    RequestError,
    UnavailableError,
    one_line,
)
from deepseek_backend.lifecycle import Exchange, Reply, StepEffect
from deepseek_backend.request import Call, GenerateRequest, parse_call
from deepseek_backend.streams import Sender
from deepseek_backend.values import shown

logger = logging.getLogger(__name__)


_MAX_CHECKS_PER_S = 4000
"""Asking Triton whether a client has gone is a message there and back: 0.2 core at 8,000 a second was measured."""


class Service:
    """Owns the open exchanges. `accept` belongs to Triton's thread, `on_steps` to the engine's."""

    def __init__(self, config: BackendConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[str, Exchange] = {}
        """Request id -> exchange, from acceptance to the final response. Guarded by _lock."""
        self._draining = False
        self._stopped = threading.Event()
        self._supported: dict[str, str] = {}
        self._sender = Sender(on_closed=self._forget, on_broken=self._abort)
        self._watcher = threading.Thread(target=self._watch_clients, name="watcher", daemon=True)

    def start(self) -> None:
        """Load the engine and begin to serve.

        :raises EngineError: when the engine can't be loaded.
        :raises ConfigError: when the engine can't do what the configuration asks for.
        """
        try:
            self._engine.start()
            self._supported = _supported_fields(self._engine)
            self._check_defaults()
        except BaseException:
            self._engine.stop()
            raise
        self._sender.start()
        self._watcher.start()

    @property
    def num_open(self) -> int:
        """Requests whose final response has not been sent."""
        return len(self._open)

    def is_ready(self) -> bool:
        return not self._draining and self._engine.health().alive

    def accept(
        self, inputs: Mapping[str, npt.NDArray[Any]], parameters: str, reply: Reply, *, client_id: str = ""
    ) -> None:
        """Take one request. Everything about it, errors too, is answered through `reply`."""
        exchange = Exchange(reply, request_id=str(next(self._ids)), client_id=client_id)
        with self._lock:
            self._open[exchange.request_id] = exchange
        try:
            call = parse_call(inputs, parameters, self._config, self._supported)
            if self._draining:
                raise UnavailableError("the model is being stopped; send the request to another server")
            exchange.begin(call)
            self._check_size(call.prompt)
            if call.stop:
                self._stop_by_client_id(exchange)
            else:
                self._engine.submit(_generate_request(exchange.request_id, call), self)
                if exchange.ended:  # while it was being submitted, and the abort came before the engine knew it
                    self._engine.abort(exchange.request_id)
        except BackendError as error:
            self._end(exchange, error)
        except Exception as error:
            logger.exception("request %r", client_id)
            self._end(exchange, EngineError(one_line(error)))

    def refuse(self, reply: Reply, error: RequestError) -> None:
        """Answer a request that could not even be read."""
        self._end(Exchange(reply, request_id=str(next(self._ids))), error)

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        """Take the steps of one engine iteration (the engine's sink)."""
        dirty: list[Exchange] = []
        for request, step in steps:
            exchange = self._open.get(request.request_id)
            if exchange is None:
                continue
            effect = exchange.add(step)
            if effect is not StepEffect.NOTHING:
                dirty.append(exchange)
            if effect is StepEffect.STOP_STRING:
                self._engine.abort(request.request_id)
        if dirty:
            self._sender.notify(dirty)

    def stop(self) -> None:
        """Refuse what comes, let go of what is open, stop the engine.

        Triton asks for it when nothing is in flight any more. What is open here all the same is a request whose client
        has gone unnoticed so far: a response to it now makes the server hang.
        """
        self._draining = True
        for exchange in self._snapshot():
            exchange.abandon()
            self._abort(exchange)
        self._stopped.set()
        self._engine.stop()
        self._sender.stop()
        if self._watcher.is_alive():
            self._watcher.join()

    def _stop_by_client_id(self, stopper: Exchange) -> None:
        """End every running request that has the stopper's id, then answer the stopper, with no text."""
        if not stopper.client_id:
            raise RequestError('stop: expected the id of the request to end as this request\'s "id", got none')
        running = [e for e in self._snapshot() if e is not stopper and e.client_id == stopper.client_id]
        if not running:
            raise RequestError(f"stop: no running request has the id {shown(stopper.client_id)}")
        for exchange in running:
            if exchange.end(finish_reason="cancelled"):
                self._abort(exchange)
            self._sender.notify([exchange])
        stopper.end(finish_reason="stop")
        self._sender.notify([stopper])

    def _watch_clients(self) -> None:
        """End requests whose client has gone, so that the engine does not work for nobody."""
        shortest_s = self._config.cancellation_check_period_ms / 1000
        while not self._stopped.wait(max(shortest_s, self.num_open / _MAX_CHECKS_PER_S)):
            for exchange in self._snapshot():
                try:
                    has_gone = exchange.client_has_gone()
                except Exception:  # whatever Triton raises: the other requests still have to be watched
                    logger.exception("request %r can't be asked whether its client has gone", exchange.client_id)
                    continue
                if has_gone and self._end(exchange, CancelledError("the client has gone")):
                    self._abort(exchange)

    def _check_size(self, prompt: str) -> None:
        most = self._engine.capabilities.max_prompt_bytes
        if most is not None and (size := len(prompt.encode())) > most:
            raise RequestError(
                f"the prompt has {size:,} bytes; more than {most:,} can't fit the context: shorten it",
                code=ErrorCode.PROMPT_TOO_LONG,
            )

    def _check_defaults(self) -> None:
        """:raises ConfigError: for a default that the engine would not honour."""
        problems = [
            f"triton_config.default_sampling.{name}: {self._supported[name]}"
            for name, value in self._config.default_sampling.items()
            if self._supported[name] and value != SAMPLING_BY_NAME[name].neutral
        ]
        if problems:
            raise ConfigError(problems)

    def _end(self, exchange: Exchange, error: BackendError) -> bool:
        ended = exchange.end(error=error)
        self._sender.notify([exchange])
        return ended

    def _abort(self, exchange: Exchange) -> None:
        self._engine.abort(exchange.request_id)
        if exchange.closed:
            self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        with self._lock:
            self._open.pop(exchange.request_id, None)

    def _snapshot(self) -> list[Exchange]:
        with self._lock:
            return list(self._open.values())


def _generate_request(request_id: str, call: Call) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt=call.prompt,
        sampling=call.sampling,
        max_tokens=call.max_tokens,
    )


def _supported_fields(engine: Engine) -> dict[str, str]:
    """Sampling field -> "" where the engine honours it, else why not."""
    capabilities = engine.capabilities
    reasons = {field.name: "not supported by this engine" for field in SAMPLING_FIELDS} | capabilities.unsupported
    return {name: "" if name in capabilities.sampling_fields else reason for name, reason in reasons.items()}
