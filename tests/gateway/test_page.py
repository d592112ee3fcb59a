"""The chat page in Chromium, before a server that answers what a test has written.

tests/live/test_gateway_page.py has it before a real gateway and a real model.
"""

import asyncio
import json
import threading
from random import Random

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deepseek_triton_tools.gateway.application import page_routes
from support.asgi_server import serving_app
from support.browser import CHROMIUM, Browser
from support.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TRY_AGAIN = "article.assistant:last-child .buttons button:last-child"
DONE = b"data: [DONE]\n\n"
"""The end of a stream."""


def chunk(finish_reason=None, stop_reason=None, **delta):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "stop_reason": stop_reason}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


def called(index, name, arguments):
    function = {"name": name, "arguments": arguments}
    return chunk(tool_calls=[{"index": index, "id": f"call_{index}", "type": "function", "function": function}])


def usage(**counts):
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()


def said(text):
    return [chunk(content=text), chunk("stop"), usage(prompt_tokens=3, completion_tokens=5), DONE]


class ScriptedGateway:
    """Answers each chat request with the next answer: pieces of a stream, or an error's response.

    A piece that is None waits until the client leaves, or the test sets `go_on`.
    """

    address = ""

    def reset(self):
        self.models = [{"id": "deepseek-v3.1", "max_model_len": 4096, "default_max_tokens": 3072}]
        self.answers, self.requests, self.keys = [], [], []
        self.left, self.go_on = threading.Event(), threading.Event()

    async def list_models(self, request):
        if isinstance(self.models, Response):
            return self.models
        return JSONResponse({"object": "list", "data": self.models})

    async def chat(self, request):
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        answer = self.answers.pop(0)
        return answer if isinstance(answer, Response) else StreamingResponse(self._stream(answer))

    async def _stream(self, pieces):
        try:
            for piece in pieces:
                if piece is None:
                    while not self.go_on.is_set():
                        await asyncio.sleep(0.01)
                else:
                    yield piece
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.left.set()
            raise


@pytest.fixture(scope="module")
def served():
    gateway = ScriptedGateway()
    chat = Route("/v1/chat/completions", gateway.chat, methods=["POST"])
    routes = [*page_routes(), Route("/v1/models", gateway.list_models), chat]
    with serving_app(Starlette(routes=routes)) as gateway.address:
        yield gateway


@pytest.fixture
def gateway(served):
    served.reset()
    return served


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser, gateway):
    with browser.page(gateway.address) as page:
        page.wait("document.querySelector('#model').value")
        yield page


def lines(page, selector):
    """What each such element shows."""
    found = page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)")
    return [str(text) for text in found]


def test_an_answer_is_put_together_however_the_stream_is_cut(page, gateway):
    text = "Ein Käse für 3 €: 🧀, and **bold** text.\n\nA second paragraph."
    parts = [chunk(role="assistant", content=""), chunk(reasoning_content="Käse? "), chunk(reasoning="🧀!")]
    whole = b": keep-alive\n\n" + b"".join([*parts, *(chunk(content=letter) for letter in text)])
    whole += chunk("stop") + usage(prompt_tokens=1234, completion_tokens=40) + DONE
    gateway.answers.append([whole[at : at + 7] for at in range(0, len(whole), 7)])
    page.ask("Käse?")
    assert lines(page, ".markdown p") == ["Ein Käse für 3 €: 🧀, and bold text.", "A second paragraph."]
    assert lines(page, ".markdown strong") == ["bold"]
    assert page.run("document.querySelector('.thought').textContent") == "Käse? 🧀!"
    assert "1234 in · 40 out" in page.text(".figures")
    assert page.complaints() == []


def test_thinking_is_open_while_it_lasts_and_then_folded(page, gateway):
    gateway.answers.append([chunk(reasoning_content="Let me think."), None])
    page.write("#question", "Why?")
    page.press("Enter")
    page.wait("document.querySelector('.thought')?.checkVisibility()")
    page.press("Escape")
    page.wait("document.querySelector('.figures')")
    assert gateway.left.wait(PATIENCE_S), "the page kept the connection"

    for stop_reason, told in ((None, "thinking"), ("cancelled", "server")):
        gateway.answers.append([chunk(reasoning_content="Let me think."), chunk("length", stop_reason), DONE])
        page.click(TRY_AGAIN)
        page.wait(f"document.querySelector('.figures')?.innerText.includes('{told}')")
    gateway.answers.append([chunk(reasoning_content="Let me think."), *said("Because.")])
    page.ask("Why not?")  # a question that has no answer is not sent with it
    assert lines(page, ".markdown")[-1] == "Because."
    assert page.run("document.querySelector('article:last-child .thinking').open") is False
    assert [message["content"] for message in gateway.requests[3]["messages"]] == ["Why not?"]


def test_the_button_stops_an_answer_and_its_text_stays(page, gateway):
    gateway.answers += [[chunk(content="Once upon a time"), None], [chunk(content="there was"), None, *said("")]]
    page.write("#question", "A story.")
    page.press("Enter")
    page.wait("document.querySelector('.markdown').innerText === 'Once upon a time'")
    page.click("#stop")
    page.wait("document.querySelector('.figures')")
    assert gateway.left.wait(PATIENCE_S)
    page.write("#question", "Go on.")
    page.press("Enter")
    page.wait("document.querySelector('article:last-child .markdown')?.innerText === 'there was'")
    page.run("new Promise((done) => setTimeout(done, 20))")
    gateway.go_on.set()
    page.wait("document.querySelectorAll('.figures').length === 2")
    assert "tokens/s" in lines(page, ".figures")[-1]
    asked = [(message["role"], message["content"]) for message in gateway.requests[1]["messages"]]
    assert asked == [("user", "A story."), ("assistant", "Once upon a time"), ("user", "Go on.")]


def test_a_question_stands_until_another_replaces_it(page, gateway):
    """Edit takes nothing away before the next question is sent, a reload loses nothing that was typed."""
    gateway.answers += [said("One."), [chunk(content="Two"), None], said("Three.")]
    page.ask("First?")
    page.write("#question", "a draft")
    page.click("article.user .buttons button:last-child")
    page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', isComposing: true}))")
    assert page.run("question.value") == "First?"
    assert "Edit" not in page.text("#log")  # it would begin anew
    page.press("Escape")
    page.click("article.user .buttons button:last-child")
    page.command("Page.reload")
    page.wait("document.querySelectorAll('article.replaced').length === 2")
    page.click("#cancel")
    assert page.run("question.value") == "a draft"
    page.press("Enter")
    page.wait("document.querySelectorAll('.markdown')[1]?.innerText === 'Two'")
    assert "Edit" not in page.text("#log")
    page.press("Escape")
    page.wait("document.querySelectorAll('.figures').length === 2")
    page.write("#question", "a draft")
    page.click("article.user:nth-last-child(2) .buttons button:last-child")
    page.write("#question", "Third?")
    page.press("Enter", shift=True)
    page.command("Input.insertText", text="Or not?")
    page.press("Enter")
    page.wait("document.querySelectorAll('.markdown')[1]?.innerText === 'Three.' && question.value === 'a draft'")
    assert [message["content"] for message in gateway.requests[2]["messages"]] == ["First?", "One.", "Third?\nOr not?"]


def test_nobodys_text_becomes_html(page, gateway, browser):
    """The model's wherever Markdown makes elements of it, the user's, a tool's, an error's, a model's name."""
    text = (
        f"{EVIL}\n\n# {EVIL}\n\n- **{EVIL}**\n\n> {EVIL}\n\n| {EVIL} |\n| --- |\n| {EVIL} |\n\n```{EVIL}\n{EVIL}\n```"
    )
    text += f"\n\n[a link](javascript:alert(1)) ![a picture]({gateway.address}picture)"
    gateway.answers.append([chunk(reasoning_content=EVIL), *said(text)])
    page.ask(EVIL)
    assert lines(page, ".markdown p")[0] == EVIL
    assert lines(page, ".markdown h3, .markdown strong, .markdown blockquote, .markdown td") == [EVIL] * 4
    assert page.run("document.querySelector('.said').textContent") == EVIL
    assert page.run("document.querySelector('.thought').textContent") == EVIL

    page.write("#tools", json.dumps([{"type": "function", "function": {"name": "t"}}]))
    gateway.answers.append([called(0, EVIL, json.dumps({"a": EVIL})), chunk("tool_calls"), DONE])
    page.ask("Call it.")
    page.write("#result_0", EVIL)
    gateway.answers.append(JSONResponse({"error": {"message": EVIL, "code": EVIL}}, 400, {"x-request-id": "r1"}))
    page.press("Enter")
    page.wait("document.querySelector('article .error')")
    assert EVIL in page.text("article .error")
    assert page.run("document.querySelectorAll('main img, main script, main a').length") == 0
    assert page.run("document.title") == "deepseek-triton"

    gateway.models = [{"id": EVIL}]
    with browser.page(gateway.address) as other:
        other.wait("document.querySelector('#model').value")
        assert other.run("document.querySelector('#model').value") == EVIL
        assert other.text("#offered") == EVIL
    assert [line for line in page.complaints() if "400" not in line] == []


MARKDOWN = """\
# Title
Text with `**code**`, *slanted* and 2 * 3 * 4.
1. one
2. two
   - inner
   - other
3. three

| a | b |
|---|:-:|
| 1 | **2** |

---
> quoted
> again

```python
if a < b:

    c()
```
after

```
open"""


def test_markdown(page, gateway):
    gateway.answers.append(said(MARKDOWN))
    page.ask("All of it.")
    shape = page.run("""(function shape(element) {
        return [...element.children].map((child) =>
            [child.localName, child.children.length ? shape(child) : child.textContent]);
    })(document.querySelector('.markdown'))""")
    code = [["pre", [["code", "if a < b:\n\n    c()"]]]], [["pre", [["code", "open"]]]]
    titles = [["figcaption", [["span", language], ["button", "Copy"]]] for language in ("python", "code")]
    assert shape == [
        ["h3", "Title"],
        ["p", [["code", "**code**"], ["em", "slanted"]]],
        ["ol", [["li", "one"], ["li", [["ul", [["li", "inner"], ["li", "other"]]]]], ["li", "three"]]],
        ["div", [["table", [
            ["thead", [["tr", [["th", "a"], ["th", "b"]]]]],
            ["tbody", [["tr", [["td", "1"], ["td", [["strong", "2"]]]]]]],
        ]]]],
        ["hr", ""],
        ["blockquote", [["p", "quoted\nagain"]]],
        ["figure", [titles[0], *code[0]]],
        ["p", "after"],
        ["figure", [titles[1], *code[1]]],
    ]  # fmt: skip


def test_no_text_breaks_the_page(page, gateway):
    random = Random(7)
    parts = [*"#*_`>|", "# ", "**", "```", "~~~", "> ", "- ", "1. ", "  ", "---", "\n", "\n\n", "é🧀"]
    texts = [">" * 50_000, "*a " * 20_000, "`a" * 20_000, "- " * 20_000, "|" * 20_000]
    texts += ["".join(random.choices(parts, k=40)) for _ in range(200)]
    gateway.answers.append([*(chunk(content=f"{text}\n\n") for text in texts), *said("The end.")])
    page.ask("All of it.")
    assert page.text(".markdown").endswith("The end.")
    assert page.complaints() == []


def test_settings_become_fields_of_the_request(page, gateway):
    gateway.answers += [said("One."), said("Two.")]
    page.ask("Plain.")
    assert gateway.requests[0] == {
        "model": "deepseek-v3.1",
        "messages": [{"role": "user", "content": "Plain."}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert gateway.keys == [None]
    assert page.run("document.querySelector('#max_tokens').placeholder") == "3,072"
    for selector, text in {"#key": "sk-1", "#system": "Be brief.", "#temperature": "0.5", "#max_tokens": "64"}.items():
        page.write(selector, text)
    page.click("#example")
    for selector, value in {"#thinking": "on", "#tool_choice": "required"}.items():
        page.run(f"document.querySelector('{selector}').value = '{value}'")
    page.ask("With all.")
    sent = gateway.requests[1]
    assert gateway.keys[1] == "Bearer sk-1"
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent["temperature"], sent["max_tokens"], sent["tool_choice"]) == (0.5, 64, "required")
    assert sent["chat_template_kwargs"] == {"thinking": True}
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["get_weather"]


def test_the_results_of_calls_go_back(page, gateway):
    calls = [called(0, "get_weather", ""), *(
        chunk(tool_calls=[{"index": 0, "function": {"arguments": part}}]) for part in ('{"city"', ': "Berlin"}')
    ), called(1, "get_time", "not JSON")]  # fmt: skip
    gateway.answers += [[*calls, chunk("tool_calls"), DONE], said("It is 21 °C.")]
    page.click("#example")
    page.ask("Weather and time?")
    assert lines(page, ".call pre") == ['{\n  "city": "Berlin"\n}', "not JSON"]
    assert page.run("document.querySelector('#send').disabled") is True
    page.write("#result_0", '{"temperature": 21}')
    page.write("#result_1", "noon")
    page.press("Enter")
    page.wait("document.querySelectorAll('.markdown')[1]?.innerText === 'It is 21 °C.'")
    _, made, *results = gateway.requests[1]["messages"]
    assert [call["function"] for call in made["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Berlin"}'}, {"name": "get_time", "arguments": "not JSON"}
    ]  # fmt: skip
    assert results == [
        {"role": "tool", "tool_call_id": "call_0", "content": '{"temperature": 21}'},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    assert lines(page, ".outcome .name") == ["get_weather", "get_time"]


def test_settings_that_are_wrong_are_not_sent(page, gateway):
    page.command("Emulation.setDeviceMetricsOverride", width=1280, height=600, deviceScaleFactor=1, mobile=False)
    wrong = {"{": "JSON", '{"a": 1}': "Expected a list", '[{"type": "function"}]': "Tool 1 needs"}
    page.write("#question", "Hello")
    for typed, complaint in wrong.items():
        page.write("#tools", typed)
        page.click("#send")
        page.wait(f"document.querySelector('#tools_wrong').innerText.includes({json.dumps(complaint)})")
        assert page.run("document.querySelector('#tools_wrong').getBoundingClientRect().bottom") <= 601
        assert page.run("document.querySelector('#question').value") == "Hello"
    page.write("#tools", "")
    page.write("#max_tokens", "1e")
    page.click("#send")
    page.wait("document.activeElement.id === 'max_tokens'")
    assert gateway.requests == []


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (
            JSONResponse({"error": {"message": "Too many requests.", "code": "rate_limit_exceeded"}}, 429,
                         {"Retry-After": "7", "X-Request-Id": "r-5"}),
            ["Too many requests.", "HTTP 429", "rate_limit_exceeded", "request r-5", "try again in 7 s"],
        ),
        (Response("<h1>Bad gateway</h1>", 502), ["<h1>Bad gateway</h1>", "HTTP 502"]),
        (
            [chunk(content="Half an"), b'data: {"error": {"message": "The engine died.", "code": "E_INTERNAL"}}\n\n'],
            ["The engine died.", "E_INTERNAL"],
        ),
        ([chunk(content="Half an")], ["The connection ended before the answer did."]),
    ],
    ids=["refused", "proxy", "in the stream", "cut off"],
)  # fmt: skip
def test_an_error_is_shown_as_it_was_said_and_can_be_tried_again(page, gateway, answer, shown):
    gateway.answers += [answer, said("At last.")]
    page.ask("Hello")
    assert [part for part in shown if part not in page.text("article .error")] == []
    page.click(TRY_AGAIN)
    page.wait("document.querySelector('.markdown').innerText === 'At last.'")
    assert gateway.requests[0] == gateway.requests[1]
    assert page.text("article .error") == ""


def test_a_phone_is_told_that_a_key_or_a_model_is_missing(browser, gateway):
    """A model that has no switch for thinking has none on the page either."""
    gateway.models = JSONResponse({"error": {"message": "Not this key."}}, 401)
    with browser.page(gateway.address, width=390) as page:
        page.wait("document.querySelector('#key_wrong').checkVisibility()")
        assert "Not this key" not in page.text("#key_wrong")
        page.write("#key", "sk-…")
        page.wait("document.querySelector('#key_wrong').innerText === 'Not this key.'")
        gateway.models = []
        page.write("#key", "sk-2")
        page.wait("document.querySelector('#trouble').checkVisibility()")
        gateway.models = [{"id": "deepseek-r1", "thinking_switch": False}]
        page.click("#trouble button")
        page.wait("document.querySelector('#model').value === 'deepseek-r1'")
        for gone in ("#trouble", "#key_wrong"):
            assert not page.run(f"document.querySelector('{gone}').checkVisibility()")
        assert page.run("document.querySelector('#thinking').disabled") is True


def test_a_conversation_and_its_settings_survive_a_reload(page, gateway):
    gateway.answers += [[chunk(reasoning_content="Hm."), *said("Hello **you**.")], said("Again.")]
    page.write("#system", "Be kind.")
    page.ask("Hello")
    figures = page.text(".figures")
    page.open(gateway.address)
    page.wait("document.querySelector('#model').value")
    assert page.text(".markdown") == "Hello you."
    assert page.text(".figures") == figures
    page.ask("And now?")
    assert [message["role"] for message in gateway.requests[1]["messages"]] == ["system", "user", "assistant", "user"]
    gateway.answers.append([chunk(content="Half an"), usage(prompt_tokens=9, completion_tokens=2), None])
    page.write("#question", "Really?")
    page.press("Enter")
    page.wait("document.querySelector('article:last-child .markdown').innerText === 'Half an'")
    page.open(gateway.address)
    assert lines(page, ".said")[-1:] + lines(page, ".markdown")[-1:] == ["Really?", "Half an"]
    assert "9 in · 2 out · stopped after" in lines(page, ".figures")[-1]
    assert lines(page, "article .error") == []
    page.click("#new")
    assert page.run("document.querySelectorAll('article').length") == 0
    page.open(gateway.address)
    assert page.run("document.querySelectorAll('article').length") == 0
    assert page.run("document.querySelector('#system').value") == "Be kind."


def test_nothing_is_wider_than_the_screen_or_over_something_else(browser, gateway):
    long = "x" * 400
    for width in (320, 1280):
        text = f"{long}\n\n```\n{long}\n```\n\n|{'a|' * 40}\n|{'-|' * 40}\n\n- שלום"
        gateway.answers.append([chunk(content=text), called(0, long, "{}"), chunk("tool_calls"), DONE])
        with browser.page(gateway.address, width=width) as page:
            page.wait("document.querySelector('#model').value")
            page.ask(long)
            assert page.run("document.documentElement.scrollWidth") <= width
            wider = "[...document.querySelectorAll('#log, .call')].filter((one) => one.scrollWidth > one.clientWidth)"
            assert page.run(f"{wider}.length") == 0
            assert page.run("getComputedStyle(document.querySelector('.markdown ul')).direction") == "rtl"
            page.run("document.querySelector('#log').scrollTop = 0")
            page.write("#question", "\n" * 40)
            page.wait("document.querySelector('#latest').checkVisibility()")
            edges = [f"document.querySelector('{one}').getBoundingClientRect()" for one in ("#latest", "#question")]
            assert page.run(f"{edges[0]}.bottom <= {edges[1]}.top")
