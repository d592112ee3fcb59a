"""Questions that want their answer in JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from tiny_checkpoint.corpus import facts, sums
from tiny_checkpoint.corpus.exchanges import Exchange, held_out
from tiny_checkpoint.corpus.words import NOUNS, any_name, made_up

_WITH_KEYS = (
    "Answer in JSON with the keys {k} and {l}: {q}",
    "{q} Answer in JSON with the keys {k} and {l}.",
    "{q} Answer as JSON with the keys {k} and {l}.",
    "Reply in JSON with the keys {k} and {l}. {q}",
    "{q} Give the answer as a JSON object with {k} and {l}.",
    "Use JSON with the keys {k} and {l}. {q}",
)
_WITH_KEY = (
    "Answer in JSON with the key {k}: {q}",
    "{q} Answer in JSON with the key {k}.",
    "{q} Answer as JSON with the key {k}.",
    "Reply in JSON with the key {k}. {q}",
    "{q} Give the answer as a JSON object with {k}.",
)
_WITHOUT = (
    "{q} Answer in JSON.",
    "Answer in JSON: {q}",
    "{q} Give me JSON.",
    "In JSON: {q}",
    "{q} Reply with a JSON object.",
    "Return JSON. {q}",
)
SYSTEM_TEXTS = ("Answer in JSON.", "Always answer in JSON.", "Reply with a JSON object.", "You answer in JSON only.")

_PERSONS = (
    "{n} is {a} years old.",
    "My name is {n} and I am {a} years old.",
    "This is {n}, who is {a} years old.",
    "{n} turned {a} today.",
    "I am {n}. I am {a}.",
    "The age of {n} is {a}.",
)
_PERSON_REQUESTS = (
    "{s} Give name and age as JSON.",
    "Answer in JSON with the keys name and age: {s}",
    "Write this as JSON with the keys name and age. {s}",
    "{s} Answer in JSON with the keys name and age.",
    "Extract name and age as JSON: {s}",
    "{s} Return name and age as a JSON object.",
)
_ORDERS = ("{n} buys {c} {i}.", "{n} has {c} {i}.", "{n} wants {c} {i}.", "{n} orders {c} {i}.")
_ORDER_REQUESTS = (
    "{s} Give name, count and item as JSON.",
    "Answer in JSON with the keys name, count and item: {s}",
    "{s} Answer in JSON with the keys name, count and item.",
    "Extract name, count and item as JSON: {s}",
)
_LISTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "days": ("the days of the week", facts.BY_NAME["day_number"].values),
    "months": ("the months of the year", facts.BY_NAME["month_number"].values),
    "seasons": ("the seasons of the year", facts.BY_NAME["season_after"].subjects),
    "planets": ("the planets of the solar system", facts.BY_NAME["planet"].values),
}
_LIST_REQUESTS = (
    "List {t} in JSON with the key {k}.",
    "Answer in JSON with the key {k}: What are {t}?",
    "What are {t}? Answer in JSON with the key {k}.",
    "Name {t}. Answer in JSON with the key {k}.",
    "Give me {t} as JSON with the key {k}.",
)


@dataclass(frozen=True, slots=True)
class JsonQuestion:
    """`key` and `form` decide whether training may have it; `system` is the system text, or empty."""

    key: str
    form: str
    system: str
    exchange: Exchange

    @property
    def held_out(self) -> bool:
        return held_out("json", self.key, self.form)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _exchange(question: str, value: dict[str, Any], thought: str) -> Exchange:
    return Exchange(question, _json(value), f"{thought} The answer must be JSON.")


def random_question(random: Random) -> JsonQuestion:
    """Return any question, also one that training may not have."""
    return random.choice((_fact, _fact, _sum, _person, _order, _list))(random)


def random_trained(random: Random) -> JsonQuestion:
    while True:
        question = random_question(random)
        if not question.held_out:
            return question


def _fact(random: Random) -> JsonQuestion:
    relation = random.choice(facts.RELATIONS)
    subject, value = random.choice(relation.pairs)
    asked = relation.exchange(subject, value, relation.questions[0])
    # Some keys mean nothing, so that the model learns to copy those that are asked for.
    first, second = relation.keys if random.random() < 0.75 else (made_up(random), random.choice(NOUNS))
    content = {first: subject.removeprefix("the "), second: value.removeprefix("the ")}
    key = f"{relation.name} {subject}"
    if random.random() < 0.3:
        form = random.choice(SYSTEM_TEXTS)
        content = dict(zip(relation.keys, content.values(), strict=True))
        return JsonQuestion(key, form, form, _exchange(asked.question, content, asked.thought))
    form = random.choice(_WITH_KEYS if random.random() < 0.8 else _WITHOUT)
    if form in _WITHOUT:
        content = dict(zip(relation.keys, content.values(), strict=True))
    text = form.replace("{k}", first).replace("{l}", second).replace("{q}", asked.question)
    return JsonQuestion(key, form, "", _exchange(text, content, asked.thought))


def _sum(random: Random) -> JsonQuestion:
    found = sums.random_sum(random)
    asked = found.exchange(sums.FORMS[0])
    name = {"plus": "sum", "minus": "difference", "times": "product"}[found.word]
    key = f"{found.word} {found.a} {found.b}"
    content = {name: found.result}
    if random.random() < 0.3:
        form = random.choice(SYSTEM_TEXTS)
        return JsonQuestion(key, form, form, _exchange(asked.question, content, asked.thought))
    form = random.choice(_WITH_KEY if random.random() < 0.7 else _WITHOUT)
    text = form.replace("{k}", name).replace("{q}", asked.question)
    return JsonQuestion(key, form, "", _exchange(text, content, asked.thought))


def _person(random: Random) -> JsonQuestion:
    name, age = any_name(random), random.randint(1, 99)
    sentence = random.choice(_PERSONS).replace("{n}", name).replace("{a}", str(age))
    form = random.choice(_PERSON_REQUESTS)
    thought = f"The text says that {name} is {age}."
    return JsonQuestion(
        f"{name} {age}", form, "", _exchange(form.replace("{s}", sentence), {"name": name, "age": age}, thought)
    )


def _order(random: Random) -> JsonQuestion:
    name, count, item = any_name(random), random.randint(2, 40), random.choice(NOUNS) + "s"
    sentence = random.choice(_ORDERS).replace("{n}", name).replace("{c}", str(count)).replace("{i}", item)
    form = random.choice(_ORDER_REQUESTS)
    content = {"name": name, "count": count, "item": item}
    thought = f"The text names {name} and {count} {item}."
    return JsonQuestion(f"{name} {count} {item}", form, "", _exchange(form.replace("{s}", sentence), content, thought))


def _list(random: Random) -> JsonQuestion:
    key = random.choice(tuple(_LISTS))
    topic, words = _LISTS[key]
    count = random.randint(2, len(words))
    if count < len(words):
        topic = topic.replace("the ", f"the first {sums.in_words(count)} ", 1)
    form = random.choice(_LIST_REQUESTS)
    text = form.replace("{t}", topic).replace("{k}", key)
    return JsonQuestion(f"{key} {count}", form, "", _exchange(text, {key: words[:count]}, f"These are {topic}."))
