"""Encodes inputs and decodes outputs, for both protocols. No I/O; what names mean is `dialect`'s matter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from deepseek_triton_client._core.exceptions import ProtocolError, ServerError, error_from_server
from deepseek_triton_client._core.tensor_encoding import decode
from deepseek_triton_client._core.transport import Input, Outputs


def encode_json(request_id: str, inputs: Sequence[Input]) -> bytes:
    """Return the body of a POST to generate_stream."""
    body: dict[str, Any] = {"id": request_id}
    for each in inputs:
        body[each.name] = each.values[0] if len(each.values) == 1 else list(each.values)
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def decode_json(data: bytes) -> Outputs:
    """Return the outputs in an event of generate_stream. Raises its `{"error": ...}`, or ProtocolError."""
    outputs = json_object(data)
    if "error" in outputs:
        raise error_from_server(str(outputs["error"]), otherwise=ServerError)
    return outputs


def decode_tensors(tensors: Iterable[tuple[str, str, bytes]]) -> Outputs:
    """Return the outputs of a gRPC response, given as (name, datatype, contents). Outputs of unknown datatypes are left
    out. Raises ProtocolError for contents that don't fit their datatype."""
    outputs: dict[str, Any] = {}
    for name, datatype, data in tensors:
        values = decode(name, datatype, data)
        if values is not None:
            outputs[name] = values[0] if len(values) == 1 else values
    return outputs


def json_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises ProtocolError for anything but a JSON object in UTF-8."""
    try:
        # Decoded here, because json.loads would guess at UTF-16 and accept halves of surrogate pairs.
        value = json.loads(data.decode())
        if b"\\u" in data:  # an escape may be half of a pair too, which no file and no terminal takes
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"expected a JSON object, got {data[:200]!r}") from exc
    if not isinstance(value, dict):
        raise ProtocolError(f"expected a JSON object, got {data[:200]!r}")
    return value
