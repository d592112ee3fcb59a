"""OpenAI's API over HTTP, for addresses whose path ends in /v1: the gateway's, or another server's.

Requests have the names of OpenAI and vLLM, and events become the outputs that Triton would send.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.exceptions import InvalidRequest, ModelNotFound, ModelNotReady, ProtocolError
from deepseek_triton_client._core.interfaces import Input, Outputs
from deepseek_triton_client._core.results import ModelMetadata, TensorMetadata
from deepseek_triton_client._core.sampling_params import GUIDES, SAMPLING_FIELDS
from deepseek_triton_client._core.wire import decode_json, json_object
from deepseek_triton_client._http.http_errors import repeatable, status_error
from deepseek_triton_client._http.http_transport import PATH_CHARACTERS, HttpResponseStream, HttpTransport, NewSocket

_TRITON_MODEL = "tensorrt_llm"
"""The name that nobody gave. OpenAI's models have other names, and then the first one is asked."""
_NOT_READ = ("logprobs", "tools", "tool_choice")
"""Fields whose results come in other forms than Triton's."""
_BESIDE = (*GUIDES, "add_special_tokens", "priority", "timeout_ms")
"""Fields that vLLM takes beside its sampling parameters, and of the gateway's the last one."""
_FIELDS = {
    field.tensor_name: field
    for field in SAMPLING_FIELDS
    if (field.vllm or field.json or field.name in _BESIDE) and field.name not in _NOT_READ
}
_EARLY = ("timeout", "cancelled")
"""Triton's finish reasons that are `stop_reason` here, beside "length"."""


def http_transport(endpoint: Endpoint, settings: Settings, new_socket: NewSocket) -> HttpTransport:
    kind = OpenAITransport if endpoint.path.endswith("/v1") else HttpTransport
    return kind(endpoint, settings, new_socket)


class OpenAITransport(HttpTransport):
    """See `Transport`."""

    def __init__(self, endpoint: Endpoint, settings: Settings, new_socket: NewSocket) -> None:
        super().__init__(endpoint, settings, new_socket)
        self._path = quote(endpoint.path, safe=PATH_CHARACTERS)
        self._asked = self._name = settings.model_name
        self._rows: dict[str, Any] = {}

    def open(self, request_id: str, inputs: Sequence[Input], *, connect_s: float | None) -> HttpResponseStream:
        values = {each.name: each.values for each in inputs}
        body: dict[str, Any] = {"model": self._name, "stream": True, "stream_options": {"include_usage": True}}
        for name in _FIELDS.keys() & values.keys():
            field, (*several,) = _FIELDS[name], values[name]
            key = field.vllm if isinstance(field.vllm, str) else field.name
            body[key] = several if field.many else _json(field.name, several[0]) if field.json else several[0]
        if "messages" in values:
            path, body["messages"] = "chat/completions", _json("messages", values["messages"][0])
        else:
            path, body["prompt"] = "completions", list(values.get("input_ids", ())) or values["text_input"][0]
        content = json.dumps(body, ensure_ascii=False).encode()
        request_ids = {b"x-request-id": quote(request_id, safe=":").encode()}
        request = partial(self.generate_request, f"{self._path}/{path}".encode(), content, request_ids)
        return self.stream(request, _outputs, connect_s)

    async def metadata(self, timeout_s: float | None) -> ModelMetadata:
        """Return what the model takes, in Triton's words."""
        status, headers, body = await self._get(f"{self._path}/models", timeout_s)
        if status == 404:
            raise ModelNotFound(f"a Triton server's URL has no /v1, and OpenAI's API at {self._path} is not found")
        if status != 200:
            raise repeatable(status_error(status, headers, body))
        try:
            self._rows = {str(each["id"]): each for each in json_object(body)["data"]}
        except (LookupError, TypeError) as exc:
            raise ProtocolError(f"{self._path}/models: expected OpenAI's list of models, got {body[:200]!r}") from exc
        is_named = self._asked != _TRITON_MODEL or _TRITON_MODEL in self._rows
        if not (is_named or self._rows):
            raise repeatable(ModelNotReady(f"{self._path}/models: no model is ready, or the key is for others"))
        self._name = self._asked if is_named else next(iter(self._rows))
        inputs = [TensorMetadata(field.tensor_name, field.datatype, (1,)) for field in _FIELDS.values()]
        inputs += [TensorMetadata(name, "BYTES", (1,)) for name in ("text_input", "messages", "input_ids")]
        outputs = [TensorMetadata(name, "BYTES", (1,)) for name in ("text_output", "sequence_index")]
        row = self._rows.get(self._name, {})
        version = row.get("system_fingerprint") or row.get("root")  # tells models of one name apart
        return ModelMetadata(self._name, (str(version),) if version else (), "openai", tuple(inputs), tuple(outputs))

    async def server_ready(self, timeout_s: float | None) -> bool:
        with suppress(ModelNotReady):
            await self.metadata(timeout_s)
        return True

    async def model_ready(self, timeout_s: float | None) -> bool:
        """Ask by name too: a gateway's model may load or be down, a proxy may list few, and vLLM has the list only."""
        status, headers, body = await self._get(f"{self._path}/models/{quote(self._name, safe='')}", timeout_s)
        if status not in (200, 503) and self._name not in self._rows:
            missing = ModelNotFound(f"model {self._name!r} is not found")
            raise missing if status == 404 else status_error(status, headers, body)
        if status == 503:
            raise ModelNotReady(status_error(status, headers, body).message)
        return True

    async def index(self, timeout_s: float | None) -> list[dict[str, str]]:
        return [{"name": name} for name in self._rows]


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise InvalidRequest(f"{name}: expected JSON, got {text!r:.200}") from exc


def _outputs(data: bytes) -> Outputs | None:
    """Return Triton's outputs of an event; None at the end."""
    if data == b"[DONE]":
        return None
    event = decode_json(data)
    try:
        choices: list[Mapping[str, Any]] = event.get("choices") or [{}]  # usage comes without a choice
        deltas = [choice.get("delta") or {} for choice in choices]
        ends = [(choice.get("finish_reason"), choice.get("stop_reason")) for choice in choices]
        outputs: dict[str, Any] = {
            "text_output": [d.get("content") or c.get("text") or "" for c, d in zip(choices, deltas, strict=True)],
            "sequence_index": [choice.get("index", 0) for choice in choices],
            "reasoning_output": [each.get("reasoning_content") or each.get("reasoning") or "" for each in deltas],
            "finish_reason": [why if end == "length" and why in _EARLY else end or "None" for end, why in ends],
        }
        if usage := event.get("usage"):
            outputs["num_input_tokens"] = [usage["prompt_tokens"]] * len(choices)
            outputs["num_output_tokens"] = [usage["completion_tokens"]] + [0] * (len(choices) - 1)
            for name, side in (("cached", "prompt"), ("reasoning", "completion")):
                if (count := (usage.get(f"{side}_tokens_details") or {}).get(f"{name}_tokens")) is not None:
                    outputs[f"num_{name}_tokens"] = [count] + [0] * (len(choices) - 1)
        return outputs
    except (AttributeError, LookupError, TypeError) as exc:
        raise ProtocolError(f"expected an event of OpenAI's API, got {data[:200]!r}") from exc
