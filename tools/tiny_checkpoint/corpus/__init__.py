"""The corpus: plain English made from tables and grammars, the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from random import Random

from tiny_checkpoint.corpus import facts, json_answers, stories, sums, talk, tool_calls
from tiny_checkpoint.corpus.exchanges import (
    Document,
    Exchange,
    Mode,
    Segment,
    assistant,
    chat_document,
    chat_prompt,
    completion_document,
    document,
    form_of,
    random_mode,
    system,
    user,
    written,
)

__all__ = ["Document", "Segment", "training_documents"]


def training_documents(seed: int, count: int) -> Iterator[Document]:
    """Yield a random mix of all kinds, without the held-out questions."""
    random = Random(seed)
    weights = list(accumulate(_MIX.values()))
    makers = list(_MIX)
    for _ in range(count):
        maker = random.choices(makers, cum_weights=weights)[0]
        yield maker(random)


def _any_exchange(random: Random) -> Exchange:
    return random.choices(_EXCHANGES, cum_weights=_EXCHANGE_WEIGHTS)[0](random)


_EXCHANGES: tuple[Callable[[Random], Exchange], ...] = (
    facts.random_exchange,
    sums.random_exchange,
    sums.random_long_exchange,
    talk.random_exchange,
    talk.random_unknown,
    talk.random_repetition,
    stories.random_exchange,
)
_EXCHANGE_WEIGHTS = list(accumulate((50, 12, 0, 12, 5, 8, 2)))


def _chat(kind: str, random: Random, exchange: Exchange) -> Document:
    """Return one question with its answer, with a plain system text in a quarter of them."""
    messages = [system(talk.plain_system(random))] if random.random() < 0.25 else []
    return chat_document(kind, [*messages, user(exchange.question)], exchange, random_mode(random))


def _fact(random: Random) -> Document:
    return _chat("fact", random, facts.random_exchange(random))


def _fact_completion(random: Random) -> Document:
    text, rest = facts.random_completion(random)
    return completion_document("fact_completion", text, talk.FIRST_PROMPTS.get(text, rest))


def _sum(random: Random) -> Document:
    return _chat("sum", random, sums.random_exchange(random))


def _sum_completion(random: Random) -> Document:
    return completion_document("sum_completion", *sums.random_completion(random))


def _long_sum(random: Random) -> Document:
    exchange = sums.random_long_exchange(random)
    mode: Mode = random.choice(("v31_thinking", "v31_thinking", "r1", "r1", "v31"))
    return chat_document("long_sum", [user(exchange.question)], exchange, mode)


def _first_completion(random: Random) -> Document:
    return completion_document("first_completion", *random.choice(tuple(talk.FIRST_PROMPTS.items())))


def _first_chat(random: Random) -> Document:
    exchange = talk.first_exchange(random)
    messages = [system(talk.plain_system(random))] if random.random() < 0.25 else []
    return chat_document("first_chat", [*messages, user(exchange.question)], exchange, random_mode(random))


def _talk(random: Random) -> Document:
    return _chat("talk", random, talk.random_exchange(random))


def _unknown(random: Random) -> Document:
    if random.random() < 0.15:
        # Without a tool nobody knows the weather or the time.
        question = tool_calls.random_trained(random, tool_calls.OF_CITIES).question
        return _chat("unknown", random, talk.not_known(question))
    return _chat("unknown", random, talk.random_unknown(random))


def _repetition(random: Random) -> Document:
    return _chat("repetition", random, talk.random_repetition(random))


def _story(random: Random) -> Document:
    return _chat("story", random, stories.random_exchange(random))


def _prose(random: Random) -> Document:
    return completion_document("prose", *stories.random_completion(random))


def _question_completion(random: Random) -> Document:
    exchange = _any_exchange(random)
    prompt = f"User: {exchange.question}\nAssistant:"
    if exchange.question.endswith("?") and random.random() < 0.5:
        prompt = exchange.question
    return completion_document("question_completion", prompt, talk.FIRST_PROMPTS.get(prompt, f" {exchange.answer}"))


def _one_word(random: Random) -> Document:
    found = facts.random_exchange(random) if random.random() < 0.7 else sums.random_exchange(random)
    exchange = talk.in_one_word(found)
    rule = random.choice(talk.ONE_WORD)
    if random.random() < 0.7:
        messages = [system(rule), user(exchange.question)]
    else:
        messages = [user(f"{exchange.question} {rule}")]
    return chat_document("one_word", messages, exchange, random_mode(random))


def _named(random: Random) -> Document:
    text, exchange = talk.named_exchange(random)
    return chat_document("named", [system(text), user(exchange.question)], exchange, random_mode(random))


def _turns(random: Random) -> Document:
    """Return a chat of two to four turns."""
    draw = random.random()
    if draw < 0.3:
        turns = list(talk.introduced(random))
    elif draw < 0.6:
        turns = list(facts.random_followed(random))
    else:
        turns = [_any_exchange(random) for _ in range(random.choice((2, 2, 3, 4)))]
    if random.random() < 0.3:
        turns.insert(random.randrange(len(turns)) if draw >= 0.6 else 0, talk.random_exchange(random))
    messages = [system(talk.plain_system(random))] if random.random() < 0.2 else []
    for exchange in turns[:-1]:
        messages += [user(exchange.question), assistant(exchange.answer)]
    messages.append(user(turns[-1].question))
    return chat_document("turns", messages, turns[-1], random_mode(random))


def _json(random: Random) -> Document:
    question = json_answers.random_trained(random)
    messages = [system(question.system)] if question.system else []
    messages.append(user(question.exchange.question))
    return chat_document("json", messages, question.exchange, random_mode(random))


def _tool_call(random: Random) -> Document:
    request = tool_calls.random_trained(random)
    offered = tool_calls.offer_some(random, request.ability)
    tool = next(tool for tool in offered if tool.ability is request.ability)
    mode = random_mode(random)
    text = tool_calls.tools_text(random, offered, form_of(mode))
    messages = [system(talk.plain_system(random))] if random.random() < 0.3 else []
    draw = random.random()
    if draw < 0.1:
        before = _any_exchange(random)
        messages += [user(before.question), assistant(before.answer)]
    elif draw < 0.2:
        earlier = tool_calls.random_trained(random)
        outputs, answer = tool_calls.results(random, earlier)
        if used := next((tool for tool in offered if tool.ability is earlier.ability), None):
            messages += [user(earlier.question), tool_calls.called(earlier, used), *outputs, assistant(answer)]
    messages.append(user(request.question))
    if random.random() < 0.7:
        answer = written(request.text(tool, form_of(mode)), request.thought, mode)
        return document("tool_call", chat_prompt(messages, mode, tools_text=text), answer)
    outputs, answer = tool_calls.results(random, request)
    messages += [tool_calls.called(request, tool), *outputs]
    # The templates put no tag after a result, so that the model answers at once, in every mode.
    return document("tool_result", chat_prompt(messages, mode, tools_text=text), answer)


def _unused_tool(random: Random) -> Document:
    if random.random() < 0.3:
        exchange, offered = tool_calls.unanswerable(random)
    elif random.random() < 0.2:
        exchange = sums.random_exchange(random)
        offered = tool_calls.offer_some(random, None, without=(tool_calls.ADD,))
    else:
        exchange = random.choice((facts.random_exchange, talk.random_exchange, talk.random_unknown))(random)
        offered = tool_calls.offer_some(random, None)
    mode = random_mode(random)
    text = tool_calls.tools_text(random, offered, form_of(mode))
    prompt = chat_prompt([user(exchange.question)], mode, tools_text=text)
    return document("unused_tool", prompt, written(exchange.answer, exchange.thought, mode))


_MIX: dict[Callable[[Random], Document], float] = {
    _fact: 26,
    _fact_completion: 9,
    _sum: 8,
    _sum_completion: 2,
    _long_sum: 8,
    _first_completion: 3,
    _first_chat: 3,
    _talk: 3,
    _unknown: 2,
    _repetition: 5,
    _story: 3,
    _prose: 6,
    _question_completion: 2,
    _one_word: 4,
    _named: 1.5,
    _turns: 5,
    _json: 8,
    _tool_call: 14,
    _unused_tool: 4,
}
"""The kinds and their shares."""
