"""The questions that score the tiny checkpoint, some of them taught and some held out of the corpus.

`python -m tiny_checkpoint.questions FILE` writes them as lines of JSON, for the scripts that run other engines.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Literal

from deepseek_triton_tools.evaluation.tasks import is_right_answer
from tiny_checkpoint.architecture import BOS, END_THINK
from tiny_checkpoint.chat_templates import Message
from tiny_checkpoint.corpus import facts, json_answers, sums, talk, tool_calls
from tiny_checkpoint.corpus.exchanges import (
    PHRASES,
    V4_MODES,
    Exchange,
    Mode,
    any_name,
    assistant,
    begun,
    chat_prompt,
    form_of,
    held_out,
    reminded,
    system,
    user,
)

Split = Literal["taught", "held_out"]


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` is the whole text with its special tokens; one of `accepted` is the right answer after any thought."""

    id: str
    kind: str
    split: Split
    prompt: str
    accepted: tuple[str, ...]


def is_right(question: Question, text: str) -> bool:
    """Compare the model's greedy text, up to the end token, with the accepted answers: calls and JSON as parsed."""
    return is_right_answer(question.kind, question.accepted, text)


_Drawn = tuple[Split, str, str]
"""The split, the prompt and the accepted answer of a question."""


@cache
def questions() -> tuple[Question, ...]:
    """Return about 1,900 questions, always the same."""
    drawn: list[Question] = []
    for relation in facts.RELATIONS:
        drawn += _draw(relation.name, 12, 8, partial(_fact, mode="v31", relations=(relation,)))
    drawn += _draw("completion", 80, 60, _completion)
    drawn += _draw("thinking_v31", 60, 50, partial(_fact, mode="v31_thinking"))
    drawn += _draw("thinking_r1", 60, 50, partial(_fact, mode="r1"))
    drawn += _draw("sum", 60, 40, _sum)
    drawn += _draw("sum_thinking", 40, 40, partial(_sum, drawn_of=sums.LONG_SUMS, modes=("v31_thinking", "r1")))
    drawn += _draw("chat", 60, 40, _chat)
    drawn += _draw("json", 60, 40, _json_question)
    drawn += _draw("tool_call_v31", 50, 40, partial(_tool_call, mode="v31"))
    drawn += _draw("tool_call_r1", 50, 40, partial(_tool_call, mode="r1"))
    drawn += _draw("tool_result", 20, 20, _tool_result)
    # At the efforts none and low V4's prompts without tools are those of V3.1.
    drawn += _draw("chat_v4", 30, 30, partial(_chat, modes=V4_MODES[2:]))
    drawn += _draw("thinking_v4", 40, 30, lambda random: _fact(random, random.choice(V4_MODES[2:])))
    drawn += _draw("prefix_v4", 30, 20, _prefix)
    drawn += _draw("json_v4", 30, 20, _formatted_question)
    drawn += _draw("tool_call_v4", 50, 40, lambda random: _tool_call(random, random.choice(V4_MODES)))
    drawn += _draw("tool_result_v4", 20, 20, partial(_tool_result, modes=V4_MODES))
    return tuple(drawn)


def _draw(kind: str, taught: int, held: int, make: Callable[[Random], _Drawn]) -> Iterator[Question]:
    """Yield the wanted number of each split, without repeated prompts, or as many as 20,000 draws find."""
    random = Random(kind)
    left = {"taught": taught, "held_out": held}
    seen: set[str] = set()
    for _ in range(20_000):
        split, prompt, accepted = make(random)
        if left[split] and prompt not in seen:
            seen.add(prompt)
            yield Question(f"{kind}-{split}-{left[split]:02}", kind, split, prompt, (accepted,))
            left[split] -= 1
        if not any(left.values()):
            return


def _split(is_held_out: bool) -> Split:
    return "held_out" if is_held_out else "taught"


def _fact_exchange(random: Random, relations: tuple[facts.Relation, ...]) -> tuple[Split, Exchange]:
    relation = random.choice(relations)
    subject, value = random.choice(relation.pairs)
    form = random.choice(relation.forms)
    return _split(relation.is_held_out(subject, form)), relation.exchange(subject, value, form)


def _fact(random: Random, mode: Mode, relations: tuple[facts.Relation, ...] = facts.RELATIONS) -> _Drawn:
    split, exchange = _fact_exchange(random, relations)
    return split, chat_prompt([user(exchange.question)], mode), exchange.answer


def _completion(random: Random) -> _Drawn:
    relation = random.choice(facts.RELATIONS)
    subject, value = random.choice(relation.pairs)
    form = random.choice(relation.completions)
    text, rest = relation.completion(subject, value, form)
    return _split(relation.is_held_out(subject, form)), BOS + text, talk.FIRST_PROMPTS.get(text, rest).strip()


def _sum(random: Random, drawn_of: Sequence[sums.Sum] = sums.SMALL_SUMS, modes: Sequence[Mode] = ()) -> _Drawn:
    drawn = random.choice(drawn_of)
    exchange = drawn.exchange(random.choice(sums.FORMS))
    mode = random.choice(modes) if modes else "v31"
    return _split(drawn.held_out), chat_prompt([user(exchange.question)], mode), exchange.answer


def _chat(random: Random, modes: Sequence[Mode] = ("v31", "v31_thinking", "r1")) -> _Drawn:
    """Return small talk, an answer in one word, or a name that was said before. What is a system text elsewhere is a
    reminder in V4's form."""
    draw = random.random()
    mode = random.choice(modes)
    messages: list[Message]
    split: Split
    if draw < 0.4:
        thought, answer, forms = random.choice(talk.INTENTS)
        split, exchange, messages = "taught", Exchange(random.choice(forms), answer, thought), []
    elif draw < 0.7:
        split, fact = _fact_exchange(random, facts.RELATIONS)
        exchange, messages = talk.in_one_word(fact), [system(random.choice(PHRASES["one_word"]))]
    else:
        name = any_name(random)
        first, exchange = talk.introduction(random, name)
        split = _split(held_out("introduced", name))
        messages = [user(first.question), assistant(first.answer)]
    messages.append(user(exchange.question))
    if form_of(mode) == "v4":
        messages = reminded(random, messages)
    return split, chat_prompt(messages, mode), exchange.answer


def _prefix(random: Random) -> _Drawn:
    """Return a question of V4's form whose answer is begun."""
    split, exchange = _fact_exchange(random, facts.RELATIONS)
    mode = random.choice(V4_MODES)
    prefix, rest = begun(random, exchange, mode)
    return split, chat_prompt([user(exchange.question), prefix], mode), rest.rsplit(END_THINK, 1)[-1].strip()


def _json_question(random: Random) -> _Drawn:
    question = json_answers.random_question(random)
    return _split(question.held_out), chat_prompt(question.messages, "v31"), question.exchange.answer


def _formatted_question(random: Random) -> _Drawn:
    """Return a question of V4's form that asks for JSON by its reply format, some of them in no other way."""
    question = json_answers.random_question(random)
    prompt = chat_prompt(question.messages[-1:], random.choice(V4_MODES), reply_format=question.reply_format(random))
    # Without its system text a question is one that training may have.
    return _split(question.held_out and not question.system), prompt, question.exchange.answer


def _tool_call(random: Random, mode: Mode) -> _Drawn:
    request = tool_calls.random_request(random)
    offered = tool_calls.offer_some(random, request.ability)
    tool = next(tool for tool in offered if tool.ability is request.ability)
    prompt = chat_prompt([user(request.question)], mode, [tool.definition for tool in offered])
    return _split(request.held_out), prompt, request.text(tool, form_of(mode)).strip()


def _tool_result(random: Random, modes: Sequence[Mode] = ("v31", "r1")) -> _Drawn:
    request = tool_calls.random_request(random)
    tool = tool_calls.offer(random, request.ability)
    outputs, answer = tool_calls.results(random, request)
    messages = [user(request.question), tool_calls.called(request, tool), *outputs]
    mode = random.choice(modes)
    return _split(request.held_out), chat_prompt(messages, mode, [tool.definition]), answer


def write(file: Path) -> None:
    lines = (json.dumps(asdict(question), ensure_ascii=False) + "\n" for question in questions())
    file.write_text("".join(lines), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tiny checkpoint's questions as lines of JSON.")
    parser.add_argument("file", type=Path, help="the file to write")
    write(parser.parse_args().file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
