"""The page that watches the servers, in Chromium, before made-up servers and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deepseek_triton_tools.gateway.app.page import page_routes
from support.asgi_server import serving_app
from support.browser import CHROMIUM, Browser, Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]
EVIL = "<img src=x onerror=\"document.title='owned'\">"


def server(url: str, state: str = "up", **more: Any) -> dict[str, Any]:
    rest = {"reason": "", "own": [2, 300], "others": [1, 100], "failures": 0, "avoided": False, "leaving": False}
    return {"url": url, "state": state, **rest, **more}


class WatchedGateway:
    """Its counters grow with each look."""

    address: str
    key = ""

    def __init__(self) -> None:
        self.looks = 0
        self.models: list[dict[str, Any]] = []

    def _is_locked(self, request: Request) -> bool:
        return request.headers.get("authorization", "").removeprefix("Bearer ") != self.key

    async def fleet(self, request: Request) -> Response:
        return Response(status_code=401) if self._is_locked(request) else JSONResponse({"models": self.models})

    async def metrics(self, request: Request) -> Response:
        self.looks += 1
        return PlainTextResponse(self.text(self.looks))

    def text(self, looks: int) -> str:
        return METRICS.format(looks, 100 * looks, looks / 4)


METRICS = """\
# HELP deepseek_triton_gateway_requests_total Requests.
deepseek_triton_gateway_requests_total{{route="/v1/chat/completions",model="a }} b"}} {0}
deepseek_triton_gateway_requests_total{{route="/v1/completions",model="b"}} {0}
deepseek_triton_gateway_output_tokens_total{{model="a"}} {1}
deepseek_triton_gateway_requests_in_flight 61
deepseek_triton_gateway_time_to_first_token_seconds_sum {2}
deepseek_triton_gateway_time_to_first_token_seconds_count {0}
deepseek_triton_inflight_tokens 7
"""


@pytest.fixture
def gateway() -> Iterator[WatchedGateway]:
    gateway = WatchedGateway()
    routes = [*page_routes(), Route("/fleet", gateway.fleet), Route("/metrics", gateway.metrics)]
    with serving_app(Starlette(routes=routes)) as gateway.address:
        yield gateway


@pytest.fixture
def page(gateway: WatchedGateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with (
        Browser(tmp_path_factory.mktemp("profile")) as browser,
        browser.page(f"{gateway.address}dashboard") as page,
    ):
        yield page


def tile(page: Page, title: str) -> str:
    return page.text(f"output[aria-label='{title}']")


def test_servers_and_rates_are_shown(page: Page, gateway: WatchedGateway) -> None:
    gateway.models = [
        {
            "name": EVIL,
            "servers": [
                server("http://one:8000"),
                server("http://two:8000", "down", reason=EVIL, own=[0, 0], others=[0, 0]),
                server("http://three:8000", avoided=True),
                server("http://four:8000", leaving=True, own=[1, 0], others=[0, 0]),
            ],
        }
    ]
    page.wait("document.querySelector('td')")
    page.wait("document.querySelector(\"output[aria-label='Requests/s']\").textContent !== '–'")
    assert tile(page, "Servers up") == "2 of 4"
    assert tile(page, "Requests in flight") == "61"
    assert tile(page, "First token after") == "250 ms"
    per_second = float(tile(page, "Requests/s"))
    assert per_second > 0
    assert 40 <= float(tile(page, "Tokens/s").replace(",", "")) / per_second <= 60
    rows = page.run("[...document.querySelectorAll('tbody tr')].map((row) => row.innerText.split('\\t'))")
    assert [row[:5] for row in rows] == [
        ["http://one:8000", "up", "2", "1", "400"],
        ["http://two:8000", f"down: {EVIL}", "0", "0", "0"],
        ["http://three:8000", "full", "2", "1", "400"],
        ["http://four:8000", "leaving", "1", "0", "0"],
    ]
    assert [row[5].strip() for row in rows] == ["50%", "0%", "50%", "0%"]
    assert page.text("section h2") == EVIL
    assert page.run("document.title") == "deepseek-triton fleet"
    assert page.complaints() == []


def test_a_gateway_with_keys_is_shown_to_whoever_has_one(page: Page, gateway: WatchedGateway) -> None:
    gateway.key = "sk-1"
    gateway.models = [{"name": "tiny", "servers": [server("http://one:8000")]}]
    page.wait("document.querySelector('#locked').checkVisibility()")
    assert page.text("#state") == "fleet answers 401"
    page.write("#key", "sk-1")
    page.wait("document.querySelector('td')")
    assert not page.run("document.querySelector('#locked').checkVisibility()")
