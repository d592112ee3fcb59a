"""Reading responses into chunks."""

import json

import pytest

from deepseek_triton_client import Chunk, ProtocolError
from deepseek_triton_client._core.response_reader import Cumulative, Deltas, ResponseReader
from deepseek_triton_client._core.results import Logprob, PerfMetrics

COUNTS = {"num_input_tokens": 3, "num_output_tokens": 2, "num_cached_tokens": 1}


def ours(num_answers=1):
    return ResponseReader(num_answers, Deltas, says_end=True)


def others(num_answers=1, increments=Deltas):
    return ResponseReader(num_answers, increments, says_end=False)


NOTHING_SAID = [
    {"text_output": ""},
    {"text_output": "", "finish_reason": "None"},
    {},
    {"text_output": [], "finish_reason": []},
]
METRICS = PerfMetrics(arrival_time_ns=5, acceptance_rate=0.25)
READ = [
    ({"model_name": "m", "model_version": "1", "text_output": "你好"}, Chunk("你好")),
    ({"text_output": "a", "finish_reason": "None", "stop_reason": "None"}, Chunk("a")),
    ({"text_output": "", "num_output_tokens": 1}, Chunk("", num_output_tokens=1)),
    # The JSON of /generate has no brackets around a list of one element.
    ({"text_output": "a", "output_ids": 7, "num_output_tokens": 1}, Chunk("a", output_ids=(7,), num_output_tokens=1)),
    ({"text_output": "a", "output_ids": []}, Chunk("a")),
    ({"text_output": "a", "logprobs": "null"}, Chunk("a")),
    # Numbers may come as text.
    ({"text_output": "a", "cumulative_logprob": "-1.5"}, Chunk("a", cumulative_logprob=-1.5)),
    ({"text_output": "a", "arrival_time_ns": "5", "acceptance_rate": "0.25"}, Chunk("a", perf_metrics=METRICS)),
    ({"text_output": "a", "cumulative_logprob": "None"}, Chunk("a")),
]


def test_a_response_is_a_chunk_unless_it_says_nothing():
    readers = [ours() for _ in READ]
    assert [reader.chunks(outputs) for reader, (outputs, _) in zip(readers, READ, strict=True)] == [
        [chunk] for _, chunk in READ
    ]
    assert not any(reader.finished for reader in readers)
    assert [ours().chunks(outputs) for outputs in NOTHING_SAID] == [[]] * 4


def test_the_last_chunk_has_the_outcome_and_the_usage():
    reader = ours()
    outputs = {"text_output": "", "finish_reason": "stop", "stop_reason": "END", **COUNTS, "of_a_newer_server": [1, 2]}
    assert reader.chunks(outputs) == [Chunk("", finish_reason="stop", stop_reason="END", **COUNTS)]
    assert reader.finished
    assert reader.end() == []


def test_several_answers_are_told_apart():
    reader = ours(3)
    outputs = {
        "text_output": ["c", "a"],
        "finish_reason": ["None", "length"],
        "num_output_tokens": [2, 1],
        "sequence_index": [2, 0],
        "output_ids": [7, 8, 9],
        "reasoning_output": ["hm", ""],
    }
    third, first = reader.chunks(outputs)
    assert third == Chunk("c", 2, reasoning="hm", num_output_tokens=2, output_ids=(7, 8))
    assert first == Chunk("a", 0, finish_reason="length", num_output_tokens=1, output_ids=(9,))
    assert not reader.finished
    end = {"text_output": ["b", "d"], "finish_reason": ["stop", "stop"], "sequence_index": [1, 2]}
    assert [chunk.index for chunk in reader.chunks(end)] == [1, 2]
    assert reader.finished


def test_several_answers_without_an_index_are_in_order():
    reader = others(2)
    outputs = {"text_output": ["a", "b"], "finish_reason": ["stop", "abort"], "num_input_tokens": 3}
    assert reader.chunks(outputs) == [
        Chunk("a", 0, finish_reason="stop", num_input_tokens=3),
        Chunk("b", 1, finish_reason="cancelled", num_input_tokens=3),
    ]
    assert reader.finished
    # Performance metrics belong to the answer that was measured.
    outputs = {"text_output": ["a", "b"], "arrival_time_ns": [0, 5], "acceptance_rate": [0.0, 0.25]}
    assert [chunk.perf_metrics for chunk in others(2).chunks(outputs)] == [None, METRICS]


def test_log_probabilities():
    token = {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}, "9": {"logprob": -9999.0}}
    read = (Logprob(7, -0.5, 1, "a"), Logprob(9, -9999.0, None, None))
    outputs = {"logprobs": json.dumps([token]), "prompt_logprobs": json.dumps([None, token])}
    (chunk,) = ours().chunks({"text_output": "a", "cumulative_logprob": -0.5, **outputs})
    assert chunk == Chunk("a", logprobs=(read,), prompt_logprobs=(None, read), cumulative_logprob=-0.5)


NO_RESPONSES = [
    ({"id": "r1"}, "text_output"),
    ({"finish_reason": "stop"}, "text_output"),
    ({"text_output": 1}, "text_output"),
    ({"text_output": ["a", "b"]}, "expected 1 answers"),
]
WRONG_OUTPUTS = {
    "sequence_index": [True],
    "finish_reason": [1, ["stop", "stop"]],
    "num_output_tokens": ["three", 1.5, "9" * 5000],
    "cumulative_logprob": ["x", None],
    "output_ids": [["x"]],
    "logprobs": ["[{", "[1]", '[{"7": {}}]'],
    "arrival_time_ns": [[1, 2]],
}
NO_RESPONSES += [({"text_output": "a", name: value}, name) for name, all_ in WRONG_OUTPUTS.items() for value in all_]
NO_RESPONSES += [({"text_output": "a", "sequence_index": index}, "expected 1 answers") for index in (1, -1)]


def test_what_is_no_response():
    for outputs, named in NO_RESPONSES:
        with pytest.raises(ProtocolError, match=named):
            ours().chunks(outputs)
    with pytest.raises(ProtocolError, match="output_ids: expected 2, as many as num_output_tokens says, got 3"):
        ours(2).chunks({"text_output": ["a", "b"], "num_output_tokens": [1, 1], "output_ids": [1, 2, 3]})


def test_a_stream_of_ours_that_ends_without_a_reason_for_each_answer_is_broken():
    begun, partly = ours(), ours(2)
    begun.chunks({"text_output": "a"})
    partly.chunks({"text_output": "a", "sequence_index": 1, "finish_reason": "stop"})
    for reader in (ours(), begun, partly):
        with pytest.raises(ProtocolError, match="without a finish_reason"):
            reader.end()


def test_of_others_the_end_of_the_stream_is_the_end_where_every_answer_has_come():
    reader, lacking = others(), others(3)
    for each in (reader, lacking):
        each.chunks({"text_output": "a"})
    assert reader.end() == []
    assert not reader.finished
    with pytest.raises(ProtocolError, match="expected 1 answers, got 0"):
        others().end()
    with pytest.raises(ProtocolError, match="expected 3 answers, got 1"):
        lacking.end()


def test_each_answer_is_cumulative_for_itself():
    reader = others(2, Cumulative)
    reader.chunks({"text_output": ["a", "x"]})
    second = reader.chunks({"text_output": ["ab\ufffd", "xy\ufffd"], "finish_reason": ["None", "stop"]})
    assert second == [Chunk("b", 0), Chunk("y\ufffd", 1, finish_reason="stop")]
    assert reader.chunks({"text_output": "abc", "sequence_index": 0}) == [Chunk("c")]
    reader.chunks({"text_output": "abc\ufffd", "sequence_index": 0})
    assert reader.end() == [Chunk("\ufffd")]


def test_what_an_answer_held_back_before_it_ended_with_less_is_not_its_text():
    reader = others(2, Cumulative)
    reader.chunks({"text_output": ["a\ufffd", "x\ufffd"]})
    end = {"text_output": "", "sequence_index": 0, "finish_reason": "stop"}
    assert reader.chunks(end) == [Chunk("", 0, finish_reason="stop")]
    assert reader.end() == [Chunk("\ufffd", 1)]
