"""Whoever the settings want to be told about requests."""

from __future__ import annotations

from collections.abc import Iterable

from deepseek_triton_tools.gateway.app.access_log import AccessLog
from deepseek_triton_tools.gateway.app.gateway_metrics import GatewayMetrics
from deepseek_triton_tools.gateway.app.handled_request import HandledRequest, RequestObserver
from deepseek_triton_tools.gateway.settings import GatewaySettings

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
            from deepseek_triton_tools.gateway.app.tracing import Traces

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
