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
from support.scraping import scrape
from support.servers import build, change_yaml, url
from support.waiting import wait_for
from support.web import web
from tiny_checkpoint.architecture import CALL, CALLS, END_CALL, END_CALLS, SEPARATOR

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
def test_the_model_thinks_where_it_is_told_to(page: Page) -> None:
    page.run("document.querySelector('#thinking').value = 'on'")
    page.ask("What is 47 + 38?")
    assert page.text(".markdown") == "47 + 38 = 85."
    assert page.text(".thinking summary").startswith("Thought for")
    assert "Ones: 7 + 8 = 15" in page.run("document.querySelector('.thought').textContent")
    assert page.run("document.querySelector('.thinking').open") is False
    page.run("document.querySelector('#thinking').value = 'off'")
    page.ask("What is the capital of France?")
    assert page.run("document.querySelectorAll('.thought')[1].textContent") == ""


@in_chromium
def test_a_tool_is_called_and_its_result_is_used(page: Page) -> None:
    page.click("#example")
    page.ask("What is the weather in Berlin?")
    assert page.text(".call .name") == "get_weather"
    assert json.loads(page.text(".call pre")) == {"city": "Berlin"}
    page.write("#result_0", '{"temperature": 21, "sky": "cloudy"}')
    page.press("Enter")
    page.wait("document.querySelectorAll('.markdown')[1]?.innerText === 'It is 21 °C and cloudy in Berlin.'")


@in_chromium
def test_the_picture_of_the_page(browser: Browser, address: str, tmp_path: Path) -> None:
    """Thinking, a call and an answer fit into it. PAGE_PICTURE=docs/gateway-page.png takes it anew."""
    with browser.page(address, width=1100, height=920) as page:
        page.wait("document.querySelector('#model').value")
        page.run("document.querySelector('#thinking').value = 'on'")
        page.ask("What is 47 + 38?")
        page.run("document.querySelector('#thinking').value = ''")
        page.click("#example")
        page.ask("What is the weather in Berlin?")
        page.write("#result_0", '{"temperature": 21, "sky": "cloudy"}')
        page.press("Enter")
        page.wait("document.querySelectorAll('.figures').length === 3 && document.querySelector('#stop').hidden")
        assert page.run("document.querySelector('#log').scrollHeight <= document.querySelector('#log').clientHeight")
        page.command("Input.dispatchMouseEvent", type="mouseMoved", x=600, y=30)  # off the button
        page.screenshot(Path(os.environ.get("PAGE_PICTURE", tmp_path / "page.png")))


@in_chromium
def test_a_stopped_answer_stops_on_the_server(
    browser: Browser, simulated_server: ServerProcess, tmp_path: Path
) -> None:
    """Without a stop it would take minutes."""

    def aborted() -> float:
        return sum(number for (name, _), number in scrape(simulated_server).items() if name == "aborts_total")

    before = aborted()
    with gateway(url(simulated_server, "http"), log=tmp_path / "log") as address, browser.page(address) as page:
        page.wait("document.querySelector('#model').value")
        page.write("#max_tokens", "20000")
        page.write("#question", "Tell me a story.")
        page.press("Enter")
        page.wait("document.querySelector('.markdown')?.innerText.length > 20")
        page.press("Escape")
        page.wait("document.querySelector('.figures')")
        assert "stopped after" in page.text(".figures")
        wait_for(lambda: aborted() > before, lambda: "the server still generates")


@in_chromium
def test_what_a_model_writes_is_text(browser: Browser, tmp_path: Path) -> None:
    """An answer, reasoning and a call that another has dictated."""
    repository = build(tmp_path / "repository", "tiny", "--engine", "simulated")
    change_yaml(repository / "tensorrt_llm/1/model.yaml", engine_options={"text": "dictated"})
    evil = "<img src=x onerror=\"document.title='owned'\">"
    call = f"{CALLS}{CALL}f{SEPARATOR}{json.dumps({'a': evil})}{END_CALL}{END_CALLS}"
    with (
        ServerProcess.serving(repository) as server,
        gateway(url(server, "http"), log=tmp_path / "log") as address,
        browser.page(address) as page,
    ):
        page.wait("document.querySelector('#model').value")
        page.write("#tools", json.dumps([{"type": "function", "function": {"name": "f"}}]))
        page.run("document.querySelector('#thinking').value = 'on'")
        page.write("#max_tokens", "1000")
        page.ask(f"<answer>{evil}</think>{evil}{call}</answer>")
        assert page.text(".markdown") == evil
        assert page.run("document.querySelector('.thought').textContent") == evil
        assert json.loads(page.text(".call pre")) == {"a": evil}
        assert page.run("document.querySelectorAll('main img').length") == 0
        assert page.complaints() == []


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
