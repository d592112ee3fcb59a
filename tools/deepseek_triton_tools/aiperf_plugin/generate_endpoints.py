# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
"""Our generate endpoints for AIPerf: what is sent, and what the answers say.

Written for AIPerf 0.13, which is not installed beside the other tools: it needs an environment of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiperf.common.models import (
    ErrorDetails,
    ExtractedPayload,
    InferenceServerResponse,
    ParsedResponse,
    ReasoningResponseData,
    RequestInfo,
    RequestRecord,
    TextResponseData,
)
from aiperf.endpoints.base_endpoint import BaseEndpoint

_GOOD_ENDS = {"stop", "length"}
"""Finish reasons of whole answers; "None" is one of a sequence that goes on."""
_COUNTS = ("num_input_tokens", "num_output_tokens", "num_cached_tokens", "num_reasoning_tokens")
"""Outputs with a number for each sequence of the response."""


class FailedAnswerError(Exception):
    """An answer that ended with an error, or without its end."""


class GenerateEndpoint(BaseEndpoint):
    """/generate and /generate_stream with a prompt; a dataset's own payload may have input_ids instead."""

    def format_payload(self, request_info: RequestInfo) -> dict[str, Any]:
        """:raises ValueError: for a conversation of several turns."""
        if len(request_info.turns) != 1:
            raise ValueError("expected one turn, as a prompt has; --endpoint-type deepseek_triton_chat takes several")
        texts = [content for text in request_info.turns[0].texts for content in text.contents if content]
        return self._payload(request_info, {"text_input": texts[0] if len(texts) == 1 else texts})

    def _payload(self, request_info: RequestInfo, prompt: Mapping[str, Any]) -> dict[str, Any]:
        turn, endpoint = request_info.turns[-1], request_info.model_endpoint.endpoint
        payload = dict(prompt)
        if endpoint.streaming:
            payload["stream"] = True
        if turn.max_tokens is not None:
            payload["max_tokens"] = turn.max_tokens
        payload.update(endpoint.extra or ())
        payload.update(turn.extra_body or ())
        return payload

    def extract_payload_inputs(self, payload: dict[str, Any]) -> ExtractedPayload:
        """Show AIPerf our inputs under the names for which it looks."""
        inputs = dict(payload)
        for name in ("messages", "tools"):
            if isinstance(inputs.get(name), str):
                inputs[name] = json.loads(inputs[name])
        if "text_input" in inputs:
            inputs["prompt"] = inputs["text_input"]
        extracted = super().extract_payload_inputs(inputs)
        extracted.pretokenised_token_count += len(_values(payload.get("input_ids")))
        return extracted

    def parse_response(self, response: InferenceServerResponse) -> ParsedResponse | None:
        """Read one chunk. Its usage says what this chunk has; AIPerf needs sums, which `extract_response_data` makes.

        :raises FailedAnswerError: for an error, and for an end that is none.
        """
        body = response.get_json()
        if not isinstance(body, dict):
            return None
        if reason := _failure(body):
            raise FailedAnswerError(reason)
        counts = {name: sum(_values(body[name])) for name in _COUNTS if name in body}
        usage: dict[str, Any] = {"completion_tokens": counts.get("num_output_tokens", 0)}
        if "num_input_tokens" in counts:
            usage["prompt_tokens"] = counts["num_input_tokens"]
        if "num_cached_tokens" in counts:
            usage["prompt_tokens_details"] = {"cached_tokens": counts["num_cached_tokens"]}
        if "num_reasoning_tokens" in counts:
            usage["completion_tokens_details"] = {"reasoning_tokens": counts["num_reasoning_tokens"]}
        text, reasoning = ("".join(_values(body.get(name))) for name in ("text_output", "reasoning_output"))
        data: ReasoningResponseData | TextResponseData | None = None
        if reasoning:
            data = ReasoningResponseData(content=text, reasoning=reasoning)
        elif text or usage["completion_tokens"]:
            data = TextResponseData(text=text)
        metadata = {"finish_reason": _values(body.get("finish_reason"))}
        return ParsedResponse(perf_ns=response.perf_ns, data=data, usage=usage, metadata=metadata)

    def extract_response_data(self, record: RequestRecord) -> list[ParsedResponse]:
        """Return the chunks, each with the usage so far. A failed answer becomes the record's error, and has none.

        AIPerf asks in two processes, for its worker's own figures and for the results.
        """
        chunks: list[ParsedResponse] | None = record._parsed_responses_cache
        if chunks is not None:
            return chunks
        try:
            chunks = super().extract_response_data(record)
            ends = chunks[-1].metadata["finish_reason"] if chunks else []
            if not record.has_error and not _GOOD_ENDS.issuperset(ends or {"None"}):
                raise FailedAnswerError("the stream ended without a finish_reason")
        except FailedAnswerError as error:
            record.error = ErrorDetails(type=type(error).__name__, message=str(error))
            chunks = []
        num_output_tokens = 0
        for chunk in chunks:
            num_output_tokens += chunk.usage["completion_tokens"]
            chunk.usage["completion_tokens"] = num_output_tokens
        record._parsed_responses_cache = chunks
        return chunks


class ChatGenerateEndpoint(GenerateEndpoint):
    """/generate and /generate_stream with a conversation, which the server renders with its chat template."""

    def format_payload(self, request_info: RequestInfo) -> dict[str, Any]:
        if not request_info.turns:
            raise ValueError("expected a turn at least")
        openings = (("system", request_info.system_message), ("user", request_info.user_context_message))
        messages = [{"role": role, "content": content} for role, content in openings if content]
        prompt = {"messages": json.dumps(messages + self.build_messages(request_info.turns))}
        if tools := self._latest_turn_attr(request_info.turns, "raw_tools"):
            prompt["tools"] = json.dumps(tools)
        return self._payload(request_info, prompt)


def _failure(body: Mapping[str, Any]) -> str:
    """Return why the answer failed, as far as this part of it says; "" if it does not."""
    if "error" in body:
        return str(body["error"])
    bad = sorted(set(_values(body.get("finish_reason"))) - _GOOD_ENDS - {"None"})
    return f"finish_reason {', '.join(bad)}" if bad else ""


def _values(output: Any) -> list[Any]:
    """Return an output's values; an output with one value is written as the value itself."""
    return output if isinstance(output, list) else [] if output is None else [output]
