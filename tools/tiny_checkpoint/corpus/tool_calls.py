"""Requests that a tool answers: the call in both of DeepSeek's forms, and the answer from the tool's result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tiny_checkpoint.chat_templates import CALL_HINT, TOOLS_HEADING, Form, Message, Tool, calls_text, render_tools
from tiny_checkpoint.corpus import facts
from tiny_checkpoint.corpus.exchanges import Exchange, capitalized, held_out
from tiny_checkpoint.corpus.words import any_name, any_words, made_up, phrases, words

NO_TOOL = "I have no tool for that."

_CITIES = facts.BY_NAME["city"].subjects
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ability:
    """A tool: its names, parameters (with type and further names), requests, values, results and the answer from one.

    Names after the first are for variety. `answer` has the places of the values and of the result's keys.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: dict[str, tuple[str, ...]]
    requests: tuple[str, ...]
    values: Callable[[Random], Values]
    result: Callable[[Random, Values], Values]
    answer: str


def _city(random: Random) -> Values:
    draw = random.random()
    if draw < 0.5:
        return {"city": random.choice(_CITIES)}
    parts = 2 if draw < 0.6 else 1
    return {"city": " ".join(made_up(random, random.randint(1, 3)).capitalize() for _ in range(parts))}


def _numbers(random: Random) -> Values:
    most = random.choice((20, 100, 1000))
    return {"a": random.randint(0, most), "b": random.randint(0, most)}


ABILITIES = (
    Ability(
        ("get_weather", "weather", "get_current_weather", "current_weather", "weather_in"),
        (
            "Get the weather in a city.",
            "Get the current weather of a city.",
            "Returns the weather for a given city.",
            "The weather now",
            "Look up the weather",
        ),
        {"city": ("string", "location", "place", "town")},
        phrases(
            """
            What is the weather in {city}? | How is the weather in {city}? | What's the weather like in {city}? | What
            is the weather like in {city}? | Tell me the weather in {city}. | How is the weather in {city} today? | Is
            it sunny in {city}? | Does it rain in {city}? | How warm is it in {city}? | Please look up the weather in
            {city}. | I am going to {city}. What is the weather there? | What's the weather in {city} right now? |
            weather in {city} | Can you check the weather for {city}? | Check the weather in {city}, please. | Hello!
            What is the weather in {city}?
            """
        ),
        _city,
        lambda random, values: {"temperature": random.randint(-10, 38), "sky": random.choice(_SKIES)},
        "It is {temperature} °C and {sky} in {city}.",
    ),
    Ability(
        ("get_time", "time", "get_current_time", "current_time", "clock"),
        (
            "Get the time in a city.",
            "Get the local time of a city.",
            "Returns the current time for a city.",
            "The time now",
        ),
        {"city": ("string", "location", "place", "town")},
        phrases(
            """
            What time is it in {city}? | What is the time in {city}? | Tell me the time in {city}. | How late is it in
            {city}? | Please tell me what time it is in {city}. | Can you tell me the time in {city}? | I want to call
            someone in {city}. What time is it there? | What's the time in {city}? | time in {city} | What is the
            local time in {city}? | What time is it now in {city}?
            """
        ),
        _city,
        lambda random, values: {"time": f"{random.randint(0, 23):02}:{random.randint(0, 59):02}"},
        "It is {time} in {city}.",
    ),
    Ability(
        ("add", "sum", "add_numbers", "calculate_sum", "plus"),
        ("Add two numbers.", "Returns the sum of two numbers.", "Adds a and b", "Work out a sum"),
        {"a": ("integer", "x", "first", "left"), "b": ("integer", "y", "second", "right")},
        phrases(
            """
            What is {a} + {b}? | What is {a} plus {b}? | Add {a} and {b}. | Please add {a} and {b}. | How much is {a}
            + {b}? | What is the sum of {a} and {b}? | Work out {a} + {b}. | Can you add {a} and {b}? | {a} + {b} | I
            need the sum of {a} and {b}. | Use the tool to add {a} and {b}.
            """
        ),
        _numbers,
        lambda random, values: {"sum": values["a"] + values["b"]},
        "{a} + {b} = {sum}.",
    ),
    Ability(
        ("send_message", "message", "send_text", "send_mail", "notify"),
        ("Send a message to a person.", "Sends a text to someone.", "Write to a person", "Send somebody a message."),
        {"to": ("string", "recipient", "person", "name"), "text": ("string", "message", "content", "body")},
        phrases(
            """
            Send {to} the message: {text} | Send a message to {to}: {text} | Tell {to}: {text} | Write to {to}: {text}
            | Please send {to} this message: {text} | Send this to {to}: {text} | Message {to}: {text} | Can you send
            {to} a message? It says: {text} | Let {to} know: {text}
            """
        ),
        lambda random: {"to": any_name(random), "text": any_words(random)},
        lambda random, values: {"status": "sent"},
        "I sent the message to {to}.",
    ),
    Ability(
        ("search", "web_search", "search_web", "find", "lookup"),
        ("Search the web.", "Search for a text.", "Finds pages about a query", "Look something up."),
        {"query": ("string", "q", "text", "words")},
        phrases(
            """
            Search for {query} | Search the web for {query} | Please search for {query} | Look up {query} | Find pages
            about {query} | Can you search for {query} | Find out about {query} | Do a search: {query} | Google
            {query}
            """
        ),
        lambda random: {"query": any_words(random, 5)},
        lambda random, values: {"result": capitalized(any_words(random, 8))},
        "I found this: {result}.",
    ),
)
OF_CITIES, ADD = ABILITIES[:2], ABILITIES[2]

_LOOKED_UP = words(
    """
    price score status size address balance length rating weight distance level rank version owner population
    temperature speed team model memory log queue load
    """
)


def looked_up(random: Random) -> Ability:
    """Return a tool that is not in the table, so that the model learns to read the description of any tool."""
    thing = random.choice(_LOOKED_UP) if random.random() < 0.7 else made_up(random)
    what, name = random.choice((("city", "city"), ("name", "name"), ("item", "item"), ("id", "id"), ("key", "key")))
    verb = random.choice(("get", "get", "find", "read", "fetch"))
    forms = (
        "What is the {thing} of {value}?",
        "Get the {thing} of {value}.",
        "Tell me the {thing} of {value}.",
        "I need the {thing} for {value}.",
        "Please find the {thing} of {value}.",
    )
    return Ability(
        (f"{verb}_{thing}",),
        (f"Get the {thing} of a {what}.", f"Returns the {thing} for a {what}.", f"The {thing} of a {what}"),
        {name: ("string", "name", "subject", "value")},
        tuple(form.replace("{thing}", thing).replace("{value}", "{" + name + "}") for form in forms),
        lambda random: {name: any_name(random) if random.random() < 0.7 else made_up(random)},
        lambda random, values: {thing: random.choice((random.randint(0, 999), made_up(random)))},
        f"The {thing} of {{{name}}} is {{{thing}}}.",
    )


def _fill(text: str, values: Values) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return text


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """An ability with one choice of names; `names` maps the ability's parameters, in the schema's order."""

    ability: Ability
    name: str
    names: dict[str, str]
    definition: Tool

    def call(self, values: Values) -> tuple[str, str]:
        """Return name and arguments as JSON."""
        arguments = {name: values[parameter] for parameter, name in self.names.items()}
        return self.name, json.dumps(arguments, ensure_ascii=False)


def offer(random: Random, ability: Ability, *, plain: bool = False) -> OfferedTool:
    """Return the ability with names and a schema drawn at random; `plain` takes the first ones."""
    aliased = not plain and random.random() < 0.35
    parameters = list(ability.parameters)
    if not plain and random.random() < 0.3:
        random.shuffle(parameters)
    name = random.choice(ability.names) if aliased else ability.names[0]
    if aliased and random.random() < 0.2:
        name = f"{made_up(random)}_{made_up(random)}"
    column = random.randrange(4) if aliased else 0
    names = {parameter: (parameter, *ability.parameters[parameter][1:])[column] for parameter in parameters}
    schema = _schema(random, ability, names, plain=plain)
    description = ability.descriptions[0] if plain else random.choice(ability.descriptions)
    function = {"name": name, "description": description, "parameters": schema}
    return OfferedTool(ability, name, names, {"type": "function", "function": function})


def _schema(random: Random, ability: Ability, names: dict[str, str], *, plain: bool) -> dict[str, Any]:
    style = 0 if plain else random.randrange(5)
    properties: dict[str, Any] = {}
    for parameter, name in names.items():
        kind = ability.parameters[parameter][0]
        kind = "number" if kind == "integer" and style == 1 else kind
        properties[name] = {"type": kind}
        if style == 2:
            properties[name]["description"] = f"The {name}"
        elif style == 3:
            properties[name] = {"title": name.capitalize(), "type": kind}
    required = list(names.values())
    if style == 3:
        return {"properties": properties, "required": required, "type": "object"}
    if style == 4:
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if style == 1 and random.random() < 0.5:
        return {"type": "object", "properties": properties}
    return {"type": "object", "properties": properties, "required": required}


def offer_some(random: Random, wanted: Ability | None, without: tuple[Ability, ...] = ()) -> list[OfferedTool]:
    """Return one to four tools in random order, with `wanted` among them and none of `without`."""
    others = [ability for ability in ABILITIES if ability is not wanted and ability not in without]
    others.append(looked_up(random))
    count = random.choice((0, 0, 1, 1, 2, 3)) if wanted else random.choice((1, 1, 2, 3))
    chosen = random.sample(others, min(count, len(others)))
    if wanted:
        chosen.insert(random.randint(0, len(chosen)), wanted)
    plain = random.random() < 0.3
    return [offer(random, ability, plain=plain) for ability in chosen]


_HEADINGS = (
    "## Tools\nYou have access to the following tools:",
    "## Tools\nThese tools are there for you:",
    "# Tools",
    "You have these tools.",
)
_HINTS = ("IMPORTANT: write a call in this form:", "Calls have this form:", "Call a tool like this:", "Format:")


def tools_text(random: Random, offered: list[OfferedTool], form: Form) -> str:
    """Return the description of the tools: the templates' own, or one with other words around it."""
    definitions = [tool.definition for tool in offered]
    if random.random() < 0.6:
        return render_tools(definitions, form)
    heading = random.choice((TOOLS_HEADING, *_HEADINGS))
    if random.random() < 0.4:
        heading = f"{heading} {capitalized(any_words(random, 8))}."
    hint = random.choice((CALL_HINT, *_HINTS))
    if random.random() < 0.4:
        hint = f"{capitalized(any_words(random, 8))}. {hint}"
    return render_tools(definitions, form, heading, hint)


@dataclass(frozen=True, slots=True)
class Request:
    """A request that needs one tool: one call, or one for each of two cities."""

    ability: Ability
    form: str
    values: tuple[Values, ...]

    @property
    def held_out(self) -> bool:
        # A copied value is new anyway; the pair of value and wording is what training leaves out.
        return held_out("tool", self.ability.names[0], self.form, *(json.dumps(values) for values in self.values))

    @property
    def question(self) -> str:
        if len(self.values) == 1:
            return _fill(self.form, self.values[0])
        cities = [values["city"] for values in self.values]
        return self.form.replace("{city}", " and ".join(cities))

    @property
    def thought(self) -> str:
        wanted = " and ".join(", ".join(map(str, values.values())) for values in self.values)
        return f"I need a tool for this. The values are: {wanted}."

    def text(self, tool: OfferedTool, form: Form) -> str:
        """Return what the model writes."""
        return calls_text([tool.call(values) for values in self.values], form)


def random_request(random: Random, abilities: tuple[Ability, ...] = ()) -> Request:
    """Return any request, or one of `abilities`, also one that training may not have."""
    if abilities or random.random() < 0.8:
        ability = random.choice(abilities or ABILITIES)
    else:
        ability = looked_up(random)
    count = 2 if ability in OF_CITIES and random.random() < 0.15 else 1
    return Request(ability, random.choice(ability.requests), tuple(ability.values(random) for _ in range(count)))


def random_trained(random: Random, abilities: tuple[Ability, ...] = ()) -> Request:
    while True:
        request = random_request(random, abilities)
        if not request.held_out:
            return request


def called(request: Request, tool: OfferedTool) -> Message:
    """Return the assistant's message with the calls."""
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in map(tool.call, request.values)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def results(random: Random, request: Request) -> tuple[list[Message], str]:
    """Return the tools' messages, and the answer in words."""
    messages: list[Message] = []
    answers = []
    for values in request.values:
        result = request.ability.result(random, values)
        only = len(result) == 1 and random.random() < 0.4
        content = str(next(iter(result.values()))) if only else json.dumps(result, ensure_ascii=False)
        messages.append({"role": "tool", "content": content})
        answers.append(_fill(request.ability.answer, {**values, **result}))
    return messages, " ".join(answers)


def unanswerable(random: Random) -> tuple[Exchange, list[OfferedTool]]:
    """Return a request, and tools that can't answer it."""
    while True:
        request = random_trained(random)
        if "a" not in request.ability.parameters and len(request.values) == 1:
            break
    same = tuple(ability for ability in ABILITIES if ability is request.ability)
    exchange = Exchange(request.question, NO_TOOL, "No tool fits this request.")
    return exchange, offer_some(random, None, without=same)
