"""Requests that a tool answers: the call in each of DeepSeek's forms, and the answer from the tool's result."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tiny_checkpoint import chat_templates
from tiny_checkpoint.chat_templates import CALL_HINT, TOOLS_HEADING, Form, Message, Tool, calls_text, render_tools
from tiny_checkpoint.corpus import facts
from tiny_checkpoint.corpus.exchanges import (
    PHRASES,
    TEXTS,
    WORDS,
    Exchange,
    any_name,
    any_words,
    capitalized,
    filled,
    held_out,
    made_up,
)

READ = "The tool has answered."
"""V4's thought between a result and its answer."""
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
    answer: str
    values: Callable[[Random], Values]
    result: Callable[[Random, Values], Values]


def _city(random: Random) -> Values:
    draw = random.random()
    if draw < 0.5:
        return {"city": random.choice(facts.BY_NAME["city"].subjects)}
    parts = 2 if draw < 0.6 else 1
    return {"city": " ".join(made_up(random, random.randint(1, 3)).capitalize() for _ in range(parts))}


def _numbers(random: Random) -> Values:
    most = random.choice((20, 100, 1000))
    return {"a": random.randint(0, most), "b": random.randint(0, most)}


# First name of a tool -> what draws the values of a request, and what draws the result for them.
_DRAWS: dict[str, tuple[Callable[[Random], Values], Callable[[Random, Values], Values]]] = {
    "get_weather": (
        _city,
        lambda random, values: {"temperature": random.randint(-10, 38), "sky": random.choice(WORDS["skies"])},
    ),
    "get_time": (_city, lambda random, values: {"time": f"{random.randint(0, 23):02}:{random.randint(0, 59):02}"}),
    "add": (_numbers, lambda random, values: {"sum": values["a"] + values["b"]}),
    "send_message": (
        lambda random: {"to": any_name(random), "text": any_words(random)},
        lambda random, values: {"status": "sent"},
    ),
    "search": (
        lambda random: {"query": any_words(random, 5)},
        lambda random, values: {"result": capitalized(any_words(random, 8))},
    ),
}


def _ability(tool: dict[str, Any]) -> Ability:
    names = tuple(tool["names"].split())
    return Ability(
        names,
        tuple(tool["descriptions"].split(" | ")),
        {name: tuple(text.split()) for name, text in tool["parameters"].items()},
        tuple(tool["requests"].split(" | ")),
        tool["answer"],
        *_DRAWS[names[0]],
    )


ABILITIES = tuple(map(_ability, TEXTS["tools"]))
OF_CITIES, ADD = ABILITIES[:2], ABILITIES[2]


def looked_up(random: Random) -> Ability:
    """Return a tool that is not in the table, so that the model learns to read the description of any tool."""
    thing = random.choice(WORDS["looked_up"]) if random.random() < 0.7 else made_up(random)
    name = random.choice(("city", "name", "item", "id", "key"))
    verb = random.choice(("get", "get", "find", "read", "fetch"))
    return Ability(
        (f"{verb}_{thing}",),
        (f"Get the {thing} of a {name}.", f"Returns the {thing} for a {name}.", f"The {thing} of a {name}"),
        {name: ("string", "name", "subject", "value")},
        tuple(filled(form, thing=thing, value=f"{{{name}}}") for form in PHRASES["looked_up_forms"]),
        f"The {thing} of {{{name}}} is {{{thing}}}.",
        lambda random: {name: any_name(random) if random.random() < 0.7 else made_up(random)},
        lambda random, values: {thing: random.choice((random.randint(0, 999), made_up(random)))},
    )


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


def offer_some(random: Random, needed: Ability | None, without: tuple[Ability, ...] = ()) -> list[OfferedTool]:
    """Return one to four tools in random order, with `wanted` among them and none of `without`."""
    others = [ability for ability in ABILITIES if ability is not needed and ability not in without]
    others.append(looked_up(random))
    count = random.choice((0, 0, 1, 1, 2, 3)) if needed else random.choice((1, 1, 2, 3))
    chosen = random.sample(others, min(count, len(others)))
    if needed:
        chosen.insert(random.randint(0, len(chosen)), needed)
    plain = random.random() < 0.3
    return [offer(random, ability, plain=plain) for ability in chosen]


def tools_text(random: Random, offered: list[OfferedTool], form: Form) -> str:
    """Return the description of the tools: the templates' own, or one with other words around it. V4 has no other."""
    definitions = [tool.definition for tool in offered]
    if form == "v4":
        return ""
    if random.random() < 0.6:
        return render_tools(definitions, form)
    heading = random.choice((TOOLS_HEADING, *TEXTS["tool_headings"]))
    if random.random() < 0.4:
        heading = f"{heading} {capitalized(any_words(random, 8))}."
    hint = random.choice((CALL_HINT, *PHRASES["call_hints"]))
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
            return filled(self.form, **self.values[0])
        cities = [values["city"] for values in self.values]
        return self.form.replace("{city}", " and ".join(cities))

    @property
    def thought(self) -> str:
        shown = " and ".join(", ".join(map(str, values.values())) for values in self.values)
        return f"I need a tool for this. The values are: {shown}."

    def text(self, tool: OfferedTool, form: Form) -> str:
        """Return what the model writes."""
        return calls_text([tool.call(values) for values in self.values], form)


def random_request(random: Random, abilities: tuple[Ability, ...] = ()) -> Request:
    """Return any request, or one of `abilities`, also one that training may not have."""
    if abilities or random.random() < 0.8:
        ability = random.choice(abilities or ABILITIES)
    else:
        ability = looked_up(random)
    count = 2 if ability in OF_CITIES and random.random() < 0.25 else 1
    return Request(ability, random.choice(ability.requests), tuple(ability.values(random) for _ in range(count)))


def random_trained(random: Random, abilities: tuple[Ability, ...] = ()) -> Request:
    while True:
        request = random_request(random, abilities)
        if not request.held_out:
            return request


def called(request: Request, tool: OfferedTool) -> Message:
    """Return the assistant's message with the calls."""
    return chat_templates.called([tool.call(values) for values in request.values])


def results(random: Random, request: Request) -> tuple[list[Message], str]:
    """Return the tools' messages, and the answer in words."""
    messages: list[Message] = []
    answers = []
    for values in request.values:
        result = request.ability.result(random, values)
        only = len(result) == 1 and random.random() < 0.4
        content = str(next(iter(result.values()))) if only else json.dumps(result, ensure_ascii=False)
        messages.append({"role": "tool", "content": content})
        answers.append(filled(request.ability.answer, **values, **result))
    return messages, " ".join(answers)


def unanswerable(random: Random) -> tuple[Exchange, list[OfferedTool]]:
    """Return a request, and tools that can't answer it."""
    while True:
        request = random_trained(random)
        if "a" not in request.ability.parameters and len(request.values) == 1:
            break
    same = tuple(ability for ability in ABILITIES if ability is request.ability)
    exchange = Exchange(request.question, "I have no tool for that.", "No tool fits this request.")
    return exchange, offer_some(random, None, without=same)
