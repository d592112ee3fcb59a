"""The servers' own metrics, and their GPUs', during a run: Prometheus text, read once a second."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from deepseek_triton_client import Client, DeepseekTritonError, Timeouts, Tls
from deepseek_triton_tools.bench.figures import MetricSummary

_INTERVAL_S = 1.0
_TIMEOUTS = Timeouts(connect=5.0)
_TRITON_PORT = 8002


def usual_metrics_urls(urls: Iterable[str], endpoint: str) -> tuple[str, ...]:
    """Return where servers at `urls` have their metrics: Triton on port 8002, OpenAI endpoints beside their API."""
    addresses = []
    for url in urls:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        is_openai = endpoint == "openai"
        addresses.append(
            f"{parts.scheme}://{parts.netloc}/metrics" if is_openai else f"http://{host}:{_TRITON_PORT}/metrics"
        )
    return tuple(dict.fromkeys(addresses))


class MetricsWatch:
    """Reads the metrics when its block begins, every second, and when it ends.

    It has threads of its own, because the load occupies the caller's. A server that can't be read costs the run
    nothing but a line in `problems`, and is asked again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        own_urls: Sequence[str] = (),
        token: str | None = None,
        tls: Tls | None = None,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        """:param own_urls: the servers that `token` is for; it is sent to no other host."""
        several = len(urls) > 1
        own_hosts = set(map(_host, own_urls))
        self._stop = threading.Event()
        self._servers = [
            _WatchedServer(
                url,
                self._stop,
                interval_s,
                {"tls": tls or Tls(), "token": token if _host(url) in own_hosts else None},
                {"server": urlsplit(url).netloc} if several else {},
            )
            for url in urls
        ]

    def __enter__(self) -> MetricsWatch:
        for server in self._servers:
            server.start()
        for server in self._servers:
            server.began.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for server in self._servers:
            server.join()

    @property
    def problems(self) -> dict[str, str]:
        """A line for each address that could not be read, of the first time."""
        return {server.url: server.problem for server in self._servers if server.problem}

    def summaries(self) -> dict[str, MetricSummary]:
        """Return each series by its name with labels, in alphabetical order, after the block."""
        series_of_all = {name: series.summary() for server in self._servers for name, series in server.series.items()}
        return dict(sorted(series_of_all.items()))


def _host(url: str) -> str | None:
    return urlsplit(url if "://" in url else f"//{url}").hostname


class _WatchedServer(threading.Thread):
    def __init__(
        self,
        url: str,
        stop: threading.Event,
        interval_s: float,
        client_settings: Mapping[str, Any],
        labels: Mapping[str, str],
    ) -> None:
        super().__init__(name=f"metrics of {url}", daemon=True)
        self.series: dict[str, _Series] = {}
        self.problem = ""
        self.began = threading.Event()
        """Set after the first reading."""
        self.url = url
        self._stop_reading = stop
        self._interval_s = interval_s
        self._client_settings = client_settings
        self._labels = labels

    def run(self) -> None:
        try:
            with Client(self.url, metrics_url=self.url, timeouts=_TIMEOUTS, **self._client_settings) as client:
                self._read(client)
                self.began.set()
                while not self._stop_reading.wait(self._interval_s):
                    self._read(client)
                self._read(client)
        except DeepseekTritonError as error:  # the URL is none
            self.problem = str(error)
        finally:
            self.began.set()

    def _read(self, client: Client) -> None:
        try:
            samples = client.metrics().samples
        except DeepseekTritonError as error:
            reason = str(error).removeprefix(f"{self.url}: ")
            self.problem = self.problem or f"{self.url}: no metrics: {reason}"
            return
        if not samples:
            self.problem = self.problem or f"{self.url}: no metrics: the page has none; does its path end in /metrics?"
        for sample in samples:
            # Buckets are many, and only a query over all of them says something.
            if math.isfinite(sample.value) and not sample.name.endswith("_bucket"):
                pairs = sorted({**sample.labels, **self._labels}.items())
                labels = ",".join(f'{name}="{value}"' for name, value in pairs)
                name = f"{sample.name}{{{labels}}}" if labels else sample.name
                self.series.setdefault(name, _Series(sample.value)).add(sample.value)


@dataclass(slots=True)
class _Series:
    first: float
    last: float = 0.0
    total: float = 0.0
    number: int = 0
    max: float = -math.inf

    def add(self, value: float) -> None:
        self.last = value
        self.total += value
        self.number += 1
        self.max = max(self.max, value)

    def summary(self) -> MetricSummary:
        return MetricSummary(first=self.first, last=self.last, mean=self.total / self.number, max=self.max)
