"""The backend without Triton: requests in, engine behind, responses out.

`model.py` wraps it in Triton's life cycle; tests drive it with a list for a reply and any engine.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import SAMPLING_FIELDS
from deepseek_backend.engines.base import Engine, Step
from deepseek_backend.errors import BackendError, CancelledError, EngineError, RequestError, UnavailableError
from deepseek_backend.lifecycle import Exchange, Reply, StepEffect
from deepseek_backend.request import Call, GenerateRequest, parse_call
from deepseek_backend.streams import Sender

logger = logging.getLogger(__name__)


class Service:
    """Owns the open exchanges. `accept` belongs to Triton's thread, `on_steps` to the engine's."""

    def __init__(self, config: BackendConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[str, Exchange] = {}
        """Engine's request id -> exchange, from acceptance to the final response. Guarded by _lock."""
        self._engine_ids: dict[Exchange, str] = {}
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
        except BaseException:
            self._engine.stop()
            raise
        self._supported = _supported_fields(self._engine)
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
        exchange = Exchange(reply, client_id=client_id)
        request_id = str(next(self._ids))
        with self._lock:
            self._open[request_id] = exchange
            self._engine_ids[exchange] = request_id
        try:
            call = parse_call(inputs, parameters, self._config, self._supported)
            if self._draining:
                raise UnavailableError("the model is being stopped; send the request to another server")
            exchange.begin(call)
            if call.stop:
                self._stop_by_client_id(exchange)
            else:
                self._engine.submit(_generate_request(request_id, call), self)
                if exchange.ended:  # while it was being submitted, and the abort came before the engine knew it
                    self._engine.abort(request_id)
        except BackendError as error:
            self._end(exchange, error)
        except Exception as error:
            logger.exception("request %r", client_id)
            self._end(exchange, EngineError(f"{type(error).__name__}: {error}"))

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
        """Refuse what comes, wait for what runs, cancel the rest with its text so far, stop the engine."""
        self._draining = True
        deadline = time.monotonic() + self._config.drain_timeout_s
        while self._open and time.monotonic() < deadline:
            time.sleep(0.02)
        for exchange in self._snapshot():
            if exchange.end(finish_reason="cancelled"):
                self._abort(exchange)
                self._sender.notify([exchange])
        self._stopped.set()
        self._engine.stop()
        self._sender.stop()
        if self._watcher.is_alive():
            self._watcher.join()

    def _stop_by_client_id(self, stopper: Exchange) -> None:
        """End every running request that has the stopper's id, then answer the stopper, with no text."""
        if not stopper.client_id:
            raise RequestError('stop: expected the id of the request to end as this request\'s "id", got none')
        for exchange in self._snapshot():
            if exchange is not stopper and exchange.client_id == stopper.client_id:
                if exchange.end(finish_reason="cancelled"):
                    self._abort(exchange)
                self._sender.notify([exchange])
        stopper.end(finish_reason="stop")
        self._sender.notify([stopper])

    def _watch_clients(self) -> None:
        """End requests whose client has gone, so that the engine does not work for nobody."""
        period_s = self._config.cancellation_check_period_ms / 1000
        while not self._stopped.wait(period_s):
            for exchange in self._snapshot():
                if exchange.client_has_gone() and self._end(exchange, CancelledError("the client has gone")):
                    self._abort(exchange)

    def _end(self, exchange: Exchange, error: BackendError) -> bool:
        ended = exchange.end(error=error)
        self._sender.notify([exchange])
        return ended

    def _abort(self, exchange: Exchange) -> None:
        with self._lock:
            request_id = self._engine_ids.get(exchange)
        if request_id is not None:
            self._engine.abort(request_id)
        if exchange.closed:
            self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        with self._lock:
            request_id = self._engine_ids.pop(exchange, None)
            if request_id is not None:
                self._open.pop(request_id, None)

    def _snapshot(self) -> list[Exchange]:
        with self._lock:
            return list(self._open.values())


def _generate_request(request_id: str, call: Call) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt=call.prompt,
        sampling=call.sampling,
        max_tokens=call.max_tokens,
        streaming=call.streaming,
    )


def _supported_fields(engine: Engine) -> dict[str, str]:
    """Sampling field -> "" where the engine honours it, else why not."""
    capabilities = engine.capabilities
    reasons = {field.name: "not supported by this engine" for field in SAMPLING_FIELDS} | capabilities.unsupported
    return {name: "" if name in capabilities.sampling_fields else reason for name, reason in reasons.items()}
