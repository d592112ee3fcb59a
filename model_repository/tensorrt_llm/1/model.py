"""TritonPythonModel: Triton's life cycle, its response senders and its metrics, nothing else.

Triton imports this file as module `1.model` and appends the version folder to sys.path. Everything else is in the
package `deepseek_backend` beside it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

try:
    from deepseek_backend.backend_metrics import BackendMetrics, Kind, info
    from deepseek_backend.config import load_config
    from deepseek_backend.contract import TRITON_CODES
    from deepseek_backend.engines import create_engine, instance_environment
    from deepseek_backend.errors import BackendError, ConfigError, RequestError, describe
    from deepseek_backend.publishing import MetricsLease, Publisher, Series
    from deepseek_backend.sequence_buffer import Outputs
    from deepseek_backend.service import Service
    from deepseek_backend.triton_process import ExitWatch, ProcessGuard, end_server, own_regions, parent_server
    from deepseek_backend.watcher import ServerAbove
except SyntaxError as error:  # whose text has the file's name alone, which several have
    raise ImportError(f"{error.filename or 'a file of deepseek_backend'}:{error.lineno or ''} {error.msg}") from None

logger = logging.getLogger("deepseek_backend")

SWITCH_INTERVAL_S = 0.001
"""Seconds for which a thread that computes in Python may keep other threads waiting. At Python's own 5 ms a model with
one busy thread was seen to send 188 responses a second, at 0.5 ms 1,340, at 0.1 ms 3,000; but below 1 ms the switches
themselves cost more than they bring once several threads are busy."""
GC_THRESHOLDS = (50_000, 50, 50)
"""New objects, and collections of the next younger generation, after which a garbage collection starts."""


class TritonPythonModel:
    """One instance of the model. Triton calls every method from the stub's main thread."""

    _service: Service | None = None
    _publisher: Publisher | None = None
    _exit_watch: ExitWatch | None = None
    _guard: ProcessGuard | None = None

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine. Triton reports the model READY when this returns and its failure when this raises."""
        _log_to_triton()
        try:
            _check_numpy()
            started = time.monotonic()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            version_dir = Path(args["model_repository"]) / args["model_version"]
            config = load_config(version_dir / "model.yaml")
            model_config = json.loads(args["model_config"])
            _check_agreement(model_config, config.decoupled, config.max_batch_size)
            logger.info("loading %s on the %s engine", config.model, config.engine)
            server = self._watched_server()  # before the engine: the guard has to be forked from a small process
            engine = create_engine(config)
            os.environ.update(instance_environment(config.engine, model_config, args["model_instance_name"]))
            metrics = BackendMetrics(info(config))
            service = Service(config, engine, metrics=metrics, server=server)
            service.start()
        except (ConfigError, BackendError) as error:
            # `from None`, because Triton puts the exception with its whole traceback into its log and its answer.
            raise pb_utils.TritonModelException(str(error)) from None
        self._service = service
        if self._guard is not None and config.on_fatal == "exit":
            self._guard.arm()
        # Triton's own labels, and the instance where several would write to one series.
        labels = {"model": args["model_name"], "version": args["model_version"]}
        if sum(group["count"] for group in model_config["instance_group"]) > 1:
            labels["model_instance"] = args["model_instance_name"]
        self._publisher = Publisher(
            metrics, TritonMetrics(labels), observe_state=service.publish_state, period_s=config.metrics_period_s
        )
        self._publisher.start()
        # Every token is an object or two, and by default 700 new objects start a collection: that took a quarter of the
        # backend's time at 600,000 tokens a second. What has been loaded stays until the process ends.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        logger.info("%s is ready after %.1f s", config.model, time.monotonic() - started)

    def execute(self, requests: list[Any]) -> None:
        """Take requests. The responses follow from delivery's threads, also where the model is not decoupled: Triton
        lets such a model answer by its senders too, so that no request waits for another."""
        if self._service is None:
            raise RuntimeError("execute before initialize")
        for request in requests:
            try:
                reply = TritonReply(request.get_response_sender())
            except Exception:
                # The bindings failed; the other requests still have their senders.
                logger.exception("a request has no response sender: it can't be answered")
                continue
            try:
                inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                parameters, client_id, timeout_us = request.parameters(), request.request_id(), request.timeout()
            except Exception as error:
                # Bytes that are not UTF-8 or not a tensor: only this request is refused.
                self._service.refuse(reply, RequestError(f"the request can't be read: {describe(error)}"))
                continue
            self._service.accept(inputs, parameters, reply, client_id=client_id, timeout_us=timeout_us)

    def is_ready(self) -> bool:
        """Answer `v2/models/<model>/ready`. Triton 26.03 and later call this; older releases never do."""
        return self._service is not None and self._service.readiness().alive

    def finalize(self) -> None:
        """Release the engine. Triton calls this on unload and on exit, when no request is in flight any more."""
        if self._guard is not None:
            self._guard.disarm()
        if self._service is not None:
            self._service.stop()
            self._service = None
        if self._publisher is not None:
            self._publisher.stop()
            self._publisher = None
        if self._exit_watch is not None:
            self._exit_watch.close()
            self._exit_watch = None

    def _watched_server(self) -> ServerAbove:
        """Return the Triton server above this process, for the watcher, and start the guard."""
        pid = parent_server()
        if pid is None:
            logger.warning(
                "process %d above this one is no Triton server (it maps no libtritonserver): when the engine or this "
                "process dies nobody ends it, and open requests get no time when it exits",
                os.getppid(),
            )
            return ServerAbove()
        try:
            self._guard = ProcessGuard(pid, own_regions())
        except OSError as error:
            logger.warning("no guard process: %s; a crash of this process would go unnoticed", describe(error))
        self._exit_watch = ExitWatch(pid)
        return ServerAbove(
            is_exiting=self._exit_watch.is_exiting,
            exit_timeout_s=self._exit_watch.exit_timeout_s,
            end=lambda reason: end_server(pid),
        )


class TritonReply:
    """An active_request.Reply on Triton's response sender."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, outputs: Outputs, *, final: bool) -> None:
        tensors = [pb_utils.Tensor(name, array) for name, array in outputs]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=flags)

    def finish(self) -> None:
        self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send_error(self, error: BackendError) -> None:
        code = getattr(pb_utils.TritonError, TRITON_CODES[error.code])
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(error.wire_message(), code))
        try:
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except pb_utils.TritonModelException:
            # A sender of a model that is not decoupled takes one response, even if that one could not be sent. It still
            # takes the end, of which Triton makes an error for the client.
            self.finish()

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class TritonMetrics:
    """A publishing.MetricFactory on Triton's own metrics. With the server's metrics turned off it does nothing."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._lease = MetricsLease(labels)
        self._families: dict[str, Any] = {}

    def claim(self) -> bool:
        return self._lease.take()

    def series(self, name: str, kind: Kind, text: str, labels: Mapping[str, str]) -> Series:
        if name not in self._families:
            triton_kind = getattr(pb_utils.MetricFamily, kind.name)
            self._families[name] = pb_utils.MetricFamily(name=name, description=text, kind=triton_kind)
        series: Series = self._families[name].Metric(labels={**self._labels, **labels})
        return series

    def close(self) -> None:
        self._families.clear()  # a family keeps its series; dropping the last reference takes them out of the server
        self._lease.give_back()


def _check_numpy() -> None:
    """Refuse a numpy that the stub was not built for: it reads and writes wrong tensors without an error.

    This was seen with nvidia-pytriton 0.7.0, whose stub needs numpy 1.x: under 2.x [1, 2, 3] came back as [1, 1, 1].
    """
    expected = [1, 2, 3]
    got = pb_utils.Tensor("check", np.array(expected, dtype=np.int32)).as_numpy().tolist()
    if got != expected:
        raise ConfigError(
            [
                f"numpy {np.__version__} does not fit this Triton's Python backend ({expected} came back as {got}): "
                "install the numpy it was built for ('numpy<2' beside the nvidia-pytriton wheel)"
            ]
        )


def _check_agreement(model_config: dict[str, Any], decoupled: bool, max_batch_size: int) -> None:
    """Check that model.yaml's copy (for upstream's model.py) says the same as config.pbtxt, which decides."""
    pbtxt = {
        "decoupled": bool(model_config.get("model_transaction_policy", {}).get("decoupled", False)),
        "max_batch_size": int(model_config.get("max_batch_size", 0)),
    }
    yaml = {"decoupled": decoupled, "max_batch_size": max_batch_size}
    problems = [
        f"{key}: config.pbtxt says {pbtxt[key]}, model.yaml says {yaml[key]}; set both alike"
        for key in pbtxt
        if pbtxt[key] != yaml[key]
    ]
    if problems:
        raise ConfigError(problems)


def _log_to_triton() -> None:
    """Send the backend's log to stderr, which is part of Triton's log in every deployment."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("deepseek_backend %(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
