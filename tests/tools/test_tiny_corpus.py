"""The corpus, tokenizer, chat templates and questions of the tiny checkpoint."""

import itertools
import json
import re
from collections import defaultdict
from functools import cache

import jinja2
import pytest
from tokenizers import Tokenizer

from tiny_checkpoint.architecture import BOS, EOS, MARKER_TOKENS, PAD
from tiny_checkpoint.chat_templates import calls_text, render
from tiny_checkpoint.corpus import facts, tool_calls, training_documents
from tiny_checkpoint.corpus.sums import LONG_SUMS, SMALL_SUMS
from tiny_checkpoint.questions import Question, is_right, questions
from tiny_checkpoint.tokenizer import VOCABULARY_SIZE, train_tokenizer

SAMPLE_SIZE = 4_000


@cache
def sample():
    return list(training_documents(1, SAMPLE_SIZE))


@cache
def many():
    return list(training_documents(4, 20_000))


@cache
def tokenizer():
    return Tokenizer.from_str(json.dumps(train_tokenizer(sample())))


@pytest.mark.slow
def test_same_seed_same_documents_and_tokenizer():
    assert list(training_documents(1, SAMPLE_SIZE)) == sample()
    assert [*training_documents(2, 100)] != sample()[:100]
    assert json.dumps(train_tokenizer(sample())) == json.dumps(train_tokenizer(sample()))


@pytest.mark.slow
def test_documents_begin_and_end_with_their_tokens_and_the_model_writes_the_end():
    for document in sample():
        first, last = document.segments[0], document.segments[-1]
        assert (first.text.startswith(BOS), first.learned, first.text.endswith(" ")) == (True, False, False)
        assert (last.text.endswith(EOS), last.learned) == (True, True)
        assert not re.search(r"\{\w+\}", first.text + last.text), "a place of a form is not filled"


@pytest.mark.slow
def test_documents_are_short_and_their_tokens_give_their_text():
    lengths = []
    for document in sample():
        ids = [tokenizer().encode(segment.text, add_special_tokens=False).ids for segment in document.segments]
        lengths.append(sum(map(len, ids)))
        for segment, encoded in zip(document.segments, ids, strict=True):
            assert tokenizer().decode(encoded, skip_special_tokens=False) == segment.text
    assert sorted(lengths)[int(len(lengths) * 0.999)] < 900


@pytest.mark.slow
def test_a_question_has_one_answer_and_thoughts_of_sums_end_in_the_result():
    answers = defaultdict(set)
    for relation in facts.RELATIONS:
        for (subject, value), form in itertools.product(relation.pairs, relation.forms):
            exchange = relation.exchange(subject, value, form)
            answers[exchange.question].add(exchange.answer)
    assert [question for question, found in answers.items() if len(found) > 1] == []
    assert facts.FACT_COUNT >= 500
    for found in (*SMALL_SUMS, *LONG_SUMS):
        thought = found.thought()
        assert thought.endswith(f" {found.result}.")
        steps = re.findall(r"(\d[\d +x-]*) = (\d+)", thought)
        for left, right in steps:
            assert eval(left.replace("x", "*")) == int(right), thought
        if found.is_long:
            ones, tens = (int(right) for _, right in steps)
            assert 10 * tens + ones % 10 == found.result, thought


@pytest.mark.slow
def test_held_out_questions_are_in_no_training_document():
    """Nor is one in an earlier turn."""
    texts = [document.segments[0].text for document in many()]
    ends = ("<｜Assistant｜></think>", "<｜Assistant｜><think>")
    held_out = {question.prompt for question in questions() if question.split == "held_out"}
    assert {*texts, *(text.split(end)[0] + end for text in texts for end in ends)}.isdisjoint(held_out)


@pytest.mark.slow
def test_held_out_requests_of_tools_are_in_no_training_document():
    requests = {True: set(), False: set()}
    for ability in tool_calls.OF_CITIES:
        for form, city in itertools.product(ability.requests, facts.BY_NAME["city"].subjects):
            request = tool_calls.Request(ability, form, ({"city": city},))
            requests[request.held_out].add(f"<｜User｜>{request.question}")
    turns = (document.segments[0].text.split("<｜Assistant｜>") for document in many() if document.kind[:4] == "tool")
    asked = {text[text.find("<｜User｜>") :] for texts in turns for text in texts}
    assert asked.isdisjoint(requests[True])
    assert len(asked & requests[False]) > 150


@pytest.mark.slow
def test_accepted_answers_are_what_the_corpus_teaches():
    taught = {question.prompt: question for question in questions() if question.split == "taught"}
    seen = set()
    for document in many():
        prompt, answer = document.segments[0].text, document.segments[1].text.removesuffix(EOS)
        if prompt in taught:
            assert is_right(taught[prompt], answer), (prompt, answer)
            seen.add(taught[prompt].kind)
    assert {"completion", "thinking_v31", "thinking_r1", "sum", "chat", "json"} <= seen


@pytest.mark.slow
def test_questions_are_unique_and_accept_their_answers():
    assert len({question.id for question in questions()}) == len(questions())
    assert len({question.prompt for question in questions()}) == len(questions())
    assert 1_800 <= len(questions()) <= 2_000
    for question in questions():
        assert question.prompt.startswith(BOS)
        assert is_right(question, f"A thought.</think>\n\n{question.accepted[0]}")
        assert not is_right(question, f"{question.accepted[0]} and more")


CALL_V31 = calls_text([("add", '{"a": 1, "b": 2}')], "v31")
CALL_R1 = calls_text([("add", '{"a": 1, "b": 2}')], "r1")


def test_json_and_calls_are_compared_as_parsed():
    for kind, accepted, text, right in (
        ("json", '{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ("json", '{"a": 1}', '{"a": "1"}', False),
        ("json", '{"a": 1}', '{"a": 1', False),
        ("tool_call_v31", CALL_V31, CALL_V31.replace(", ", ","), True),
        ("tool_call_v31", CALL_V31, CALL_V31.replace("2", "3"), False),
        ("tool_call_v31", CALL_V31, CALL_V31.replace("add", "sub"), False),
        ("tool_call_v31", CALL_V31, CALL_R1, False),
        ("tool_call_r1", CALL_R1, f"I call.\n</think>\n\n{CALL_R1}", True),
        ("tool_call_r1", CALL_R1, "", False),
        ("sum", "1 + 1 = 2.", " 1 + 1 = 2. ", True),
        ("sum", "1 + 1 = 2.", "1 + 1 = 3.", False),
    ):
        assert is_right(Question("1", kind, "taught", BOS, (accepted,)), text) is right, (accepted, text)


@pytest.mark.slow
def test_tokens_have_the_ids_that_the_checkpoint_expects():
    with pytest.raises(ValueError, match="train on more documents"):
        train_tokenizer(sample()[:10])
    assert tokenizer().get_vocab_size() == VOCABULARY_SIZE
    assert [tokenizer().id_to_token(index) for index in range(3)] == [BOS, EOS, PAD]
    first = VOCABULARY_SIZE - len(MARKER_TOKENS)
    assert tuple(tokenizer().id_to_token(index) for index in range(first, VOCABULARY_SIZE)) == MARKER_TOKENS
    assert tokenizer().encode("12").tokens == [BOS, "1", "2"]
    assert tokenizer().decode(tokenizer().encode(f"<think>é漢🙂{EOS}").ids) == "<think>é漢🙂"


CONVERSATION = [
    {"role": "user", "content": "Add 1 and 2."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
    },
    {"role": "tool", "content": "3"},
]
ASKED = "<｜User｜>Add 1 and 2.<｜Assistant｜>"
PUBLISHED = [
    ("v31", CONVERSATION[:1], False, f"{ASKED}</think>"),
    ("v31", CONVERSATION[:1], True, f"{ASKED}<think>"),
    ("r1", CONVERSATION[:1], False, f"{ASKED}<think>\n"),
    (
        "v31",
        CONVERSATION,
        True,
        f"{ASKED}</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        f'{{"a": 1, "b": 2}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{EOS}<｜tool▁output▁begin｜>3<｜tool▁output▁end｜>',
    ),
    (
        "r1",
        CONVERSATION,
        True,
        f"{ASKED}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f'add\n```json\n{{"a": 1, "b": 2}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>{EOS}'
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
]


def test_templates_write_the_published_tokens():
    for form, messages, thinking, expected in PUBLISHED:
        assert render(messages, form, thinking=thinking) == BOS + expected


@pytest.mark.parametrize("form", ["v31", "r1"])
def test_templates_take_objects_and_parts_and_refuse_what_they_would_drop(form):
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    parts = [{"type": "text", "text": "Add 1 "}, {"type": "text", "text": "and 2."}]
    messages = [{"role": "user", "content": parts}, {**CONVERSATION[1], "tool_calls": [call]}, CONVERSATION[2]]
    assert render(messages, form) == render(CONVERSATION, form)
    for message, variables, error in (
        ({"role": "developer", "content": "a"}, {}, "got developer"),
        ({"role": "user", "content": [{"type": "image_url"}]}, {}, "got image_url"),
        ({"role": "user", "content": "a"}, {"thinking": "yes"}, "expected true or false"),
    ):
        with pytest.raises(jinja2.TemplateError, match=error):
            render([message], form, **variables)
