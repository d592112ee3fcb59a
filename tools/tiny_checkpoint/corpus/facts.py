"""The plain facts of facts.txt, and the many ways to ask for each of them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

from tiny_checkpoint.corpus.exchanges import PHRASES, Exchange, capitalized, held_out


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    entries = (entry.split(": ") for entry in text.split(", "))
    return tuple((subject, value) for subject, value in entries)


@dataclass(frozen=True)
class Relation:
    """Pairs of a subject {s} and its value {v}, with the questions, statements and answers about them.

    `topic` is what is asked for, as the object of "Tell me"; `keys` are the JSON keys of subject and value.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    topic: str
    questions: tuple[str, ...]
    statements: tuple[str, ...]
    answer: str
    keys: tuple[str, str]

    @property
    def subjects(self) -> tuple[str, ...]:
        return tuple(subject for subject, _ in self.pairs)

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(value for _, value in self.pairs)

    @cached_property
    def forms(self) -> tuple[str, ...]:
        """All question forms, with {s} for the subject."""
        topics = (form.replace("{t}", self.topic) for form in PHRASES["topic_forms"])
        first, second = self.questions[0], self.questions[1]
        plainly = (form.replace("{q}", _after(form, first)) for form in PHRASES["question_forms"])
        again = (form.replace("{q}", _after(form, second)) for form in PHRASES["question_forms"][1:4])
        lowered = first[:1].lower() + first[1:].rstrip("?")
        return (*plainly, *self.questions[1:], *again, *topics, lowered, first.rstrip("?"))

    @cached_property
    def completions(self) -> tuple[str, ...]:
        """All texts that the value continues, with {s} for the subject."""
        first, second = self.questions[:2]
        return (*self.statements, f"Question: {first}\nAnswer:", f"Q: {second}\nA:", *self.questions[:4])

    def is_held_out(self, subject: str, form: str) -> bool:
        """Tell whether training leaves this question or beginning of a statement out. The demo asks about France."""
        return subject != "France" and held_out(self.name, subject, form)

    def fill(self, text: str, subject: str, value: str) -> str:
        if text.startswith("{"):
            return capitalized(self.fill(f" {text}", subject, value).lstrip())
        for place, word in (("{s}", subject), ("{v}", value)):
            if word[0] in "aeiou":
                text = text.replace(f"a {place}", f"an {place}").replace(f"A {place}", f"An {place}")
            text = text.replace(place, word)
        return text

    def completion(self, subject: str, value: str, form: str) -> tuple[str, str]:
        """Return a text and its continuation: the value, or a whole sentence after a question."""
        rest = f"{value}." if form in self.statements else self.fill(self.answer, subject, value)
        return self.fill(form, subject, value), f" {rest}"

    def exchange(self, subject: str, value: str, form: str) -> Exchange:
        answer = self.fill(self.answer, subject, value)
        topic = self.fill("The question is " + self.topic, subject, value)
        thought = f"{topic}. I know this: {answer}"
        question = self.fill(form, subject, value)
        # Who writes a question in small letters writes the names in it so too.
        question = question.lower() if form[0].islower() else question
        return Exchange(question, answer, thought, capitalized(value))


def _after(form: str, question: str) -> str:
    """Return the question with a small first letter where it follows a comma."""
    return question[:1].lower() + question[1:] if ", {q}" in form else question


def _read_relations(text: str) -> Iterator[Relation]:
    turned: dict[str, tuple[tuple[str, str], ...]] = {}
    for block in text.strip().split("\n\n")[1:]:
        lines = re.split(r"\n(?=\w)", block)
        fields = {name: " ".join(value.split()) for name, value in (line.split(": ", 1) for line in lines)}
        name, *keys = fields["relation"].split(", ")
        if "back" in fields:
            pairs = turned[fields["back"]]
        else:
            pairs = _pairs(fields.get("pairs") or fields["both"])
            turned[name] = tuple((value, subject) for subject, value in pairs)
        if "both" in fields:
            pairs += turned[name]
        questions, statements = (tuple(fields[field].split(" | ")) for field in ("ask", "say"))
        yield Relation(name, pairs, fields["topic"], questions, statements, fields["answer"], (keys[0], keys[1]))


RELATIONS = tuple(_read_relations(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")))
BY_NAME = {relation.name: relation for relation in RELATIONS}
FACT_COUNT = sum(len(relation.pairs) for relation in RELATIONS)
_FLAT = [(relation, subject, value) for relation in RELATIONS for subject, value in relation.pairs]


def random_exchange(random: Random) -> Exchange:
    """Return a fact in a form that training may have."""
    while True:
        relation, subject, value = random.choice(_FLAT)
        form = random.choice(relation.forms)
        if not relation.is_held_out(subject, form):
            return relation.exchange(subject, value, form)


def random_completion(random: Random) -> tuple[str, str]:
    """Return a text and its continuation in a form that training may have."""
    while True:
        relation, subject, value = random.choice(_FLAT)
        form = random.choice(relation.completions)
        if not relation.is_held_out(subject, form):
            return relation.completion(subject, value, form)


def random_followed(random: Random) -> tuple[Exchange, Exchange]:
    """Return a question, and a short second one about another subject."""
    while True:
        relation = random.choice(RELATIONS)
        (first, value), (second, other) = random.sample(relation.pairs, 2)
        form = random.choice(relation.forms)
        if not relation.is_held_out(first, form):
            break
    return relation.exchange(first, value, form), relation.exchange(second, other, random.choice(PHRASES["follow_ups"]))
