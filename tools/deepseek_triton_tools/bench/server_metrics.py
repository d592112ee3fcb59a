"""The servers' own metrics, and their GPUs', during a run: Prometheus text, read once a second."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from types import TracebackType
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
        place = f"{parts.scheme}://{parts.netloc}" if endpoint == "openai" else f"http://{host}:{_TRITON_PORT}"
        addresses.append(f"{place}/metrics")
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
        own_hosts = set(map(_host, own_urls))
        self.problems: dict[str, str] = {}
        """A line for each address that could not be read, of the first time."""
        self._interval_s = interval_s
        self._values: dict[str, array[float]] = {}
        self._stop = threading.Event()
        self._threads = []
        self._began = threading.Barrier(len(urls) + 1)
        for url in urls:
            client = partial(
                Client,
                url,
                metrics_url=url,
                timeouts=_TIMEOUTS,
                tls=tls or Tls(),
                token=token if _host(url) in own_hosts else None,
            )
            labels = {"server": urlsplit(url).netloc} if len(urls) > 1 else {}
            thread = threading.Thread(
                target=self._watch, args=(url, client, labels), name=f"metrics of {url}", daemon=True
            )
            self._threads.append(thread)

    def __enter__(self) -> MetricsWatch:
        for thread in self._threads:
            thread.start()
        self._began.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def summaries(self) -> dict[str, MetricSummary]:
        """Return each series by its name with labels, in alphabetical order, after the block."""
        return {
            name: MetricSummary(first=values[0], last=values[-1], mean=fmean(values), max=max(values))
            for name, values in sorted(self._values.items())
        }

    def _watch(self, url: str, connect: Callable[[], Client], labels: Mapping[str, str]) -> None:
        client: Client | None = None
        try:
            client = connect()
            self._read(url, client, labels)
        except DeepseekTritonError as error:  # the URL is none
            self.problems[url] = str(error)
        finally:
            self._began.wait()
        if client is not None:
            with client:
                while not self._stop.wait(self._interval_s):
                    self._read(url, client, labels)
                self._read(url, client, labels)

    def _read(self, url: str, client: Client, labels: Mapping[str, str]) -> None:
        try:
            samples = client.metrics().samples
        except DeepseekTritonError as error:
            self.problems.setdefault(url, f"{url}: no metrics: {str(error).removeprefix(f'{url}: ')}")
            return
        if not samples:
            self.problems.setdefault(url, f"{url}: no metrics: the page has none; does its path end in /metrics?")
        for sample in samples:
            # Buckets are many, and only a query over all of them says something.
            if math.isfinite(sample.value) and not sample.name.endswith("_bucket"):
                pairs = sorted({**sample.labels, **labels}.items())
                text = ",".join(f'{name}="{value}"' for name, value in pairs)
                name = f"{sample.name}{{{text}}}" if text else sample.name
                self._values.setdefault(name, array("d")).append(sample.value)


def _host(url: str) -> str | None:
    return urlsplit(url if "://" in url else f"//{url}").hostname
