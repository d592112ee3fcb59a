"""A real tritonserver with the tiny checkpoint, a gateway in front of it, and the clients of others.

`make test-gateway` runs this folder in an environment of its own; elsewhere it is left out.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell that starts this in the background has SIGINT ignored, and so would every program whose Ctrl-C is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_CLIENTS = all(importlib.util.find_spec(name) for name in ("langchain_tests", "litellm", "lm_eval"))
collect_ignore_glob = [] if HAS_CLIENTS else ["*"]

if HAS_CLIENTS:  # every run of the tests reads this file
    # The clients look for news of themselves, and for prices, on the network; and they keep what they have read.
    os.environ.update(
        HF_HOME=str(Path(__file__).resolve().parents[2] / ".cache" / "huggingface"),
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        LANGSMITH_TRACING="false",
        OPENAI_API_KEY="none",
    )
    for _name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[_name]


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that gets what the servers print."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def tiny_triton(logs: Path) -> Iterator[str]:
    """The URL of a tritonserver with the trained tiny checkpoint."""
    from conformance.running import TINY, triton

    with triton(TINY, logs / "tiny_triton.log") as url:
        yield url


@pytest.fixture(scope="session")
def gateway_url(tiny_triton: str, logs: Path) -> Iterator[str]:
    """The gateway in front of the tiny checkpoint, without /v1."""
    from conformance.running import gateway

    with gateway(tiny_triton, log=logs / "gateway.log") as url:
        yield url


@pytest.fixture(scope="session")
def base_url(gateway_url: str) -> str:
    """What OpenAI's clients are given as `base_url`."""
    return f"{gateway_url}/v1"


@pytest.fixture(scope="session")
def model_name(base_url: str) -> str:
    """The name that the gateway serves the tiny model by."""
    import httpx

    name: str = httpx.get(f"{base_url}/models", timeout=60).json()["data"][0]["id"]
    return name


@pytest.fixture(scope="session")
def obedient_url(logs: Path) -> Iterator[str]:
    """The base URL of a gateway in front of a model that calls any tool and follows any schema."""
    from conformance.obedient_triton import ObedientTriton
    from conformance.running import NAMES, gateway

    with ObedientTriton() as server:
        names = tuple(word for name in NAMES for word in ("--model", f"{name}={server.url}"))
        with gateway(log=logs / "obedient_gateway.log", options=names) as url:
            yield f"{url}/v1"
