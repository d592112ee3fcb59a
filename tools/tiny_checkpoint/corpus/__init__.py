"""The corpus: plain English made from tables and grammars, the same for the same seed."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from random import Random

from deepseek_backend.v4_prompt import V4
from tiny_checkpoint.architecture import BOS
from tiny_checkpoint.chat_templates import Message
from tiny_checkpoint.corpus import facts, json_answers, sums, talk, tool_calls
from tiny_checkpoint.corpus.exchanges import (
    PHRASES,
    V4_MODES,
    Document,
    Exchange,
    Mode,
    Segment,
    assistant,
    begun,
    chat_document,
    chat_prompt,
    document,
    form_of,
    random_mode,
    reminded,
    system,
    thought_of,
    user,
    written,
)

__all__ = ["Document", "Segment", "training_documents"]

ExchangeMaker = Callable[[Random], Exchange]
DocumentMaker = Callable[[Random], Document]

_EXCHANGES: dict[ExchangeMaker, int] = {
    facts.random_exchange: 50,
    sums.random_exchange: 12,
    talk.random_exchange: 12,
    talk.random_unknown: 5,
    talk.random_repetition: 8,
    talk.random_story: 2,
}
"""Maker of a turn of a longer chat -> its share."""


def _any_exchange(random: Random) -> Exchange:
    return random.choices(tuple(_EXCHANGES), cum_weights=tuple(accumulate(_EXCHANGES.values())))[0](random)


def _plain_system(random: Random, share: float) -> list[Message]:
    """Return a system text that changes nothing in the answer, in this share of the draws."""
    return [system(talk.plain_system(random))] if random.random() < share else []


def _answered(random: Random, kind: str, messages: list[Message], exchange: Exchange) -> Document:
    """Return the document of an exchange, in V4's form also with a reminder, or with the answer begun."""
    mode = random_mode(random)
    if form_of(mode) != "v4":
        return chat_document(kind, messages, exchange, mode)
    if random.random() < 0.5:
        messages = reminded(random, messages)
    if random.random() < 0.85:
        return chat_document(kind, messages, exchange, mode)
    prefix, rest = begun(random, exchange, mode)
    return document("prefix", chat_prompt([*messages, prefix], mode), rest)


def _chat(kind: str, make: ExchangeMaker, random: Random) -> Document:
    """Return one question with its answer."""
    exchange = make(random)
    messages = [*_plain_system(random, 0.25), user(exchange.question)]
    return _answered(random, kind, messages, exchange)


def _unknown(random: Random) -> Exchange:
    if random.random() < 0.15:
        # Without a tool nobody knows the weather or the time.
        return talk.not_known(tool_calls.random_trained(random, tool_calls.OF_CITIES).question)
    return talk.random_unknown(random)


def _completion(kind: str, make: Callable[[Random], tuple[str, str]], random: Random) -> Document:
    """Return the beginning of a text, and how it goes on."""
    prompt, text = make(random)
    return document(kind, BOS + prompt, text)


def _fact_completion(random: Random) -> tuple[str, str]:
    prompt, rest = facts.random_completion(random)
    return prompt, talk.FIRST_PROMPTS.get(prompt, rest)


def _question_completion(random: Random) -> tuple[str, str]:
    exchange = _any_exchange(random)
    is_alone = exchange.question.endswith("?") and random.random() < 0.5
    prompt = exchange.question if is_alone else f"User: {exchange.question}\nAssistant:"
    return prompt, talk.FIRST_PROMPTS.get(prompt, f" {exchange.answer}")


def _long_sum(random: Random) -> Document:
    exchange = sums.random_sum(random, sums.LONG_SUMS).exchange(random.choice(sums.FORMS))
    mode: Mode = random.choice(("v31_thinking", "v31_thinking", "r1", "r1", "v31", *V4_MODES[1:]))
    return chat_document("long_sum", [user(exchange.question)], exchange, mode)


def _one_word(random: Random) -> Document:
    make = facts.random_exchange if random.random() < 0.7 else sums.random_exchange
    exchange = talk.in_one_word(make(random))
    rule = random.choice(PHRASES["one_word"])
    if random.random() < 0.7:
        messages = [system(rule), user(exchange.question)]
    else:
        messages = [user(f"{exchange.question} {rule}")]
    return _answered(random, "one_word", messages, exchange)


def _named(random: Random) -> Document:
    text, exchange = talk.named_exchange(random)
    return _answered(random, "named", [system(text), user(exchange.question)], exchange)


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
    messages = _plain_system(random, 0.2)
    for exchange in turns[:-1]:
        messages += [user(exchange.question), assistant(exchange.answer)]
    messages.append(user(turns[-1].question))
    return _answered(random, "turns", messages, turns[-1])


def _json(random: Random) -> Document:
    question, mode = json_answers.random_trained(random), random_mode(random)
    if form_of(mode) != "v4" or random.random() < 0.3:
        return chat_document("json", question.messages, question.exchange, mode)
    prompt = chat_prompt(question.messages[-1:], mode, reply_format=question.reply_format(random))
    return document("json", prompt, written(question.exchange.answer, question.exchange.thought, mode))


def _tool_call(random: Random) -> Document:
    request = tool_calls.random_trained(random)
    offered = tool_calls.offer_some(random, request.ability)
    tool = next(tool for tool in offered if tool.ability is request.ability)
    mode = random_mode(random, 0.4)
    text, tools = tool_calls.tools_text(random, offered, form_of(mode)), [one.definition for one in offered]
    messages = _plain_system(random, 0.3)
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
        required = mode == "v4_none" and random.random() < 0.3
        prompt = chat_prompt(messages, mode, tools, text, required=required)
        return document("tool_call", prompt, answer.removeprefix(V4.block) if required else answer)
    outputs, answer = tool_calls.results(random, request)
    # Some clients give the reasoning back with the calls.
    thought = thought_of(request.thought, mode) if random.random() < 0.7 else ""
    messages += [tool_calls.called(request, tool) | {"reasoning_content": thought}, *outputs]
    if form_of(mode) == "v4":
        answer = written(answer, tool_calls.READ, mode)
    # The templates put no tag after a result, so that the model answers at once, in every other mode.
    return document("tool_result", chat_prompt(messages, mode, tools, text), answer)


def _unused_tool(random: Random) -> Document:
    if random.random() < 0.3:
        exchange, offered = tool_calls.unanswerable(random)
    elif random.random() < 0.2:
        exchange = sums.random_exchange(random)
        offered = tool_calls.offer_some(random, None, without=(tool_calls.ADD,))
    else:
        exchange = random.choice((facts.random_exchange, talk.random_exchange, talk.random_unknown))(random)
        offered = tool_calls.offer_some(random, None)
    mode = random_mode(random, 0.4)
    text, tools = tool_calls.tools_text(random, offered, form_of(mode)), [one.definition for one in offered]
    prompt = chat_prompt([user(exchange.question)], mode, tools, text)
    return document("unused_tool", prompt, written(exchange.answer, exchange.thought, mode))


_MIX: tuple[tuple[float, DocumentMaker], ...] = (
    (26, partial(_chat, "fact", facts.random_exchange)),
    (9, partial(_completion, "fact_completion", _fact_completion)),
    (8, partial(_chat, "sum", sums.random_exchange)),
    (2, partial(_completion, "sum_completion", sums.random_completion)),
    (8, _long_sum),
    (3, partial(_completion, "first_completion", lambda random: random.choice([*talk.FIRST_PROMPTS.items()]))),
    (3, partial(_chat, "first_chat", talk.first_exchange)),
    (3, partial(_chat, "talk", talk.random_exchange)),
    (2, partial(_chat, "unknown", _unknown)),
    (5, partial(_chat, "repetition", talk.random_repetition)),
    (3, partial(_chat, "story", talk.random_story)),
    (6, partial(_completion, "prose", talk.random_prose)),
    (2, partial(_completion, "question_completion", _question_completion)),
    (4, _one_word),
    (1.5, _named),
    (5, _turns),
    (8, _json),
    (17, _tool_call),
    (4, _unused_tool),
)
"""The kinds, each after its share."""


def training_documents(seed: int, count: int) -> Iterator[Document]:
    """Yield a random mix of all kinds, without the held-out questions."""
    random = Random(seed)
    shares, makers = zip(*_MIX, strict=True)
    cum_weights = tuple(accumulate(shares))
    for _ in range(count):
        yield random.choices(makers, cum_weights=cum_weights)[0](random)
