"""Makes a prompt of a conversation: the engine's chat template, and what it leaves out.

DeepSeek's own templates of V3, R1 and V3.1 show no tools to the model. They write calls, but not as the model wrote
them: that of V3 and R1 only where content is null, closes a list of calls from the second call on, and begins it only
once in a conversation. So a conversation's calls and results are written here, as the text of the assistant's turn.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

from deepseek_backend.contract import ErrorCode
from deepseek_backend.dsml_prompt import render_dsml
from deepseek_backend.engines.generate_request import Messages
from deepseek_backend.engines.tags import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    CLOSING,
    DSML,
    DSML_BEGIN,
    RESULT_BEGIN,
    RESULT_END,
    RESULTS_BEGIN,
    RESULTS_END,
    SEPARATOR,
    ends_inside,
)
from deepseek_backend.errors import RequestError
from deepseek_backend.field_values import quoted, read_object
from deepseek_backend.messages import ToolUse, joined, without_old_reasoning
from deepseek_backend.v4_prompt import Rendered, V4Form, render_v4


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """One way to write calls."""

    name: str
    """Value of model_info's `tool_form`."""
    begins: str
    """Text before the name of the first call."""
    after_name: str
    """Text between a call's name and its arguments."""
    call_begins: str = CALL_BEGIN
    after_arguments: str = CALL_END
    between_calls: str = ""
    results_begin: str = ""
    between_results: str = ""
    results_end: str = ""
    instruction: str = ""
    """The text below the list of tools that tells the model how to call one."""

    def beginning(self, name: str) -> str:
        """Return the beginning of a call: up to its arguments, or up to its name where that is ""."""
        return f"{self.begins}{name}{self.after_name}" if name else self.begins

    def calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return calls as the model writes them."""
        written = [
            f"{self.call_begins}{function['name']}{self.after_name}{function['arguments']}{self.after_arguments}"
            for function in (call["function"] for call in calls)
        ]
        return f"{CALLS_BEGIN}{self.between_calls.join(written)}{CALLS_END}"

    def tools_text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the part of the system text that shows the tools."""
        listed = ""
        for function in (tool["function"] for tool in tools):
            parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
            description = f"Description: {function.get('description', '')}"
            listed += f"### {function['name']}\n{description}\n\nParameters: {parameters}\n\n"
        return f"## Tools\nYou have access to the following tools:\n\n{listed}{self.instruction}"

    def turn(self, messages: Sequence[Mapping[str, Any]], eos_token: str) -> str:
        """Return a turn of the assistant, with the results that tools gave meanwhile, as one text.

        An answer inside it ends with `eos_token`; the last message does not.
        """
        text = ""
        after_results = False
        for position, message in enumerate(messages):
            content = message["content"] or ""
            if message["role"] == "tool":
                text += self.between_results if after_results else self.results_begin
                text += f"{RESULT_BEGIN}{content}{RESULT_END}"
                after_results = True
                continue
            if after_results:
                text += self.results_end
            text += content if message.get("prefix") else content.split(CLOSING, 1)[-1]
            text += self.calls(message["tool_calls"]) if message.get("tool_calls") else ""
            text += eos_token if position < len(messages) - 1 else ""
            after_results = False
        return text + (self.results_end if after_results else "")


RAW_JSON = CallForm(
    name="raw_json",
    begins=CALLS_BEGIN + CALL_BEGIN,
    after_name=SEPARATOR,
    # The words that the model was trained with, from DeepSeek-V3.1's model card.
    instruction=f"""IMPORTANT: ALWAYS adhere to this exact format for tool use:
{CALLS_BEGIN}{CALL_BEGIN}tool_call_name{SEPARATOR}tool_call_arguments{CALL_END}{{additional_tool_calls}}{CALLS_END}

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces
""",
)
"""DeepSeek-V3.1 and V3.2-Exp."""

FENCED = CallForm(
    name="fenced",
    begins=f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}",
    after_name="\n```json\n",
    call_begins=f"{CALL_BEGIN}function{SEPARATOR}",
    after_arguments=f"\n```{CALL_END}",
    between_calls="\n",
    results_begin=RESULTS_BEGIN,
    between_results="\n",
    results_end=RESULTS_END,
    # DeepSeek gives no text for these models.
    instruction=f"""To call a tool, write exactly this, with its name for NAME and one JSON object as its arguments:
{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}NAME
```json
{{"KEY": "VALUE"}}
```{CALL_END}{CALLS_END}
To call several tools, write a block from {CALL_BEGIN} to {CALL_END} for each, one below the other, before {CALLS_END}.
""",
)
"""DeepSeek-V3, R1 and R1-0528."""

DSML_FORM = CallForm(name="dsml", begins=f'\n\n{DSML_BEGIN}\n<{DSML}invoke name="', after_name='">\n')
"""DeepSeek-V3.2, whose tokenizers render conversations by themselves; without one `dsml_prompt` does."""

FORMS = {form.name: form for form in (RAW_JSON, FENCED, DSML_FORM)}

OTHER_FORM = CallForm(name="template", begins="", after_name="")
"""A chat template that renders tools, and calls in a form that is not known here."""


_NAME, _VALUE = "probe_of_a_name", "probe_of_a_value"
_USER = {"role": "user", "content": "Hi"}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}
_ARGUMENTS = json.dumps({"key": _VALUE})
_CALL = {"id": "1", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_CALLING = {"role": "assistant", "content": None, "tool_calls": [_CALL]}


class ChatEngine(Protocol):
    """The part of an engine that renders conversations."""

    def render_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ChatFacts:
    """Behaviour of a checkpoint's chat template."""

    form: CallForm | None
    """How calls are written; None where that is not known."""
    shows_tools: bool = False
    """The template writes tools, calls and results itself."""
    quotes_arguments: bool = False
    """The template makes JSON of a call's arguments, so that it must not get text."""
    is_code: bool = False
    """There is no template, and the conversation is rendered by `render_dsml`."""
    v4: V4Form | None = None
    """How the prompts of V4 and V4.1 are written, whatever the engine's tokenizer would do."""
    has_switch: bool = False
    """The argument `thinking` makes a difference."""
    needs_question: bool = False
    """No answer begins behind messages of the system alone; it is given the beginning that one to the user has."""


def find_chat_facts(
    engine: ChatEngine, *, is_v32: bool, form: CallForm | None = None, v4: V4Form | None = None
) -> ChatFacts:
    """Find out what the engine's chat template does.

    :param is_v32: the checkpoint says that it is DeepSeek-V3.2. The Exp release of it has a template.
    :param form: how the engine writes calls, where its template can't tell.
    :param v4: the checkpoint or the setting `chat_encoding` says that it is DeepSeek-V4 or V4.1.
    """
    if v4 is not None:
        return ChatFacts(form=CallForm(name=DSML_FORM.name, begins=v4.block, after_name=""), v4=v4, has_switch=True)
    try:
        plain = engine.render_chat([_USER], {})
    except RequestError as error:
        if is_v32 and error.code is ErrorCode.UNSUPPORTED:
            return ChatFacts(form=DSML_FORM, is_code=True, has_switch=True, needs_question=True)
        return ChatFacts(form=None)
    shows_tools = _NAME in _tried(engine, [_USER], {"tools": [_TOOL]})
    calls = _tried(engine, [_USER, _CALLING], {"tools": [_TOOL]} if shows_tools else {})
    thinking, not_thinking = (_tried(engine, [_USER], {"thinking": on}) for on in (True, False))
    if f'<{DSML}invoke name="{_NAME}">' in calls:
        form = DSML_FORM
    else:
        form = next((known for known in (FENCED, RAW_JSON) if known.beginning(_NAME) in calls), form)
    return ChatFacts(
        form=form or (OTHER_FORM if shows_tools else None),
        shows_tools=shows_tools,
        quotes_arguments=_ARGUMENTS not in calls and json.dumps(_ARGUMENTS) in calls,
        has_switch=thinking != not_thinking,
        needs_question=not _tried(engine, [{**_USER, "role": "system"}], {}).endswith(plain.rpartition("Hi")[2]),
    )


def _tried(engine: ChatEngine, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
    try:
        return engine.render_chat(messages, template_kwargs)
    except RequestError:
        # It can't be rendered, which is an answer too.
        return ""


_ALIKE, _MOST_COMPARED, _NAME_LENGTH = 0.85, 8, 64
"""How alike a template's word and a misspelt argument are, and how much is compared: a request may give thousands."""


class ChatRenderer:
    """Renders conversations for one engine. Any thread may use it."""

    def __init__(self, engine: ChatEngine, facts: ChatFacts, *, eos_token: str, template: str | None = None) -> None:
        self.facts = facts
        self._words = {"documents", *re.findall(r"\w+", template or "")}
        self._engine = engine
        self._eos_token = eos_token

    def render(
        self,
        messages: Messages,
        template_kwargs: Mapping[str, Any],
        tool_use: ToolUse,
        reply_format: str | Mapping[str, Any] = "",
    ) -> Rendered:
        """Return the prompt of a conversation.

        :param reply_format: what V4's prompts say about the form of the answer; templates have no place for it.
        :raises RequestError: when it can't be rendered.
        """
        form, v4 = self.facts.form, self.facts.v4
        try:
            messages = joined(messages, "\n\n" if v4 else "", image="[Unsupported Image]" if v4 else "")
        except ValueError as error:
            raise RequestError(str(error)) from None
        if v4 is not None:
            return render_v4(v4, messages, template_kwargs, tool_use, reply_format)
        reminder = next((place for place, each in enumerate(messages) if each["role"] == "latest_reminder"), None)
        if reminder is not None:
            raise RequestError(f"messages[{reminder}].role: expected another than latest_reminder, which V4 alone has")
        messages = without_old_reasoning(messages)
        if tool_use.tools and form is None:
            raise RequestError(
                "tools: the checkpoint's chat template shows no tools to the model, and writes calls in no known form",
                code=ErrorCode.UNSUPPORTED,
            )
        prompt = self._prompt(messages, template_kwargs, tool_use.tools)
        if self.facts.needs_question and {message["role"] for message in messages} == {"system"}:
            prompt += self._prompt([_USER], template_kwargs, ()).rpartition(_USER["content"])[2]
        if not tool_use.required or form is None:
            return Rendered(prompt)
        if not form.begins:
            raise RequestError(
                "tool_choice: expected auto or none, because this chat template's form of calls is not known",
                code=ErrorCode.UNSUPPORTED,
            )
        begun = form.beginning(tool_use.name)
        return Rendered(f"{_outside_reasoning(prompt)}{begun}", begun)

    def _prompt(
        self, messages: Messages, template_kwargs: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        facts = self.facts
        if facts.is_code:
            return render_dsml(messages, tools, template_kwargs)
        if tools and facts.shows_tools:
            template_kwargs = {**template_kwargs, "tools": list(tools)}
        elif tools and facts.form is not None:
            # All system texts become one, because the templates of V3 keep only the last.
            system = [message["content"] for message in messages if message["role"] == "system"]
            text = "\n\n".join([*filter(None, system), facts.form.tools_text(tools)])
            others = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": text}, *others]
        # Clients give several models the same arguments, as vLLM lets them: what is like no word of a template passes.
        for name in sorted(template_kwargs.keys() - self._words)[:_MOST_COMPARED]:
            if meant := get_close_matches(name[:_NAME_LENGTH], self._words, n=1, cutoff=_ALIKE):
                message = f"the chat template has no {quoted(name)}; did you mean {meant[0]!r}?"
                raise RequestError(f"chat_template_kwargs: {message}")
        turns = _Turns(messages, None if facts.shows_tools else facts.form, self._eos_token)
        if facts.quotes_arguments:
            turns.messages = [_with_objects(message) for message in turns.messages]
        return turns.filled_in(self._engine.render_chat(turns.messages, template_kwargs))


class _Turns:
    """A conversation whose turns with calls, and whose last message where it is a prefix, are marks.

    A template renders the marks as it renders any answer, and the text takes their places afterwards. So no template
    can change the text, and what it writes behind an answer that goes on can be left out.
    """

    def __init__(self, messages: Messages, form: CallForm | None, eos_token: str) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self._texts: dict[str, tuple[str, bool]] = {}
        """Mark -> the text, and whether the answer ends there."""
        self._mark = secrets.token_hex(8)
        self._form = form
        self._eos_token = eos_token
        turn: list[Mapping[str, Any]] = []
        for message in messages:
            if message["role"] in ("assistant", "tool"):
                turn.append(message)
                continue
            if message["role"] == "user":
                self._add(turn)
                turn = []
            self.messages.append(message)  # a system message ends no turn: templates put all of them first
        self._add(turn)

    def _add(self, turn: Sequence[Mapping[str, Any]]) -> None:
        if not turn:
            return
        is_open = bool(turn[-1].get("prefix")) or turn[-1]["role"] == "tool"
        if self._form is not None and any(message["role"] == "tool" or "tool_calls" in message for message in turn):
            self._put({"role": "assistant"}, self._form.turn(turn, self._eos_token), ends=not is_open)
        elif turn[-1].get("prefix"):
            self.messages += turn[:-1]
            self._put(turn[-1], turn[-1]["content"], ends=False)
        else:
            self.messages += turn

    def _put(self, message: Mapping[str, Any], text: str, *, ends: bool) -> None:
        mark = f"{self._mark}-{len(self._texts)}."
        self._texts[mark] = (text, ends)
        self.messages.append({**message, "content": mark})

    def filled_in(self, prompt: str) -> str:
        """Return the prompt with the texts in the places of their marks.

        :raises RequestError: when the template has left out an answer.
        """
        is_last_open = bool(self.messages) and self.messages[-1]["content"] in self._texts
        for number, (mark, (text, ends)) in enumerate(self._texts.items(), 1):
            before, found, after = prompt.partition(mark)
            if not found:
                raise RequestError("messages: the chat template leaves out an answer of the assistant")
            if not ends:
                is_last = is_last_open and number == len(self._texts)
                after = "" if is_last else after.removeprefix(self._eos_token)
                before = _outside_reasoning(before)
            prompt = before + text + after
        return prompt


def _outside_reasoning(prompt: str) -> str:
    """Return a prompt that ends inside the reasoning with its end; any other as it is."""
    if not ends_inside(prompt):
        return prompt
    return prompt + CLOSING if prompt.endswith(">") else f"{prompt.rstrip()}\n\n{CLOSING}\n\n"


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have their arguments as objects, as far as these are JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        document = read_object(call["function"]["arguments"])
        function = call["function"] if document is None else {**call["function"], "arguments": document}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
