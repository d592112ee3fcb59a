"""The page that watches the servers, in Chromium, before made-up servers and metrics."""

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deepseek_triton_tools.gateway.application import page_routes
from deepseek_triton_tools.gateway.fleet_member import FleetServer
from deepseek_triton_tools.gateway.observers import GatewayMetrics, HandledRequest
from deepseek_triton_tools.gateway.triton_call import Load
from support.asgi_server import serving_app
from support.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]
REFUSAL = {"error": {"message": "Not this key."}}
EVIL = "<img src=x onerror=\"document.title='owned'\">"


def server(url, state="up", **more):
    rest = {"reason": "", "own": Load(2, 300), "others": Load(1, 100), "failures": 0, "avoided": False}
    return FleetServer(url, state, **{**rest, "leaving": False, **more})


class WatchedGateway:
    """It answers two requests and breaks off a stream between two looks, which are two seconds apart."""

    address: str
    key = ""
    refusal = 0

    def __init__(self):
        self._counted = GatewayMetrics()
        self._seconds = 1e9
        self.models = {}

    def _is_locked(self, request):
        return request.headers.get("authorization", "").removeprefix("Bearer ") != self.key

    async def fleet(self, request):
        status = self.refusal or (401 if self._is_locked(request) else 0)
        return JSONResponse(REFUSAL, status) if status else self._fleet()

    def _fleet(self):
        models = [{"model": name, "servers": servers} for name, servers in self.models.items()]
        history = [self._look() for _ in range(2)]
        return Response(msgspec.json.encode({"models": models, "now": self._look(), "history": history}))

    def _look(self):
        self._seconds += 2
        for error in ("", "", "unavailable"):
            record = HandledRequest("r", "/v1/chat/completions", began_s=100.0, model='a } "b', status=200, stream=True)
            record.error_code = error
            self._counted.begins(record)
            if not error:
                record.num_output_tokens, record.first_token_s, record.last_token_s = 51, 100.25, 101.25
            record.ended_s = 102.0
            self._counted.ends(record)
        self._counted.ends(HandledRequest("the dashboard's own", "/fleet", status=401, error_code="invalid_api_key"))
        return {"at": self._seconds, "up": 2, "servers": 4, "inflight": 7, "sums": self._counted.sums()}


@pytest.fixture
def gateway():
    gateway = WatchedGateway()
    routes = [*page_routes(), Route("/fleet/history", gateway.fleet), Route("/fleet", gateway.fleet)]
    with serving_app(Starlette(routes=routes)) as gateway.address:
        yield gateway


@pytest.fixture
def page(gateway, tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser, browser.page(f"{gateway.address}dashboard") as page:
        yield page


def tile(page, title):
    return page.text(f"output[aria-label='{title}']")


def test_servers_and_rates_are_shown(page, gateway):
    gateway.models = {
        EVIL: [
            server("http://one:8000"),
            server("http://two:8000", "down", reason=EVIL, own=Load(), others=Load()),
            server("http://three:8000", avoided=True),
            server("http://four:8000", leaving=True, own=Load(1, 0), others=Load(), no_metrics="refused"),
        ]
    }
    page.wait("document.querySelector('td')")
    assert tile(page, "Servers up") == "2 of 4"
    assert tile(page, "Requests in flight") == "7"
    assert tile(page, "First token after") == "250 ms"
    assert tile(page, "Between tokens") == "20 ms"
    assert [tile(page, title) for title in ("Requests/s", "Tokens/s", "Errors/s, 4xx too")] == ["1.5", "51", "0.5"]
    lines = page.run("[...document.querySelectorAll('polyline')].map((line) => line.getAttribute('points').split(' '))")
    assert len(lines[0]) > len(lines[4]) >= 2  # what was before the page was opened; no latency is known at first
    rows = page.run("[...document.querySelectorAll('tbody tr')].map((row) => row.innerText.split('\\t'))")
    assert [row[:5] for row in rows] == [
        ["http://one:8000", "up", "2", "1", "400"],
        ["http://two:8000", "down", "0", "0", "0"],
        [EVIL],
        ["http://three:8000", "full", "2", "1", "400"],
        ["http://four:8000", "leaving", "1", "no metrics", "0"],
    ]
    assert [row[5].strip() for row in rows if len(row) > 5] == ["46%", "0%", "46%", "7%"]
    assert page.text("section h2") == EVIL
    assert page.run("document.title") == "deepseek-triton fleet"
    assert page.complaints() == []


def test_a_gateway_with_keys_is_shown_to_whoever_may_see_it(page, gateway):
    gateway.key = "sk-1"
    gateway.models = {"tiny": [server("http://one:8000")]}
    page.wait("document.querySelector('#locked').checkVisibility()")
    assert page.text("#state").endswith("This gateway asks for an API key.")
    page.write("#key", "sk-…")
    page.wait("document.querySelector('#state').innerText.endsWith('Not this key.')")
    page.write("#key", "sk-1")
    page.wait("document.querySelector('td')")
    assert not page.run("document.querySelector('#locked').checkVisibility()")
    gateway.refusal = 403
    page.wait(r"/:\d\d:\d\d.*: Not this key/.test(document.querySelector('body:has(.stale) #state')?.innerText)")
    assert page.run("document.querySelector('#locked').checkVisibility()")
    gateway.refusal = 0
    page.wait("!document.querySelector('.stale')")
