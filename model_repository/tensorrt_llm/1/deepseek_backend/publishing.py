"""Publishes `BackendMetrics` on Triton's /metrics: a thread writes what has changed.

Each write is a message from the stub to tritonserver and back, 15 to 45 microseconds, so the threads that serve
requests never write. They count, and once in a period the differences are written. A histogram's buckets, sum and count
are written as counters, with the names that Prometheus gives to those of a histogram: PromQL sees no difference. Triton
has histograms of its own, which want a message for each value: at 900 requests a second these took a fifth of a core.
"""

import errno
import hashlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from deepseek_backend.backend_metrics import BackendMetrics, Kind, MetricSample

logger = logging.getLogger(__name__)

# Seconds to wait for the last write. A write that takes longer has nobody at the other end.
_STOP_S = 5.0


class Series(Protocol):
    """One series. Only the methods that its kind has are called. pb_utils.Metric has this form."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...


class MetricFactory(Protocol):
    """Makes series, with the labels that all of them have. model.py implements it on Triton's metrics."""

    def claim(self) -> bool:
        """Whether series can be made. The publisher asks before it makes the first one, until the answer is true."""

    def series(self, name: str, kind: Kind, text: str, labels: Mapping[str, str]) -> Series:
        """Make a series of the family `name`; the family is made on first use."""

    def close(self) -> None:
        """Remove every series."""


class MetricsLease:
    """The right to have series with some labels on this tritonserver. One process at a time holds it.

    A model that is loaded again without an unload is there twice until the old instance has finalized. Triton's core
    (2.51 to its main branch of 2026) counts the users of a series in each process's own family object: when the old
    instance's series are removed, the new instance's memory is freed with them, and tritonserver dies of a corrupted
    heap. So the new instance waits. The right is the name of an abstract socket, which the kernel takes back from a
    process that ends.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        # The server's pid and its pid namespace: containers may share the host's network, and with it these names.
        server = (os.stat("/proc/self/ns/pid").st_ino, os.getppid())
        name = hashlib.sha256(repr((server, sorted(labels.items()))).encode()).hexdigest()
        self._address = f"\0deepseek_triton_metrics_{name}"
        self._held: socket.socket | None = None

    def take(self) -> bool:
        """Take the right if it is free. True: this process holds it."""
        if self._held is not None:
            return True
        mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mine.bind(self._address)
        except OSError as error:
            mine.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._held = mine
        return True

    def give_back(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


class Publisher:
    """Publishes once in a period and once more on `stop`. After `start` only its thread publishes.

    After the first write that fails nothing more is written: in python_backend up to its main branch of July 2026, the
    stub reads a metric's error text from shared memory after the server may have freed it, and a few such errors end
    tritonserver (boost::interprocess::lock_exception). So nothing is written that Triton would refuse, and nothing is
    tried twice.
    """

    def __init__(
        self, metrics: BackendMetrics, factory: MetricFactory, *, observe_state: Callable[[], None], period_s: float
    ) -> None:
        """`observe_state` brings the gauges up to date."""
        self._metrics = metrics
        self._factory = factory
        self._observe_state = observe_state
        self._period_s = period_s
        self._series: dict[tuple[str, ...], Series] = {}
        self._written: dict[tuple[str, ...], float] = {}
        self._state_is_known = True
        self._broken = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Publish once more and remove every series."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        if self._thread.is_alive():
            logger.error("the metrics are stuck: Triton has not taken a number for %.0f s", _STOP_S)
            return
        self.publish()
        self._series.clear()
        self._factory.close()

    def publish(self) -> None:
        """Write every difference once. It raises nothing: metrics must not hurt serving."""
        if self._broken:
            return
        try:
            self._observe_state()
            self._state_is_known = True
        except Exception:
            if self._state_is_known:  # logged once, not every second
                logger.exception("the engine's state can't be read; the gauges on /metrics stay as they are")
            self._state_is_known = False
        try:
            if self._factory.claim():
                for sample in self._metrics.samples():
                    self._write(sample)
        except Exception:
            self._broken = True
            logger.exception("a metric can't be written; serving goes on, nothing more is published on /metrics")

    def _run(self) -> None:
        self.publish()
        while not self._broken and not self._stopped.wait(self._period_s):
            self.publish()

    def _write(self, sample: MetricSample) -> None:
        key = (sample.name, *sample.labels.values())
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._factory.series(sample.name, sample.kind, sample.help, sample.labels)
            self._written[key] = 0.0  # the value of a new series
        before = self._written[key]
        if sample.value == before:
            return
        if sample.kind is Kind.GAUGE:
            series.set(float(sample.value))
        elif sample.value > before:
            series.increment(float(sample.value - before))
        else:  # an engine that counts backwards; Triton refuses a decrease
            return
        self._written[key] = sample.value
