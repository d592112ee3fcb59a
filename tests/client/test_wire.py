"""What goes over both wires, without regard to its meaning: JSON and tensors, against numpy and tritonclient."""

import json
import math
import struct

import numpy as np
import pytest
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from deepseek_triton_client import Overloaded, ProtocolError, ServerError
from deepseek_triton_client._core.interfaces import Input
from deepseek_triton_client._core.wire import decode, decode_json, decode_tensors, encode, encode_json

NUMPY = {f"{kind}{bits}": getattr(np, f"{kind.lower()}{bits}") for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)}
NUMPY |= {"BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}


def test_texts_are_encoded_and_decoded_as_tritonclient_does():
    for texts in ([], [""], ["é"], ["你好", "", "🙂\0\n", "a" * 70_000]):
        theirs = serialize_byte_tensor(np.array([text.encode() for text in texts], dtype=np.object_))
        data = encode("BYTES", texts)
        assert data == (theirs.item() if theirs.size else b"")
        found = decode("text_output", "BYTES", data)
        assert found == [each.decode() for each in deserialize_bytes_tensor(data)] == texts


def test_numbers_are_those_of_numpy():
    for datatype, kind in NUMPY.items():
        if datatype == "BOOL":
            values = [True, False, True]
        elif datatype.startswith("FP"):
            values = [0.0, -1.5, float(np.finfo(kind).max), float(np.finfo(kind).tiny), math.inf]
        else:
            values = [int(np.iinfo(kind).min), 0, 1, int(np.iinfo(kind).max)]
        for some in ([], values[:1], values):
            theirs = np.array(some, dtype=kind)
            assert encode(datatype, some) == theirs.tobytes(), datatype
            assert decode("a", datatype, theirs.tobytes()) == theirs.tolist() == some, datatype


def test_contents_that_do_not_fit_are_refused_by_name():
    halves = (b"\x03\0\0", b"\x03\0\0\0ab", b"\x01\0\0\0a\x02\0\0\0b")
    no_utf8 = (b"\x01\0\0\0\xff", b"\x03\0\0\0\xed\xa0\x80")  # the second is half of a surrogate pair
    numbers = [("INT32", b"\0\0\0"), ("INT64", struct.pack("<iii", 1, 2, 3))]
    for datatype, data in [*(("BYTES", data) for data in halves + no_utf8), *numbers]:
        with pytest.raises(ProtocolError, match=f"text_output: expected {datatype} elements"):
            decode("text_output", datatype, data)
    assert decode("a", "BF16", b"\0\0") is None  # an unknown datatype


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
