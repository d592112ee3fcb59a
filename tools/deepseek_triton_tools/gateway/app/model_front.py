"""A model as clients see it: its name, what its server tells of it, and the fleet that answers."""

from __future__ import annotations

import hashlib
import time
import uuid

import msgspec

from deepseek_triton_tools.gateway.fleet.fleet import Fleet
from deepseek_triton_tools.gateway.settings import ServedModel
from deepseek_triton_tools.gateway.triton.call import Call


class ModelInfo(msgspec.Struct, frozen=True):
    """What `describe` tells (docs/contract.md)."""

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

    def __init__(self, model: ServedModel, fleet: Fleet) -> None:
        self.fleet = fleet
        self.created = int(time.time())
        self._given_name = model.name
        self._info: ModelInfo | None = None
        self._fingerprint = ""

    @property
    def known_name(self) -> str:
        """The name that clients use; "" while no server has told it."""
        return self._given_name or (self._info.name if self._info is not None else "")

    async def name(self) -> str:
        """The name that clients use. Raises UpstreamError while no server has told it."""
        return self._given_name or (await self.info()).name

    async def info(self) -> ModelInfo:
        """Raises UpstreamError while no server has told it."""
        if self._info is None:
            outputs = await self.ask({"text_input": "", "task": "describe"})
            told = str(outputs["model_info"])
            self._info = msgspec.json.decode(told, type=ModelInfo)
            self._fingerprint = f"fp_{hashlib.sha256(told.encode()).hexdigest()[:10]}"
        return self._info

    async def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: another one when the server's model or engine is another."""
        await self.info()
        return self._fingerprint

    async def ask(self, inputs: dict[str, object]) -> dict[str, object]:
        """The outputs of a task that generates nothing. Raises UpstreamError."""
        return await self.fleet.ask(Call(inputs, f"gateway-{uuid.uuid4().hex}"))
