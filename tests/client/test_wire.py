"""Encoding inputs and decoding outputs, without regard to their meaning."""

import json

import numpy as np
import pytest

from deepseek_triton_client import Overloaded, ProtocolError, ServerError
from deepseek_triton_client._core.tensor_encoding import encode
from deepseek_triton_client._core.transport import Input
from deepseek_triton_client._core.wire import decode_json, decode_tensors, encode_json

VALUES = {
    "BYTES": ["", 'é"\\\n', "你🙂\0"],
    "BOOL": [True, False],
    "INT32": [-(2**31), 0, 2**31 - 1],
    "UINT64": [0, 2**64 - 1],
    "FP32": [0.0, -1.5, 2.0**-149],
}
NAMED = [
    *((datatype.lower(), datatype, values) for datatype, values in VALUES.items()),
    *((f"one {datatype}", datatype, values[:1]) for datatype, values in VALUES.items()),
]


def in_brackets_unless_one(elements):
    return elements[0] if len(elements) == 1 else elements


def test_json_holds_each_input_and_the_id():
    body = json.loads(encode_json('r"1', [Input(*each) for each in NAMED]))
    assert body == {"id": 'r"1'} | {name: in_brackets_unless_one(values) for name, _, values in NAMED}
    assert [Input("input_ids", "INT32", (1, 2, 3), batched).shape for batched in (False, True)] == [(3,), (1, 3)]


def test_both_wires_give_the_same_outputs():
    """The outputs are equal but for numbers that JSON can't tell apart, such as 1 and 1.0."""
    outputs = [*NAMED, ("none", "INT32", [])]
    expected = {name: in_brackets_unless_one(values) for name, _, values in outputs}
    assert decode_json(json.dumps(expected).encode()) == expected
    assert (
        decode_tensors([(name, datatype, encode(datatype, values)) for name, datatype, values in outputs]) == expected
    )


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
