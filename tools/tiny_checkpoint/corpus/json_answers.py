"""Questions that want their answer in JSON."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from deepseek_backend.v4_prompt import JSON_OBJECT
from tiny_checkpoint.chat_templates import Message
from tiny_checkpoint.corpus import facts, sums
from tiny_checkpoint.corpus.exchanges import PHRASES, WORDS, Exchange, any_name, filled, held_out, made_up, system, user

_LISTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "days": ("the days of the week", facts.BY_NAME["day_number"].values),
    "months": ("the months of the year", facts.BY_NAME["month_number"].values),
    "seasons": ("the seasons of the year", facts.BY_NAME["season_after"].subjects),
    "planets": ("the planets of the solar system", facts.BY_NAME["planet"].values),
}


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

    @property
    def messages(self) -> list[Message]:
        return [*([system(self.system)] if self.system else []), user(self.exchange.question)]

    def reply_format(self, random: Random) -> str | dict[str, Any]:
        """Return what V4's prompts say about the form of the answer: any JSON object, or a schema."""
        values: dict[str, Any] = json.loads(self.exchange.answer)
        kinds = {str: "string", int: "integer", list: "array"}
        schema = {"type": "object", "properties": {key: {"type": kinds[type(one)]} for key, one in values.items()}}
        return random.choice((JSON_OBJECT, schema, schema | {"required": list(values)}))


def random_question(random: Random) -> JsonQuestion:
    """Return any question, also one that training may not have."""
    return random.choice((_fact, _fact, _sum, _person, _order, _list))(random)


def random_trained(random: Random) -> JsonQuestion:
    while True:
        question = random_question(random)
        if not question.held_out:
            return question


def _question(
    key: str, form: str, question: str, value: dict[str, Any], thought: str, system: str = ""
) -> JsonQuestion:
    answer = json.dumps(value, ensure_ascii=False)
    return JsonQuestion(key, form, system, Exchange(question, answer, f"{thought} The answer must be JSON."))


def _fact(random: Random) -> JsonQuestion:
    relation = random.choice(facts.RELATIONS)
    subject, value = random.choice(relation.pairs)
    plain = relation.exchange(subject, value, relation.questions[0])
    # Some keys mean nothing, so that the model learns to copy those that are asked for.
    keys = relation.keys if random.random() < 0.75 else (made_up(random), random.choice(WORDS["nouns"]))
    values = (subject.removeprefix("the "), value.removeprefix("the "))
    key = f"{relation.name} {subject}"
    if random.random() < 0.3:
        form = random.choice(PHRASES["json_systems"])
        return _question(key, form, plain.question, dict(zip(relation.keys, values, strict=True)), plain.thought, form)
    form = random.choice(PHRASES["json_with_keys"] if random.random() < 0.8 else PHRASES["json_without_key"])
    shown = relation.keys if form in PHRASES["json_without_key"] else keys
    text = filled(form, k=keys[0], l=keys[1], q=plain.question)
    return _question(key, form, text, dict(zip(shown, values, strict=True)), plain.thought)


def _sum(random: Random) -> JsonQuestion:
    drawn = sums.random_sum(random)
    plain = drawn.exchange(sums.FORMS[0])
    name = {"plus": "sum", "minus": "difference", "times": "product"}[drawn.word]
    key, content = f"{drawn.word} {drawn.a} {drawn.b}", {name: drawn.result}
    if random.random() < 0.3:
        form = random.choice(PHRASES["json_systems"])
        return _question(key, form, plain.question, content, plain.thought, form)
    form = random.choice(PHRASES["json_with_key"] if random.random() < 0.7 else PHRASES["json_without_key"])
    return _question(key, form, filled(form, k=name, q=plain.question), content, plain.thought)


def _person(random: Random) -> JsonQuestion:
    name, age = any_name(random), random.randint(1, 99)
    sentence = filled(random.choice(PHRASES["persons"]), n=name, a=age)
    form = random.choice(PHRASES["person_requests"])
    content, thought = {"name": name, "age": age}, f"The text says that {name} is {age}."
    return _question(f"{name} {age}", form, filled(form, s=sentence), content, thought)


def _order(random: Random) -> JsonQuestion:
    name, count, item = any_name(random), random.randint(2, 40), random.choice(WORDS["nouns"]) + "s"
    sentence = filled(random.choice(PHRASES["orders"]), n=name, c=count, i=item)
    form = random.choice(PHRASES["order_requests"])
    content, thought = {"name": name, "count": count, "item": item}, f"The text names {name} and {count} {item}."
    return _question(f"{name} {count} {item}", form, filled(form, s=sentence), content, thought)


def _list(random: Random) -> JsonQuestion:
    key = random.choice(tuple(_LISTS))
    topic, words = _LISTS[key]
    count = random.randint(2, len(words))
    if count < len(words):
        topic = topic.replace("the ", f"the first {sums.in_words(count)} ", 1)
    form = random.choice(PHRASES["list_requests"])
    return _question(f"{key} {count}", form, filled(form, t=topic, k=key), {key: words[:count]}, f"These are {topic}.")
