"""The trained tiny model under a real tritonserver: what is made of the text that a model really writes.

The server is model_repository/ as it is checked out, whose chat template is V3.1's. The variant tiny-r1 has R1's, which
begins every answer with reasoning.
"""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton_tools.server.server_process import ServerProcess
from support.documents import ROOT, snippets
from support.servers import url
from support.terminal_session import Terminal
from support.wire import STREAMS, WAYS, WHOLE, Answer, Way, ask
from tiny_checkpoint.architecture import CALL, CALLS, END_CALL, END_CALLS, END_THINK, SEPARATOR

EOS_ID = 1
MAX_TOKENS = 200
"""More than any answer has, so that all end by themselves."""
FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."
SUM = "What is 47 + 38?"
THINKING = {"thinking": True}

each_way = pytest.mark.parametrize("way", WAYS, ids=str)
each_stream = pytest.mark.parametrize("way", STREAMS, ids=str)


def said(*texts: str, system: str = "") -> list[dict[str, Any]]:
    """Return a conversation in which user and assistant take turns."""
    turns = zip(itertools.cycle(["user", "assistant"]), texts, strict=False)
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, *({"role": role, "content": text} for role, text in turns)]


def chat_body(messages: list[dict[str, Any]], template: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """Return the body of /generate for a conversation."""
    rest = {} if template is None else {"chat_template_kwargs": json.dumps(template)}
    return {"messages": json.dumps(messages), "max_tokens": MAX_TOKENS, **rest, **fields}


def chat(server: ServerProcess, way: Way, messages: Any, template: Any = None, **fields: Any) -> Answer:
    return ask(server, way, chat_body(messages, template, **fields)).answer()


# --- answers ----------------------------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("The capital of France is", r" Paris\b"),
        ("The president of the United States is", r" the head of the government\b"),
        ("Hello, my name is", r" [A-Z]"),
        ("The future of AI is", r" [a-z]"),
        ("7 + 5 =", r" 12\."),
    ],
)
def test_a_prompt_is_continued_in_english_and_the_text_ends_by_itself(v31_server, way, prompt, expected):
    answer = ask(v31_server, way, {"text_input": prompt, "max_tokens": MAX_TOKENS, "return_output_ids": True}).answer()

    assert re.match(expected, answer.text)
    assert answer.text.endswith(".")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert (answer.token_ids.count(EOS_ID), answer.token_ids[-1]) == (1, EOS_ID)


def test_a_chat_goes_on_from_its_own_answers(client_kind, v31_server):
    conversation = said("My name is Clara.")
    with client_kind.client(v31_server) as client:
        first = client.chat(conversation)
        conversation += [first.message, *said("What is my name?")]
        with client.stream_chat(conversation) as stream:
            chunks = [chunk.text for chunk in stream]

    assert "Clara" in first.text
    assert "".join(chunks) == "Your name is Clara."


ANSWERS = [
    (said(FRANCE), PARIS),
    (said(FRANCE, PARIS, "And Spain?"), "The capital of Spain is Madrid."),
    (said(FRANCE, system="Answer in one word."), "Paris"),
    (said("What is your name?", system="You are Flora."), "My name is Flora."),
]


def test_what_was_said_before_and_the_system_text_count(v31_server):
    assert [chat(v31_server, way, asked).text for way, (asked, _) in zip(WAYS, ANSWERS, strict=True)] == [
        expected for _, expected in ANSWERS
    ]


def test_sampled_answers_agree_on_a_fact(v31_server):
    """A right answer is likely, and so are the best of several."""
    body = chat_body(said(FRANCE), temperature=0.5, seed=7, return_cumulative_logprob=True)

    several = ask(v31_server, WHOLE[0], {**body, "n": 4}).answers()
    best = ask(v31_server, WHOLE[1], {**body, "n": 2, "best_of": 6}).answers()

    assert len(several) == 4
    assert {answer.text for answer in [*several, *best]} == {PARIS}
    assert best[0].cumulative_logprob >= best[1].cumulative_logprob > -1


# --- reasoning --------------------------------------------------------------------------------------------------------


def test_thinking_is_on_where_it_is_turned_on(v31_server):
    off = chat(v31_server, WAYS[0], said(SUM), {"thinking": False}, separate_reasoning=True)
    on = [chat(v31_server, way, said(SUM), THINKING, separate_reasoning=True) for way in WAYS[1:3]]
    joined = chat(v31_server, WAYS[3], said(SUM), THINKING)

    assert (off.reasoning, END_THINK in off.text) == ("", False)
    assert on[0] == on[1]
    assert on[0].reasoning.endswith("Together 85.")
    assert (on[0].text, on[0].finish_reason) == ("47 + 38 = 85.", "stop")
    assert joined.text == on[0].reasoning + END_THINK + on[0].text
    assert joined.reasoning == ""


def test_all_clients_part_reasoning_and_answer(client_kind, r1_server):
    """R1's always thinks."""
    with client_kind.client(r1_server) as client:
        whole = client.chat(said(FRANCE), separate_reasoning=True)
        with client.stream_chat(said(FRANCE), separate_reasoning=True) as stream:
            chunks = list(stream)

    assert (whole.text, PARIS in whole.reasoning, whole.finish_reason) == (PARIS, True, "stop")
    assert "".join(chunk.text for chunk in chunks) == PARIS
    assert "".join(chunk.reasoning for chunk in chunks) == whole.reasoning
    assert not any(chunk.text and chunk.reasoning for chunk in chunks)


@each_stream
@pytest.mark.parametrize("name", ["v31_server", pytest.param("r1_server", marks=pytest.mark.nightly)])
def test_a_tag_that_comes_in_two_chunks_parts_reasoning_all_the_same(request, name, way):
    """The tag is one token. A stop string that begins inside it holds its end back, until the next token has come."""
    server = request.getfixturevalue(name)
    template = THINKING if name == "v31_server" else None
    uncut = chat(server, way, said(SUM), template, separate_reasoning=True)
    cuts_seen = 0
    for cut in (2, 6):
        stop = {"sampling_param_stop": [f"{END_THINK[cut:]} and never this"]}
        parted = chat(server, way, said(SUM), template, separate_reasoning=True, **stop)
        chunks = ask(server, way, chat_body(said(SUM), template, **stop)).chunks

        assert (parted.reasoning, parted.text) == (uncut.reasoning, uncut.text), END_THINK[cut:]
        cuts_seen += any(chunk["text_output"][0].endswith(END_THINK[:cut]) for chunk in chunks)

    assert cuts_seen  # not 2: a busy machine sends several texts in one chunk


# --- tools ------------------------------------------------------------------------------------------------------------


def function(name: str, description: str, **kinds: str) -> dict[str, Any]:
    """Return a tool, as OpenAI's API describes one."""
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function("get_weather", "Get the weather in a city.", city="string")
ADD = function("add", "Add two numbers.", a="integer", b="integer")
MESSAGE = function("send_message", "Send a message to a person.", to="string", text="string")
_V31_CALL = re.compile(f"{CALL}(\\w+){SEPARATOR}(.*?){END_CALL}", re.DOTALL)
_R1_CALL = re.compile(f"{CALL}function{SEPARATOR}(\\w+)\n```json\n(.*?)\n```{END_CALL}", re.DOTALL)


def calls_of(server_name: str, text: str) -> list[tuple[str, Any]]:
    """Return the names and arguments of the calls in V3.1's or R1's published form, which must be all of the text."""
    assert text.startswith(CALLS), text
    assert text.endswith(END_CALLS), text
    form = _V31_CALL if server_name == "v31_server" else _R1_CALL
    assert form.sub("", text.removeprefix(CALLS).removesuffix(END_CALLS)).strip() == ""
    return [(name, json.loads(arguments)) for name, arguments in form.findall(text)]


CALLS_ASKED = [
    ("What is the weather in Berlin?", [("get_weather", {"city": "Berlin"})]),
    ("What is 123 + 456?", [("add", {"a": 123, "b": 456})]),
    ("Send Ada the message: the train is late", [("send_message", {"to": "Ada", "text": "the train is late"})]),
    ("What is the weather in Oslo and Rome?", [("get_weather", {"city": city}) for city in ("Oslo", "Rome")]),
]


@pytest.mark.parametrize("name", ["v31_server", "r1_server"])
def test_the_tool_that_fits_is_called_with_what_the_user_said(request, name):
    server = request.getfixturevalue(name)
    tools = {"tools": [MESSAGE, WEATHER, ADD]}
    table = CALLS_ASKED if name == "v31_server" else CALLS_ASKED[-1:]
    for way, (asked, expected) in zip(WAYS, table, strict=False):
        answer = chat(server, way, said(asked), tools, separate_reasoning=True)

        assert calls_of(name, answer.text) == expected
        assert answer.finish_reason == "stop"


# The page docs/engines.md

PAGE = snippets(page="docs/engines.md")
ANSWERED = {str(asked): (asked, shown.text) for asked, shown in itertools.pairwise(PAGE) if shown.language == "text"}
"""The commands and programs of the page that have their output below them."""


def output_of(argv: list[str], folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(argv, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


BY_TRANSFORMERS = next(name for name, (asked, _) in ANSWERED.items() if "from transformers" in asked.text)


@pytest.mark.documents
@pytest.mark.parametrize("name", sorted(ANSWERED.keys() - {BY_TRANSFORMERS}))
def test_the_page_shows_what_the_model_says(v31_server, tmp_path, name):
    (snippet, shown), address = ANSWERED[name], url(v31_server, "http")
    if snippet.language == "sh":
        with Terminal(*shlex.split(snippet.text)[1:], "--url", address) as terminal:
            assert terminal.exit_code() == 0
        found = re.sub(r"\x1b\[\d*m|\r", "", terminal.seen)
    else:
        found = output_of([sys.executable, "-c", snippet.text.replace("http://localhost:8000", address)], tmp_path)
    assert found == shown


@pytest.mark.documents
def test_transformers_answers_as_the_page_shows(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    program, shown = ANSWERED[BY_TRANSFORMERS]
    [conversion] = [snippet.text for snippet in PAGE if snippet.text.startswith("deepseek-triton checkpoint quantize")]
    output_of(["bash", "-c", conversion.replace("model_repository", f"'{ROOT}'/model_repository")], tmp_path)

    assert output_of([sys.executable, "-c", program.text], tmp_path) == shown
