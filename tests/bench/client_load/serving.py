"""The one server that all ask, and what it costs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from bench._harness import cpu_s
from bench._served import repository, serving_repository
from bench.client_load.cases import FLAT, PACED, TOKENS_PER_S, TWIN

from deepseek_backend.engines.simulated.simulated_engine import NEUTRAL_STEP_S
from deepseek_triton_tools.host.process_sessions import session_members
from deepseek_triton_tools.server.server_process import ServerProcess

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)
"""Columns of /proc/stat's first line: idle and iowait."""


@contextmanager
def serving_all(log_file: Path) -> Iterator[ServerProcess]:
    """A tritonserver with the three models."""
    with TemporaryDirectory(prefix="deepseek-triton-bench-") as folder:
        made = repository(Path(folder) / "repository", "simulated", engine_options={})
        _change_settings(_copy(made, PACED), engine_options={"pace": "real", "speed": TOKENS_PER_S * NEUTRAL_STEP_S})
        _make_whole(_copy(made, TWIN))
        with serving_repository(made, log_file) as server:
            yield server


def _copy(made: Path, name: str) -> Path:
    """Of the first model, under another name."""
    model = made / name
    shutil.copytree(made / FLAT, model)
    _change(model / "config.pbtxt", f'name: "{FLAT}"', f'name: "{name}"')
    return model


def _make_whole(model: Path) -> None:
    """Not decoupled: one response to each request."""
    _change(model / "config.pbtxt", "decoupled: true", "decoupled: false")
    _change_settings(model, decoupled=False)


def _change_settings(model: Path, **triton_config: Any) -> None:
    settings = model / "1/model.yaml"
    document = yaml.safe_load(settings.read_text())
    document["triton_config"].update(triton_config)
    settings.write_text(yaml.safe_dump(document))


def _change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise SystemExit(f"{file.name}: expected {old!r} once")
    file.write_text(text.replace(old, new), encoding="utf-8")


def server_cpu_s(server: ServerProcess) -> float:
    """Of Triton and its stubs so far."""
    assert server.pid is not None
    return sum(cpu_s(pid) for pid in {server.pid, *session_members(server.pid)})


def machine_cpu_s() -> float:
    """What all processors have worked so far."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]  # guests' time is in user time already
    return sum(int(ticks) for place, ticks in enumerate(first) if place not in _IDLE) / _TICKS_PER_S
