"""The events of a stream as parts, wherever the network cuts them."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.gateway import triton_call
from deepseek_triton_tools.gateway.triton_call import EventReader, Part

EVENTS = [
    {"text_output": "Grüße, 你好 \n\n", "finish_reason": "None", "output_ids": 7, "num_output_tokens": 1},
    {
        "sequence_index": [1, 0],
        "text_output": ["a", "b"],
        "num_output_tokens": [2, 1],
        "output_ids": [1, 2, 3],
        "finish_reason": ["stop", "None"],
        "model_name": "tensorrt_llm",
    },
    {"reasoning_output": "hm", "finish_reason": "length", "stop_reason": "None", "num_input_tokens": 5},
]
STREAM = b"".join(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in EVENTS)


def test_events_become_parts():
    assert EventReader().feed(STREAM) == [
        Part(text="Grüße, 你好 \n\n", num_output_tokens=1),
        Part(sequence=1, text="a", num_output_tokens=2, finish_reason="stop"),
        Part(sequence=0, text="b", num_output_tokens=1),
        Part(reasoning="hm", finish_reason="length", num_input_tokens=5),
    ]


@pytest.mark.slow
@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_any_cut_gives_the_same_parts(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    found = [part for begin, end in itertools.pairwise(edges) for part in reader.feed(STREAM[begin:end])]
    assert found == EventReader().feed(STREAM)


def test_what_comes_before_an_error_is_not_lost():
    reader = EventReader()
    refused = b'data: {"error": "[E_CANCELLED] gone"}\n\n'
    assert reader.feed(STREAM + refused + STREAM) == EventReader().feed(STREAM)
    assert str(reader.error) == "gone"


def test_an_event_is_read_up_to_its_limit(monkeypatch):
    monkeypatch.setattr(triton_call, "MOST_ANSWER_BYTES", len(STREAM))
    reader = EventReader()
    assert reader.feed(STREAM[:-1]) + reader.feed(STREAM[-1:]) == EventReader().feed(STREAM)
    reader.feed(b"data: " + b" " * (len(STREAM) - 6))
    assert reader.error is None
    assert reader.feed(b" ") == []
    assert "the server sent an event of more than" in str(reader.error)


def test_a_server_that_breaks_off_its_lists_is_told():
    reader = EventReader()
    assert reader.feed(b'data: {"sequence_index": [0, 1], "text_output": ["a"]}\n\n') == []
    assert str(reader.error).endswith("expected a value for each of 2 sequences, got less")
