"""Servers are asked about themselves before a benchmark begins."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from deepseek_triton_client import Client, DeepseekTritonError, InvalidRequest, ServerUnavailable
from deepseek_triton_tools.bench.openai_target import tls_of
from deepseek_triton_tools.bench.targets import Endpoint, TargetSettings, client_arguments
from deepseek_triton_tools.tool_errors import ToolError

_LIMIT_S = 10
_LONG_FACTS = ("chat_template", "fields")


def endpoint_of(urls: Sequence[str], kind: str | None) -> Endpoint:
    """Tell what kind of servers these are. Raises ToolError for a mixture, and for the address of a model."""
    for url in urls:
        if "/v2/models" in url:
            raise ToolError(f"expected the server's own address, got {url}; name a model with --model", exit_code=2)
    kinds: set[Endpoint] = set()
    for url in urls:
        if kind == "openai" or (kind is None and url.startswith("http") and url.rstrip("/").endswith("/v1")):
            kinds.add("openai")
        else:
            kinds.add("triton-grpc" if url.startswith("grpc") else "triton-http")
    if len(kinds) > 1:
        raise ToolError(f"expected servers of one kind, got {' and '.join(sorted(kinds))}", exit_code=2)
    return kinds.pop()


def first_openai_model(target: TargetSettings) -> str:
    """Return the name of the first model that an OpenAI endpoint lists. Raises ToolError."""
    url = f"{target.urls[0].rstrip('/')}/models"
    try:
        return str(_document(url, target)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        other = "; there is no OpenAI API: for Triton, leave /v1 out" if error.code == HTTPStatus.NOT_FOUND else ""
        raise ToolError(f"{url}: {error.code} {error.reason}{other}") from error
    except urllib.error.URLError as error:
        is_tls = isinstance(error.reason, ssl.SSLError)
        hint = "does it speak TLS (https://), and is --ca right?" if is_tls else "is the server running?"
        raise ToolError(f"{url}: no answer ({error.reason}); {hint}") from error
    except OSError as error:
        raise ToolError(f"{url}: no answer ({error}); is the server running?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ToolError(f"{url}: expected a list of models; name one with --model") from error


def _document(url: str, target: TargetSettings) -> Any:
    """Return the JSON at `url`. Raises OSError, of which URLError is one, and ValueError."""
    request = urllib.request.Request(url)
    if target.token:
        request.add_unredirected_header("Authorization", f"Bearer {target.token}")
    tls = tls_of(target)
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_S, context=None if tls is True else tls) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        error.close()
        raise


def model_facts(target: TargetSettings) -> Mapping[str, Any]:
    """Return what our backend says of the model, or our gateway at `/tokenizer_info`; nothing for other servers.

    :raises DeepseekTritonError: when the server can't be reached.
    :raises ToolError: when it has OpenAI's API only.
    """
    if target.endpoint == "openai":
        return _tokenizer_facts(target)
    url = target.urls[0].rstrip("/")
    try:
        with Client(target.urls[0], **client_arguments(target)) as client:
            facts = client.model_info()
    except InvalidRequest:
        if target.endpoint == "triton-http" and url.startswith("http"):
            with suppress(OSError, ValueError):  # Triton has no such page
                _document(f"{url}/v1/models", target)
                raise ToolError(f"{url} is an OpenAI endpoint: expected {url}/v1", exit_code=2) from None
        return {}  # another model of Triton's, which describes nothing
    return {name: value for name, value in facts.items() if name not in _LONG_FACTS}


def _tokenizer_facts(target: TargetSettings) -> Mapping[str, Any]:
    try:
        facts = _document(f"{target.urls[0].rstrip('/').removesuffix('/v1')}/tokenizer_info", target)
    except (OSError, ValueError):
        return {}  # most servers have no such page
    if not isinstance(facts, dict):
        return {}
    sizes = {"vocab_size": facts.get("vocab_size"), "max_seq_len": facts.get("model_max_length")}
    return {name: value for name, value in sizes.items() if type(value) is int and value > 0}


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
