"""A line of JSON for each request."""

from __future__ import annotations

import logging
import sys
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler

import msgspec

from deepseek_triton_tools.gateway.app.handled_request import HandledRequest


class AccessLog:
    """Writes lines to a file or to stdout. Several processes may write to the same one.

    A file that was renamed, as logrotate does, is made anew.
    """

    def __init__(self, target: str) -> None:
        """`target` is a path, or "-" for stdout. Raises OSError."""
        self._handler = (
            logging.StreamHandler(sys.stdout) if target == "-" else WatchedFileHandler(target, encoding="utf-8")
        )

    def begins(self, record: HandledRequest) -> None:
        pass

    def ends(self, record: HandledRequest) -> None:
        self._handler.handle(logging.makeLogRecord({"msg": line_of(record)}))

    def close(self) -> None:
        self._handler.close()


def line_of(record: HandledRequest) -> str:
    """All fields in every line; what did not come to be is null."""
    fields = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "id": record.request_id,
        "upstream_id": record.upstream_id,
        "key": record.key_name or None,
        "route": record.route,
        "model": record.model or None,
        "stream": record.stream,
        "status": record.status or None,
        "error": record.error_code or None,
        "finish_reason": record.finish_reason or None,
        "server": record.server or None,
        "context_server": record.context_server or None,
        "retries": record.retries,
        "prompt_tokens": record.num_input_tokens,
        "cached_tokens": record.num_cached_tokens,
        "generated_tokens": record.num_output_tokens,
        "reasoning_tokens": record.num_reasoning_tokens,
        "ttft_s": _rounded(record.ttft_s),
        "itl_s": _rounded(record.mean_itl_s),
        "duration_s": _rounded(record.duration_s),
        "client_left": record.client_left,
    }
    return msgspec.json.encode(fields).decode()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
