"""The state that all requests share: the models, the guard, and whoever is told of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from deepseek_triton_tools.gateway.app.model_front import ModelFront
from deepseek_triton_tools.gateway.app.observers import Observers
from deepseek_triton_tools.gateway.fleet.fleet import open_fleet
from deepseek_triton_tools.gateway.guard.api_keys import Caller
from deepseek_triton_tools.gateway.guard.guard import Guard
from deepseek_triton_tools.gateway.protocol.openai_errors import OpenAIError
from deepseek_triton_tools.gateway.settings import GatewaySettings
from deepseek_triton_tools.gateway.triton.call import UpstreamError

_LAST_WORDS_S = 2.0
"""For clients to read that their requests are ended. One that reads nothing must not hold up the stop."""


class GatewayState:
    """Lives as long as the application. Raises what Guard and Observers raise."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.guard = Guard(settings.keys_file, settings.limits_file) if settings.keys_file is not None else None
        self.observers = Observers(settings)
        self.models: Sequence[ModelFront] = [
            ModelFront(model, open_fleet(model, settings)) for model in settings.models
        ]
        self._running: set[asyncio.Task[object]] = set()

    def runs(self, task: asyncio.Task[object]) -> None:
        """The task answers a request, and needs all of this until it has ended."""
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def start(self) -> None:
        await asyncio.gather(*(model.fleet.start() for model in self.models))

    async def close(self) -> None:
        """Let the requests end first: after `drain_s` uvicorn cancels them, and does not wait for their ends."""
        if self._running:
            await asyncio.wait(self._running, timeout=_LAST_WORDS_S)
        await asyncio.gather(*(model.fleet.close() for model in self.models))
        if self.guard is not None:
            self.guard.close()
        self.observers.close()

    async def named_models(self) -> dict[str, ModelFront]:
        """Every model whose name is known. One is unknown while none of its servers has ever been up."""
        named: dict[str, ModelFront] = {}
        for model in self.models:
            with suppress(UpstreamError):
                named.setdefault(await model.name(), model)
        return named

    async def model(self, name: str, caller: Caller | None) -> tuple[str, ModelFront]:
        """The model that a request names, and its name. A gateway with one model needs no name.

        Raises OpenAIError: 403 for one that the caller's key isn't for, or 404, which names those that it is for.
        Raises UpstreamError while no server can tell what the model is called.
        """
        if len(self.models) == 1:
            only = self.models[0]
            known = await only.name()
            named = {known: only}
            name = name or known
        else:
            named = await self.named_models()
        if name in named:
            if caller is not None and self.guard is not None:
                self.guard.check_model(caller, name)
            return name, named[name]
        names = sorted(each for each in named if caller is None or caller.may_use(each))
        expected = " or ".join(map(repr, names)) or "one of those that /v1/models lists"
        got = repr(name[:200]) if name else "nothing"
        raise OpenAIError(404, f"model: expected {expected}, got {got}.", param="model", code="model_not_found")
