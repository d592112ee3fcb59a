"""Servers are asked about themselves before a benchmark begins."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from deepseek_triton_client import Client, DeepseekTritonError, InvalidRequest, ServerUnavailable
from deepseek_triton_tools.bench.load.bench_target import Endpoint, TargetSettings
from deepseek_triton_tools.bench.load.triton_target import client_arguments
from deepseek_triton_tools.tool_errors import ToolError

_LIMIT_S = 10


def endpoint_of(urls: Sequence[str], given: str | None) -> Endpoint:
    """Tell what kind of servers these are. Raises ToolError for a mixture."""
    kinds: set[Endpoint] = {_endpoint(url, given) for url in urls}
    if len(kinds) > 1:
        raise ToolError(f"expected servers of one kind, got {' and '.join(sorted(kinds))}", exit_code=2)
    return kinds.pop()


def _endpoint(url: str, given: str | None) -> Endpoint:
    if given == "openai" or (given is None and url.startswith("http") and url.rstrip("/").endswith("/v1")):
        return "openai"
    return "triton-grpc" if url.startswith("grpc") else "triton-http"


def first_openai_model(url: str, token: str | None) -> str:
    """Return the name of the first model that an OpenAI endpoint lists. Raises ToolError."""
    request = urllib.request.Request(f"{url.rstrip('/')}/models")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
            return str(json.load(response)["data"][0]["id"])
    except (urllib.error.URLError, OSError) as error:
        raise ToolError(f"{request.full_url}: no answer ({error}); is the server running?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ToolError(f"{request.full_url}: expected a list of models; name one with --model") from error


def model_facts(target: TargetSettings) -> Mapping[str, Any]:
    """Return what our backend says of the model; nothing for other servers.

    :raises DeepseekTritonError: when the server can't be reached.
    """
    if target.endpoint == "openai":
        return {}
    try:
        with Client(target.urls[0], **client_arguments(target)) as client:
            facts = client.model_info()
    except InvalidRequest:
        return {}  # another model of Triton's, which describes nothing
    return {name: value for name, value in facts.items() if name not in _LONG_FACTS}


_LONG_FACTS = {"chat_template", "fields"}


def token_counts(target: TargetSettings, texts: Sequence[str]) -> list[int]:
    """Let the first server count the tokens of texts. Raises ToolError where it can't."""
    if target.endpoint == "openai":
        raise ToolError("an OpenAI endpoint can't count the tokens of this dataset: give --osl", exit_code=2)
    try:
        with Client(target.urls[0], **client_arguments(target)) as client:
            return [len(client.tokenize(text)) for text in texts]
    except ServerUnavailable:
        raise
    except DeepseekTritonError as error:
        raise ToolError(f"the server can't count the tokens of this dataset, so give --osl: {error}") from error
