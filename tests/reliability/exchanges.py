"""One request to a server or a gateway, and the record of all that came back.

HTTP is aiohttp's client, gRPC a stream for each request over one channel, with the messages of tritonclient: its own
clients don't show the final flag of a stream.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import grpc
import numpy as np
from bench._load import infer_message, strings, why_lost
from tritonclient.grpc import service_pb2_grpc

from reliability.history import NO_END, Record
from reliability.jobs import GRPC, Asked

# Two thousand clients beside other work make two cores that slow: a request waited for its turn, and had its end later.
PATIENCE_S = 600.0
"""A request without an end for so long counts as lost."""
_MODEL = "tensorrt_llm"
_BODY_TYPES = {"Content-Type": "application/json"}

OnFirst = Callable[[], object]


class Exchanges:
    """The connections of one client process. Make it in the event loop that it is used in."""

    def __init__(self, urls: Mapping[str, str], grpc_address: str, models: Mapping[str, str] | None = None) -> None:
        """`urls`: target -> base URL of HTTP. `models`: a gateway's target -> the model it is asked for."""
        self._urls = urls
        self._models = models or {}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        options = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
        # Else gRPC tries a server that was down again only after up to two minutes. The least of these times bounds the
        # making of a connection too, which takes seconds where many come at once: it stays as it is.
        options += [(f"grpc.{bound}_reconnect_backoff_ms", 100) for bound in ("initial", "max")]
        self._channel = grpc.aio.insecure_channel(grpc_address, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        await self._http.close()
        await self._channel.close()

    async def ask(self, asked: Asked, record: Record, on_first: OnFirst | None = None) -> None:
        """Fill the record. Leave where the request says so."""
        read = self._read_grpc if asked.protocol == GRPC else self._read_openai if asked.path else self._read_http
        leaves = asked.leave_after_s is not None
        try:
            await asyncio.wait_for(read(asked, record, on_first), asked.leave_after_s if leaves else PATIENCE_S)
        except asyncio.TimeoutError:
            record.left, record.lost = leaves, "" if leaves else f"{NO_END} in {PATIENCE_S:.0f} s"
        # grpc.aio raises a BaseError of its own where the connection goes while the last message is sent.
        except (aiohttp.ClientError, OSError, grpc.aio.AioRpcError, grpc.aio.BaseError) as error:
            record.lost = why_lost(error) or type(error).__name__
        record.ended_s = time.monotonic()

    # --- Triton's own protocols ---

    async def _read_http(self, asked: Asked, record: Record, on_first: OnFirst | None) -> None:
        verb = "generate_stream" if asked.streaming else "generate"
        body = {**asked.body, **({"id": asked.request_id} if asked.request_id else {})}
        async with self._post(f"{self._urls[asked.target]}/v2/models/{_MODEL}/{verb}", body) as answer:
            record.status = answer.status
            if answer.status != 200 or not asked.streaming:
                _take_outputs(record, _json_outputs((await answer.text()).removeprefix("data:")), asked)
                record.closed = True
                return
            async for event in _events(answer):
                _take_outputs(record, _json_outputs(event), asked)
                if on_first and record.responses == 1:
                    on_first()
                if record.responses == asked.leave_after_chunks and not _has_ended(record):
                    record.left = True
                    return
            record.closed = True

    async def _read_grpc(self, asked: Asked, record: Record, on_first: OnFirst | None) -> None:
        message = infer_message(_MODEL, asked.body)
        message.id = asked.request_id
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        if asked.timeout_us:
            message.parameters["timeout"].int64_param = asked.timeout_us
        record.finals = 0
        call = self._stub.ModelStreamInfer()
        try:
            await call.write(message)
            await call.done_writing()
            async for response in call:
                _take_message(record, response, asked)
                if on_first and record.responses == 1:
                    on_first()
                if record.responses == asked.leave_after_chunks and not _has_ended(record):
                    record.left = True
                    return
            record.closed = True
        finally:
            call.cancel()

    # --- OpenAI's ---

    async def _read_openai(self, asked: Asked, record: Record, on_first: OnFirst | None) -> None:
        body = {"model": self._models[asked.target], **asked.body}
        take = _take_response_event if asked.path == "/v1/responses" else _take_openai
        async with self._post(f"{self._urls[asked.target]}{asked.path}", body) as answer:
            record.status = answer.status
            if answer.status != 200 or not asked.streaming:
                document = json.loads(await answer.text())
                if document.get("error"):
                    record.errors.append(str(document["error"]["message"]))
                elif asked.path == "/v1/responses":
                    _take_response_event(record, {"type": "response.completed", "response": document})
                else:
                    _take_openai(record, document)
                record.closed = True
                return
            async for event in _events(answer):
                if event == "[DONE]":
                    record.closed = True
                    continue
                record.late += record.closed
                take(record, json.loads(event))
                if record.responses == asked.leave_after_chunks and not _has_ended(record):
                    record.left = True
                    return

    def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        return self._http.post(url, data=json.dumps(body).encode(), headers=_BODY_TYPES)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the data of each server-sent event. An error may come in a body without events, as a line."""
    async for line in answer.content:
        text = line.decode().strip()
        if text.startswith("data:"):
            yield text.removeprefix("data:").strip()
        elif text.startswith("{"):
            yield text


def _has_ended(record: Record) -> bool:
    return bool(record.errors or record.reasons)


def _json_outputs(text: str) -> dict[str, Any]:
    """Return each output as a list: Triton writes a tensor of one value as the value alone."""
    try:
        document = json.loads(text)
    except ValueError:
        return {"error": f"no JSON: {text[:200]!r}"}
    return {
        name: value if isinstance(value, list) or name in ("error", "id") else [value]
        for name, value in document.items()
    }


def _take_message(record: Record, message: Any, asked: Asked) -> None:
    response = message.infer_response
    if message.error_message:
        record.finals = (record.finals or 0) + 1
        _take_outputs(record, {"error": message.error_message}, asked)
        return
    outputs: dict[str, Any] = {"id": response.id} if response.id else {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        outputs[output.name] = _values(output.datatype, raw)
    record.finals = (record.finals or 0) + response.parameters["triton_final_response"].bool_param
    if response.outputs:
        _take_outputs(record, outputs, asked)


def _values(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        return [value.decode() for value in strings(raw)]
    return np.frombuffer(raw, np.dtype({"FP32": "f4"}.get(datatype, datatype.lower()))).tolist()


def _take_outputs(record: Record, outputs: Mapping[str, Any], asked: Asked) -> None:
    """Add one response of the model."""
    record.responses += 1
    if (found := outputs.get("id")) and found not in record.ids:
        record.ids.append(found)
    if "error" in outputs:
        record.late += bool(record.errors) or len(record.reasons) >= asked.num_sequences
        record.errors.append(str(outputs["error"]))
        return
    texts = outputs.get("text_output", [])
    indices = outputs.get("sequence_index", range(len(texts)))
    reasons = outputs.get("finish_reason", ["None"] * len(texts))
    for index, text, reason in zip(indices, texts, reasons, strict=True):
        record.late += index in record.reasons
        is_cumulative = asked.body.get("stream_mode") == "cumulative"
        record.texts[index] = text if is_cumulative else record.texts.get(index, "") + text
        if reason != "None":
            record.reasons.setdefault(index, []).append(reason)
    for index, number in zip(indices, outputs.get("num_output_tokens", ()), strict=False):
        record.tokens[index] = record.tokens.get(index, 0) + number
    record.prompt_tokens += [
        number for number in outputs.get("num_input_tokens", ()) if number not in record.prompt_tokens
    ]
    record.handover += "".join(outputs.get("context_phase_params", ()))
    record.logprobs += sum(len(json.loads(each)) for each in outputs.get("logprobs", ()))


def _take_openai(record: Record, document: Mapping[str, Any]) -> None:
    """Add a chunk, or a whole answer, of chat or plain completions."""
    record.responses += 1
    if "error" in document:
        record.late += _has_ended(record)
        record.errors.append(str(document["error"]["message"]))
        return
    if document["id"] not in record.ids:
        record.ids.append(document["id"])
    for choice in document["choices"]:
        index = choice["index"]
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        text = said.get("content") or ""
        calls = said.get("tool_calls") or ()
        record.late += bool(index in record.reasons and (text or calls))
        record.texts[index] = record.texts.get(index, "") + text
        record.call += "".join(call["function"].get("arguments") or "" for call in calls)
        if choice["finish_reason"]:
            record.reasons.setdefault(index, []).append(choice["finish_reason"])
    if usage := document.get("usage"):
        _take_usage(record, usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])


def _take_response_event(record: Record, event: Mapping[str, Any]) -> None:
    """Add an event of the Responses API. The last one has the whole answer, which must be what the deltas said."""
    record.responses += 1
    kind = event["type"]
    if kind == "error":
        record.errors.append(event["message"])
    if kind == "response.output_text.delta":
        record.texts[0] = record.texts.get(0, "") + event["delta"]
    if "response" not in event:
        return
    response = event["response"]
    if response["id"] not in record.ids:
        record.ids.append(response["id"])
    if kind not in ("response.completed", "response.incomplete", "response.failed"):
        return
    record.closed = True
    if response.get("error"):
        record.errors.append(str(response["error"]["message"]))
        return
    text = "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])
    record.late += 0 in record.texts and record.texts[0] != text
    record.texts[0] = text
    record.reasons.setdefault(0, []).append("length" if response["status"] == "incomplete" else "stop")
    usage = response["usage"]
    _take_usage(record, usage["input_tokens"], usage["output_tokens"], usage["total_tokens"])


def _take_usage(record: Record, prompt: int, completion: int, total: int) -> None:
    record.prompt_tokens.append(prompt)
    record.tokens[0] = record.tokens.get(0, 0) + completion
    record.total_tokens = total
