"""The gateway's application before a server that gives one answer to everything, without a socket between."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from deepseek_triton_tools.gateway.application import create_app
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings
from support.raw_triton import RawTriton, answer, event


class ScriptedTriton(RawTriton):
    events: Sequence[dict[str, Any]] = ()
    """The responses of the model."""


@contextmanager
def gateway_of(triton: ScriptedTriton) -> Iterator[TestClient]:
    triton.script = lambda wire: answer(*(event(**outputs) for outputs in triton.events))(wire)
    with triton.serving(), TestClient(create_app(GatewaySettings((ModelSettings((triton.url,)),)))) as client:
        yield client
