"""Whether a server that is ready can still come to have the model that is waited for."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from deepseek_triton_client import AsyncClient, DeepseekTritonError, ModelNotFound

_ANSWER_S = 10.0
_UNKNOWN = "is not found"
"""So end Triton's words on a model or version it neither has nor loads (seen with 2.51.0). A proxy's 404 has others."""


async def missing_model(client: AsyncClient) -> str:
    """Why the server will not have the model, in one line; "" while it may.

    Triton's index also has models that are in its repository and not loaded: somebody may load them yet. Over gRPC, and
    where the index is closed to us, the model's own answer decides alone.
    """
    try:
        await client.metadata()
    except ModelNotFound as error:
        words = error.message
    except DeepseekTritonError:
        return ""
    else:
        return ""
    if not words.endswith(_UNKNOWN):
        return ""
    rows = await asyncio.to_thread(_index, client.url)
    if any(row.get("state") == "LOADING" for row in rows):
        return ""
    own = [row for row in rows if row.get("name") == client.model_name]
    if own and not any(row.get("state") == "READY" for row in own):
        return ""
    there = "" if not rows else f"; it has {_names(rows)}"
    return f"{client.url} has no such model: {words}{there}: give --model and --model-version as the server has them"


def _index(url: str) -> list[dict[str, Any]]:
    """What Triton says of its model repository; nothing where it can't be asked. Blocks."""
    if not url.startswith(("http://", "https://")):
        return []
    request = urllib.request.Request(f"{url.rstrip('/')}/v2/repository/index", data=b"", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            rows = json.load(answer)
    except (OSError, ValueError):  # it wants a token, a certificate of ours, or does not let anybody look
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _names(rows: Sequence[dict[str, Any]]) -> str:
    named = (
        f"{row.get('name')} version {row['version']}" if row.get("version") else f"{row.get('name')}" for row in rows
    )
    return ", ".join(sorted(set(named)))
