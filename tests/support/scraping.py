"""The backend's numbers on a real tritonserver's /metrics, read without the client."""

import re
from collections.abc import Callable

from deepseek_backend.backend_metrics import FAMILIES, LAST_TOKEN_AGE, PREFIX
from deepseek_triton_tools.server.server_process import ServerProcess
from support.waiting import wait_for
from support.web import web

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

MODEL = {"model": "tensorrt_llm", "version": "1"}
AGE = LAST_TOKEN_AGE.name.removeprefix(PREFIX)
"""Another one in each publication, and written behind the counters."""
LAST = f"{FAMILIES[-1].name.removeprefix(PREFIX)}_count"
"""What is written last of a publication."""


def scrape(server: ServerProcess) -> Series:
    """Every series of ours: (name without prefix, labels) -> number."""
    text = web.get(server.metrics_url).text
    lines = re.findall(rf"^{PREFIX}(\w+)\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    return {
        (name, frozenset(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))): float(value)
        for name, labels, value in lines
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset({**MODEL, **labels}.items())]


def published(server: ServerProcess, holds: Callable[[Series], bool]) -> Series:
    """What is there once `holds`; publication is once a second, and not in one piece."""
    found: Series = {}

    def look() -> bool:
        found.clear()
        found.update(scrape(server))
        return (LAST, frozenset(MODEL.items())) in found and holds(found)

    wait_for(look)
    return found


def settled(server: ServerProcess, holds: Callable[[Series], bool] = lambda series: True) -> Series:
    """As `published`, with all that has been counted up to now: by a publication that began after this call."""
    for _ in range(2):  # the first may have begun before it
        age = value(published(server, lambda series: True), AGE)
        wait_for(lambda: value(scrape(server), AGE) != age)  # noqa: B023
    return published(server, holds)
