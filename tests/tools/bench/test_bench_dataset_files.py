"""Datasets in files: each format, what is wrong with a line, too few requests, traces and ShareGPT."""

import json
import pickle
import random
import re
from pathlib import Path

import pytest

from deepseek_triton_tools.bench.dataset_files import HASHED_BLOCK, FileConversationSource, parse_row
from deepseek_triton_tools.bench.random_prompts import text_token_ids
from deepseek_triton_tools.bench.workload import BenchRequest, DatasetOptions, NormalLengths
from deepseek_triton_tools.cli.bench import dataset_lines
from deepseek_triton_tools.tool_errors import ToolError


def count_words(texts):
    """As a server does it, which refuses an empty text."""
    assert all(texts)
    return [len(text.split()) for text in texts]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "requests.jsonl"


def conversations(path, num=None, count=None, **options):
    source = FileConversationSource(DatasetOptions(file=path, **options), text_token_ids(), count, num)
    return source(num or source.num_requests, 0)


def made(path, rows, num=None, **options):
    """The conversations of a file with these rows."""
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return list(conversations(path, num, **options))


def prompts(path, rows, num=None, **options):
    return [request.prompt for (request,) in made(path, rows, num, **options)]


def test_a_row_of_each_tool_is_read(path):
    sent = {"text_input": "why", "max_tokens": 4, "stream": True, "min_tokens": 4}
    rows = [
        ({"task_id": 0, "input_ids": [5, 6], "output_tokens": 7}, {"prompt": (5, 6), "output_tokens": 7}),
        ({"task_id": 0, "logits": [5, 6], "output_tokens": 7}, {"prompt": (5, 6), "output_tokens": 7}),
        ({"task_id": 0, "prompt": "why", "output_tokens": 7}, {"prompt": "why", "output_tokens": 7}),
        ("why", {"prompt": "why"}),
        (
            {"id": 3, "prompt": [9], "max_tokens": 4, "temperature": 0.5},
            {"prompt": (9,), "output_tokens": 4, "fields": {"temperature": 0.5}},
        ),
        (
            {"timestamp": 900, "payload": sent},
            {"prompt": "why", "output_tokens": 4, "at_s": 0.0, "fields": {"min_tokens": 4}},
        ),
    ]
    assert [made(path, [row]) for row, _ in rows] == [[(BenchRequest(**expected),)] for _, expected in rows]


WRONG = [
    ([], "expected an object with a prompt, got []"),
    ({}, "expected one of input_ids, logits, prompt, text_input, input_length, got nothing"),
    ({"task_id": 1, "output_tokens": 5}, "got task_id, output_tokens"),
    ({"prompt": "a", "input_ids": [1]}, "expected only one of input_ids and prompt"),
    ({"prompt": ""}, "prompt: expected a text or token ids, got ''"),
    ({"prompt": "\ud800"}, "prompt: half of a surrogate pair"),
    ({"prompt": [1, True]}, "prompt: expected a text or token ids"),
    ({"input_ids": "why"}, "input_ids: expected token ids, got 'why'"),
    ({"input_ids": []}, "input_ids: expected token ids, got []"),
    ({"input_ids": [-1]}, "input_ids: expected token ids, got [-1]"),
    ({"input_ids": [2**31]}, "input_ids: expected token ids"),
    ({"text_input": [1]}, "text_input: expected a text, got [1]"),
    ({"messages": []}, "messages can't be sent as a prompt"),
    ({"prompt": "a", "output_tokens": 0}, "output_tokens: expected a whole number from 1, got 0"),
    ({"prompt": "a", "output_tokens": 1, "max_tokens": 1}, "expected only one of output_tokens and max_tokens"),
    ({"prompt": "a", "temprature": 0}, "did you mean 'temperature'?"),
    ({"promt": "a"}, "got promt; unknown 'promt'; did you mean 'prompt'?"),
    ({"prompt": "a", "output_token": 5}, "unknown 'output_token'; did you mean 'output_tokens'?"),
    ({"prompt": "a", "top_logprobs": 5}, "use logprobs"),
    ({"prompt": "a", "temperature": "hot", "output_tokens": "5"}, "output_tokens: expected a whole number from 1"),
    ({"prompt": "a", "temperature": "hot", "output_tokens": "5"}, "temperature"),
    ({"prompt": "a", "timestamp": -1}, "timestamp: expected milliseconds from 0, got -1"),
    ({"input_length": 0}, "input_length: expected a whole number from 1, got 0"),
    ({"input_length": 1100, "hash_ids": [1]}, "hash_ids: expected 2 or more, one for each 512 tokens of"),
    ({"input_length": 5, "hash_ids": [-1]}, "hash_ids: expected whole numbers from 0, got [-1]"),
]
BROKEN = {
    '{"prompt": "a"': "not JSON: Expecting ',' delimiter at character 16\n",
    "{'prompt': 5}": "not JSON: Expecting property name enclosed in double quotes at character 2\n",
}


def test_a_wrong_row_is_named_with_its_line(path, capsys, subtests):
    for line, problem in [(json.dumps(row), problem) for row, problem in WRONG] + list(BROKEN.items()):
        with subtests.test(line, problem=problem):
            path.write_text(f'"fine"\n{line}\n')
            with pytest.raises(ToolError, match=r"^1 of 2 lines of .*requests.jsonl are wrong$"):
                conversations(path)
            said = capsys.readouterr().err
            assert said.startswith(f"{path} line 2: ")
            assert problem in said
            assert said.count("\n") == 1


def test_ids_beyond_the_servers_vocabulary_are_refused(path, capsys):
    options = DatasetOptions(file=path)
    for name in ("input_ids", "prompt"):
        path.write_text(json.dumps({name: [5, 1279]}) + "\n" + json.dumps({name: [1280, 5]}))
        with pytest.raises(ToolError, match="1 of 2 lines"):
            FileConversationSource(options, text_token_ids(1280), count_words, None, 1280)
        expected = f"line 2: {name}: expected token ids from 0 to 1279, the server's vocabulary, got 1280\n"
        assert capsys.readouterr().err == f"{path} {expected}"
        assert FileConversationSource(options, text_token_ids(1280), count_words, None, None).num_requests == 2


def test_at_most_ten_problems_are_listed(path, capsys):
    path.write_text("fine?\n\n" * 12)
    with pytest.raises(ToolError, match=r"12 of 12 lines of .*; the first 10 are listed"):
        conversations(path)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" line ")[2].split(":")[0] for line in lines] == [str(2 * n + 1) for n in range(10)]


def test_an_empty_file_is_refused(path):
    for content in ("", "\n", "[]"):
        path.write_text(content)
        with pytest.raises(ToolError, match="has no request"):
            conversations(path, output=NormalLengths(4))


def test_too_few_requests_are_repeated_and_the_first_of_too_many_are_taken(path, capsys):
    assert prompts(path, ["a", "b", "c"], 7) == list("abcabca")
    assert "has 3 requests" in capsys.readouterr().err
    rows = [str(number) for number in range(50)]
    assert prompts(path, rows, 5) == rows[:5]
    shuffled = prompts(path, rows, 5, shuffle=True, seed=1)
    assert shuffled != prompts(path, rows, 5, shuffle=True, seed=2)
    assert shuffled == prompts(path, rows, 5, shuffle=True, seed=1)
    assert capsys.readouterr().err == ""


def test_lengths_that_are_asked_for_replace_those_of_the_file(path):
    rows = [{"prompt": "a", "output_tokens": 5}] * 3
    assert [request.output_tokens for (request,) in made(path, rows)] == [5] * 3
    assert [request.output_tokens for (request,) in made(path, rows, output=NormalLengths(9))] == [9] * 3


# --- Traces ---


def hashed(at_ms, length, *hash_ids):
    return {"timestamp": at_ms, "input_length": length, "output_length": 52, "hash_ids": list(hash_ids)}


def test_a_trace_keeps_its_times_and_its_common_prefixes(path):
    rows = [hashed(3000, 1400, 46, 47, 48), hashed(1000, 600, 46, 9), hashed(1500, 1024, 46, 47)]
    (first,), (second,), (third,) = made(path, rows)
    assert [first.at_s, second.at_s, third.at_s] == [0.0, 0.5, 2.0]
    assert [len(request.prompt) for request in (first, second, third)] == [600, 1024, 1400]
    assert first.output_tokens == 52
    assert first.prompt[:HASHED_BLOCK] == third.prompt[:HASHED_BLOCK]
    assert second.prompt == third.prompt[: 2 * HASHED_BLOCK]
    assert first.prompt[HASHED_BLOCK:] != third.prompt[HASHED_BLOCK:600]


def test_what_has_no_hash_is_in_no_other_prompt(path):
    """In some traces only whole blocks have one."""
    one, other = prompts(path, [hashed(0, 1500, 1, 2), hashed(1, 1500, 1, 2)])
    assert len(one) == len(other) == 1500
    assert one[:1024] == other[:1024]
    assert one[1024:] != other[1024:]


def test_a_trace_can_be_faster_and_cut(path):
    (one,), (other,) = made(path, [{"timestamp": at, "input_length": 20} for at in (5, 105, 205)], 2, speedup=4.0)
    assert [one.at_s, other.at_s] == pytest.approx([0, 0.025])
    assert one.prompt != other.prompt


def test_what_can_t_be_done_with_a_trace_is_refused(path, subtests):
    trace, mixed = [hashed(0, 5, 1)], [hashed(0, 5, 1), {"prompt": "a"}]
    for problem, rows, num, options in (
        ("only 1 of 2 lines have a timestamp", mixed, None, {}),
        ("--shuffle", mixed, None, {"shuffle": True}),
        (r"--trace-speedup: .* has no timestamps", ["a"], None, {"speedup": 2.0}),
        (r"requests.jsonl is a trace of 1 requests, not 2", trace, 2, {}),
    ):
        with subtests.test(problem), pytest.raises(ToolError, match=problem):
            made(path, rows, num, **options)


def test_only_the_rows_of_a_run_go_to_the_load_processes(path):
    whole = made(path, [{"timestamp": n, "input_length": 50} for n in range(100)])
    part = conversations(path, 3)
    assert list(part) == whole[:3]
    assert len(pickle.dumps(part)) < 1000


def test_the_lines_of_the_page_are_read():
    page = (Path(__file__).resolve().parents[3] / "docs/bench.md").read_text("utf-8")
    lines = [line for line in re.findall(r"`(\{.*?\})`", page) if "conversations" not in line]
    assert len(lines) == 4
    for line in lines:
        parse_row(line.encode())


# --- ShareGPT ---


def sharegpt(path, *texts):
    """A file of conversations; numbers stand for so many words."""
    entries = []
    for n, numbers in enumerate(texts):
        turns = zip(("human", "gpt", "human"), map(words, numbers), strict=False)
        entries.append({"id": str(n), "conversations": [{"from": who, "value": text} for who, text in turns]})
    path.write_text(json.dumps(entries, indent=1), "utf-8")


def words(number):
    return "word " * number


def test_answers_of_sharegpt_give_the_lengths(path):
    sharegpt(path, (10, 20, 5), (7,), (30, 4))
    assert list(conversations(path, count=count_words)) == [
        (BenchRequest(prompt=words(10), output_tokens=20),),
        (BenchRequest(prompt=words(30), output_tokens=4),),
    ]
    with pytest.raises(ToolError, match="give --tokenizer DIR"):
        conversations(path)


def test_what_benchmark_serving_leaves_out_is_left_out(path):
    sharegpt(path, (3, 50), (4, 3), (1025, 5), (1000, 1049), (1000, 1048), (4, 4), (0, 9), (9, 0))
    assert [request.output_tokens for (request,) in conversations(path, count=count_words)] == [1048, 4]
    assert len(conversations(path, count=count_words, output=NormalLengths(2))) == 4
    assert len(conversations(path, output=NormalLengths(2))) == 6


def test_sharegpt_in_random_order_is_as_in_benchmark_serving(path):
    """It shuffles what has an answer with Python's own generator, and then takes the first that are long enough."""
    pairs = [(n % 7 + 2, n + 4) for n in range(200)]
    sharegpt(path, *pairs)
    random.seed(0)
    random.shuffle(pairs)
    expected = [answer for prompt, answer in pairs if prompt >= 4]
    found = conversations(path, 80, count_words, shuffle=True)
    assert [request.output_tokens for (request,) in found] == expected[:80]


def test_what_is_no_sharegpt_is_refused(path, subtests):
    refused = {
        '[{"conversations": 5}, {}, 7]': "3 of 3 conversations",
        '[{"conversations": [{"value": "a"}, {"value": 5}]}]': "1 of 1 conversations",
        '[{"conversations": [{"value": "\\udfff"}, {"value": "a"}]}]': "1 of 1 conversations",
        "[{": "is not JSON",
    }
    for content, message in refused.items():
        with subtests.test(repr(content)):
            path.write_text(content)
            with pytest.raises(ToolError, match=message):
                conversations(path, count=count_words)


# --- Writing ---


def written(path, requests):
    """Write requests, and read them again."""
    path.write_text("\n".join(dataset_lines(requests)), "utf-8")
    return [request for (request,) in conversations(path)]


def test_what_is_written_is_read_again_and_without_a_length_nothing(path):
    fields = {"temperature": 0.5, "stop": ["a"]}
    requests = [BenchRequest(prompt='\u00fc "\n\u2028', output_tokens=1, fields=fields)]
    requests.append(BenchRequest(prompt=(0, 2**31 - 1), output_tokens=10**6))
    assert written(path, requests) == requests
    requests = [BenchRequest(prompt="a", output_tokens=1, at_s=at_s) for at_s in (0.0, 0.25)]
    assert written(path, requests) == requests
    with pytest.raises(ToolError, match="request 2 has no number of output tokens") as caught:
        written(path, [BenchRequest(prompt="a", output_tokens=1), BenchRequest(prompt="b")])
    assert caught.value.exit_code == 2
