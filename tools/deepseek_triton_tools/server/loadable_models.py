"""Finds out whether a ready server may still load a model, or will never have it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from deepseek_triton_client import AsyncClient, DeepseekTritonError, ModelNotFound

_ANSWER_S = 10.0
"""Seconds for the server's answer."""
_UNKNOWN = "is not found"
"""The end of Triton 2.51.0's message on a model that it neither has nor loads. A proxy's 404 has other words."""


async def missing_model(client: AsyncClient) -> str:
    """Say in one line why the server will never have the model; "" while it may.

    Triton's index also lists models that are in its repository and not loaded: somebody may still load them. Over gRPC,
    and where we may not read the index, only the model's own answer decides.
    """
    try:
        await client.metadata()
    except ModelNotFound as error:
        message = error.message
    except DeepseekTritonError:
        return ""
    else:
        return ""
    if not message.endswith(_UNKNOWN):
        return ""
    rows = await asyncio.to_thread(_index, client.url)
    if any(row.get("state") == "LOADING" for row in rows):
        return ""
    own = [row for row in rows if row.get("name") == client.model_name]
    if own and not any(row.get("state") == "READY" for row in own):
        return ""
    there = "" if not rows else f"; it has {_names(rows)}"
    return f"{client.url} has no such model: {message}{there}: give --model and --model-version as the server has them"


def _index(url: str) -> list[dict[str, Any]]:
    """Read Triton's index of its models by urllib: the client has no call for it. Empty if it can't be read. Blocks."""
    if not url.startswith(("http://", "https://")):
        return []
    request = urllib.request.Request(f"{url.rstrip('/')}/v2/repository/index", data=b"", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            rows = json.load(answer)
    except (OSError, ValueError):  # the server wants a token or a certificate, or doesn't show its index
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _names(rows: Sequence[dict[str, Any]]) -> str:
    named = (
        f"{row.get('name')} version {row['version']}" if row.get("version") else f"{row.get('name')}" for row in rows
    )
    return ", ".join(sorted(set(named)))
