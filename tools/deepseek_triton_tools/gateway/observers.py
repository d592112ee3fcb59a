"""Whoever the settings want to be told about requests, the log with a line of JSON for each among them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler

import msgspec

from deepseek_triton_tools.gateway.gateway_metrics import GatewayMetrics
from deepseek_triton_tools.gateway.handled_request import HandledRequest, RequestObserver
from deepseek_triton_tools.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)


class _GoesOn(logging.Handler):
    """Tells once that lines can't be written, and how many are missing when they can be again."""

    num_missing = 0
    _is_written = True

    def emit(self, record: logging.LogRecord) -> None:
        self._is_written = True
        try:
            super().emit(record)
        except OSError:  # the file has gone, and can't be opened again
            self.handleError(record)
        if self._is_written and self.num_missing:
            logger.warning("the access log is written again; %d lines are missing", self.num_missing)
            self.num_missing = 0

    def handleError(self, record: logging.LogRecord) -> None:
        self._is_written = False
        if not self.num_missing:
            logger.error("the access log can't be written: %s; requests are served without it", sys.exc_info()[1])
        self.num_missing += 1


class _ToFile(_GoesOn, WatchedFileHandler):
    pass


class _ToStdout(_GoesOn, logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 has it without arguments
    pass


class AccessLog:
    """Writes lines to a file or to stdout. Several processes may write to the same one.

    A file that was renamed, as logrotate does, is made anew. Where lines can't be written, as on a full disk, requests
    are served all the same.
    """

    def __init__(self, target: str) -> None:
        """`target` is a path, or "-" for stdout. Raises OSError."""
        self._handler = _ToStdout(sys.stdout) if target == "-" else _ToFile(target, encoding="utf-8")

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


_PROBES = {"/health", "/ready", "/metrics", "/v2/health/live", "/v2/health/ready", "/v2/models/{model}/ready"}
"""Asked every few seconds by machines; nobody is told of these."""


class Observers:
    """The metrics, and the access log and traces where the settings have them, as one RequestObserver."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises OSError for an access log that can't be written, ModuleNotFoundError without the extra `tracing`."""
        self._metrics = GatewayMetrics()
        self._all: list[RequestObserver] = [self._metrics]
        if settings.access_log is not None:
            self._all.append(AccessLog(settings.access_log))
        if settings.traces_url is not None:
            from deepseek_triton_tools.gateway.tracing import Traces

            self._all.append(Traces(settings.traces_url))

    def begins(self, record: HandledRequest) -> None:
        for observer in self._told_of(record):
            observer.begins(record)

    def ends(self, record: HandledRequest) -> None:
        record.end()
        for observer in self._told_of(record):
            observer.ends(record)

    def metrics(self, servers_up: Iterable[tuple[str, bool]] = (), *, names: bool = True) -> bytes:
        """The text for GET /metrics. servers_up: URL, and whether it gets requests. names: of servers and keys too."""
        return self._metrics.text(servers_up, names=names)

    def _told_of(self, record: HandledRequest) -> Iterable[RequestObserver]:
        return () if record.route in _PROBES else self._all

    def close(self) -> None:
        for observer in self._all:
            observer.close()
