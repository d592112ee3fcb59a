"""A model as clients see it: its name, what its server tells of it, and the fleet that answers."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Sequence

import msgspec

from deepseek_triton_tools.gateway.fleet.fleet import Fleet
from deepseek_triton_tools.gateway.settings import ModelSettings
from deepseek_triton_tools.gateway.triton.call import Call, UpstreamError

TEXTS_AT_ONCE = 32
"""How many texts of one request are asked for together."""


class ModelInfo(msgspec.Struct, frozen=True):
    """The answer to `describe` (docs/contract.md)."""

    name: str = ""
    checkpoint: str = ""
    max_seq_len: int = 0
    thinking_switch: bool = False
    tool_form: str | None = None
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    pad_token: str = ""
    vocab_size: int | None = None


class ModelFront:
    """One model behind the gateway."""

    def __init__(self, model: ModelSettings, fleet: Fleet) -> None:
        self.fleet = fleet
        self.created = int(time.time())
        self._given_name = model.name
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
        """OpenAI's system_fingerprint: another one when the server's model or engine is another."""
        await self.info()
        return f"fp_{hashlib.sha256(self._told.encode()).hexdigest()[:10]}"

    async def ask(self, inputs: dict[str, object]) -> dict[str, object]:
        """The outputs of a task that generates nothing. Raises UpstreamError."""
        return await self.fleet.ask(Call(inputs, f"gateway-{uuid.uuid4().hex}"))

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
