"""The chat page in Chromium before a real gateway and the trained tiny model, and the commands of docs/gateway.md.

tests/gateway/test_page.py has what a test must write itself: markup, broken streams, errors.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.running import gateway
from deepseek_triton_tools.gateway.guard import new_key
from deepseek_triton_tools.server.server_process import ServerProcess
from support.browser import CHROMIUM, Browser, Page
from support.documents import Command, commands
from support.servers import url
from support.web import web

pytestmark = pytest.mark.slow
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")


@pytest.fixture(scope="module")
def address(v31_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway(url(v31_server, "http"), log=tmp_path_factory.mktemp("gateway") / "log") as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with browser.page(address) as page:
        page.wait("document.querySelector('#model').value")
        yield page
        assert page.complaints() == []


@in_chromium
def test_a_question_is_answered(page: Page) -> None:
    page.ask("What is the capital of France?")
    assert page.text(".markdown") == "The capital of France is Paris."
    assert page.text("article .error") == ""
    # The pace is not among them: so short an answer may come in one piece (tests/gateway/test_page.py has it).
    for part in ("first token", " in", " out"):
        assert part in page.text(".figures")


@in_chromium
def test_the_model_thinks_calls_a_tool_and_uses_the_result_in_one_picture(
    browser: Browser, address: str, tmp_path: Path
) -> None:
    """PAGE_PICTURE=docs/gateway-page.png takes it anew."""
    with browser.page(address, width=1100, height=920) as page:
        page.wait("document.querySelector('#model').value")
        page.run("document.querySelector('#thinking').value = 'on'")
        page.ask("What is 47 + 38?")
        assert page.text(".markdown") == "47 + 38 = 85."
        assert "Ones: 7 + 8 = 15" in page.run("document.querySelector('.thought').textContent")
        page.run("document.querySelector('#thinking').value = ''")
        page.click("#example")
        page.ask("What is the weather in Berlin?")
        assert json.loads(page.text(".call pre")) == {"city": "Berlin"}
        page.write("#result_0", '{"temperature": 21, "sky": "cloudy"}')
        page.press("Enter")
        page.wait("document.querySelectorAll('.figures').length === 3 && document.querySelector('#stop').hidden")
        page.wait("document.querySelectorAll('.markdown')[2]?.innerText === 'It is 21 °C and cloudy in Berlin.'")
        assert page.run("document.querySelector('#log').scrollHeight <= document.querySelector('#log').clientHeight")
        page.command("Input.dispatchMouseEvent", type="mouseMoved", x=600, y=30)  # off the button
        page.screenshot(Path(os.environ.get("PAGE_PICTURE", tmp_path / "page.png")))


@in_chromium
def test_a_key_that_is_wrong_is_refused_in_the_servers_words(
    browser: Browser, v31_server: ServerProcess, tmp_path: Path
) -> None:
    key, line = new_key("ann")
    (tmp_path / "keys").write_text(line)
    options = ("--keys", str(tmp_path / "keys"))
    with (
        gateway(url(v31_server, "http"), log=tmp_path / "log", options=options) as address,
        browser.page(address) as page,
    ):
        page.wait("document.querySelector('#key_wrong').checkVisibility()")
        assert "HTTP" not in page.text("body")
        page.write("#key", "sk-wrong")
        page.wait("document.querySelector('#key_wrong').innerText.includes('not known')")
        page.write("#question", "What is the capital of France?")
        page.press("Enter")
        page.wait("document.querySelector('article .error')?.innerText.includes('not known')")
        page.write("#key", key)
        page.wait("document.querySelector('#model').value && !document.querySelector('#key_wrong').checkVisibility()")
        page.click("article.assistant .buttons button:last-child")
        page.wait("document.querySelector('.markdown').innerText === 'The capital of France is Paris.'")


@in_chromium
def test_the_dashboard_shows_the_server_and_what_it_was_asked(browser: Browser, address: str) -> None:
    question = {"stream": True, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    with browser.page(f"{address}/dashboard") as page:
        page.wait("document.querySelector(\"output[aria-label='Requests/s']\").textContent !== '–'")
        assert web.post(f"{address}/v1/chat/completions", json=question).status_code == 200
        page.wait("document.querySelector(\"output[aria-label='First token after']\").textContent !== '–'")
        assert page.text("section h2") == "tiny"
        assert page.text("output[aria-label='Servers up']") == "1 of 1"
        assert page.complaints() == []


ASKED = [command for command in commands("docs/gateway.md") if command.program == "curl"]


@pytest.mark.parametrize("command", ASKED, ids=lambda command: command.argv[1])
def test_what_the_page_asks_is_answered(address: str, command: Command) -> None:
    script = command.statement.replace("http://localhost:9000", address)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True)
    [choice] = json.loads(done.stdout)["choices"]
    assert choice["finish_reason"] in ("stop", "length")


def test_the_page_is_where_its_document_says(address: str) -> None:
    assert web.get(address).text.startswith("<!doctype html>")
