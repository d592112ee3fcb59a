"""Encoding inputs and decoding outputs, without regard to their meaning."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_client import Overloaded, ProtocolError, ServerError
from deepseek_triton_client._core.tensor_encoding import encode
from deepseek_triton_client._core.transport import Input
from deepseek_triton_client._core.wire import decode_json, decode_tensors, encode_json

values = {
    "BYTES": st.text(),
    "BOOL": st.booleans(),
    "INT32": st.integers(-(2**31), 2**31 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
}
outputs = st.dictionaries(
    st.text(min_size=1).filter(lambda name: name != "error"),
    st.sampled_from(sorted(values)).flatmap(lambda datatype: st.tuples(st.just(datatype), st.lists(values[datatype]))),
)


@st.composite
def inputs(draw):
    names = draw(st.lists(st.text(min_size=1).filter(lambda name: name != "id"), unique=True))
    datatypes = [draw(st.sampled_from(sorted(values))) for _ in names]
    return [
        Input(name, datatype, draw(st.lists(values[datatype], min_size=1)))
        for name, datatype in zip(names, datatypes, strict=True)
    ]


def in_brackets_unless_one(elements):
    return elements[0] if len(elements) == 1 else elements


@pytest.mark.slow
@given(st.text(), inputs())
def test_json_holds_each_input_and_the_id(request_id, given_inputs):
    body = json.loads(encode_json(request_id, given_inputs))
    assert body == {"id": request_id} | {each.name: in_brackets_unless_one(each.values) for each in given_inputs}


def test_the_shape_of_an_input():
    assert [Input("input_ids", "INT32", (1, 2, 3), batched).shape for batched in (False, True)] == [(3,), (1, 3)]


@pytest.mark.slow
@given(outputs)
def test_both_wires_give_the_same_outputs(given_outputs):
    """The outputs are equal but for numbers that JSON can't tell apart, such as 1 and 1.0."""
    expected = {name: in_brackets_unless_one(elements) for name, (_, elements) in given_outputs.items()}
    assert decode_json(json.dumps(expected).encode()) == expected
    tensors = [(name, datatype, encode(datatype, elements)) for name, (datatype, elements) in given_outputs.items()]
    assert decode_tensors(tensors) == expected


def test_numbers_of_every_kind_are_plain_python_and_unknown_datatypes_are_left_out():
    tensors = [(name, name, np.array([3], dtype=name.lower()).tobytes()) for name in ("INT64", "UINT32", "UINT8")]
    tensors += [("FP64", "FP64", np.array([0.1]).tobytes()), ("logits", "BF16", b"\0\0")]
    assert decode_tensors(tensors) == {"INT64": 3, "UINT32": 3, "UINT8": 3, "FP64": 0.1}


def test_what_is_no_json_object_is_refused():
    wrong = (b"", b"{", b"[1]", b'{"text_output": "\xff"}', b"[" * 100_000, b'{"text_output": "\\ud83d"}')
    for data in (*wrong, '{"text_output": "a"}'.encode("utf-16")):
        with pytest.raises(ProtocolError, match="expected a JSON object"):
            decode_json(data)


def test_an_error_event_raises():
    """test_exceptions.py has the table of messages."""
    for message, kind in (("[E_OVERLOADED] 512 requests in flight", Overloaded), ("what", ServerError)):
        with pytest.raises(kind) as caught:
            decode_json(json.dumps({"error": message}).encode())
        assert (type(caught.value), str(caught.value)) == (kind, message)
        assert caught.value.unprocessed is (kind is Overloaded)
